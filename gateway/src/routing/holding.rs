//! Requests that wait until a worker can begin on them: [`keyway_core::waiting_room`] with the gateway's
//! workers behind it. Each request enters the room and mostly leaves it at once; the others are begun when a
//! first token comes, a request ends, a worker comes back, or the room's own clock says so.
//!
//! Locks are taken in the order room, index, sessions. What is begun is handed out after both are open again:
//! a client that is gone drops its choice, whose ticket asks the room for the next one.

mod enter;
mod pauses;
mod split;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use keyway_core::{
    index::{Owner, PrefixIndex, WorkerId},
    may_wait,
    pick::{Candidate, Pick, Policy, Turn},
    quote,
    waiting_room::{Ahead, CandidateSet, OwnerWord, Quote, RoomRules, WaitingRoom, WorkerChooser},
    working_sets::{HeldTurn, Left, SetRules, WorkingSets},
};
use keyway_wire::block_hash::BlockHash;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use tokio::sync::{Notify, oneshot};

use self::split::Asks;
use super::{
    Choice, Router, Rules, Setting, Ticket,
    legs::keep_no_kv,
    setting::Few,
    ticket::{Coming, Sending},
};
use crate::{
    api::Api,
    clock,
    error::Error,
    fleet::{Fleet, Worker},
};

/// A request that waits.
#[derive(Debug)]
pub(super) struct Held {
    setting: Setting,
    /// The workers that may compute its prompt for the one that answers, if there are any.
    prefill: Option<Box<Setting>>,
    /// Its API, if it may have such a worker.
    moves_kv: Option<Api>,
    /// Whose the blocks of its prompt are.
    index_owner: Owner,
    streams: bool,
    /// The turn of a session that it is, if it is one.
    turn: Option<HeldTurn>,
    /// The conversation that it may be the first turn of, if it is no session's.
    opens: Option<u64>,
    /// These two of one that waits, or that is logged: they are copies.
    model: Option<String>,
    tried: Vec<WorkerId>,
    entered: Duration,
    /// Tells the task that waits; `None` while the request comes, when what is decided is handed back.
    begin: Option<oneshot::Sender<Decided>>,
}

/// In a box: a request goes into the room and out of it again some eight times moved, and it is large.
type Waiting = Box<Held>;

/// Requests that wait, and what wakes them.
#[derive(Debug)]
pub(super) struct Holding {
    room: Mutex<WaitingRoom<Waiting>>,
    /// Which sessions are paused.
    sets: Mutex<WorkingSets>,
    /// Requests in the room, to know without its lock that there are none.
    requests: AtomicUsize,
    /// How often the fleet has changed, and what those in the room have been told of that.
    pub(super) fleet_changes: AtomicU64,
    told_changes: AtomicU64,
    /// When the room is looked at again.
    alarm: Mutex<Option<Duration>>,
    /// Tells who waits for a first worker that the fleet has changed.
    pub(super) changed: Notify,
}

impl Default for Holding {
    fn default() -> Self {
        Self {
            room: Mutex::new(WaitingRoom::new(RoomRules::default())),
            sets: Mutex::new(WorkingSets::new(SetRules::default())),
            requests: AtomicUsize::new(0),
            fleet_changes: AtomicU64::new(0),
            told_changes: AtomicU64::new(0),
            alarm: Mutex::default(),
            changed: Notify::new(),
        }
    }
}

impl Holding {
    /// Lets requests wait by these rules from now on.
    pub(super) fn set_rules(&self, rules: RoomRules) {
        self.sets.lock().set_rules(rules.pauses.unwrap_or_default());
        self.room.lock().set_rules(rules);
    }

    /// Whether requests wait, as far as can be known without the room's lock.
    pub(super) fn any_wait(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }
}

impl Held {
    fn look_again(&mut self, fleet: &Fleet, now: Duration) {
        self.setting.look_again(fleet, self.model.as_deref(), &self.tried);
        if let Some(prefill) = &mut self.prefill {
            let passed = self.moves_kv.map(|api| keep_no_kv(fleet, api, now)).unwrap_or_default();
            prefill.look_again(fleet, self.model.as_deref(), &passed);
        }
    }
}

/// A worker, or why there is none.
type Decided = Result<Choice, Error>;
/// What was decided, and who is to be told.
type Begun = Vec<(oneshot::Sender<Decided>, Decided)>;

