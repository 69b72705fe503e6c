//! One simulated worker: the engine under a lock, the thread that keeps its time, and the desk that hands its
//! tokens to the answers. No HTTP. Engine time is wall time, sped up.
//!
//! A thread of its own for each worker, as a real engine has: it sleeps to tens of microseconds where the
//! runtime's timer would to a millisecond. What is ready at once (always with the `instant` profile) is done
//! in the caller's thread.

use std::{
    fmt::Write as _,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use keyway_wire::block_hash::BlockHash;
use tokio::sync::watch;

use super::{
    First,
    events::{EventLog, Numbered, Snapshot},
    faults::{Fault, Faults, Kind, TooManyFaults},
    kv::KvMover,
    loads,
    prompt::{Tokens, Vocabulary},
    request::Ask,
    series::{Names, Series},
    ticket::Ticket,
};
use crate::engine_model::{Engine, Listener, Nanos, Profile, Refusal, RequestId, Submission, Token};

/// Longest sleep of a worker's thread with nothing to wait for.
const IDLE: Duration = Duration::from_secs(60);

/// What all workers of the fleet have in common.
#[derive(Debug)]
pub(super) struct Setup {
    /// The model they say they serve.
    pub model: String,
    /// Speed and bounds of every worker's engine.
    pub profile: Profile,
    /// Seconds of engine time in one second.
    pub time_scale: f64,
    /// Tokens generated for requests that set no limit.
    pub output_tokens: u32,
    /// Tokens of a picture in a prompt; 0: those of its text.
    pub image_tokens: u32,
    /// In whose names they tell their metrics.
    pub metrics: Names,
    /// Whether they render prompts.
    pub render: bool,
    /// What their streams say before the first token.
    pub first: First,
    /// What moves KV between them, if anything does.
    pub kv: Option<KvMover>,
    /// When the mock started.
    pub zero: Instant,
    /// What answers are made of.
    pub vocabulary: Vocabulary,
}

/// One simulated worker, shared by its own thread and the tasks of its connections.
#[derive(Debug)]
pub(super) struct Worker {
    /// Its number in the fleet, from 0, by which faults name it.
    pub number: usize,
    /// What all workers of the fleet have in common.
    pub setup: Arc<Setup>,
    model_json: String,
    state: Mutex<State>,
    wake: Condvar,
    /// Whether there may be faults; spares requests the lock.
    faulty: AtomicBool,
    alive: watch::Sender<bool>,
    /// Turns `true` when the mock ends.
    stop: AtomicBool,
}

#[derive(Debug)]
struct State {
    engine: Engine,
    desk: Desk,
    faults: Faults,
    /// Counts the engine's lives.
    life: u64,
    dead: bool,
    stalled: bool,
    /// Faults are applied up to here.
    faults_at: Option<Duration>,
}

/// A request that was taken.
#[derive(Debug)]
pub(super) struct Admission {
    /// What the engine says about it.
    pub ticket: Arc<Ticket>,
    id: RequestId,
    life: u64,
}

/// Hands tokens to answers, and counts.
#[derive(Debug)]
struct Desk {
    open: Vec<Option<Open>>,
    over: Vec<RequestId>,
    series: Series,
    events: Option<EventLog>,
    /// Wall seconds in one nanosecond of engine time.
    seconds: f64,
}

/// A request under way.
#[derive(Debug)]
struct Open {
    ticket: Arc<Ticket>,
    submitted: Nanos,
    last_token: Nanos,
    finish: &'static str,
    /// Its tokens and salt, where KV events tell them.
    said: Option<(Tokens, Option<String>)>,
}

// === impl Worker ===

impl Worker {
    /// A worker with an idle engine. Its thread is [`Worker::keep_time`].
    pub(super) fn new(number: usize, setup: Arc<Setup>, events: Option<EventLog>) -> Self {
        let state = State {
            engine: new_engine(&setup.profile, events.is_some()),
            desk: Desk {
                open: Vec::new(),
                over: Vec::new(),
                series: Series::default(),
                events,
                seconds: 1e-9 / setup.time_scale,
            },
            faults: Faults::default(),
            life: 0,
            dead: false,
            stalled: false,
            faults_at: None,
        };
        Self {
            number,
            // Strings always serialise.
            model_json: serde_json::to_string(&setup.model).unwrap_or_default(),
            setup,
            state: Mutex::new(state),
            wake: Condvar::new(),
            faulty: AtomicBool::new(false),
            alive: watch::Sender::new(true),
            stop: AtomicBool::new(false),
        }
    }

    /// The model's name as a JSON string.
    pub(super) fn model_json(&self) -> &str {
        &self.model_json
    }

    /// What answers are made of.
    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.setup.vocabulary
    }

    /// Whether its process is up; changes with the faults.
    pub(super) fn alive(&self) -> watch::Receiver<bool> {
        self.alive.subscribe()
    }

    /// Takes a request in.
    pub(super) fn submit(&self, ask: &mut Ask) -> Result<Admission, Refusal> {
        let mut state = self.lock();
        let now = self.now();
        let state = &mut *state;
        let due = state.engine.next_event_at();
        state.advance(now);
        let submission = Submission {
            prompt_tokens: ask.prompt_tokens,
            output_tokens: ask.output_tokens,
            chain: std::mem::take(&mut ask.chain),
            fetched_tokens: ask.fetched_tokens,
        };
        let id = state.engine.submit(now, submission)?;
        let said = state.desk.events.is_some().then(|| (std::mem::take(&mut ask.tokens), ask.salt.take()));
        let ticket = state.desk.open(id, now, ask.finish, said);
        state.desk.series.prompt_tokens += u64::from(ask.prompt_tokens);
        state.advance(now);
        if state.engine.next_event_at() != due {
            self.wake.notify_one();
        }
        Ok(Admission { ticket, id, life: state.life })
    }

    /// Leading tokens of a prompt that its cache holds.
    pub(super) fn held_tokens(&self, chain: &[BlockHash]) -> u32 {
        let mut state = self.lock();
        let now = self.now();
        state.advance(now);
        state.engine.pool().cached(chain) as u32 * self.setup.profile.block_tokens
    }

    /// Ends a request whose client has left.
    pub(super) fn cancel(&self, admission: &Admission) {
        let mut state = self.lock();
        if state.life == admission.life && state.engine.cancel(admission.id) {
            state.desk.series.end("abort");
            state.desk.close(admission.id);
        }
    }

    /// The page of `/metrics`, in the names of the chosen engine.
    pub(super) fn metrics(&self) -> String {
        let state = self.lock();
        state.desk.series.render(&state.engine, &self.setup.model, self.setup.metrics)
    }

    /// SGLang's `/v1/loads`; nothing in vLLM's words.
    pub(super) fn loads(&self, prometheus: bool) -> Option<String> {
        (self.setup.metrics == Names::Sglang).then(|| loads::page(&self.lock().engine, prometheus))
    }

    /// The batches of KV events that are there by now, from number `start` on. What is no longer kept when
    /// its turn comes is left out.
    pub(super) fn batches_since(self: &Arc<Self>, start: u64) -> impl Iterator<Item = Numbered> + use<> {
        let worker = Arc::clone(self);
        let end = worker.lock().desk.events.as_ref().map_or(0, EventLog::next);
        let mut next = start;
        std::iter::from_fn(move || {
            let batch =
                worker.lock().desk.events.as_ref()?.first_since(next).filter(|(number, _)| *number < end)?;
            next = batch.0 + 1;
            Some(batch)
        })
    }

    /// The whole cache as batches of KV events.
    pub(super) fn snapshot(&self) -> Option<Snapshot> {
        self.lock().desk.events.as_ref().map(EventLog::snapshot)
    }

    /// Adds a fault whose times count from now.
    pub(super) fn add_fault(&self, fault: Fault) -> Result<(), TooManyFaults> {
        let mut state = self.lock();
        state.faults.add(fault, self.since_start())?;
        self.faulty.store(true, Ordering::Release);
        self.wake.notify_one();
        Ok(())
    }

    /// Forgets all faults, those to come too; a dead or stalled worker goes on.
    pub(super) fn clear_faults(&self) {
        let mut state = self.lock();
        state.faults.clear();
        self.faulty.store(false, Ordering::Release);
        self.wake.notify_one();
    }

    /// Its faults, one a line.
    pub(super) fn faults(&self) -> String {
        let mut list = String::new();
        for fault in self.lock().faults.iter() {
            // Writing to a string cannot fail.
            let _ = writeln!(list, "{fault}");
        }
        list
    }

    /// The first fault that strikes the next request or stream, among those for which `wanted` gives
    /// something.
    pub(super) fn strike<T>(&self, wanted: impl Fn(Kind) -> Option<T>) -> Option<T> {
        if !self.faulty.load(Ordering::Acquire) {
            return None;
        }
        self.lock().faults.strike(self.since_start(), wanted)
    }

    /// Makes the worker's thread return from [`Worker::keep_time`].
    pub(super) fn stop(&self) {
        let _state = self.lock();
        self.stop.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// The worker's thread: advances the engine when its steps end, and begins and ends faults.
    pub(super) fn keep_time(&self) {
        let mut state = self.lock();
        while !self.stop.load(Ordering::Acquire) {
            let since_start = self.since_start();
            self.apply_faults(&mut state, since_start);
            state.advance(self.now());
            let step = state.engine.next_event_at().filter(|_| !state.stalled).map(|at| self.wall(at));
            let change = state.faults.next_change_after(since_start);
            let next = [step, change].into_iter().flatten().min();
            let wait = next.map_or(IDLE, |at| at.saturating_sub(self.since_start()));
            // Spurious and early ends of the wait only make the loop look again.
            state = self.wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn apply_faults(&self, state: &mut State, now: Duration) {
        let before = state.faults_at.replace(now);
        let dead = state.faults.active(now).any(|fault| fault.kind == Kind::Die);
        if (dead && !state.dead) || state.faults.restarts_between(before, now) {
            state.restart(&self.setup.profile);
            // Connections break on any change of this value, also from alive to alive.
            self.alive.send_replace(!dead);
        } else if state.dead && !dead {
            self.alive.send_replace(true);
        }
        state.dead = dead;
        let factor = |fault: &Fault| if let Kind::Slow(factor) = fault.kind { factor } else { 1.0 };
        state.engine.slow_down(state.faults.active(now).map(factor).product());
        let stalled = state.faults.active(now).any(|fault| fault.kind == Kind::Stall);
        if std::mem::replace(&mut state.stalled, stalled) && !stalled {
            state.engine.resume(self.engine_time(now));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn since_start(&self) -> Duration {
        self.setup.zero.elapsed()
    }

    pub(super) fn now(&self) -> Nanos {
        self.engine_time(self.since_start())
    }

    fn engine_time(&self, wall: Duration) -> Nanos {
        (wall.as_nanos() as f64 * self.setup.time_scale) as Nanos
    }

    pub(super) fn wall(&self, at: Nanos) -> Duration {
        Duration::from_nanos((at as f64 / self.setup.time_scale).ceil() as u64)
    }
}

fn new_engine(profile: &Profile, recording: bool) -> Engine {
    let engine = Engine::new(profile.clone());
    if recording { engine.recording() } else { engine }
}

// === impl State ===

impl State {
    fn advance(&mut self, now: Nanos) {
        if self.stalled {
            return;
        }
        self.engine.advance(now, &mut self.desk);
        if let Some(events) = &mut self.desk.events
            && self.engine.has_changes()
        {
            let (open, block_tokens) = (&self.desk.open, self.engine.profile().block_tokens);
            let said = |id: RequestId| open.get(id.slot as usize)?.as_ref()?.said.as_ref();
            let lost = self.faults_at.is_some_and(|at| {
                self.faults.strike(at, |kind| (kind == Kind::LoseEvents).then_some(())).is_some()
            });
            events.publish(self.engine.take_changes(), block_tokens, said, lost);
        }
        for id in std::mem::take(&mut self.desk.over) {
            self.desk.open[id.slot as usize] = None;
        }
    }

    /// A new process: nothing cached, nothing running, every answer broken.
    fn restart(&mut self, profile: &Profile) {
        self.engine = new_engine(profile, self.desk.events.is_some());
        for open in self.desk.open.drain(..).flatten() {
            open.ticket.break_off();
        }
        self.desk.over.clear();
        self.desk.series = Series::default();
        if let Some(events) = &mut self.desk.events {
            events.restart();
        }
        self.life += 1;
    }
}

// === impl Desk ===

impl Desk {
    fn open(
        &mut self,
        id: RequestId,
        now: Nanos,
        finish: &'static str,
        said: Option<(Tokens, Option<String>)>,
    ) -> Arc<Ticket> {
        let slot = id.slot as usize;
        if self.open.len() <= slot {
            self.open.resize_with(slot + 1, || None);
        }
        let ticket = Arc::<Ticket>::default();
        self.open[slot] =
            Some(Open { ticket: Arc::clone(&ticket), submitted: now, last_token: now, finish, said });
        ticket
    }

    /// No more tokens go to the request's answer. With KV events its tokens stay until the slot is used
    /// again.
    fn close(&mut self, id: RequestId) {
        if self.events.is_none() {
            self.open[id.slot as usize] = None;
        }
    }
}

impl Listener for Desk {
    fn token(&mut self, token: Token) {
        let Some(open) = &mut self.open[token.request.slot as usize] else { return };
        let since = |from: Nanos| token.at.saturating_sub(from) as f64 * self.seconds;
        if token.number == 1 {
            self.series.ttft.observe(since(open.submitted));
        } else {
            self.series.itl.observe(since(open.last_token));
        }
        open.last_token = token.at;
        if token.last {
            self.series.e2e.observe(since(open.submitted));
            self.series.end(open.finish);
            self.over.push(token.request);
        }
        // The last token wakes the answer after all others are told: one wake for a whole answer at once.
        open.ticket.advance(token.number, token.cached_tokens);
    }
}
