//! What launches must know of the kernels: threads, tiles, limits, sizes of what both read. Written by
//! `kernels/build`, as `emulate/constants.h` says, from the sources that each module names: change it there.

/// A product's block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
}

/// How packed weights lie, and what a product of few rows keeps of them in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Bytes of a tile: codes, and what belongs to them alone.
    pub(crate) image: usize,
    /// Bytes of its codes.
    pub(crate) codes: usize,
    /// Bytes of a warp in a stage.
    pub(crate) warp_bytes: usize,
    /// Stages of blocks of up to 16 rows, and of up to 64.
    pub(crate) stages: [usize; 2],
}

/// What launches share with `attention.cu` and `attention_sm90.cu`.
pub(crate) mod attention {
    pub(crate) const CHUNK: usize = 256;
    pub(crate) const ITEM_WORDS: usize = 8;
    pub(crate) const FEW_ROWS: usize = 16;
    pub(crate) const FEW_THREADS: usize = 128;
    pub(crate) const MANY_ROWS: usize = 128;
    pub(crate) const MANY_THREADS: usize = 256;
    pub(crate) const LATENT_ROWS: usize = 64;
    pub(crate) const PIPELINED_THREADS: usize = 384;
    pub(crate) const MERGE_THREADS: usize = 128;
    pub(crate) const FEW_64_BF16_BYTES: usize = 67_840;
    pub(crate) const FEW_64_FP8_BYTES: usize = 35_072;
    pub(crate) const FEW_128_BF16_BYTES: usize = 100_608;
    pub(crate) const FEW_128_FP8_BYTES: usize = 67_840;
    pub(crate) const FEW_LATENT_BF16_BYTES: usize = 131_328;
    pub(crate) const FEW_LATENT_FP8_BYTES: usize = 112_896;
    pub(crate) const MANY_64_BF16_BYTES: usize = 49_152;
    pub(crate) const MANY_64_FP8_BYTES: usize = 49_152;
    pub(crate) const MANY_128_BF16_BYTES: usize = 98_304;
    pub(crate) const MANY_128_FP8_BYTES: usize = 98_304;
    pub(crate) const PIPELINED_64_BYTES: usize = 98_400;
    pub(crate) const PIPELINED_64_APART_BYTES: usize = 98_400;
    pub(crate) const PIPELINED_128_BYTES: usize = 221_280;
    pub(crate) const PIPELINED_128_APART_BYTES: usize = 196_704;
    pub(crate) const PIPELINED_LATENT_BYTES: usize = 231_976;
}

/// What launches share with `codes.cuh`.
pub(crate) mod codes {
    pub(crate) const TILE: usize = 64;
    pub(crate) const GROUP: usize = 128;
    pub(crate) const BF16_IMAGE: usize = 8192;
}

/// What launches share with `product.cuh` and `product_sm90.cuh`.
pub(crate) mod product {
    use super::Block;

    pub(crate) const ROWS_16: Block = Block { rows: 16, outputs: 64, threads: 128, shared_bytes: 51_200 };
    pub(crate) const ROWS_64: Block = Block { rows: 64, outputs: 64, threads: 128, shared_bytes: 65_536 };
    pub(crate) const ROWS_128: Block = Block { rows: 128, outputs: 128, threads: 256, shared_bytes: 98_304 };
    pub(crate) const HOPPER_ROWS_16: Block =
        Block { rows: 16, outputs: 128, threads: 256, shared_bytes: 110_592 };
}

/// What launches share with `product_few.cuh`.
pub(crate) mod product_few {
    use super::Packing;

    pub(crate) const OUTPUTS: usize = 16;
    pub(crate) const ROW_BYTES: usize = 256;
    pub(crate) const ROWS: usize = 16;
    pub(crate) const MANY_ROWS: usize = 64;
    pub(crate) const THREADS_MAX: usize = 512;
    pub(crate) const MANY_THREADS_MAX: usize = 256;
    pub(crate) const INT8: Packing = Packing { image: 4096, codes: 4096, warp_bytes: 2112, stages: [4, 4] };
    pub(crate) const INT4: Packing = Packing { image: 2048, codes: 2048, warp_bytes: 1088, stages: [6, 4] };
    pub(crate) const FP8: Packing = Packing { image: 4096, codes: 4096, warp_bytes: 2112, stages: [4, 4] };
    pub(crate) const MXFP4: Packing = Packing { image: 2176, codes: 2048, warp_bytes: 1088, stages: [6, 4] };
}

/// What launches share with `pipeline_sm90.cuh`.
pub(crate) mod pipeline_sm90 {
    use super::Block;

    pub(crate) const ROWS_64: Block = Block { rows: 64, outputs: 128, threads: 384, shared_bytes: 213_376 };
    pub(crate) const ROWS_128: Block = Block { rows: 128, outputs: 128, threads: 384, shared_bytes: 213_600 };
    pub(crate) const ROWS_192: Block = Block { rows: 192, outputs: 128, threads: 384, shared_bytes: 222_032 };
    pub(crate) const ROWS_256: Block = Block { rows: 256, outputs: 128, threads: 384, shared_bytes: 230_448 };
    pub(crate) const WHOLE_256: Block =
        Block { rows: 256, outputs: 128, threads: 384, shared_bytes: 214_080 };
    pub(crate) const CLUSTER: usize = 2;
    pub(crate) const CLUSTERED_128: Block =
        Block { rows: 128, outputs: 128, threads: 384, shared_bytes: 213_600 };
    pub(crate) const CLUSTERED_256: Block =
        Block { rows: 256, outputs: 128, threads: 384, shared_bytes: 230_448 };
    pub(crate) const CLUSTERED_WHOLE_256: Block =
        Block { rows: 256, outputs: 128, threads: 384, shared_bytes: 214_080 };
}

