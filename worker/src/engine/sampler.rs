//! Logits to a token id. The choice depends on the logits, the request's parameters and seed, and the token's
//! absolute position, and on nothing else: not on the batch, nor on what was sampled before.
//!
//! Weights are whole numbers, so that sums are exact in any order: `sample.cu` adds them by hundreds of
//! threads and finds the same id for the same logits.

use std::cmp::Ordering;

use keyway_kernels::scalar::{argmax, exp};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Below this, a temperature means greedy decoding (the bound vLLM uses).
const GREEDY_TEMPERATURE: f32 = 1e-5;
/// The weight of the likeliest token.
const UNIT: f32 = (1u64 << 40) as f32;

/// How a request's tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub(crate) temperature: f32,
    /// Keeps the most likely tokens whose probabilities first reach this sum; 1 keeps all.
    pub(crate) top_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub(crate) top_k: usize,
    /// Drops tokens that are less likely than this times the likeliest one; 0 keeps all (Nguyen et al. 2024,
    /// "Turning Up the Heat: Min-p Sampling").
    pub(crate) min_p: f32,
    /// Makes the choice at each position repeatable.
    pub(crate) seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 }
    }
}

/// Scratch space for sampling.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    logit: f32,
    /// Probability times a constant: `exp((logit - max) / temperature)` in units of 2^-40, rounded down.
    weight: u64,
    id: u32,
}

impl Sampler {
    /// The token at absolute `position` from its row of logits. Ids with a logit of minus infinity never
    /// come, unless all have it.
    pub(crate) fn sample(&mut self, row: &[f32], sampling: &Sampling, position: usize) -> u32 {
        let best = argmax(row);
        if sampling.temperature < GREEDY_TEMPERATURE {
            return best as u32;
        }
        let max = row[best];
        let candidate = |(id, &logit): (usize, &f32)| {
            // The conversion makes 0 of what is no number.
            let weight = (exp((logit - max) / sampling.temperature) * UNIT) as u64;
            Candidate { logit, weight, id: id as u32 }
        };
        let least = ((sampling.min_p * UNIT) as u64).max(1);
        self.candidates.clear();
        let possible = row.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
        self.candidates.extend(possible.map(candidate).filter(|candidate| candidate.weight >= least));
        self.keep_top_k(sampling.top_k);
        self.keep_top_p(f64::from(sampling.top_p));
        let mut left = share(uniform(sampling.seed, position), self.total());
        for candidate in &self.candidates {
            match left.checked_sub(candidate.weight) {
                Some(rest) => left = rest,
                None => return candidate.id,
            }
        }
        // Nothing has a weight: the best is not finite.
        best as u32
    }

    fn keep_top_k(&mut self, k: usize) {
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, Candidate::likelier_first);
            self.candidates.truncate(k);
            self.candidates.sort_unstable_by(Candidate::likelier_first);
        }
    }

    fn keep_top_p(&mut self, p: f64) {
        if p >= 1.0 || self.candidates.is_empty() {
            return;
        }
        let total = self.total();
        let wanted = (p * total as f64) as u64;
        // All candidates below this weight hold together at most half of what top-p cuts off, so none of them
        // is kept. Spares sorting a large vocabulary.
        let floor = total.saturating_sub(wanted) / self.candidates.len() as u64 / 2;
        self.candidates.retain(|c| c.weight >= floor);
        self.candidates.sort_unstable_by(Candidate::likelier_first);
        let mut sum = 0;
        let reached = self.candidates.iter().position(|c| {
            sum += c.weight;
            sum >= wanted
        });
        self.candidates.truncate(reached.map_or(usize::MAX, |i| i + 1));
    }

    fn total(&self) -> u64 {
        self.candidates.iter().map(|c| c.weight).sum()
    }
}

impl Candidate {
    /// The lower id first among equals, so that the order is total.
    fn likelier_first(a: &Self, b: &Self) -> Ordering {
        // No candidate is NaN, and both zeros are equal.
        b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
    }
}

/// In `[0, 1)` in units of 2^-64, a pure function of its arguments: the top 53 bits of a hash.
fn uniform(seed: u64, position: usize) -> u64 {
    let bits = xxh3_64_with_seed(&(position as u64).to_le_bytes(), seed);
    bits >> 11 << 11
}

