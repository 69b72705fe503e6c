//! Requests that no worker can begin yet wait here, not in a worker's queue, so that the order in which they
//! begin and the worker each begins on are decided as late as can be. It keeps the order; costs, loads and
//! the index are the caller's, asked through a quote.
//!
//! - **Order:** the highest response ratio first, (waited + own) / own with `own` the request's own prefill
//!   (highest response ratio next, P. Brinch Hansen 1971): short prefills, above all those whose prefix is
//!   cached, do not wait for long ones, and a long one's turn comes as its wait grows.
//! - **Objective:** where one is set for the time to first token, those who have missed it let those go first
//!   who can still keep it, but for every 32nd place: a backlog that is worked off makes no other request
//!   late, and none starves.
//! - **Whole plan:** every release goes through all that wait in that order, and who is not begun yet weighs
//!   on the worker it would go to. Otherwise a hot prefix would keep all its requests waiting for one worker
//!   while others idle, since the queue that makes it spread is in here and not there.
//! - **Cheap:** a request that cannot begin anywhere is not quoted, and in a large fleet none is quoted again
//!   at once, unless the worker that it waits for has opened. So quotes take a bounded share of the time, and
//!   a release that finds every worker full orders no requests and looks at each waiting request in constant
//!   time ([`CandidateSet`]).
//! - **Fair:** owners take turns by tokens, priorities go first ([`fair`]), over all rooms that tell each
//!   other.
//! - **Sessions:** a turn whose session is paused waits for no worker ([`crate::working_sets`]).
//! - **Bounded:** beyond its limit, and after the longest wait, requests begin at once wherever they cost
//!   least; or, where the rules shed load, they are refused.

mod candidate_set;
pub mod fair;
mod order;

use std::time::Duration;

pub use self::candidate_set::CandidateSet;
pub use self::fair::Share;
pub use self::fair::elsewhere::OwnerWord;
use self::fair::{Begun, Fair, Outflow};
use crate::index::WorkerId;
use crate::spread_map::SpreadMap;
use crate::working_sets::SetRules;

/// Bounds of the pause until the next look at those who wait, in milliseconds: a prediction that has not come
/// true is not asked again at once, and one that is far off not believed for long.
const MIN_PAUSE_MS: f64 = 2.0;
/// The upper bound of that pause: a prediction is believed for a second at most.
const MAX_PAUSE_MS: f64 = 1_000.0;

/// Who is foreseen to wait for longer than this share of the limit is refused at once, and is late from this
/// share of the objective on: what is foreseen is off by a tenth or two, and to be refused after all of the
/// wait is worst.
const FORESEEN: f64 = 0.75;

/// Pause between two quotes of a request, for each worker that a quote weighs and each request that waits:
/// ten times what weighing takes (25 ns a worker), so that it takes a tenth of the time. With 8 workers and
/// 50 who wait a tenth of a millisecond, with 1,000 and 256 64 ms.
const PAUSE_PER_WEIGHED_NS: f64 = 250.0;

/// Above so many who wait, a release is followed by a pause, of so many nanoseconds for each of them: some
/// twenty times what looking at one takes. With 4,096 who wait 16 ms, which a worker's horizon bridges.
const CROWD: usize = 256;
/// Nanoseconds of that pause for each request that waits, once more than [`CROWD`] do.
const PAUSE_PER_WAITING_NS: u64 = 4_000;

/// Workers that one release weighs at most, over all its quotes: half a millisecond, in which no other
/// request is routed. A request that is not quoted then is a pause later, still in order. Up to 80 workers a
/// full room is gone through at once.
const MAX_WEIGHED: usize = 20_480;

/// Which requests may begin, in which order, and what becomes of those that wait for too long or are too
/// many.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct RoomRules {
    /// A worker takes another request while its backlog is at most this: enough to bridge the time until the
    /// next one reaches it, little enough to leave the choice open.
    pub horizon_ms: f64,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// After so long a request begins wherever it costs least. With a `shed_after` of no more, it is refused
    /// by then instead.
    pub max_wait: Duration,
    /// Milliseconds added to each prefill in the order: differences below it do not matter to clients.
    pub grain_ms: f64,
    /// Whether the order is by response ratio; otherwise by arrival.
    pub by_response_ratio: bool,
    /// Time to first token that is wanted: a request that would miss it anyway lets the others go first,
    /// mostly.
    pub objective: Option<Duration>,
    /// Requests that would wait for longer are refused, and so are those beyond `max_waiting`; `None`: none
    /// is.
    pub shed_after: Option<Duration>,
    /// When sessions are paused between two turns; `None`: never.
    pub pauses: Option<SetRules>,
}