/// Where a request would begin: candidates as they were weighed, and the pick among them.
struct Plan {
    /// Which of the counter's rosters the candidates are from.
    roster: usize,
    candidates: Vec<Candidate>,
    pick: Pick,
    /// What its prompt asks of a worker for prefill; `None` where none may compute it.
    asks: Option<Asks>,
    /// Whether it is computed elsewhere.
    splits: bool,
}

/// Workers that the same requests may go to, looked at once for all of them.
struct Roster {
    workers: Arc<[Arc<Worker>]>,
    by_tokens: bool,
    may_pull: bool,
    /// Of which kind the requests are, where some of the workers refuse some kind.
    kind: Option<u64>,
    /// Whether one of them has begun to be tried since.
    stale: bool,
    /// What all of them can do together, and the most tokens that one of them has left for a session; not
    /// looked at yet, or not since one began.
    left: Option<Left>,
    /// The place of each candidate among the workers: who went down in the meantime is no candidate.
    worker_of: Few<usize>,
    candidate_set: CandidateSet,
}

/// The room's desk: quotes from the index, begins with a ticket.
struct Counter<'a> {
    router: &'a Arc<Router>,
    index: MutexGuard<'a, PrefixIndex>,
    now: Duration,
    horizon_ms: f64,
    /// Whether sessions may be paused.
    pauses: bool,
    rules: Rules,
    /// Whether requests waited when it opened.
    others_wait: bool,
    /// One for each set of workers that those who wait may go to; mostly there is one request, and with it
    /// one set.
    rosters: SmallVec<[Roster; 1]>,
    decisions: Decisions,
}

/// What one look at the room has decided, handed out once the locks are open.
#[derive(Default)]
struct Decisions {
    /// Of those who waited.
    begun: Begun,
    /// Of the request that has just come.
    own: Option<Decided>,
}

impl Router {
    /// Begins whatever can begin now.
    pub(super) fn pump(self: &Arc<Self>) {
        // Almost always no request waits.
        if self.holding.requests.load(Ordering::Acquire) > 0 {
            let mut room = self.holding.room.lock();
            self.tell_of_the_fleet(&mut room);
            let mut counter = self.counter(&room, self.now());
            let (decisions, room) = counter.release(room);
            drop((counter, room));
            hand_out(decisions.begun);
        }
    }

    /// What other gateways are to be told of the owners whose requests wait, or came of late.
    pub fn words_of_owners(&self) -> Vec<OwnerWord> {
        self.holding.room.lock().words(self.now())
    }

    /// Another gateway, which speaks once in `every`, has said this of owners, and how many tokens it has
    /// served of each since.
    pub fn hear_of_owners(&self, words: &[(OwnerWord, f64)], every: Duration) {
        if words.is_empty() {
            return;
        }
        let now = self.now();
        self.holding.room.lock().hear(now, every, words);
    }

    /// Requests that wait may go to workers that have come up since. Returns how often the fleet has changed.
    fn tell_of_the_fleet(&self, room: &mut WaitingRoom<Waiting>) -> u64 {
        let changes = self.holding.fleet_changes.load(Ordering::Acquire);
        if self.holding.told_changes.swap(changes, Ordering::AcqRel) != changes {
            let now = self.now();
            room.requests_mut().for_each(|held| held.look_again(&self.fleet, now));
        }
        changes
    }

    fn counter(self: &Arc<Self>, room: &WaitingRoom<Waiting>, now: Duration) -> Counter<'_> {
        let rules = *self.rules.read();
        Counter {
            router: self,
            index: self.index.settled(),
            now,
            horizon_ms: room.rules().horizon_ms,
            pauses: rules.holds && rules.policy == Policy::Prefix && room.rules().pauses.is_some(),
            rules,
            others_wait: !room.is_empty(),
            rosters: SmallVec::new(),
            decisions: Decisions::default(),
        }
    }

    /// Looks at the room again at `wake`, unless an alarm is set for an earlier time.
    fn set_alarm(self: &Arc<Self>, now: Duration, wake: Option<Duration>) {
        let Some(wake) = wake else { return };
        let mut alarm = self.holding.alarm.lock();
        // A runtime that is gone has no task that waits for an answer.
        let (true, Ok(runtime)) = (alarm.is_none_or(|at| wake < at), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        *alarm = Some(wake);
        let router = Arc::downgrade(self);
        runtime.spawn(async move {
            clock::sleep(wake.saturating_sub(now)).await;
            if let Some(router) = router.upgrade() {
                let mut alarm = router.holding.alarm.lock();
                if *alarm == Some(wake) {
                    *alarm = None;
                }
                drop(alarm);
                router.pump();
            }
        });
    }
}

