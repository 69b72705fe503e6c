//! How many workers a model needs, worked out from what one gateway sees of its requests. Sans-IO: it reads
//! no clock and starts nothing; what owns the workers (KEDA, an HPA, a script) acts on the result.
//!
//! ```text
//! prefill = uncached tokens a second / (V U)          what comes must be computed
//! backlog = U prefill + uncached tokens that wait / (V within)    what comes, and what waits besides in time
//! decode  = running requests / running_per_worker
//! growth  = (uncached tokens a second / V - ready workers) start / within   what will wait when workers come
//! kv      = tokens that running requests hold / (kv_share * tokens of a worker's cache), answers included
//! steady  = max(prefill, decode, kv)
//! need    = c max(steady, floor(min(backlog + growth, (1 + catch_up) prefill)), 1 if a request is here)
//! out     = max(ceil(need), guard, min)
//! in      = greatest ceil(c steady U / (U - margin)) of the last `scale_in_after`, and
//!           ceil(need U / (U - margin)) of the last half of it
//! desired = out, but what was desired before until `in` is lower; at most `max`
//! ```
//!
//! `V` is the prefill rate of one worker that is full, as far as any has been, `U` the share of it that is
//! planned for, and `within` half the time that a worker takes to start.
//! - Tokens that a cache holds cost nothing, so they are not in it, and a queue counts by its work, not by
//!   its length.
//! - A backlog is what a fleet that was too small has left behind. One that the workers for what comes work
//!   off within half a start asks for no worker: one that came for it would soon have to go again. Another
//!   one asks for more, but workers that are only starting do not shrink it, so taken at its word it would
//!   ask for many times too many: it adds at most `catch_up`, and whole workers only, so that chance in what
//!   comes adds none.
//! - A worker with a queue runs as many requests as fit, whatever is needed: while the backlog is the greater
//!   part, and until what it left has run, `decode` and `kv` are at most what flows through, arrivals times
//!   the time that a request runs (J. Little, 1961). Otherwise each worker that comes would be full too, and
//!   ask for the next.
//! - `c` is what the guard has learned: when an SLO (TTFT, or the time between tokens where one is set) is
//!   missed over four windows although no worker is starting and the sum holds, the sum is wrong (prompts
//!   that differ, a noisy machine), and one more worker in ten is asked for. It fades over an hour, so that
//!   the fleet does not swing between what the sum says and what the SLO needs.
//! - Fewer are asked for only when one worker fewer would have held what comes, with `margin` to spare, all
//!   through `scale_in_after`. What a backlog asked for besides is held for half as long: what has been
//!   worked off does not come again, unless the rate that is believed is too high, which the guard has
//!   learned by then.
//!
//! `prefill`, `backlog`, `decode` and `kv` count this gateway's own requests, so with several gateways they
//! add up. `growth` does not, as each sees all workers: with several gateways it is too small, and a step is
//! followed some seconds later.

mod first_tokens;
mod reason;
mod window;

use std::{collections::VecDeque, time::Duration};

pub use self::first_tokens::{FirstTokens, Watched};
pub use self::reason::ScaleReason;
pub use self::window::{Recent, TokenRate};

/// Share of the TTFT budget that an average may use, so that the tail keeps the SLO.
const MEAN_SHARE_OF_SLO: f64 = 0.65;
/// The budget is never taken for less than this share of the SLO, however long a prompt's own prefill is.
const MIN_SHARE_OF_SLO: f64 = 0.1;
/// Share of a start's time within which a backlog that asks for no worker is worked off.
const SHARE_OF_START: f64 = 0.5;
/// Below the planned utilisation by this much, one worker fewer would hold.
const SCALE_IN_MARGIN: f64 = 0.02;
/// What the guard adds at a time, as a share of the fleet; at least one worker.
const GUARD_STEP: f64 = 0.1;
/// Bounds of the guard's correction of the sum.
const MAX_CORRECTION: f64 = 2.0;
/// Time in which the correction falls to 37 %.
const CORRECTION_MEMORY_S: f64 = 3_600.0;
/// A backlog that has fallen to this share between two looks of the guard is being caught up with.
const FALLING: f64 = 0.9;
/// Windows over which an SLO is judged.
const JUDGED_WINDOWS: u32 = 4;
/// Sums this close above a whole number of workers are that number.
const GRAIN: f64 = 1e-6;

