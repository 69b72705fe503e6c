//! The CPU backend: a model, the memory of its KV cache, and the buffers of a step.

use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::isa::Isa;
use keyway_kernels::kv_cache::{KvCache, KvShape};

use super::cache_plan::CachePlan;
use super::config::Config;
use super::decoder::{Buffers, Decoder};
use super::experts::{ExpertGroup, GroupError, Spread};
use super::weights::Weights;
use super::{KvLayout, ModelError};
use crate::engine::backend::{Backend, BlockLayout, CacheGroup, Chunk, CopyError, StepError};

/// A model and its KV cache on the CPU.
#[derive(Debug)]
pub struct CpuBackend {
    pub(super) decoder: Decoder,
    pub(super) kv: KvLayout,
    pub(super) plan: CachePlan,
    /// One per slot of the plan.
    pub(super) slabs: Vec<KvCache>,
    pub(super) buffers: Buffers,
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

    /// The same model with its experts spread over a group, which is started: equal bits. Of the model its
    /// share must be loaded, see `LoadedModel::load_share`.
    pub(crate) fn with_group(mut self, mut group: ExpertGroup) -> Result<Self, GroupError> {
        group.ensure()?;
        self.buffers.feed_forward.group = Some(Spread::Lead(Box::new(group)));
        Ok(self)
    }

    /// Runs a step until it succeeds, or the group says that it will not: a step may be run again, as it
    /// writes the same KV to the same places.
    fn step_in_group(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), GroupError> {
        loop {
            if let Some(group) = self.group() {
                group.ensure()?;
            }
            logits.clear();
            let (slabs, places) = (&mut self.slabs, &self.plan.places);
            let done = self.decoder.step(chunks, slabs, places, &mut self.buffers, logits);
            let Some(Spread::Lead(group)) = &mut self.buffers.feed_forward.group else { return Ok(()) };
            match done {
                Ok(()) => return group.step_done(&mut self.decoder.weights),
                Err(error) => group.fail(&error)?,
            }
        }
    }
}

#[cfg(test)]
impl CpuBackend {
    /// Has the next step look at the experts' load, however small.
    pub(super) fn rebalance_soon(&mut self) {
        self.group().into_iter().for_each(ExpertGroup::rebalance_soon);
    }

    /// How often experts were given other ranks.
    pub(super) fn placements_changed(&mut self) -> u64 {
        self.group().map_or(0, |group| group.placements_changed())
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

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        assert!(chunks.iter().all(|chunk| !chunk.tokens.is_empty()), "step: a chunk has no tokens");
        if chunks.is_empty() {
            return Ok(());
        }
        self.step_in_group(chunks, logits).map_err(|error| StepError(error.to_string()))
    }

    fn keep_alive_every(&self) -> Option<Duration> {
        match &self.buffers.feed_forward.group {
            Some(Spread::Lead(group)) => Some(group.keep_alive_every()),
            _ => None,
        }
    }

    fn keep_alive(&mut self) {
        if let Some(Err(error)) = self.group().map(ExpertGroup::keep_alive) {
            // The next step tries again.
            tracing::error!("{error}");
        }
    }

    fn block_layout(&self) -> Option<BlockLayout> {
        Some(self.layout_of_blocks())
    }

    fn copy_block(&self, group: usize, block: u32, out: &mut Vec<u8>) -> Result<(), CopyError> {
        self.copy_of_block(group, block, out);
        Ok(())
    }

    fn write_block(&mut self, group: usize, block: u32, bytes: &[u8]) -> Result<(), CopyError> {
        self.take_block(group, block, bytes)
    }

    fn hidden(&self) -> Option<&[f32]> {
        Some(&self.buffers.normed)
    }
}
