//! The price of sending a request to a worker, in one place. It compares workers; who is chosen among nearly
//! equal ones is [`mod@crate::pick`]'s.
//!
//! ```text
//! cost = (waiting + own_factor * uncached + tokens_per_running * requests) / weight        [prefill tokens]
//! ```
//!
//! `waiting / weight` predicts how long the request queues (first come, first served) and `uncached / weight` how
//! long its own prefill takes, so their sum is its time to first token in units of one token's prefill. One rate
//! is assumed for all workers, up to `weight`. The own work counts more than once because those who come later
//! wait for it too: the queue is paid for already, work not avoided is paid by everybody.
//!
//! The defaults come from replaying 20 minutes of the Mooncake conversation trace (`examples/trace_sim`) over 4
//! and 16 workers at 2 to 85 % utilisation:
//! - `own_factor` 6: within 10 % of the best mean time to first token at every load (4: 24 %; 1: more than twice
//!   it near saturation) and 94 % or more of a pooled cache's hits at half load. 8 does as well, but lets the
//!   queue at a hot prefix grow longer before it spreads.
//! - `tokens_per_running`: 0 to 1024 make no difference there. 256 spreads a prefix so hot that prefill never
//!   queues but decoding does.
//! - `equal_share` 1/16: with none, every prompt follows the system prompt it shares, and at 2 % utilisation one
//!   of 16 workers gets 4.2 times its share (blocks of 64 tokens; 1.3 times with it). Twice that gains nothing.
//! - `equal_blocks` 1: a single block in common is never a reason to go anywhere.
//!
//! A sum, not the product of uncached tokens and running requests (LMetric, arXiv 2603.15202): in a product the
//! queue of a worker that holds all of a prompt counts for next to nothing, however long it is.

use crate::load::LoadSnapshot;

/// The constants of the cost, and how close two costs are to count as equal.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct CostModel {
    /// How often the request's own uncached prefill counts, against once for the queue it joins.
    pub own_factor: f64,
    /// Prefill tokens that one running request is worth: what its decoding takes from the prefill behind it.
    pub tokens_per_running: f64,
    /// Share of the cheapest cost within which another cost counts as equal.
    pub equal_share: f64,
    /// Chain blocks of uncached prefill within which another cost counts as equal, whatever the share.
    pub equal_blocks: f64,
}

/// The parts of a cost, in prefill tokens of a worker of weight 1.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct CostTerms {
    /// What waits there already.
    pub waiting: f64,
    /// What runs there, for what its decoding takes.
    pub running: f64,
    /// The request's own work, as often as it counts.
    pub own: f64,
}

impl CostTerms {
    /// The cost.
    pub fn total(&self) -> f64 {
        self.waiting + self.running + self.own
    }
}

impl Default for CostModel {
    fn default() -> Self {
        Self { own_factor: 6.0, tokens_per_running: 256.0, equal_share: 0.0625, equal_blocks: 1.0 }
    }
}

impl CostModel {
    /// The cost of `uncached_tokens` of own prefill on a worker under this load, in prefill tokens of a worker
    /// of weight 1.
    pub fn cost(&self, load: LoadSnapshot, uncached_tokens: u64, weight: f64) -> f64 {
        self.terms(load, uncached_tokens, weight).total()
    }

    /// [`CostModel::cost`] part by part.
    pub fn terms(&self, load: LoadSnapshot, uncached_tokens: u64, weight: f64) -> CostTerms {
        let weight = usable_weight(weight);
        CostTerms {
            waiting: load.waiting_prefill_tokens as f64 / weight,
            running: load.requests as f64 * self.tokens_per_running / weight,
            own: self.own_factor * uncached_tokens as f64 / weight,
        }
    }

    /// The greatest cost that counts as equal to the cheapest one. `block_tokens`: prompt tokens of one block.
    pub fn equal_to(&self, cheapest: f64, block_tokens: f64) -> f64 {
        // Token counts are rounded, so two that are a block apart may differ by the next whole number.
        let blocks = (self.equal_blocks * block_tokens).ceil();
        cheapest + (cheapest * self.equal_share).max(self.own_factor * blocks)
    }
}

/// A weight to divide by: whatever is not a positive number counts as next to nothing.
pub(crate) fn usable_weight(weight: f64) -> f64 {
    if weight.is_finite() && weight > 0.0 { weight } else { 1e-9 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: CostModel =
        CostModel { own_factor: 2.0, tokens_per_running: 10.0, equal_share: 0.1, equal_blocks: 1.0 };

    #[test]
    fn the_formula() {
        let load = LoadSnapshot { requests: 3, waiting_prefill_tokens: 500 };
        assert_eq!(MODEL.cost(load, 100, 1.0), 730.0);
        assert_eq!(MODEL.cost(load, 100, 2.0), 365.0);
    }

    #[test]
    fn a_weight_that_is_no_positive_number_is_a_last_resort() {
        let load = LoadSnapshot::default();
        for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let cost = MODEL.cost(load, 1, weight);
            assert!(cost.is_finite() && cost > MODEL.cost(load, 1_000_000, 1.0));
        }
    }

    #[test]
    fn equal_means_within_a_block_or_within_the_share() {
        assert_eq!(MODEL.equal_to(100.0, 64.0), 228.0);
        assert_eq!(MODEL.equal_to(10_000.0, 64.0), 11_000.0);
    }
}
