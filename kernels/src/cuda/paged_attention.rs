//! Plans and launches `attention.cu`: causal attention over a paged KV cache, prefill and decode alike.
//!
//! A [`AttentionPlan`] says which block does which rows over which chunks of positions. It decides speed
//! alone: every plan of the same batch gives the same bits.

use half::bf16;

mod plan;

use super::constants::attention::{
    self, FEW_ROWS, FEW_THREADS, LATENT_ROWS, MANY_ROWS, MANY_THREADS, MERGE_THREADS, PIPELINED_THREADS,
};
use super::matmul::Unit;
use super::{Kernel, Launch, Slice};
pub use plan::{AttentionCut, AttentionPlan, CutFor, Sequence};

/// Absolute positions whose state is joined at a time.
pub const CHUNK: usize = attention::CHUNK;
/// Words of an item, `struct Item` in `attention.cu`; one of zeros has no tokens, and its block returns at
/// once.
pub const ITEM_WORDS: usize = attention::ITEM_WORDS;

/// How pages hold keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// bf16, two bytes an element; its scales are 1.
    Bf16,
    /// FP8 E4M3, with one scale for all keys and one for all values.
    Fp8,
}

/// A vector's width in the cache, and what a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// Keys and values of 64 elements.
    Dim64,
    /// Keys and values of 128 elements.
    Dim128,
    /// One vector of 576 elements a position, whose first 512 are the value (DeepSeek's MLA, absorbed).
    Latent,
}

impl HeadKind {
    /// Elements of a key.
    pub fn key_dim(self) -> usize {
        match self {
            Self::Dim64 => 64,
            Self::Dim128 => 128,
            Self::Latent => 576,
        }
    }

    /// Elements of a value.
    pub fn value_dim(self) -> usize {
        match self {
            Self::Dim64 => 64,
            Self::Dim128 => 128,
            Self::Latent => 512,
        }
    }
}

/// One layer's pages on the device: `keys` `[page][kv_head][offset][key_dim]`, `values` alike, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    /// Keys; in a latent cache the latents, each with the rotated key that all heads share behind it.
    pub keys: Slice<u8>,
    /// Values; `None` of a latent cache.
    pub values: Option<Slice<u8>>,
    /// What an element is.
    pub kv_type: KvType,
    /// Sizes of a vector.
    pub kind: HeadKind,
    /// Heads of keys and values per position; 1 in a latent cache.
    pub kv_heads: usize,
    /// Positions a page, a power of two.
    pub page_size: usize,
}

impl Pages {
    /// Panics if the sizes disagree.
    fn check(&self) {
        let Self { keys, values, kv_type, kind, kv_heads, page_size } = *self;
        let bytes = kv_heads * page_size * if kv_type == KvType::Fp8 { 1 } else { 2 };
        assert!(
            page_size.is_power_of_two()
                && keys.len % (bytes * kind.key_dim()) == 0
                && keys.len / if kv_type == KvType::Fp8 { 1 } else { 2 } / kind.key_dim() < 1 << 32
                && values.is_none() == (kind == HeadKind::Latent)
                && (kind != HeadKind::Latent || kv_heads == 1)
                && values.is_none_or(|v| v.len * kind.key_dim() == keys.len * kind.value_dim()),
            "attention: shapes disagree"
        );
    }
}

/// What a launch reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The plan, and its lists on the device.
    pub plan: &'a AttentionPlan,
    /// [`AttentionPlan::items`], copied to the device by the caller.
    pub items: Slice<u32>,
    /// [`AttentionPlan::merges`], copied to the device by the caller; empty if it is.
    pub merges: Slice<u32>,
    /// Page numbers of all sequences.
    pub tables: Slice<u32>,
    /// Queries; row `t` begins at `t * q_stride` with its heads.
    pub q: Slice<bf16>,
    /// Distance between rows, in elements.
    pub q_stride: usize,
    /// Query heads of a token: a multiple of the pages' `kv_heads`.
    pub heads: usize,
    /// One logit per query head that joins the denominator alone.
    pub sinks: Option<Slice<f32>>,
    /// How many positions a token sees, its own among them.
    pub window: Option<usize>,
    /// Factor of `q . k`.
    pub scale: f32,
    /// What multiplies where there are many rows, of bf16: the device's best. Few rows, and FP8, know one
    /// unit alone. Either gives the same bits.
    pub unit: Unit,
    /// The device's: by `Unit::Warpgroup` each has one block, which goes through its share of the work.
    pub processors: usize,
    /// What FP8 keys and values were divided by, the same of a latent's; 1 for bf16.
    pub kv_scale: [f32; 2],
    /// `[tokens, heads * value_dim]`.
    pub out: Slice<bf16>,
    /// Room for the states of parts that are merged, or joined by their block, at least
    /// [`AttentionPlan::partial_floats`] of the plan.
    pub partials: Slice<f32>,
}

