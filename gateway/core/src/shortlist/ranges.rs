//! The arithmetic of a shortlist: what each worker's pace comes to at a moment, and the range that its price
//! lies in. In rows of plain numbers, which a processor takes several of at a time.

use std::time::Duration;

use crate::cost::CostModel;
use crate::index::Hottest;
use crate::pace::{IDLE_BEFORE_S, MAX_BUSY_SHARE, MEMORY_S, PaceBasis};
use crate::pick::RequestView;

/// What a price may be off by, as a share of the sum of all that was added for it. Rounding errors of what is
/// taken from an epoch come to less than one part in 10^12: sixteen steps, of which the two that take a share
/// from 1 make an error at most twenty times as large.
const MARGIN: f64 = 1e-9;
/// Time constants that may pass until numbers are taken from a new epoch: their exponentials grow with it.
const EPOCH_LENGTHS: f64 = 20.0;

/// Each worker's pace and load, as of one epoch.
#[derive(Debug)]
pub(super) struct Paces {
    epoch: Duration,
    /// The last moment at which anything happened at any worker.
    latest: Duration,
    /// Milliseconds in which a prompt token is computed.
    ms_per_token: Vec<f64>,
    requests: Vec<f64>,
    /// Milliseconds of prefill that wait; and those of them that time alone can take to be done, and since
    /// when it does, in nanoseconds.
    waiting_ms: Vec<f64>,
    passing_ms: Vec<f64>,
    head_ns: Vec<f64>,
    /// Requests that arrive in a millisecond, on the mean.
    arrivals: Vec<f64>,
    /// The busy share: what stays, and what fades.
    busy: Vec<f64>,
    busy_fading: Vec<f64>,
    /// The part of the memory that is not filled yet.
    unseen: Vec<f64>,
}

/// What workers are weighed for.
pub(super) struct Scene<'a> {
    pub(super) model: CostModel,
    pub(super) request: &'a RequestView<'a>,
    pub(super) hottest: Hottest,
    /// Blocks that the one who holds the most holds.
    pub(super) longest: u32,
}

/// Each worker's part of one choice.
#[derive(Debug)]
pub(super) struct Ranges {
    pub(super) ahead_ms: Vec<f64>,
    /// Prompt tokens to compute, and those of them that would be a copy of a hot prefix.
    uncached: Vec<f64>,
    copied: Vec<f64>,
    /// The price lies between these.
    low: Vec<f64>,
    high: Vec<f64>,
}

impl Paces {
    pub(super) fn new(len: usize) -> Self {
        let row = || vec![0.0; len];
        Self {
            epoch: Duration::ZERO,
            latest: Duration::ZERO,
            ms_per_token: row(),
            requests: row(),
            waiting_ms: row(),
            passing_ms: row(),
            head_ns: row(),
            arrivals: row(),
            busy: row(),
            busy_fading: row(),
            unseen: row(),
        }
    }

    /// A worker has so many requests and this pace.
    pub(super) fn set(&mut self, i: usize, requests: u64, pace: &PaceBasis, tokens_per_ms: f64) {
        self.latest = self.latest.max(pace.updated).max(pace.head_since);
        if self.lengths(pace.updated) > EPOCH_LENGTHS {
            self.begin_epoch(pace.updated);
        }
        let ms_per_token = 1.0 / tokens_per_ms;
        let grown = self.lengths(pace.updated).exp();
        self.ms_per_token[i] = ms_per_token;
        self.requests[i] = requests as f64;
        self.waiting_ms[i] = pace.waiting_tokens * ms_per_token;
        self.passing_ms[i] = pace.passing_tokens * ms_per_token;
        self.head_ns[i] = pace.head_since.as_nanos() as f64;
        self.arrivals[i] = pace.arrivals * grown / 1e3;
        (self.busy[i], self.busy_fading[i]) =
            if pace.is_busy { (1.0, (pace.busy - 1.0) * grown) } else { (0.0, pace.busy * grown) };
        // Who was sent nothing yet has no arrivals that this could be a part of.
        let unseen = |began: Duration| (self.lengths(began) - IDLE_BEFORE_S / MEMORY_S).exp();
        self.unseen[i] = pace.began.map_or(0.0, unseen);
    }

    /// Whether nothing is known of a later moment.
    pub(super) fn can_be_at(&self, now: Duration) -> bool {
        now >= self.latest
    }

    /// No less than the milliseconds of prefill that wait at a worker.
    pub(super) fn most_backlog_ms(&self, i: usize, now: Duration) -> f64 {
        let passed_ms = (now.as_nanos() as f64 - self.head_ns[i]).max(0.0) * 1e-6;
        self.waiting_ms[i] * (1.0 + MARGIN) - passed_ms.min(self.passing_ms[i]) * (1.0 - MARGIN)
    }

    /// Time constants from the epoch to this moment; less than 0 before it.
    fn lengths(&self, at: Duration) -> f64 {
        (at.as_secs_f64() - self.epoch.as_secs_f64()) / MEMORY_S
    }

    fn begin_epoch(&mut self, now: Duration) {
        let fade = (-self.lengths(now)).exp();
        for row in [&mut self.arrivals, &mut self.busy_fading, &mut self.unseen] {
            for number in row {
                *number *= fade;
            }
        }
        self.epoch = now;
    }
}