/// What the operator wants of a model's fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleRules {
    /// Workers at least, even without requests.
    pub min: u32,
    /// Workers at most, even where more are needed. The configuration refuses 0, and less than `min`.
    pub max: u32,
    /// Seconds to the first token that nine of ten streams must keep.
    pub ttft_slo_s: f64,
    /// Mean seconds between an answer's tokens that nine of ten requests must keep; `None`: not watched.
    pub itl_slo_s: Option<f64>,
    /// Share of the measured prefill rate that is planned for, above 0.02 and at most 1.
    pub utilisation: f64,
    /// Share of the KV cache that running requests may hold.
    pub kv_share: f64,
    /// Running requests that one worker bears; `None`: not a limit.
    pub running_per_worker: Option<f64>,
    /// How much a backlog may add to what arrivals need.
    pub catch_up: f64,
    /// Time from asking for a worker until it takes requests.
    pub start: Duration,
    /// How long one worker fewer must have been enough before it is asked for.
    pub scale_in_after: Duration,
    /// A quarter of the time over which the SLOs are looked at, a tenth of that of arrivals.
    pub window: Duration,
}

impl ScaleRules {
    /// Time over which the SLO is judged: in one window of a small fleet nine of ten are a matter of chance.
    pub fn judged_over(&self) -> Duration {
        JUDGED_WINDOWS * self.window
    }
}

impl Default for ScaleRules {
    fn default() -> Self {
        Self {
            min: 1,
            max: 64,
            ttft_slo_s: 2.0,
            itl_slo_s: None,
            utilisation: 0.95,
            kv_share: 0.8,
            running_per_worker: None,
            catch_up: 0.3,
            start: Duration::from_secs(60),
            scale_in_after: Duration::from_secs(300),
            window: Duration::from_secs(30),
        }
    }
}

/// What one gateway sees of a model at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// Uncached prompt tokens per second that came lately.
    pub uncached_tokens_per_s: f64,
    /// Uncached prompt tokens of one request, on average.
    pub mean_uncached_tokens: f64,
    /// Uncached prompt tokens without a first token, wherever they wait.
    pub backlog_tokens: f64,
    /// Requests that wait for a worker or a first token.
    pub waiting: u64,
    /// Requests past their first token.
    pub running: u64,
    /// Those of the last window, on average: at one moment they are as many as chance has it.
    pub running_mean: f64,
    /// Tokens of KV cache that they held, on average.
    pub kv_tokens: f64,
    /// Requests that would run if all that comes began at once: arrivals a second times the seconds that one
    /// runs. Infinite where that is unknown.
    pub flow: f64,
    /// Whether work waited lately ([`is_behind`]), so that what was begun with it may be running still.
    pub was_behind: bool,
    /// Tokens that one worker's cache holds, if that is known.
    pub kv_tokens_per_worker: Option<f64>,
    /// Prompt tokens that one worker computes in a second.
    pub prefill_tokens_per_s: f64,
    /// What nine of ten streams kept of those that came lately ([`FirstTokens`]); `None` where too few did.
    pub ttft_p90_s: Option<f64>,
    /// Mean time between an answer's tokens that nine of ten kept of those that ended lately.
    pub itl_p90_s: Option<f64>,
    /// Workers that take requests.
    pub ready: u32,
    /// Workers known that do not take requests yet or at the moment.
    pub starting: u32,
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            uncached_tokens_per_s: 0.0,
            mean_uncached_tokens: 0.0,
            backlog_tokens: 0.0,
            waiting: 0,
            running: 0,
            running_mean: 0.0,
            kv_tokens: 0.0,
            flow: f64::INFINITY,
            was_behind: false,
            kv_tokens_per_worker: None,
            prefill_tokens_per_s: 0.0,
            ttft_p90_s: None,
            itl_p90_s: None,
            ready: 0,
            starting: 0,
        }
    }
}

