//! The CPU backend: a model, the memory of its KV cache, and the buffers of a step.

use keyway_kernels::compute::Compute;
use keyway_kernels::isa::Isa;
use keyway_kernels::kv_cache::{KvCache, KvShape};

use super::cache_plan::CachePlan;
use super::config::Config;
use super::decoder::{Buffers, Decoder};
use super::weights::Weights;
use super::{KvLayout, ModelError};
use crate::backend::{Backend, CacheGroup, Chunk};

/// A model and its KV cache on the CPU.
#[derive(Debug)]
pub struct CpuBackend {
    decoder: Decoder,
    kv: KvLayout,
    plan: CachePlan,
    /// One per slot of the plan.
    slabs: Vec<KvCache>,
    buffers: Buffers,
}

impl CpuBackend {
    pub(super) fn new(config: Config, weights: Weights, kv: KvLayout) -> Result<Self, ModelError> {
        let KvLayout { block_size, num_blocks } = kv;
        if block_size == 0 || !block_size.is_multiple_of(KvShape::GRANULE) {
            let granule = KvShape::GRANULE;
            let reason =
                format!("a block size of {block_size} is not supported; use a multiple of {granule}");
            return Err(ModelError::KvCache(reason));
        }
        let plan = CachePlan::new(config.kept());
        let slab = || config.attention.new_cache(block_size, num_blocks);
        let slabs: Option<Vec<KvCache>> = (0..plan.slots).map(|_| slab()).collect();
        let Some(slabs) = slabs else {
            let bytes = config.attention.cache_bytes() as u128
                * (plan.slots as u128 * num_blocks as u128 * block_size as u128);
            let reason =
                format!("{num_blocks} blocks take {} MiB, which is not there; ask for fewer", bytes >> 20);
            return Err(ModelError::KvCache(reason));
        };
        let decoder = Decoder { compute: Compute::single(), config, weights };
        Ok(Self { decoder, kv, plan, slabs, buffers: Buffers::default() })
    }

    /// The same model computing with another instruction set: slower or faster, equal bits.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.decoder.compute = self.decoder.compute.with_isa(isa);
        self
    }

    /// The same model computing on other threads: slower or faster, equal bits.
    #[must_use]
    pub fn with_compute(mut self, compute: Compute) -> Self {
        self.decoder.compute = compute;
        self
    }
}

impl Backend for CpuBackend {
    fn vocab_size(&self) -> usize {
        self.decoder.config.vocab_size
    }

    fn block_size(&self) -> usize {
        self.kv.block_size
    }

    fn num_blocks(&self) -> usize {
        self.kv.num_blocks
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &self.plan.groups
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        logits.clear();
        assert!(chunks.iter().all(|chunk| !chunk.tokens.is_empty()), "step: a chunk has no tokens");
        if !chunks.is_empty() {
            self.decoder.step(chunks, &mut self.slabs, &self.plan.places, &mut self.buffers, logits);
        }
    }

    fn hidden(&self) -> Option<&[f32]> {
        Some(&self.buffers.normed)
    }
}
