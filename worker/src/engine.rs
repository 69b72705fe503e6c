//! The step loop: schedule, run the backend, sample, tell the clients. One thread owns the backend and all
//! sequences; requests come through a channel, and each client's tokens leave through its own. Sees token ids
//! only, no text.
//!
//! A client that drops its [`Generation`] is noticed at the next step, where its blocks are freed, whether it
//! was waiting, in prefill or decoding.
//!
//! Next: `engine/turn.rs`, one step; `scheduler.rs`, who runs in it.

pub mod backend;
pub mod bench;
pub(crate) mod block_manager;
pub(crate) mod engines;
mod failures;
pub(crate) mod generation_config;
pub(crate) mod grammar;
pub(crate) mod holds;
pub(crate) mod kv_events;
pub(crate) mod logprobs;
pub(crate) mod sampler;
pub(crate) mod scheduler;
pub(crate) mod sequence;
pub(crate) mod token_rules;
mod turn;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::{Semaphore, oneshot};

use self::failures::Failures;
use self::turn::UnderWay;
use crate::engine::backend::{Backend, StepOutput};
use crate::engine::block_manager::{BlockManager, CacheChange, GroupRules};
use crate::engine::holds::Holder;
use crate::engine::kv_events::Recorder;
use crate::engine::sampler::Sampler;
use crate::engine::scheduler::{Planned, Scheduler, StepLimits};
use crate::engine::sequence::{Generation, GenerationRequest, Sequence};
use crate::limits::LIVE_SEQUENCES_MAX;
use crate::metrics::{Metrics, Phase};

/// What an engine is started with, besides its backend.
#[derive(Debug, Clone)]
pub(crate) struct EngineOptions {
    pub(crate) limits: StepLimits,
    /// Ids that end a generation.
    pub(crate) eos_token_ids: Vec<u32>,
    /// Ids that are never generated.
    pub(crate) suppress_token_ids: Vec<u32>,
    /// Whether a step is planned and started before the tokens of the one before are known, where a backend
    /// draws them.
    pub(crate) step_ahead: bool,
}

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SubmitError {
    /// Too many sequences are live.
    Overloaded,
    /// The engine is gone.
    Stopped,
}

/// What reaches the engine's thread.
#[derive(Debug)]
enum Message {
    Submit(Box<Sequence>),
    /// Asks for every block of the prefix cache; answered between two steps.
    Resident(oneshot::Sender<Vec<CacheChange>>),
    /// Wants to know every change of the prefix cache from now on, and what is in it.
    Follow(Recorder),
    /// Is about prefixes that are held for others; done between two steps.
    Hold(holds::Asked),
}

/// Sends requests to the engine. The engine ends when the last handle is dropped and the last sequence is
/// through.
#[derive(Debug, Clone)]
pub(crate) struct EngineHandle {
    inbox: Sender<Message>,
    slots: Arc<Semaphore>,
    /// Set while the engine's thread lives.
    alive: Arc<AtomicBool>,
    failures: Arc<Failures>,
}

impl EngineHandle {
    /// Queues all requests or none. Prompts must be non-empty, of the model's ids, and fit its context with
    /// their `max_tokens`.
    pub(crate) fn submit(&self, requests: Vec<GenerationRequest>) -> Result<Vec<Generation>, SubmitError> {
        let slots = Arc::clone(&self.slots).try_acquire_many_owned(requests.len() as u32);
        let mut slots = slots.map_err(|_| SubmitError::Overloaded)?;
        let now = Instant::now();
        let submit = |request: GenerationRequest| {
            let slot = slots.split(1).ok_or(SubmitError::Overloaded)?;
            let keeper = request.keep.then(|| Holder(self.inbox.clone()));
            let (mut sequence, generation) = Sequence::new(request, slot, now);
            sequence.keeper = keeper;
            self.inbox.send(Message::Submit(Box::new(sequence))).map_err(|_| SubmitError::Stopped)?;
            Ok(generation)
        };
        requests.into_iter().map(submit).collect()
    }