impl Decisions {
    fn add(&mut self, begin: Option<oneshot::Sender<Decided>>, decided: Decided) {
        match begin {
            Some(begin) => self.begun.push((begin, decided)),
            None => self.own = Some(decided),
        }
    }
}

fn hand_out(begun: Begun) {
    for (begin, choice) in begun {
        // It fails where the client has left, and the choice is undone as it is dropped.
        drop(begin.send(choice));
    }
}

impl Counter<'_> {
    /// Begins what can begin now; nothing is to be asked of it after that. It takes the room, so that a panic
    /// opens it before what was decided is dropped, which asks for it.
    fn release<'r>(
        &mut self,
        mut room: MutexGuard<'r, WaitingRoom<Waiting>>,
    ) -> (Decisions, MutexGuard<'r, WaitingRoom<Waiting>>) {
        let now = self.now;
        room.release(now, self);
        let router = self.router;
        router.holding.requests.store(room.len(), Ordering::Release);
        router.metrics.holding.set(room.len() as i64);
        router.set_alarm(now, room.wake());
        (std::mem::take(&mut self.decisions), room)
    }

    fn own_ms(&mut self, held: &Waiting) -> Option<f64> {
        self.quote(held, &Ahead::default()).map(|(quote, _)| quote.own_ms)
    }

    /// The roster of a request, and which it is.
    fn roster(&mut self, setting: &Setting) -> usize {
        let same = |roster: &Roster| {
            !roster.stale
                && roster.may_pull == setting.may_pull
                && roster.by_tokens == setting.by_tokens
                && roster.kind.is_none_or(|kind| kind == setting.kind)
                && roster.workers.len() == setting.workers.len()
                && roster.workers.iter().zip(&*setting.workers).all(|(a, b)| Arc::ptr_eq(a, b))
        };
        if let Some(known) = self.rosters.iter().position(same) {
            return known;
        }
        let mut candidates = setting.candidates(self.now, self.others_wait);
        let askable = setting.askable(self.now);
        let kind = askable.as_ref().map(|_| setting.kind);
        let worker_of = askable.unwrap_or_else(|| (0..candidates.len()).collect());
        let (mut places, mut kept) = (0.., worker_of.iter().peekable());
        candidates.retain(|_| places.next().is_some_and(|place: usize| kept.next_if_eq(&&place).is_some()));
        let candidate_set = CandidateSet::new(candidates, self.horizon_ms);
        self.rosters.push(Roster {
            workers: Arc::clone(&setting.workers),
            by_tokens: setting.by_tokens,
            may_pull: setting.may_pull,
            kind,
            stale: false,
            left: None,
            worker_of,
            candidate_set,
        });
        self.rosters.len() - 1
    }

    fn plan(&mut self, held: &Held, ahead: &Ahead) -> Option<Plan> {
        let setting = &held.setting;
        let crowds = self.crowds(held);
        let turn =
            Turn { counter: self.router.turn.fetch_add(1, Ordering::Relaxed), random: fastrand::u64(..) };
        let roster = self.roster(setting);
        let Roster { worker_of, candidate_set, .. } = &self.rosters[roster];
        let mut candidates = candidate_set.candidates().to_vec();
        let by = setting.seen_by(worker_of.iter().copied());
        if let Some(next) = crowds {
            self.router.holding.sets.lock().displace(&next, &mut candidates);
        }
        let step = (self.now, &turn);
        let (policy, seen) = (self.rules.policy, (&by.seen(), &mut candidates[..]));
        let pick = self.router.consider(policy, setting, seen, ahead, step, &self.index)?;
        let plan = Plan { roster, candidates, pick, asks: None, splits: false };
        Some(if held.prefill.is_some() { self.with_ways(held, plan, ahead, &turn) } else { plan })
    }
}