impl Ranges {
    pub(super) fn new(len: usize) -> Self {
        let row = || vec![0.0; len];
        Self { ahead_ms: row(), uncached: row(), copied: row(), low: row(), high: row() }
    }

    /// What each has to compute that holds so many blocks.
    pub(super) fn fill(&mut self, scene: &Scene<'_>, matched: &[u32]) {
        let Scene { request, hottest, .. } = scene;
        let part = |blocks: u32| {
            let uncached = request.prompt_tokens as f64 - request.cached_tokens(blocks);
            (uncached, hottest.lacked(request, blocks).unwrap_or(0.0).max(0.0))
        };
        // Mostly it is as much as at the one before.
        let (mut last, mut of_last) = (0, part(0));
        for ((blocks, uncached), copied) in matched.iter().zip(&mut self.uncached).zip(&mut self.copied) {
            if *blocks != last {
                (last, of_last) = (*blocks, part(*blocks));
            }
            (*uncached, *copied) = of_last;
        }
    }

    /// What each costs: not less than this, and not more than that.
    pub(super) fn range(&mut self, scene: &Scene<'_>, paces: &mut Paces, now: Duration) {
        if paces.lengths(now) > EPOCH_LENGTHS {
            paces.begin_epoch(now);
        }
        if scene.hottest.contended() > 0.0 {
            self.range_of::<true>(scene, paces, now);
        } else {
            self.range_of::<false>(scene, paces, now);
        }
    }

    /// The formulas of [`crate::cost`] and [`crate::pace`], in another order. `HOT`: a copy of a prefix may
    /// be of use.
    fn range_of<const HOT: bool>(&mut self, scene: &Scene<'_>, paces: &Paces, now: Duration) {
        let model = &scene.model;
        let fade = (-paces.lengths(now)).exp();
        let (now_ns, uses) = (now.as_nanos() as f64, model.reuse * scene.hottest.contended());
        let len = self.low.len();
        // Rows of one length, so that no place has to be looked at before it is read.
        let Paces { ms_per_token, requests, waiting_ms, passing_ms, .. } = paces;
        let Paces { head_ns, arrivals, busy, busy_fading, unseen, .. } = paces;
        let (ms_per_token, requests) = (&ms_per_token[..len], &requests[..len]);
        let (waiting_ms, passing_ms) = (&waiting_ms[..len], &passing_ms[..len]);
        let (head_ns, arrivals, unseen) = (&head_ns[..len], &arrivals[..len], &unseen[..len]);
        let (busy, busy_fading) = (&busy[..len], &busy_fading[..len]);
        let (ahead_ms, uncached, copied) =
            (&self.ahead_ms[..len], &self.uncached[..len], &self.copied[..len]);
        let (low, high) = (&mut self.low[..len], &mut self.high[..len]);
        for i in 0..len {
            // Arrivals and the busy share are parts of what is filled of the memory: one division for both.
            let filled = 1.0 - unseen[i] * fade;
            let idle = most(filled - (busy[i] + busy_fading[i] * fade), filled * (1.0 - MAX_BUSY_SHARE));
            let later = model.later * arrivals[i] * fade / (2.0 * idle);
            let done_ms = least((now_ns - head_ns[i]) * 1e-6, passing_ms[i]);
            let before_ms =
                waiting_ms[i] + ahead_ms[i] + requests[i] * model.tokens_per_running * ms_per_token[i];
            let cost = |wait: f64, own: f64| {
                wait + own + later * (2.0 * wait * own + own * own) + model.displaced * own
            };
            let own = uncached[i] * ms_per_token[i];
            let mut ms = cost(before_ms - done_ms, own);
            let slack = MARGIN * cost(before_ms, own);
            if HOT {
                let uses = uses * ms_per_token[i];
                let held = most(own - copied[i] * ms_per_token[i], 0.0);
                ms -= (ms - cost(before_ms - done_ms, held)) * uses / (1.0 + uses);
            }
            (low[i], high[i]) = (ms - slack, ms + slack);
        }
    }

    /// Those that may cost least.
    pub(super) fn may_be_least(&self) -> impl Iterator<Item = usize> {
        // Several at a time, as one after the other each would wait for the one before.
        let (rows, rest) = self.high.as_chunks::<8>();
        let mut of_rows = [f64::INFINITY; 8];
        for row in rows {
            for (most, high) in of_rows.iter_mut().zip(row) {
                *most = least(*high, *most);
            }
        }
        let most = of_rows.iter().chain(rest).fold(f64::INFINITY, |most, high| least(*high, most));
        (0..self.low.len()).filter(move |&i| self.low[i] <= most)
    }

    /// Those that cost at most this and make no copy, and the cheapest. `price` is asked where the range does
    /// not tell.
    pub(super) fn equals(
        &self,
        limit_ms: f64,
        cheapest: usize,
        price: impl Fn(usize) -> f64,
    ) -> impl Iterator<Item = usize> {
        (0..self.low.len()).filter(move |&i| {
            let counts = i == cheapest || self.copied[i] <= 0.0;
            counts && self.low[i] <= limit_ms && (self.high[i] <= limit_ms || price(i) <= limit_ms)
        })
    }
}

/// The greater one, in a single instruction.
fn most(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// The lesser one, in a single instruction.
fn least(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}
