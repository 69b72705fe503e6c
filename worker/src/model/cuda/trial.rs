//! First steps, taken before a worker says that it is ready: what a device cannot carry out shows then, and
//! not with the first requests.

use std::ops::Range;

use keyway_kernels::cuda::Device;

use super::CudaBackend;
use crate::engine::backend::{Backend as _, Chunk, Draw, Parameters, StepError, StepOutput};

/// Tokens of the prompt, where the KV cache has room: more than the products for few rows take.
const PROMPT: usize = 100;
/// Single tokens behind it: a step that is launched, one that is recorded, one that is started again.
const SINGLE: usize = 3;

impl<D: Device + Send> CudaBackend<D> {
    /// Takes a few steps for no request. The KV that they leave is in blocks that the engine has still to
    /// give out.
    ///
    /// # Errors
    /// What the device says.
    pub fn try_out(&mut self) -> Result<(), StepError> {
        // One pool for all groups: each has blocks of its own.
        let blocks = self.num_blocks() / self.cache_groups().len();
        let room = (blocks * self.block_size()).min(PROMPT + SINGLE);
        let prompt = room.saturating_sub(SINGLE);
        let singles = (prompt..room).map(|at| at..at + 1);
        let prompt = Some(0..prompt).filter(|prompt| !prompt.is_empty());
        prompt.into_iter().chain(singles).try_for_each(|positions| self.try_step(positions))
    }

    fn try_step(&mut self, positions: Range<usize>) -> Result<(), StepError> {
        let blocks: Vec<u32> = (0..self.num_blocks() as u32).collect();
        let (groups, used) = (self.cache_groups().len(), positions.end.div_ceil(self.block_size()));
        let tables: Vec<&[u32]> =
            blocks.chunks_exact(blocks.len() / groups).take(groups).map(|own| &own[..used]).collect();
        let tokens = vec![0; positions.len()];
        let chunk = Chunk { tokens: &tokens, start: positions.start, tables: &tables, wants_logits: true };
        let position = positions.end as u64;
        let by = Parameters { temperature: 1.0, top_p: 0.9, min_p: 0.0, top_k: 50, seed: 0, position };
        self.start(&[chunk], &[Some(Draw::from(by))])?;
        self.finish(&mut StepOutput::default())
    }
}