impl RoomRules {
    /// After which a request begins, or is refused where load is shed.
    fn longest_wait(&self) -> Duration {
        self.shed_after.map_or(self.max_wait, |limit| self.max_wait.min(limit))
    }
}

impl Default for RoomRules {
    fn default() -> Self {
        Self {
            horizon_ms: 500.0,
            max_waiting: 4_096,
            max_wait: Duration::from_secs(300),
            grain_ms: 1_000.0,
            by_response_ratio: true,
            objective: None,
            shed_after: None,
            pauses: Some(SetRules::default()),
        }
    }
}

/// Where a request would begin now.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Quote {
    /// The worker that costs least, with all that waits for it before this request.
    pub worker: WorkerId,
    /// Milliseconds until that worker has computed what it was sent.
    pub backlog_ms: f64,
    /// Milliseconds of this request's own prefill there.
    pub own_ms: f64,
    /// Workers that were weighed.
    pub weighed: usize,
}

/// Who knows the workers: says where a request would begin, and begins it.
pub trait WorkerChooser<R> {
    /// What [`WorkerChooser::begin`] needs of the quote.
    type Plan;

    /// Milliseconds by which the least backlog of those who may have this request, with what waits before it
    /// and what is kept for others, is above the room's horizon. Above 0 it cannot begin anywhere, and is not
    /// quoted. [`CandidateSet::least_excess_ms`] is meant for it.
    fn least_excess_ms(&mut self, request: &R, ahead: &Ahead) -> f64;

    /// Whether the backlog of this worker, with what waits before the request and is kept for others, is
    /// within the room's horizon. See [`CandidateSet::is_open`].
    fn is_open(&mut self, request: &R, worker: WorkerId, ahead: &Ahead) -> bool;

    /// Where this request would go now, given what waits before it; `None` if no worker may have it.
    fn quote(&mut self, request: &R, ahead: &Ahead) -> Option<(Quote, Self::Plan)>;

    /// Sends the request there; what that changes must be seen by the next quote. Without a plan, refuses it.
    fn begin(&mut self, request: R, plan: Option<Self::Plan>);

    /// Until when a request that came then waits although a worker may be open, as its session is paused
    /// ([`crate::working_sets`]); `None`: it is not.
    fn paused_until(&mut self, _request: &R, _arrived: Duration) -> Option<Duration> {
        None
    }

    /// Tokens that a worker will have to compute for it, where the plan knows better than who sent it.
    fn tokens(&self, _plan: &Self::Plan) -> Option<f64> {
        None
    }

    /// Refuses a request that has waited, or would wait, for too long; it may come again after that time.
    fn refuse(&mut self, request: R, _retry_after: Duration) {
        self.begin(request, None);
    }
}

/// What comes before the request that is asked about: milliseconds of prefill that wait for each worker in
/// here, and that each keeps for others.
#[derive(Debug, Default)]
pub struct Ahead {
    waits: SpreadMap<WorkerId, f64>,
    reserve_ms: f64,
}

/// The room. `R` is what the caller needs to quote and to begin a request.
#[derive(Debug)]
pub struct WaitingRoom<R> {
    rules: RoomRules,
    waiting: Vec<Entry<R>>,
    next: u64,
    /// When a request may begin although nothing happens.
    wake: Option<Duration>,
    /// Until when a crowd is not looked at again.
    rests_until: Duration,
    /// How many who can keep the objective have begun since one who cannot.
    in_time_begun: u32,
    fair: Fair,
    outflow: Outflow,
}

#[derive(Debug)]
struct Entry<R> {
    number: u64,
    arrived: Duration,
    /// Own prefill, as of the last quote; a request that comes while none waits mostly begins unasked.
    own_ms: Option<f64>,
    /// The worker that it waits for, as of the last quote, and until when that is not asked again.
    hope: Option<(WorkerId, Duration)>,
    share: Share,
    request: R,
}

