//! The price of sending a request to a worker, in milliseconds, in one place. It compares workers; who is chosen among
//! nearly equal ones is [`mod@crate::pick`]'s.
//!
//! ```text
//! cost = queue + own                     its time to first token there
//!      + later * (2 queue own + own^2)   what it takes from those who come after it
//!      + displaced * own                 what its blocks displace from the cache
//! later = arrivals / (2 (1 - busy))
//! ```
//!
//! `queue` is the prefill that waits there (and what running requests take from it), `own` the request's own uncached
//! prefill, both by the worker's rate.
//!
//! `later` is the price of waiting in a queue that serves in order of arrival: with random arrivals, `arrivals` a
//! millisecond and the share `busy` of time spent on them, all who come later wait
//! `arrivals (u + s)^2 / (2 (1 - busy)) - arrivals u^2 / (2 (1 - busy))` longer in sum when work `s` joins a queue of `u`
//! (the M/G/1 queue's value function, E. Hyytiä et al., "Size- and state-aware dispatching problem with
//! queue-specific job sizes", EJOR 2012). Rates are each worker's own and of the last minutes, and that is what lets
//! affinity bend: at the only holder of a hot prefix both are high, so queueing there grows dear and another worker
//! soon pays for a copy; at an even load they are equal everywhere and affinity holds.
//!
//! `displaced`: blocks computed twice push others out of the cache, which somebody computes again.
//!
//! Constants and alternatives were compared by replaying 30 minutes of the Mooncake conversation trace over 8 workers of
//! 6,000 prefill tokens/s whose caches hold 25 % of its blocks, at 1 and 1.4 times its speed, and five synthetic loads
//! with one hot prefix. Against the former sum `queue + 4 own` (mean time to first token, s): 1.94 and 1.95 at trace
//! speed, 2.78 and 2.91 at 1.4 times, 0.77 and 2.35 when half of all prompts share 20,000 tokens; hits within one
//! point. `displaced` 3 keeps 95 % of a pooled cache's hits (0: 91 %). That was a model of a
//! few lines, no part of this repository; `keyway-loadtest simulate` compares over simulated engines.

use crate::candidate::Candidate;
use crate::load::LoadSnapshot;

/// The constants of the cost, and how close two costs are to count as equal.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct CostModel {
    /// Weight of what comes later; 0 switches it off.
    pub later: f64,
    /// Share of its own prefill that a request costs others through the blocks it displaces.
    pub displaced: f64,
    /// Prefill tokens that one running request is worth: what its decoding takes from the prefill behind it.
    pub tokens_per_running: f64,
    /// Share of the cheapest cost within which another cost counts as equal.
    pub equal_share: f64,
    /// Chain blocks of uncached prefill within which another cost counts as equal, whatever the share.
    pub equal_blocks: f64,
}

/// A worker's state, as the cost sees it.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Queue {
    /// Milliseconds until a request sent now begins there.
    pub wait_ms: f64,
    /// Prompt tokens computed in a millisecond.
    pub tokens_per_ms: f64,
    /// Requests per millisecond that come.
    pub arrivals_per_ms: f64,
    /// Share of time it is busy with them, below 1.
    pub busy_share: f64,
}

/// The cost of one request on one worker, term by term, in milliseconds.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// Until it begins.
    pub queue_ms: f64,
    /// Its own prefill.
    pub own_ms: f64,
    /// What those who come later wait longer.
    pub later_ms: f64,
    /// What its blocks displace.
    pub displaced_ms: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { later: 1.0, displaced: 3.0, tokens_per_running: 256.0, equal_share: 0.0625, equal_blocks: 1.0 }
    }
}

impl CostModel {
    /// The queue at this candidate.
    pub fn queue(&self, candidate: &Candidate) -> Queue {
        let tokens_per_ms = candidate.tokens_per_ms * usable_weight(candidate.weight).min(1.0);
        let LoadSnapshot { requests, pace, .. } = candidate.load;
        let running_ms = requests as f64 * self.tokens_per_running / tokens_per_ms;
        Queue {
            wait_ms: pace.backlog_ms + candidate.ahead_ms + running_ms,
            tokens_per_ms,
            arrivals_per_ms: pace.arrivals_per_ms,
            busy_share: pace.busy_share,
        }
    }

    /// The cost of `uncached_tokens` of own prefill behind this queue.
    pub fn cost(&self, queue: &Queue, uncached_tokens: u64) -> Cost {
        let own = uncached_tokens as f64 / queue.tokens_per_ms;
        let later = self.later * queue.arrivals_per_ms / (2.0 * (1.0 - queue.busy_share));
        Cost {
            queue_ms: queue.wait_ms,
            own_ms: own,
            later_ms: later * (2.0 * queue.wait_ms * own + own * own),
            displaced_ms: self.displaced * own,
        }
    }

