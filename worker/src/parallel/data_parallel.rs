//! Engines that step together: each has a scheduler, a KV cache and sequences of its own, and all of them one
//! model whose experts they share. An engine sees a backend of its own ([`RankBackend`]); behind it a thread
//! joins what the engines ask for into steps that all ranks take (`model/joint.rs`).
//!
//! A step begins once every engine that has work has planned its part; who rests is not waited for, and its
//! rank joins with empty messages. When a group ends, so does what its ranks kept: an engine hears that its
//! KV is lost, and begins again with its sequences, whose tokens stay the same.

use std::io;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::engine::backend::{Backend, CacheGroup, Chunk, StepError};
use crate::metrics::ExpertMetrics;
use crate::model::{Joint, JointError, RankOutput, StepWords};

/// How often an engine that rests looks whether its KV is still there.
const LOSS_CHECK_EVERY: Duration = Duration::from_secs(1);

/// What the engines and the thread behind them share.
#[derive(Debug)]
struct Hub {
    state: Mutex<State>,
    /// Something was asked, or an engine rests.
    asked: Condvar,
    answered: Condvar,
}

#[derive(Debug)]
struct State {
    ranks: Vec<Rank>,
    /// How often the ranks' KV was lost.
    losses: u64,
    /// Set while the thread lives.
    serves: bool,
}

/// What one engine and the thread that computes tell each other.
#[derive(Debug)]
struct Rank {
    /// Whether it has work: a step waits for its part.
    works: bool,
    gone: bool,
    /// Its part of the next step, planned over KV as it was after so many losses.
    part: Option<(StepWords, u64)>,
    answer: Option<Result<RankOutput, JointError>>,
}

/// One engine's rank, as its backend.
#[derive(Debug)]
pub(crate) struct RankBackend {
    rank: usize,
    hub: Arc<Hub>,
    vocab_size: usize,
    block_size: usize,
    num_blocks: usize,
    groups: Vec<CacheGroup>,
    hidden: Vec<f32>,
    /// The losses of KV that the engine knows of.
    losses: u64,
    lost: bool,
    _thread: Arc<Thread>,
}

/// The thread, which the last engine waits for.
#[derive(Debug)]
struct Thread(Mutex<Option<JoinHandle<()>>>);

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(thread) = lock(&self.0).take() {
            // All engines are gone, so it ends.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Backends for the engines of `size` ranks, by rank. `backend` is rank 0's, with its group.
pub(crate) fn backends(
    mut backend: impl Joint + 'static,
    size: usize,
    metrics: Arc<ExpertMetrics>,
) -> io::Result<Vec<RankBackend>> {
    let rank = |_| Rank { works: false, gone: false, part: None, answer: None };
    let losses = backend.losses();
    let state = State { ranks: (0..size).map(rank).collect(), losses, serves: true };
    let hub = Arc::new(Hub { state: Mutex::new(state), asked: Condvar::new(), answered: Condvar::new() });
    let (vocab_size, block_size, num_blocks) =
        (backend.vocab_size(), backend.block_size(), backend.num_blocks());
    let groups = backend.cache_groups().to_vec();
    let served = Arc::clone(&hub);
    let thread = thread::Builder::new().name("keyway-group".to_owned()).spawn(move || {
        let _end = End { hub: Arc::clone(&served), metrics };
        served.serve(&mut backend);
    })?;
    let thread = Arc::new(Thread(Mutex::new(Some(thread))));
    let of_rank = |rank| RankBackend {
        rank,
        hub: Arc::clone(&hub),
        vocab_size,
        block_size,
        num_blocks,
        groups: groups.clone(),
        hidden: Vec::new(),
        losses,
        lost: false,
        _thread: Arc::clone(&thread),
    };
    Ok((0..size).map(of_rank).collect())
}

/// Marks the end of the thread, by whatever way it ends.
struct End {
    hub: Arc<Hub>,
    metrics: Arc<ExpertMetrics>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.metrics.up.set(0);
        lock(&self.hub.state).serves = false;
        self.hub.answered.notify_all();
    }
}

impl State {
    /// Whether an engine has planned a part, and no engine that works is still planning.
    fn is_ready(&self) -> bool {
        let planned = |rank: &Rank| rank.part.is_some();
        self.ranks.iter().any(planned) && self.ranks.iter().all(|rank| planned(rank) || !rank.works)
    }
}