/// Names a request that waits.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Place(u64);

impl Ahead {
    /// What waits for this worker.
    pub fn of(&self, worker: WorkerId) -> f64 {
        self.waits.get(&worker).copied().unwrap_or(0.0)
    }

    /// The workers that something waits for, and how much.
    pub(crate) fn each(&self) -> impl Iterator<Item = (WorkerId, f64)> {
        self.waits.iter().map(|(worker, ms)| (*worker, *ms))
    }

    /// How much less than the room's horizon a worker's backlog has to be, because others are about who have
    /// had less.
    pub fn reserve_ms(&self) -> f64 {
        self.reserve_ms
    }

    #[cfg(test)]
    pub(crate) fn with(waits: impl Iterator<Item = (WorkerId, f64)>) -> Self {
        Self { waits: waits.collect(), reserve_ms: 0.0 }
    }

    fn add(&mut self, worker: WorkerId, ms: f64) {
        *self.waits.entry(worker).or_default() += ms;
    }
}

impl<R> WaitingRoom<R> {
    /// A room in which no request waits and of whose owners none was served yet.
    pub fn new(rules: RoomRules) -> Self {
        Self {
            rules,
            waiting: Vec::new(),
            next: 0,
            wake: None,
            rests_until: Duration::ZERO,
            in_time_begun: 0,
            fair: Fair::default(),
            outflow: Outflow::default(),
        }
    }

    /// The rules in force: those of [`WaitingRoom::new`], or of the last [`WaitingRoom::set_rules`].
    pub fn rules(&self) -> &RoomRules {
        &self.rules
    }

    /// Requests begin by other rules from the next [`WaitingRoom::release`] on.
    pub fn set_rules(&mut self, rules: RoomRules) {
        self.rules = rules;
    }

    /// A request came; `own_ms` is its prefill where it is least, which may be unknown if no request waits.
    /// It begins with the next [`WaitingRoom::release`].
    pub fn enter(&mut self, now: Duration, own_ms: Option<f64>, request: R) -> Place {
        self.enter_as(now, own_ms, Share::default(), request)
    }

    /// Whether a request of this owner would begin in time; else, when to come again.
    pub fn admit(&mut self, now: Duration, share: &Share) -> Result<(), Duration> {
        let Some(limit) = self.rules.shed_after else { return Ok(()) };
        self.come_back(now, share);
        let mut all: Vec<(Share, bool)> = self.waiting.iter().map(|entry| (entry.share, false)).collect();
        all.push((*share, true));
        self.fair.arrange(&mut all, |(share, _)| *share);
        let ahead = || all.iter().take_while(|(_, new)| !new).map(|(share, _)| share);
        let all_tokens = ahead().map(|share| share.tokens).sum();
        let own_tokens = ahead().filter(|other| other.owner == share.owner).map(|share| share.tokens).sum();
        let wait = self.outflow.time_for(all_tokens).max(self.fair.time_for(share, own_tokens));
        match wait {
            Some(wait) if wait > limit.mul_f64(FORESEEN) => {
                Err(wait.saturating_sub(limit).max(Duration::from_millis(1)))
            }
            _ => Ok(()),
        }
    }

    /// As [`WaitingRoom::enter`], for one of several owners.
    pub fn enter_as(&mut self, now: Duration, own_ms: Option<f64>, share: Share, request: R) -> Place {
        self.come_back(now, &share);
        if share.owed > 0.0 {
            self.fair.charge(&share, share.owed);
        }
        let number = self.next;
        self.next += 1;
        self.waiting.push(Entry { number, arrived: now, own_ms, hope: None, share, request });
        Place(number)
    }

    fn come_back(&mut self, now: Duration, share: &Share) {
        let credit = self.outflow.credit();
        self.fair.come_back(share, self.waiting.iter().map(|entry| entry.share), (now, credit));
    }

    /// Its client left. `None` if it has begun.
    pub fn leave(&mut self, place: Place) -> Option<R> {
        let at = self.waiting.iter().position(|entry| entry.number == place.0)?;
        Some(self.waiting.swap_remove(at).request)
    }