/// Attention of a batch over one layer's pages.
///
/// # Panics
/// If shapes disagree.
pub fn launch(pages: &Pages, batch: &Batch<'_>) -> Vec<Launch> {
    pages.check();
    let (plan, kind, AttentionCut { rows, chunks }) = (batch.plan, pages.kind, batch.plan.cut);
    let group = batch.heads / pages.kv_heads;
    let items = plan.items.len() / ITEM_WORDS;
    assert!(
        batch.heads == group * pages.kv_heads
            && batch.q_stride >= batch.heads * kind.key_dim()
            && batch.q_stride.is_multiple_of(8)
            && (kind != HeadKind::Latent || batch.kv_scale[0] == batch.kv_scale[1])
            && batch.sinks.is_none_or(|sinks| sinks.len == batch.heads)
            && batch.items.len == plan.items.len()
            && batch.merges.len == plan.merges.len()
            && batch.partials.len >= plan.partial_floats(pages.kv_heads, kind.value_dim(), batch.processors),
        "attention: shapes disagree"
    );
    let carries = kind == HeadKind::Dim128 && pages.kv_type == KvType::Bf16;
    assert!(carries || !plan.carried, "attention: only bf16 heads of 128 have kernels that carry");
    if items == 0 {
        return Vec::new();
    }
    let attend = attend(pages, batch, items);
    if chunks.is_none() {
        return vec![attend];
    }
    let merge = Launch {
        kernel: Kernel::attention_merge,
        grid: [(plan.merges.len() / ITEM_WORDS) as u32, pages.kv_heads as u32, rows as u32],
        cluster: 1,
        threads: MERGE_THREADS as u32,
        shared_bytes: 0,
        arguments: vec![
            batch.merges.into(),
            batch.partials.into(),
            batch.sinks.into(),
            batch.out.into(),
            pages.kv_heads.into(),
            group.into(),
            rows.into(),
            kind.value_dim().into(),
            batch.kv_scale[1].into(),
        ],
    };
    vec![attend, merge]
}

/// The launch that goes through keys and values.
fn attend(pages: &Pages, batch: &Batch<'_>, items: usize) -> Launch {
    let (plan, kind, AttentionCut { rows, chunks }) = (batch.plan, pages.kind, batch.plan.cut);
    let pipelined =
        rows != FEW_ROWS && batch.unit == Unit::Warpgroup && pages.kv_type == KvType::Bf16 && !plan.carried;
    let leaves = chunks.is_some() || rows == LATENT_ROWS;
    let partials = if leaves { batch.partials.into() } else { super::Argument::Null };
    let pieces = items * pages.kv_heads;
    let mut arguments = vec![batch.items.into()];
    if pipelined {
        arguments.push(pieces.into());
    }
    arguments.extend([
        batch.tables.into(),
        batch.q.into(),
        batch.q_stride.into(),
        pages.keys.into(),
        pages.values.into(),
        batch.sinks.into(),
        batch.out.into(),
        partials,
        pages.kv_heads.into(),
        (batch.heads / pages.kv_heads).into(),
        (pages.page_size.trailing_zeros() as usize).into(),
        batch.window.unwrap_or(0).into(),
        (batch.scale * batch.kv_scale[0] * std::f32::consts::LOG2_E).into(),
        batch.kv_scale[1].into(),
    ]);
    if pipelined {
        return Launch {
            kernel: pipelined_kernel(kind, rows, chunks.is_some()),
            grid: [pieces.min(batch.processors.max(1)) as u32, 1, 1],
            cluster: 1,
            threads: PIPELINED_THREADS as u32,
            shared_bytes: pipelined_shared_bytes(kind, chunks.is_some()) as u32,
            arguments,
        };
    }
    Launch {
        kernel: kernel(kind, pages.kv_type, rows, plan.carried),
        grid: [items as u32, pages.kv_heads as u32, 1],
        cluster: 1,
        threads: (if rows == FEW_ROWS { FEW_THREADS } else { MANY_THREADS }) as u32,
        shared_bytes: shared_bytes(kind, pages.kv_type, rows) as u32,
        arguments,
    }
}

/// The kernel of `attention_sm90.cu` for bf16 heads of this kind, whose states are merged afterwards if
/// `apart`.
fn pipelined_kernel(kind: HeadKind, rows: usize, apart: bool) -> Kernel {
    let is_latent = kind == HeadKind::Latent;
    assert!(rows == if is_latent { LATENT_ROWS } else { MANY_ROWS }, "attention: no kernel has {rows} rows");
    match (kind, apart) {
        (HeadKind::Dim64, false) => Kernel::attention_sm90_64_bf16,
        (HeadKind::Dim64, true) => Kernel::attention_sm90_64_bf16_apart,
        (HeadKind::Dim128, false) => Kernel::attention_sm90_128_bf16,
        (HeadKind::Dim128, true) => Kernel::attention_sm90_128_bf16_apart,
        (HeadKind::Latent, false) => Kernel::attention_sm90_latent_bf16,
        (HeadKind::Latent, true) => Kernel::attention_sm90_latent_bf16_apart,
    }
}