/// The terms of the sum, in workers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Terms {
    /// To compute the uncached prompt tokens that come, at the planned utilisation.
    pub prefill: f64,
    /// For what comes and what waits.
    pub backlog: f64,
    /// For what will wait besides when workers that are asked for take requests.
    pub growth: f64,
    /// For requests past their first token; 0 where [`ScaleRules::running_per_worker`] is no limit.
    pub decode: f64,
    /// For the cache they hold.
    pub kv: f64,
}

/// The sum, worked out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sum {
    /// Its terms, as seen by this gateway alone.
    pub terms: Terms,
    /// What the terms come to, in workers, with the correction.
    pub need: f64,
    /// Factor on the terms that the guard has learned, at least 1.
    pub correction: f64,
    /// Workers that the guard asks for; 0 where it does not.
    pub guard: u32,
    /// Factor from what is needed to what is needed with a margin, `U / (U - margin)`.
    pub spare: f64,
    /// What the last `scale_in_after` would have needed with a margin, without what has been caught up with.
    pub peak: u32,
    /// Workers wanted now, within the rules' `min` and `max`.
    pub desired: u32,
    /// The term or the bound that made `desired` what it is.
    pub reason: ScaleReason,
}

impl Terms {
    /// The terms of what is seen.
    pub fn of(rules: &ScaleRules, seen: &Seen) -> Self {
        let rate = positive(seen.prefill_tokens_per_s);
        let computed = seen.uncached_tokens_per_s / rate;
        let prefill = computed / positive(rules.utilisation);
        let within_s = (SHARE_OF_START * rules.start.as_secs_f64()).max(budget_s(rules, seen));
        let backlog = computed + seen.backlog_tokens / (rate * positive(within_s));
        let short = (computed - f64::from(seen.ready)).max(0.0);
        let growth = short * rules.start.as_secs_f64() / positive(within_s);
        let running = seen.running_mean;
        let flows = flowing(rules, seen);
        let kv = |tokens: f64| flows * seen.kv_tokens / positive(rules.kv_share * tokens);
        Self {
            prefill,
            backlog,
            growth,
            decode: rules.running_per_worker.map_or(0.0, |per_worker| flows * running / positive(per_worker)),
            kv: seen.kv_tokens_per_worker.map_or(0.0, kv),
        }
    }

    /// What must be there all the time.
    pub fn steady(&self) -> f64 {
        self.prefill.max(self.decode).max(self.kv)
    }

    /// What is needed now, with what is left to catch up; `present`: whether a request waits or runs, which
    /// needs one worker at least.
    pub fn need(&self, catch_up: f64, present: bool) -> f64 {
        let steady = self.steady();
        // Of what comes: a fleet that catches up is full, so `decode` and `kv` say how much it can hold, not
        // what it needs.
        let late = ((self.backlog + self.growth).min(self.prefill * (1.0 + catch_up)) + GRAIN).floor();
        steady.max(late).max(if present { 1.0 } else { 0.0 })
    }

    fn greatest(&self, catch_up: f64) -> ScaleReason {
        if self.need(catch_up, false) > self.steady() {
            return ScaleReason::Backlog;
        }
        let terms = [
            (self.prefill, ScaleReason::Prefill),
            (self.decode, ScaleReason::Decode),
            (self.kv, ScaleReason::Kv),
        ];
        let greatest = terms.iter().max_by(|a, b| a.0.total_cmp(&b.0));
        greatest.map_or(ScaleReason::Minimum, |term| term.1)
    }
}

/// The greatest values of some time: decreasing ones, each with the last time it was seen.
#[derive(Debug, Clone, Default)]
struct Peaks(VecDeque<(Duration, u32)>);