impl WorkerChooser<Waiting> for Counter<'_> {
    type Plan = Plan;

    fn least_excess_ms(&mut self, held: &Waiting, ahead: &Ahead) -> f64 {
        if !may_wait(self.rules.policy, self.rules.holds, held.setting.prompt_tokens)
            || held.prefill.is_some()
        {
            return f64::NEG_INFINITY;
        }
        let roster = self.roster(&held.setting);
        self.rosters[roster].candidate_set.least_excess_ms(ahead)
    }

    fn is_open(&mut self, held: &Waiting, worker: WorkerId, ahead: &Ahead) -> bool {
        let roster = self.roster(&held.setting);
        self.rosters[roster].candidate_set.is_open(worker, ahead)
    }

    fn quote(&mut self, held: &Waiting, ahead: &Ahead) -> Option<(Quote, Plan)> {
        let plan = self.plan(held, ahead)?;
        let (rules, prompt_tokens) = (self.rules, held.setting.prompt_tokens);
        // Whose prompt is computed elsewhere waits for that worker, in a place of its own.
        let holds = rules.holds && !plan.splits;
        let quote = quote(rules.policy, holds, prompt_tokens, &plan.candidates, &plan.pick);
        Some((quote, plan))
    }

    fn begin(&mut self, mut held: Waiting, plan: Option<Plan>) {
        // Without a plan no worker is ready; dropping its end of the channel, or deciding nothing, says so.
        let Some(Plan { roster, candidates, pick, asks, splits }) = plan else { return };
        let begin = held.begin.take();
        let (router, setting) = (self.router, &held.setting);
        let Roster { worker_of, candidate_set, stale, .. } = &mut self.rosters[roster];
        let chosen = worker_of[pick.index];
        let worker = Arc::clone(&setting.workers[chosen]);
        *stale = worker.standing.refuses_something();
        let view = setting.view_at(chosen);
        self.index.used(self.now, &setting.request_view(), &candidates, pick.uncached_tokens);
        let (owner, indexed) = (held.index_owner, candidates[pick.index].worker);
        // What another worker computes is not there yet.
        let coming = splits.then(|| Coming {
            owner,
            worker: indexed,
            chain: Arc::clone(&view.chain),
            block_tokens: view.block_tokens,
        });
        let chain: &[BlockHash] = if splits { &[] } else { &view.chain };
        let placement = self.index.place_of(owner, indexed, chain);
        let pull = if splits { None } else { Router::pull_of(setting, &candidates, pick.index, worker_of) };
        // What another worker has, this one has not announced.
        let fetched = match &pull {
            None => setting.request_view().fetched_tokens(&candidates[pick.index]) as f64,
            Some(_) => 0.0,
        };
        let announced = placement.found_blocks(chain) as f64 * view.block_tokens + fetched;
        // The load counts before the locks open, so that two requests of a burst never see the same queue.
        let sending = Sending {
            at: self.now,
            uncached_tokens: pick.uncached_tokens,
            splits,
            streams: held.streams,
            kind: setting.kind,
        };
        let ticket = Ticket::start(Arc::clone(router), Arc::clone(&worker), placement, sending)
            .announced(announced as u64)
            .pulling(pull.as_ref())
            .telling(owner, chain)
            .placing_later(coming)
            .in_session(held.next_turn().filter(|_| self.pauses));
        // From here on it is dropped after the locks are open, whatever happens: it takes them itself.
        if let Some(Asks { of, left, evenness }) = &asks {
            of.load.asked(self.now, *left, *evenness);
        }
        if asks.is_some() || pull.is_some() {
            router.metrics.prefill_legs.chose(splits, pull.is_some());
        }
        self.decisions.add(begin, Ok(Choice { worker: Arc::clone(&worker), pick, splits, pull, ticket }));
        tracing::trace!(worker = %worker.name, reason = pick.reason.as_str(), "a request begins");
        let before = &candidates[pick.index];
        // Where none waited, no other request is weighed against what this one has changed.
        if self.others_wait {
            let load = worker.load.snapshot(self.now, before.tokens_per_ms).among(before.load.shares);
            candidate_set.update(pick.index, load);
        }
        if let Some(log) = &router.decision_log {
            let workers = worker_of.iter().map(|&i| &setting.workers[i]);
            log.choice(held.model.as_deref(), setting, view, workers.zip(&candidates), &pick, &worker.name);
        }
        let (rate, waited) = (before.tokens_per_ms * 1e3, self.now.saturating_sub(held.entered));
        router.metrics.hold.observe(waited.as_secs_f64());
        worker.series(&router.metrics).picked(pick.reason);
        self.session_goes_on(&held, &worker, rate, pick.uncached_tokens);
        router.sent.to(worker.id);
    }

    fn paused_until(&mut self, held: &Waiting, _: Duration) -> Option<Duration> {
        self.session_waits_until(held)
    }

    fn tokens(&self, plan: &Plan) -> Option<f64> {
        // Who computes the prompt is charged for it.
        Some(if plan.splits { 0.0 } else { plan.pick.uncached_tokens as f64 })
    }

    fn refuse(&mut self, held: Waiting, retry_after: Duration) {
        self.router.holding.turn_leaves(&held);
        self.decisions.add(held.begin, Err(Error::TooBusy { retry_after }));
    }
}

#[cfg(test)]
mod tests;