fn pipelined_shared_bytes(kind: HeadKind, apart: bool) -> usize {
    match (kind, apart) {
        (HeadKind::Dim64, false) => attention::PIPELINED_64_BYTES,
        (HeadKind::Dim64, true) => attention::PIPELINED_64_APART_BYTES,
        (HeadKind::Dim128, false) => attention::PIPELINED_128_BYTES,
        (HeadKind::Dim128, true) => attention::PIPELINED_128_APART_BYTES,
        (HeadKind::Latent, _) => attention::PIPELINED_LATENT_BYTES,
    }
}

fn kernel(kind: HeadKind, kv_type: KvType, rows: usize, carried: bool) -> Kernel {
    assert!(
        rows == FEW_ROWS || rows == MANY_ROWS && kind != HeadKind::Latent,
        "attention: no kernel has {rows} rows"
    );
    match (kind, kv_type, rows == FEW_ROWS) {
        (HeadKind::Dim64, KvType::Bf16, true) => Kernel::attention_64_bf16_16,
        (HeadKind::Dim64, KvType::Bf16, false) => Kernel::attention_64_bf16_128,
        (HeadKind::Dim64, KvType::Fp8, true) => Kernel::attention_64_fp8_16,
        (HeadKind::Dim64, KvType::Fp8, false) => Kernel::attention_64_fp8_128,
        (HeadKind::Dim128, KvType::Bf16, true) if carried => Kernel::attention_128_bf16_16_carried,
        (HeadKind::Dim128, KvType::Bf16, false) if carried => Kernel::attention_128_bf16_128_carried,
        (HeadKind::Dim128, KvType::Bf16, true) => Kernel::attention_128_bf16_16,
        (HeadKind::Dim128, KvType::Bf16, false) => Kernel::attention_128_bf16_128,
        (HeadKind::Dim128, KvType::Fp8, true) => Kernel::attention_128_fp8_16,
        (HeadKind::Dim128, KvType::Fp8, false) => Kernel::attention_128_fp8_128,
        (HeadKind::Latent, KvType::Bf16, _) => Kernel::attention_latent_bf16_16,
        (HeadKind::Latent, KvType::Fp8, _) => Kernel::attention_latent_fp8_16,
    }
}

fn shared_bytes(kind: HeadKind, kv_type: KvType, rows: usize) -> usize {
    match (kind, kv_type, rows == FEW_ROWS) {
        (HeadKind::Dim64, KvType::Bf16, true) => attention::FEW_64_BF16_BYTES,
        (HeadKind::Dim64, KvType::Bf16, false) => attention::MANY_64_BF16_BYTES,
        (HeadKind::Dim64, KvType::Fp8, true) => attention::FEW_64_FP8_BYTES,
        (HeadKind::Dim64, KvType::Fp8, false) => attention::MANY_64_FP8_BYTES,
        (HeadKind::Dim128, KvType::Bf16, true) => attention::FEW_128_BF16_BYTES,
        (HeadKind::Dim128, KvType::Bf16, false) => attention::MANY_128_BF16_BYTES,
        (HeadKind::Dim128, KvType::Fp8, true) => attention::FEW_128_FP8_BYTES,
        (HeadKind::Dim128, KvType::Fp8, false) => attention::MANY_128_FP8_BYTES,
        (HeadKind::Latent, KvType::Bf16, _) => attention::FEW_LATENT_BF16_BYTES,
        (HeadKind::Latent, KvType::Fp8, _) => attention::FEW_LATENT_FP8_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a block may have on the smallest GPUs (sm_86, sm_89, sm_120), and on sm_80, for latents.
    #[test]
    fn shared_memory_fits() {
        for kv_type in [KvType::Bf16, KvType::Fp8] {
            for kind in [HeadKind::Dim64, HeadKind::Dim128] {
                for rows in [FEW_ROWS, MANY_ROWS] {
                    assert!(shared_bytes(kind, kv_type, rows) <= 99 << 10, "{kind:?} {kv_type:?} {rows}");
                }
            }
            assert!(shared_bytes(HeadKind::Latent, kv_type, FEW_ROWS) <= 163 << 10);
        }
        for kind in [HeadKind::Dim64, HeadKind::Dim128, HeadKind::Latent] {
            assert!(pipelined_shared_bytes(kind, false) <= 227 << 10, "{kind:?}");
        }
    }
}