/// What launches share with `matmul.cu`.
pub(crate) mod matmul {
    pub(crate) const REDUCE_THREADS: usize = 256;
}

/// What launches share with `choice.cuh`.
pub(crate) mod choice {
    pub(crate) const EXPERTS_MAX: usize = 1024;
    pub(crate) const LANES: usize = 32;
    pub(crate) const NO_SLOT: u32 = 4_294_967_295;
    pub(crate) const SOFTMAX_ALL: u32 = 0;
    pub(crate) const SOFTMAX_TOP: u32 = 1;
    pub(crate) const SIGMOID: u32 = 2;
}

/// What launches share with `moe.cu` and `moe.cuh`.
pub(crate) mod moe {
    pub(crate) const ROUTE_TOKENS: usize = 4;
    pub(crate) const ROUTE_THREADS: usize = 128;
    pub(crate) const GROUP_THREADS_MAX: usize = 1024;
    pub(crate) const GROUPED_AT_ONCE: usize = 8;
    pub(crate) const CHOOSE_TOKENS_MAX: usize = 32;
    pub(crate) const COMBINE_THREADS: usize = 128;
    pub(crate) const ITEM_WORDS: usize = 4;
    pub(crate) const TOGETHER: usize = 8;
    pub(crate) const NO_GATE: u32 = 0;
    pub(crate) const SILU: u32 = 1;
    pub(crate) const CLAMPED: u32 = 2;
}

/// What launches share with `peer.cuh`.
pub(crate) mod peer {
    pub(crate) const RANKS_MAX: usize = 32;
    pub(crate) const LANES: usize = 32;
    pub(crate) const CONTROL_BYTES: usize = 1024;
    pub(crate) const SHARED_WORDS: usize = 16;
    pub(crate) const PART: usize = 128;
    pub(crate) const WHOLE: usize = 256;
    pub(crate) const ROW_BYTES: usize = 8;
    pub(crate) const STATE_WORDS: usize = 15;
    pub(crate) const FAULT_AT: usize = 8;
    pub(crate) const SPENT_AT: usize = 12;
    pub(crate) const CAUSE_BIT: u32 = 8;
    pub(crate) const PHASE_BIT: u32 = 16;
    pub(crate) const RANK_BIT: u32 = 16;
    pub(crate) const DEADLINE: u32 = 1;
    pub(crate) const PROTOCOL: u32 = 2;
}

/// What launches share with `elementwise.cu`.
pub(crate) mod elementwise {
    pub(crate) const THREADS: usize = 128;
}

/// What launches share with `gather.cu`.
pub(crate) mod gather {
    pub(crate) const THREADS: usize = 128;
    pub(crate) const PENDING: u32 = 2_147_483_648;
}

/// What launches share with `numbers.cuh`.
pub(crate) mod numbers {
    pub(crate) const PACKET_BYTES: usize = 16;
    pub(crate) const PACKET: usize = 8;
    pub(crate) const PACKET_WORDS: usize = 4;
}

/// What launches share with `probe.cu`.
pub(crate) mod probe {
    pub(crate) const THREADS: usize = 256;
    pub(crate) const SEED_WORDS: usize = 6;
}

/// What launches share with `rms_norm.cu`.
pub(crate) mod rms_norm {
    pub(crate) const THREADS_MAX: usize = 512;
}

/// What launches share with `rope.cu`.
pub(crate) mod rope {
    pub(crate) const THREADS: usize = 256;
    pub(crate) const HEAD_THREADS: usize = 128;
}

/// What launches share with `rules.cu`.
pub(crate) mod rules {
    pub(crate) const THREADS: usize = 256;
    pub(crate) const SCRATCH_BYTES: usize = 36;
    pub(crate) const RULE_WORDS: usize = 4;
    pub(crate) const ROW_WORDS: usize = 8;
    pub(crate) const NONE: u32 = 4_294_967_295;
    pub(crate) const IN_PROMPT: u32 = 1;
    pub(crate) const BIASED: u32 = 2;
    pub(crate) const HELD: u32 = 4;
    pub(crate) const NEVER: u32 = 8;
}

/// What launches share with `sample.cu`, `sample_row.cuh` and `sample_work.cuh`.
pub(crate) mod sample {
    pub(crate) const THREADS: usize = 512;
    pub(crate) const CHUNKS: usize = 256;
    pub(crate) const PEAKS_BYTES: usize = 4096;
    pub(crate) const FINDER_BYTES: usize = 51_456;
    pub(crate) const JOINT_WORDS: usize = 7688;
    pub(crate) const PART_WORDS: usize = 32;
    pub(crate) const PARAMETER_WORDS: usize = 8;
    pub(crate) const SCORE_WORDS: usize = 46;
    pub(crate) const TOP: usize = 20;
    pub(crate) const NOT_WANTED: u32 = 4_294_967_295;
}
