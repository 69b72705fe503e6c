//! Which engine takes a request, where a worker has several: the one that is asked for, or the one with the
//! fewest live sequences. What engines do is `engine.rs`' business.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::engine::sequence::{Generation, GenerationRequest};
use crate::engine::{EngineHandle, SubmitError};

/// The engines of a worker, by data-parallel rank; at least one.
#[derive(Debug)]
pub(crate) struct Engines {
    handles: Vec<EngineHandle>,
    /// Whose turn it is where several have equally few.
    turn: AtomicUsize,
}

/// What an engine took.
#[derive(Debug)]
pub(crate) struct Taken {
    /// The data-parallel rank of the engine, counted from 0.
    pub(crate) rank: usize,
    pub(crate) generations: Vec<Generation>,
}

impl Engines {
    pub(crate) fn new(handles: Vec<EngineHandle>) -> Self {
        Self { handles, turn: AtomicUsize::new(0) }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.handles.len()
    }

    /// Whether all of them serve: each is waited for.
    pub(crate) fn are_alive(&self) -> bool {
        self.handles.iter().all(EngineHandle::is_alive)
    }

    /// Why the steps of one of them fail, if several in a row did.
    pub(crate) fn failing(&self) -> Option<String> {
        self.handles.iter().find_map(EngineHandle::failing)
    }

    /// Queues all requests or none, at one engine: they may share a prefix. `rank`, below [`Engines::count`],
    /// says which.
    pub(crate) fn submit(
        &self,
        rank: Option<usize>,
        requests: Vec<GenerationRequest>,
    ) -> Result<Taken, SubmitError> {
        let rank = rank.unwrap_or_else(|| self.least_loaded());
        let engine = self.handles.get(rank).ok_or(SubmitError::Stopped)?;
        Ok(Taken { rank, generations: engine.submit(requests)? })
    }

    fn least_loaded(&self) -> usize {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let ranks = (0..self.count()).map(|i| (turn.wrapping_add(i)) % self.count());
        ranks.min_by_key(|rank| self.handles[*rank].live()).unwrap_or(0)
    }
}