impl Hub {
    /// Runs steps until all engines are gone.
    fn serve(&self, backend: &mut dyn Joint) {
        let every = backend.keep_alive_every().unwrap_or(LOSS_CHECK_EVERY);
        let mut heard = Instant::now();
        let mut outputs = Vec::new();
        loop {
            let mut state = lock(&self.state);
            if state.ranks.iter().all(|rank| rank.gone) {
                return;
            }
            if state.is_ready() {
                let parts: Vec<_> = state.ranks.iter_mut().map(|rank| rank.part.take()).collect();
                drop(state);
                self.step(backend, parts, &mut outputs);
                heard = Instant::now();
                continue;
            }
            let left = (heard + every).saturating_duration_since(Instant::now());
            if !left.is_zero() {
                drop(self.asked.wait_timeout(state, left));
                continue;
            }
            drop(state);
            backend.keep_alive();
            lock(&self.state).losses = backend.losses();
            heard = Instant::now();
        }
    }

    /// Runs one step and answers those who asked.
    fn step(
        &self,
        backend: &mut dyn Joint,
        mut parts: Vec<Option<(StepWords, u64)>>,
        outputs: &mut Vec<RankOutput>,
    ) {
        let ready = backend.ensure_group();
        let losses = backend.losses();
        let mut answers: Vec<Option<Result<RankOutput, JointError>>> = Vec::new();
        for part in &mut parts {
            // What was planned over KV that is gone cannot be computed.
            let stale = part.take_if(|(_, known)| *known != losses);
            answers.push(stale.map(|_| Err(JointError::Lost("the ranks were started again".to_owned()))));
        }
        let asked: Vec<bool> = parts.iter().map(Option::is_some).collect();
        let parts: Vec<StepWords> = parts.into_iter().map(|part| part.unwrap_or_default().0).collect();
        let done = match ready {
            Err(error) => Err(JointError::Failed(error.to_string())),
            Ok(()) if !asked.contains(&true) => Ok(()),
            Ok(()) => backend.joint_step(&parts, outputs),
        };
        for (rank, answer) in answers.iter_mut().enumerate().filter(|(rank, _)| asked[*rank]) {
            *answer = Some(done.clone().map(|()| mem::take(&mut outputs[rank])));
        }
        let mut state = lock(&self.state);
        state.losses = backend.losses();
        for (rank, answer) in state.ranks.iter_mut().zip(answers) {
            rank.answer = answer.or(rank.answer.take());
        }
        self.answered.notify_all();
    }
}

impl RankBackend {
    /// Hands in this rank's part of the next step and waits for what it comes to.
    fn ask(&mut self, part: StepWords) -> Result<RankOutput, JointError> {
        let mut state = lock(&self.hub.state);
        state.ranks[self.rank].works = true;
        state.ranks[self.rank].part = Some((part, self.losses));
        self.hub.asked.notify_all();
        loop {
            if let Some(answer) = state.ranks[self.rank].answer.take() {
                // An engine whose step fails forgets what was cached, however often it was lost.
                self.losses = if answer.is_err() { state.losses } else { self.losses };
                return answer;
            }
            if !state.serves {
                return Err(JointError::Failed("the thread that computes has stopped".to_owned()));
            }
            state = self.hub.answered.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Changes what the others know of this engine.
    fn tell(&self, change: impl FnOnce(&mut Rank)) {
        change(&mut lock(&self.hub.state).ranks[self.rank]);
        self.hub.asked.notify_all();
    }
}

impl Drop for RankBackend {
    fn drop(&mut self) {
        self.tell(|rank| (rank.works, rank.gone, rank.part) = (false, true, None));
    }
}

impl Backend for RankBackend {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn block_size(&self) -> usize {
        self.block_size
    }

    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        if chunks.is_empty() {
            return Ok(());
        }
        match self.ask(StepWords::write(chunks)) {
            Ok(output) => {
                *logits = output.logits;
                self.hidden = output.hidden;
                Ok(())
            }
            Err(JointError::Failed(reason)) => Err(StepError(reason)),
            Err(JointError::Lost(reason)) => {
                self.lost = true;
                Err(StepError(reason))
            }
        }
    }

    fn keep_alive_every(&self) -> Option<Duration> {
        Some(LOSS_CHECK_EVERY)
    }

    fn rest(&mut self) {
        self.tell(|rank| rank.works = false);
    }

    fn cache_was_lost(&mut self) -> bool {
        let known = mem::replace(&mut self.losses, lock(&self.hub.state).losses);
        mem::take(&mut self.lost) || known != self.losses
    }

    fn hidden(&self) -> Option<&[f32]> {
        Some(&self.hidden)
    }
}