    /// A request that waits; `None` if it has begun.
    pub fn request_mut(&mut self, place: Place) -> Option<&mut R> {
        let entry = self.waiting.iter_mut().find(|entry| entry.number == place.0)?;
        Some(&mut entry.request)
    }

    /// Requests that wait now, of all owners together.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request waits now, of whichever owner.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The requests that wait, in no order; where each may begin is asked anew.
    pub fn requests_mut(&mut self) -> impl Iterator<Item = &mut R> {
        self.waiting.iter_mut().map(|entry| {
            entry.hope = None;
            &mut entry.request
        })
    }

    /// When [`WaitingRoom::release`] is to be called again if nothing happens before: a backlog will have
    /// fallen to the horizon if all goes as predicted, or a request will have waited for long enough.
    pub fn wake(&self) -> Option<Duration> {
        self.wake.filter(|_| !self.waiting.is_empty())
    }

    /// Begins what can be begun now. A request that no worker may have begins too, for the desk to refuse.
    pub fn release(&mut self, now: Duration, desk: &mut impl WorkerChooser<R>) {
        if now < self.rests_until {
            self.wake = Some(self.rests_until);
            return;
        }
        // Who has just come has not waited.
        let waited = self.wake.is_some();
        if let Some(due) = self.shut_until(now, desk) {
            self.wake = Some(due);
            self.rest(now);
            self.outflow.note(now, waited, Begun::default());
            return;
        }
        self.order(now);
        self.shed(now, desk);
        let mut begun = Begun::default();
        let mut ahead = Ahead::default();
        let mut surplus = self.waiting.len().saturating_sub(self.rules.max_waiting);
        let crowd = self.waiting.len() as f64;
        let mut kept = Vec::new();
        let mut weighed = 0;
        let mut wake: Option<Duration> = None;
        let rules = self.rules;
        let (RoomRules { horizon_ms, shed_after, .. }, max_wait) = (rules, rules.longest_wait());
        let mut keep = |entry: Entry<R>, due: Duration| {
            let due = due.min(entry.arrived + max_wait);
            wake = Some(wake.map_or(due, |wake| wake.min(due)));
            kept.push(entry);
        };
        let least = self.fair.least(now);
        let mut waiting = std::mem::take(&mut self.waiting);
        for mut entry in waiting.drain(..) {
            let late = entry.is_late(now, &rules);
            let greedy = self.fair.is_greedy(&entry.share, &least, now);
            ahead.reserve_ms = horizon_ms * if greedy { fair::RESERVED } else { order::reserved(late) };
            let must_begin =
                (surplus > 0 && shed_after.is_none()) || now.saturating_sub(entry.arrived) >= max_wait;
            // While its session is paused it waits for no worker, and weighs on none.
            let paused = if must_begin { None } else { entry.paused_until(now, desk) };
            let mut unweighed = || entry.waits_unweighed(now, desk, &mut ahead, &mut weighed);
            if let Some(due) = paused.or_else(|| if must_begin { None } else { unweighed() }) {
                keep(entry, due);
                continue;
            }
            let Some((quote, plan)) = desk.quote(&entry.request, &ahead) else {
                desk.begin(entry.request, None);
                continue;
            };
            weighed += quote.weighed;
            let excess_ms = quote.backlog_ms + ahead.of(quote.worker) + ahead.reserve_ms - horizon_ms;
            if must_begin || excess_ms <= 0.0 {
                surplus = surplus.saturating_sub(1);
                self.in_time_begun = if late { 0 } else { self.in_time_begun.saturating_add(1) };
                let tokens = desk.tokens(&plan).unwrap_or(entry.share.tokens);
                self.fair.began(now, &entry.share, tokens);
                begun.requests += 1.0;
                begun.tokens += entry.share.tokens;
                begun.charged += tokens / entry.share.weight.max(f64::MIN_POSITIVE);
                desk.begin(entry.request, Some(plan));
            } else {
                let pause =
                    Duration::from_nanos((PAUSE_PER_WEIGHED_NS * quote.weighed as f64 * crowd) as u64);
                entry.hope = Some((quote.worker, now + pause));
                entry.own_ms = Some(quote.own_ms);
                ahead.add(quote.worker, quote.own_ms);
                keep(entry, after(now, excess_ms));
            }
        }
        // Where no request is kept the list's memory is.
        self.waiting = if kept.is_empty() { waiting } else { kept };
        self.wake = wake;
        self.rest(now);
        self.outflow.note(now, waited, begun);
    }