    /// The blocks of the prefix cache, parents first; `None` if the engine is gone.
    pub(crate) async fn resident_blocks(&self) -> Option<Vec<CacheChange>> {
        let (reply, blocks) = oneshot::channel();
        self.inbox.send(Message::Resident(reply)).ok()?;
        blocks.await.ok()
    }

    /// Tells `recorder` what the prefix cache holds and, after each step, what changed.
    pub(crate) fn follow(&self, recorder: Recorder) {
        // If the engine is gone, nothing changes any more.
        drop(self.inbox.send(Message::Follow(recorder)));
    }

    /// How many sequences are live.
    pub(crate) fn live(&self) -> usize {
        LIVE_SEQUENCES_MAX.saturating_sub(self.slots.available_permits())
    }

    /// Whether the engine's thread still serves.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// Why steps fail, if several in a row did.
    pub(crate) fn failing(&self) -> Option<String> {
        self.failures.lasting()
    }
}

/// An engine whose thread runs: the way to it, and how its end shows.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) handle: EngineHandle,
    pub(crate) thread: JoinHandle<()>,
    /// Resolves, to an error, once the thread is gone.
    pub(crate) stopped: oneshot::Receiver<()>,
}

/// Marks the end of the engine's thread, by whatever way it ends.
struct AliveGuard {
    alive: Arc<AtomicBool>,
    _stopped: oneshot::Sender<()>,
}

impl Drop for AliveGuard {
    fn drop(&mut self) {
        self.alive.store(false, Ordering::Relaxed);
    }
}

/// Starts the engine's thread.
pub(crate) fn spawn(
    backend: Box<dyn Backend>,
    options: EngineOptions,
    metrics: Arc<Metrics>,
) -> io::Result<Spawned> {
    let (inbox, receiver) = channel();
    let (stopped_sender, stopped) = oneshot::channel();
    let alive = Arc::new(AtomicBool::new(true));
    let guard = AliveGuard { alive: Arc::clone(&alive), _stopped: stopped_sender };
    let engine = Engine::new(backend, options, metrics, fastrand::u64(..));
    let failures = Arc::clone(&engine.failures);
    let thread = std::thread::Builder::new().name("keyway-engine".to_owned()).spawn(move || {
        let _guard = guard;
        engine.run(&receiver);
    })?;
    let handle = EngineHandle { inbox, slots: Arc::new(Semaphore::new(LIVE_SEQUENCES_MAX)), alive, failures };
    Ok(Spawned { handle, thread, stopped })
}

struct Engine {
    backend: Box<dyn Backend>,
    scheduler: Scheduler,
    sampler: Sampler,
    options: EngineOptions,
    metrics: Arc<Metrics>,
    /// Told of the changes of the prefix cache, after the step that made them.
    kv_events: Option<Recorder>,
    /// What the last step that is through came to.
    output: StepOutput,
    /// A step that was started and whose tokens are not known yet.
    under_way: Option<UnderWay>,
    failures: Arc<Failures>,
}

impl Engine {
    fn new(backend: Box<dyn Backend>, options: EngineOptions, metrics: Arc<Metrics>, hash_seed: u64) -> Self {
        let rules = GroupRules::new(backend.cache_groups(), backend.block_size());
        let blocks = BlockManager::new(backend.num_blocks(), backend.block_size(), rules, hash_seed);
        let scheduler = Scheduler::new(options.limits, blocks);
        Self {
            backend,
            scheduler,
            sampler: Sampler::default(),
            options,
            metrics,
            kv_events: None,
            output: StepOutput::default(),
            under_way: None,
            failures: Arc::default(),
        }
    }

    fn follow(&mut self, recorder: Recorder) {
        recorder.record(self.scheduler.blocks().resident());
        self.scheduler.record_changes();
        self.kv_events = Some(recorder);
    }

    fn run(mut self, inbox: &Receiver<Message>) {
        loop {
            if self.is_idle() {
                debug_assert_eq!(self.scheduler.check(), Ok(()));
                match self.wait(inbox) {
                    Some(message) => self.receive(message),
                    None => return,
                }
            }
            while let Ok(message) = inbox.try_recv() {
                self.receive(message);
            }
            if !self.is_idle() {
                self.step();
            }
        }
    }