impl Peaks {
    /// The greatest of the last `over`, `value` among them.
    fn note(&mut self, now: Duration, value: u32, over: Duration) -> u32 {
        while self.0.back().is_some_and(|last| last.1 <= value) {
            self.0.pop_back();
        }
        self.0.push_back((now, value));
        while self.0.front().is_some_and(|(at, _)| now.saturating_sub(*at) > over) {
            self.0.pop_front();
        }
        self.0.front().map_or(value, |first| first.1)
    }
}

/// The state behind the sum of one model.
#[derive(Debug, Clone)]
pub struct Scaler {
    rules: ScaleRules,
    began: Option<Duration>,
    desired: u32,
    /// What came, in workers with a margin.
    peaks: Peaks,
    /// The same with what waited.
    late_peaks: Peaks,
    correction: f64,
    corrected: Duration,
    /// Since when as many workers are ready as now, and how many.
    fleet: (Duration, u32),
    /// Workers that the guard asks for, and until when.
    guard: (u32, Duration),
    /// When the guard last looked, and how many workers the backlog was worth then.
    looked: (Duration, f64),
    /// When more waited last than the fleet works off beside what comes.
    behind: Duration,
}

impl Scaler {
    /// Of a model of which nothing was seen.
    pub fn new(rules: ScaleRules) -> Self {
        Self {
            rules,
            began: None,
            desired: 0,
            peaks: Peaks::default(),
            late_peaks: Peaks::default(),
            correction: 1.0,
            corrected: Duration::ZERO,
            fleet: (Duration::ZERO, 0),
            guard: (0, Duration::ZERO),
            looked: (Duration::ZERO, 0.0),
            behind: Duration::ZERO,
        }
    }

    /// What the operator wants, as [`Scaler::new`] was given it; it never changes.
    pub fn rules(&self) -> &ScaleRules {
        &self.rules
    }

    /// The sum at `now`; to be called about once a second, with times that do not go back.
    pub fn step(&mut self, now: Duration, seen: &Seen) -> Sum {
        let began = *self.began.get_or_insert(now);
        let terms = Terms::of(&self.rules, seen);
        let present = seen.waiting + seen.running > 0;
        let uncorrected = terms.need(self.rules.catch_up, present);
        self.watch_slo(now, seen, terms.steady());
        let need = uncorrected * self.correction;
        let guard = if now < self.guard.1 { self.guard.0 } else { 0 };

        let spare = self.rules.utilisation / positive(self.rules.utilisation - SCALE_IN_MARGIN);
        let steady = terms.steady().max(if present { 1.0 } else { 0.0 }) * self.correction;
        let peak = self.peaks.note(now, whole(steady * spare), self.rules.scale_in_after);
        let peak = peak.max(self.late_peaks.note(now, whole(need * spare), self.rules.scale_in_after / 2));
        let settled = now.saturating_sub(began) >= self.rules.scale_in_after;
        // After a start nothing is known of the last minutes: the fleet found is right until it was watched
        // for long enough.
        let known = if settled { 0 } else { seen.ready + seen.starting };
        let held = if peak < self.desired && settled { peak } else { self.desired.max(known) };
        let out = whole(need).max(guard);
        let wanted = out.max(held);
        let desired = wanted.max(self.rules.min).min(self.rules.max);
        let reason = if wanted > self.rules.max {
            ScaleReason::Maximum
        } else if desired > wanted || desired == 0 || (desired == self.rules.min && out < desired) {
            ScaleReason::Minimum
        } else if desired > out {
            ScaleReason::Held
        } else if guard == out && guard > whole(need) {
            ScaleReason::Guard
        } else {
            terms.greatest(self.rules.catch_up)
        };
        self.desired = desired;
        Sum { terms, need, correction: self.correction, guard, spare, peak, desired, reason }
    }