    /// The greatest cost that counts as equal to the cheapest one. `block_ms`: prefill of one block of the chain.
    pub fn equal_to(&self, cheapest_ms: f64, block_ms: f64) -> f64 {
        let blocks_ms = (1.0 + self.displaced) * self.equal_blocks * block_ms;
        // One part in a million more, for sums in another order.
        cheapest_ms + (cheapest_ms * self.equal_share).max(blocks_ms * (1.0 + 1e-6))
    }
}

impl Cost {
    /// The sum.
    pub fn total_ms(&self) -> f64 {
        self.queue_ms + self.own_ms + self.later_ms + self.displaced_ms
    }
}

/// A weight to divide by: whatever is not a positive number counts as next to nothing.
pub(crate) fn usable_weight(weight: f64) -> f64 {
    if weight.is_finite() && weight > 0.0 { weight } else { 1e-9 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::WorkerId;
    use crate::pace::PaceSnapshot;

    const MODEL: CostModel = CostModel {
        later: 1.0,
        displaced: 1.0,
        tokens_per_running: 10.0,
        equal_share: 0.1,
        equal_blocks: 1.0,
    };

    fn candidate(backlog_ms: f64, requests: u64, arrivals_per_s: f64, busy_share: f64) -> Candidate {
        let pace = PaceSnapshot { backlog_ms, arrivals_per_ms: arrivals_per_s / 1e3, busy_share };
        let load = LoadSnapshot { requests, waiting_prefill_tokens: 0, pace };
        Candidate {
            worker: WorkerId(0),
            load,
            ahead_ms: 0.0,
            matched_blocks: 0,
            tokens_per_ms: 5.0,
            weight: 1.0,
        }
    }

    #[test]
    fn the_formula() {
        let queue = MODEL.queue(&Candidate { ahead_ms: 40.0, ..candidate(300.0, 3, 2.0, 0.5) });
        assert_eq!((queue.wait_ms, queue.tokens_per_ms), (300.0 + 40.0 + 6.0, 5.0));
        let cost = MODEL.cost(&queue, 1_000);
        assert_eq!((cost.queue_ms, cost.own_ms, cost.displaced_ms), (346.0, 200.0, 200.0));
        // 2 a second, half busy: 0.002 / (2 * 0.5) for each square millisecond.
        assert!((cost.later_ms - 0.002 * (2.0 * 346.0 * 200.0 + 200.0 * 200.0)).abs() < 1e-9);
        assert_eq!(cost.total_ms(), 346.0 + 200.0 + 200.0 + cost.later_ms);
    }

    /// The value function's whole point: what a job costs others, found by brute force.
    #[test]
    fn the_price_of_those_who_come_later_is_what_they_wait_longer() {
        let (rate, service, queue, own) = (0.4, 1.5, 2.0, 3.0);
        let mut random = 88172645463325252_u64;
        let mut uniform = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) as f64 / (1_u64 << 53) as f64
        };
        let mut longer = 0.0;
        let runs = 40_000;
        for _ in 0..runs {
            let (mut without, mut with) = (queue, queue + own);
            while with > without {
                let gap = -uniform().ln() / rate;
                without = f64::max(without - gap, 0.0);
                with = f64::max(with - gap, 0.0);
                longer += with - without;
                without += service;
                with += service;
            }
        }
        let measured = longer / f64::from(runs);
        let busy_share = rate * service;
        let queue = Queue { wait_ms: queue, tokens_per_ms: 1.0, arrivals_per_ms: rate, busy_share };
        let predicted = MODEL.cost(&queue, own as u64).later_ms;
        assert!((measured / predicted - 1.0).abs() < 0.05, "{measured} {predicted}");
    }

    #[test]
    fn a_weight_that_is_no_positive_number_is_a_last_resort() {
        for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let of = |weight| MODEL.queue(&Candidate { weight, ..candidate(0.0, 0, 0.0, 0.0) });
            let cost = |weight, tokens| MODEL.cost(&of(weight), tokens);
            let (last, usual) = (cost(weight, 1).total_ms(), cost(1.0, 1_000_000).total_ms());
            assert!(last.is_finite() && last > usual);
        }
    }

    #[test]
    fn equal_means_within_a_block_or_within_the_share() {
        assert!((MODEL.equal_to(100.0, 64.0) - 228.0).abs() < 0.001);
        assert_eq!(MODEL.equal_to(10_000.0, 64.0), 11_000.0);
    }
}