    /// Whether there is nothing to do.
    fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.under_way.is_none()
    }

    /// The next message; `None` once no sender is left. Meanwhile the backend's other parts are kept alive.
    fn wait(&mut self, inbox: &Receiver<Message>) -> Option<Message> {
        self.backend.rest();
        let Some(every) = self.backend.keep_alive_every() else { return inbox.recv().ok() };
        loop {
            match inbox.recv_timeout(every) {
                Ok(message) => return Some(message),
                Err(RecvTimeoutError::Timeout) => {
                    self.backend.keep_alive();
                    if self.backend.cache_was_lost() {
                        self.recompute_all();
                        self.tell_changes();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Submit(sequence) => self.scheduler.add(*sequence),
            Message::Resident(reply) => {
                self.catch_up();
                // Who asked may be gone.
                drop(reply.send(self.scheduler.blocks().resident()));
            }
            Message::Follow(recorder) => {
                self.catch_up();
                self.follow(recorder);
            }
            Message::Hold(asked) => {
                self.catch_up();
                self.hold(asked);
            }
        }
    }

    /// Plans and carries out one step of the live sequences.
    fn step(&mut self) {
        let started = Instant::now();
        self.plan();
        // A step may take long, and what it is to do is not done before.
        self.record_state();
        if self.scheduler.plan().parts.is_empty() {
            self.catch_up();
        } else {
            let phase = self.phase();
            self.carry_out();
            self.metrics.step_seconds(phase).observe(started.elapsed().as_secs_f64());
        }
        self.tell_changes();
        self.record_state();
    }

    /// Tells followers what changed; of a step under way once it is through.
    fn tell_changes(&mut self) {
        let changes = self.scheduler.take_changes();
        match &mut self.under_way {
            Some(step) => step.changes.extend(changes),
            None => self.announce(changes),
        }
    }

    fn announce(&self, changes: Vec<CacheChange>) {
        if let Some(recorder) = &self.kv_events {
            recorder.record(changes);
        }
    }

    fn plan(&mut self) {
        self.scheduler.remove_aborted();
        self.scheduler.schedule();
        self.record_plan();
    }

    /// Begins again with all sequences: what was cached of them is gone.
    fn recompute_all(&mut self) {
        let lost = self.scheduler.recompute_all();
        self.metrics.preemptions.inc_by(lost as u64);
    }

    /// What kind of work the planned step does.
    fn phase(&self) -> Phase {
        let running = self.scheduler.running();
        let decodes =
            |part: &Planned| running[part.sequence].tokens.len() > running[part.sequence].prompt_len;
        let decoding = self.scheduler.plan().parts.iter().filter(|p| p.tokens == 1 && decodes(p)).count();
        match decoding {
            0 => Phase::Prefill,
            n if n == self.scheduler.plan().parts.len() => Phase::Decode,
            _ => Phase::Mixed,
        }
    }

    fn record_plan(&self) {
        let plan = self.scheduler.plan();
        self.metrics.prompt_tokens.inc_by(plan.admitted_tokens as u64);
        self.metrics.cached_tokens.inc_by(plan.cached_tokens as u64);
        self.metrics.external_wanted_tokens.inc_by(plan.external_wanted as u64);
        self.metrics.external_tokens.inc_by(plan.external_tokens as u64);
        self.metrics.preemptions.inc_by(plan.preempted as u64);
    }

    fn record_state(&mut self) {
        self.metrics.requests_running.set(self.scheduler.running().len() as i64);
        self.metrics.requests_waiting.set(self.scheduler.waiting_len() as i64);
        self.metrics.waiting_uncached_tokens.set(self.scheduler.uncached_tokens() as i64);
        self.metrics.kv_blocks_used.set(self.scheduler.blocks().used_blocks() as i64);
        self.metrics.kv_blocks_held.set(self.scheduler.holds().blocks() as i64);
    }
}

#[cfg(test)]
mod tests;