    /// Asks for one more in ten when the SLO is missed by a fleet that is all there, as large as the sum
    /// says, and not catching up.
    fn watch_slo(&mut self, now: Duration, seen: &Seen, steady: f64) {
        let late = late_workers(&self.rules, seen);
        let elapsed = now.saturating_sub(self.corrected).as_secs_f64();
        self.correction = 1.0 + (self.correction - 1.0) * (-elapsed / CORRECTION_MEMORY_S).exp();
        self.corrected = now;
        if self.fleet.1 != seen.ready {
            self.fleet = (now, seen.ready);
            self.looked = (now, late);
        }
        if late > steady {
            self.behind = now;
        }
        // The times that are looked at must all be of this fleet, but for its first moments.
        if now.saturating_sub(self.looked.0) < self.rules.judged_over() + self.rules.window {
            return;
        }
        let before = std::mem::replace(&mut self.looked, (now, late)).1;
        let catching_up = late < before * FALLING && late > steady;
        let slow = |p90: Option<f64>, slo: f64| p90.is_some_and(|p90| p90 > slo);
        let missed = slow(seen.ttft_p90_s, self.rules.ttft_slo_s)
            || self.rules.itl_slo_s.is_some_and(|slo| slow(seen.itl_p90_s, slo));
        let stands = seen.starting == 0 && seen.ready >= self.desired && seen.ready > 0;
        // A backlog that is gone is in the times of the last window still.
        let was_behind = late <= steady && now.saturating_sub(self.behind) < self.rules.judged_over();
        if missed && stands && !catching_up && !was_behind {
            let more = (f64::from(seen.ready) * GUARD_STEP).ceil().max(1.0) as u32;
            self.guard = ((seen.ready + more).min(self.rules.max), now + 2 * self.rules.window);
            // That so many are too few is known, not that the next whole number is right: one that should be
            // two is no reason to double every later fleet. So the least that rounds up to it.
            let learned = (f64::from(seen.ready + more) - 0.9) / steady.max(1.0);
            self.correction = learned.clamp(self.correction, MAX_CORRECTION.max(self.correction));
        }
    }
}

/// What an HPA is to be told, so that its ceiling is `desired`. It leaves a difference of a tenth alone,
/// which would keep one of eleven to nineteen workers for ever; so where fewer are wanted than there are, the
/// least that still rounds up to it.
pub fn scaler_value(desired: u32, there: u32) -> f64 {
    let rounded_up = if 0 < desired && desired < there { 0.9 } else { 0.0 };
    f64::from(desired) - rounded_up
}

/// Whether more waits than is worked off beside what comes: workers are full then, and show what full ones
/// can do.
pub fn is_behind(rules: &ScaleRules, seen: &Seen) -> bool {
    late_workers(rules, seen) > Terms::of(rules, seen).steady()
}

/// The share of what runs that is not there because work waits or waited; at most 1.
pub fn flowing(rules: &ScaleRules, seen: &Seen) -> f64 {
    let planned = positive(seen.prefill_tokens_per_s) * positive(rules.utilisation);
    let waits = late_workers(rules, seen) > seen.uncached_tokens_per_s / planned;
    if (waits || seen.was_behind) && seen.running_mean > seen.flow {
        seen.flow / seen.running_mean
    } else {
        1.0
    }
}

/// Seconds that an average request may wait, so that the tail keeps the SLO.
fn budget_s(rules: &ScaleRules, seen: &Seen) -> f64 {
    let own_s = seen.mean_uncached_tokens / positive(seen.prefill_tokens_per_s);
    (MEAN_SHARE_OF_SLO * (rules.ttft_slo_s - own_s)).max(MIN_SHARE_OF_SLO * rules.ttft_slo_s)
}

/// Workers that would compute what waits in time for the SLO: far too many to ask for, but what shows a queue
/// at once.
fn late_workers(rules: &ScaleRules, seen: &Seen) -> f64 {
    seen.backlog_tokens / (positive(seen.prefill_tokens_per_s) * positive(budget_s(rules, seen)))
}

/// Whole workers; what is no number is none.
fn whole(workers: f64) -> u32 {
    // The cast saturates, and takes NaN for 0.
    (workers - GRAIN).ceil().max(0.0) as u32
}

/// A divisor: `value`, or a tiny number where it is not finite or not above 0.
fn positive(value: f64) -> f64 {
    if value > 0.0 && value.is_finite() { value } else { f64::MIN_POSITIVE.sqrt() }
}

#[cfg(test)]
mod tests;