    /// Until when no request can begin, nor has to, as long as nothing happens: then order does not matter.
    /// `None` if one may, or has to be asked about first.
    fn shut_until(&self, now: Duration, desk: &mut impl WorkerChooser<R>) -> Option<Duration> {
        if self.waiting.len() > self.rules.max_waiting {
            return None;
        }
        let max_wait = self.rules.longest_wait();
        let nobody_before = Ahead::default();
        let mut until: Option<Duration> = None;
        for entry in &self.waiting {
            let has_to = entry.arrived + max_wait;
            if has_to <= now || entry.own_ms.is_none() {
                return None;
            }
            let due = if let Some(due) = entry.paused_until(now, desk) {
                due.min(has_to)
            } else {
                let least_ms = desk.least_excess_ms(&entry.request, &nobody_before);
                if least_ms <= 0.0 {
                    return None;
                }
                after(now, least_ms).min(has_to)
            };
            until = Some(until.map_or(due, |until| until.min(due)));
        }
        until
    }

    /// A crowd is not looked at again at once.
    fn rest(&mut self, now: Duration) {
        if self.waiting.len() > CROWD {
            self.rests_until = now + Duration::from_nanos(PAUSE_PER_WAITING_NS * self.waiting.len() as u64);
        }
    }

    /// Refuses who has waited for too long, and the last in order of those who are too many.
    fn shed(&mut self, now: Duration, desk: &mut impl WorkerChooser<R>) {
        let Some(limit) = self.rules.shed_after else { return };
        let late = |entry: &Entry<R>| now.saturating_sub(entry.arrived) >= limit;
        if self.waiting.len() <= self.rules.max_waiting && !self.waiting.iter().any(late) {
            return;
        }
        let (gone, mut kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(late);
        let beyond = kept.split_off(self.rules.max_waiting.min(kept.len()));
        for entry in gone.into_iter().chain(beyond) {
            desk.refuse(entry.request, limit);
        }
        self.waiting = kept;
    }
}

impl<R> Entry<R> {
    /// When it is to be looked at again, if its session is paused.
    fn paused_until(&self, now: Duration, desk: &mut impl WorkerChooser<R>) -> Option<Duration> {
        let until = desk.paused_until(&self.request, self.arrived)?;
        Some(until.max(after(now, MIN_PAUSE_MS)))
    }

    /// When it is to be looked at again, if it is known without weighing all workers that it cannot begin
    /// now, or if enough have been weighed at this release.
    fn waits_unweighed(
        &mut self,
        now: Duration,
        desk: &mut impl WorkerChooser<R>,
        ahead: &mut Ahead,
        weighed: &mut usize,
    ) -> Option<Duration> {
        let least_ms = desk.least_excess_ms(&self.request, ahead);
        if least_ms > 0.0 {
            if self.own_ms.is_none() {
                let quote = desk.quote(&self.request, ahead).map(|(quote, _)| quote);
                self.own_ms = quote.map(|quote| quote.own_ms);
                *weighed += quote.map_or(0, |quote| quote.weighed);
            }
            return Some(after(now, least_ms));
        }
        let hoped = self.hope.filter(|(_, until)| now < *until);
        if let Some((worker, until)) = hoped
            && !desk.is_open(&self.request, worker, ahead)
        {
            ahead.add(worker, self.own_ms.unwrap_or(0.0));
            return Some(until);
        }
        if *weighed < MAX_WEIGHED {
            return None;
        }
        if let Some((worker, _)) = self.hope {
            ahead.add(worker, self.own_ms.unwrap_or(0.0));
        }
        Some(after(now, MIN_PAUSE_MS))
    }
}

/// So many milliseconds later, within what is worth a look.
fn after(now: Duration, ms: f64) -> Duration {
    now + Duration::from_secs_f64(ms.clamp(MIN_PAUSE_MS, MAX_PAUSE_MS) / 1e3)
}

#[cfg(test)]
mod tests;