/// `number` of 2^64 parts of `total`, rounded down.
fn share(number: u64, total: u64) -> u64 {
    ((u128::from(number) * u128::from(total)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROW: [f32; 5] = [1.0, 3.0, f32::NEG_INFINITY, 2.0, 3.0];

    fn sampling(temperature: f32, top_p: f32, top_k: usize) -> Sampling {
        Sampling { temperature, top_p, top_k, seed: 42, ..Sampling::default() }
    }

    fn shares(sampling: &Sampling) -> Vec<f64> {
        let mut counts = vec![0.0; ROW.len()];
        let mut sampler = Sampler::default();
        let n = 40_000;
        for position in 0..n {
            counts[sampler.sample(&ROW, sampling, position) as usize] += 1.0 / f64::from(n as u32);
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let mut sampler = Sampler::default();
        assert_eq!(sampler.sample(&ROW, &sampling(0.0, 1.0, 0), 7), 1);
        assert_eq!(sampler.sample(&ROW, &sampling(1.0, 1.0, 1), 7), 1);
        assert_eq!(sampler.sample(&ROW, &sampling(1.0, 0.01, 0), 7), 1);
    }

    #[test]
    fn shares_follow_the_softmax() {
        let weights: Vec<f64> = ROW.iter().map(|l| (f64::from(*l) / 2.0).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (share, weight) in shares(&sampling(2.0, 1.0, 0)).iter().zip(&weights) {
            assert!((share - weight / total).abs() < 0.01, "{share} instead of {}", weight / total);
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_unlikely() {
        let alive = |s: Sampling| shares(&s).iter().map(|s| *s > 0.0).collect::<Vec<_>>();
        assert_eq!(alive(sampling(1.0, 1.0, 3)), [false, true, false, true, true]);
        assert_eq!(alive(sampling(1.0, 1.0, 9)), [true, true, false, true, true]);
        // Probabilities: 0.06, 0.40, 0, 0.15, 0.40.
        assert_eq!(alive(sampling(1.0, 0.7, 0)), [false, true, false, false, true]);
        assert_eq!(alive(sampling(1.0, 0.9, 0)), [false, true, false, true, true]);
        assert_eq!(alive(sampling(1.0, 0.99, 0)), [true, true, false, true, true]);
    }

    #[test]
    fn min_p_cuts_what_is_unlikely_beside_the_likeliest() {
        // Weights beside the likeliest: 0.14, 1, 0, 0.37, 1; at half the temperature 0.02, 1, 0, 0.14, 1.
        let alive = |temperature, min_p| {
            let sampling = Sampling { min_p, ..sampling(temperature, 1.0, 0) };
            shares(&sampling).iter().map(|s| *s > 0.0).collect::<Vec<_>>()
        };
        assert_eq!(alive(1.0, 0.1), [true, true, false, true, true]);
        assert_eq!(alive(1.0, 0.2), [false, true, false, true, true]);
        assert_eq!(alive(0.5, 0.2), [false, true, false, false, true]);
        assert_eq!(alive(1.0, 1.0), [false, true, false, false, true]);
    }

    #[test]
    fn a_row_without_any_choice_does_not_panic() {
        let mut sampler = Sampler::default();
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY; 3], &sampling(1.0, 0.5, 2), 0), 0);
        assert_eq!(sampler.sample(&[f32::NAN; 3], &sampling(1.0, 0.5, 2), 0), 0);
    }

    proptest! {
        /// The floor that spares sorting must not change the choice.
        #[test]
        fn top_p_is_the_same_as_by_sorting_everything(
            row in prop::collection::vec(-6f32..6.0, 1..200), p in 0.01f32..1.0, position in 0usize..1000,
        ) {
            let mut sorted: Vec<Candidate> = row.iter().enumerate()
                .map(|(id, logit)| {
                    let weight = (exp(*logit - row[argmax(&row)]) * UNIT) as u64;
                    Candidate { logit: *logit, weight, id: id as u32 }
                })
                .collect();
            let total: u64 = sorted.iter().map(|c| c.weight).sum();
            sorted.sort_by(Candidate::likelier_first);
            let (mut sum, wanted) = (0, (f64::from(p) * total as f64) as u64);
            let kept = sorted.iter().enumerate().take_while(|(i, c)| {
                let go_on = *i == 0 || sum < wanted;
                sum += c.weight;
                go_on
            }).map(|(_, c)| c.id).collect::<Vec<_>>();
            let chosen = Sampler::default().sample(&row, &sampling(1.0, p, 0), position);
            prop_assert!(kept.contains(&chosen));
            let mut sampler = Sampler::default();
            sampler.sample(&row, &sampling(1.0, p, 0), position);
            prop_assert_eq!(sampler.candidates.iter().map(|c| c.id).collect::<Vec<_>>(), kept);
        }
    }
}
