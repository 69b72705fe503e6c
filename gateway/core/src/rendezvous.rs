//! Weighted rendezvous hashing: everyone who knows the same workers orders them alike for a key, each comes
//! first for its share of the keys, and a worker that leaves moves only its own.

use crate::cost::usable_weight;
use crate::index::WorkerId;

/// What `key` draws for `worker`, uniform in (0, 1).
pub(crate) fn draw(key: u64, worker: WorkerId) -> f64 {
    draw_for(key, spread(worker))
}

/// A worker's part in what keys draw for it.
pub(crate) fn spread(worker: WorkerId) -> u64 {
    mix(u64::from(worker.0) + 1)
}

/// [`draw`] for the worker with this [`spread`].
pub(crate) fn draw_for(key: u64, spread: u64) -> f64 {
    let bits = mix(key ^ spread);
    ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
}

/// How much a key wants a worker for which it has drawn this; the highest score comes first. After
/// Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005): `-weight / ln(u)` with `u` uniform
/// in (0, 1).
pub(crate) fn score(drawn: f64, weight: f64) -> f64 {
    -usable_weight(weight) / drawn.ln()
}

/// The finaliser of splitmix64: every bit of the result depends on every bit of `x`.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(key: u64, workers: &[(u32, f64)]) -> u32 {
        let of = |(worker, weight): &(u32, f64)| score(draw(key, WorkerId(*worker)), *weight);
        let best = workers.iter().max_by(|a, b| of(a).total_cmp(&of(b)));
        best.unwrap().0
    }

    #[test]
    fn each_worker_gets_the_share_its_weight_asks_for() {
        let workers = [(0, 1.0), (1, 1.0), (2, 2.0)];
        let mut counts = [0_u32; 3];
        for key in 0..40_000 {
            counts[first(key, &workers) as usize] += 1;
        }
        for (count, share) in counts.into_iter().zip([10_000, 10_000, 20_000]) {
            assert!(count.abs_diff(share) < share / 20, "{counts:?}");
        }
    }

    #[test]
    fn a_worker_that_leaves_moves_only_its_own_keys() {
        let all = [(0, 1.0), (1, 1.0), (2, 1.0)];
        for key in 0..2000 {
            let before = first(key, &all);
            if before != 2 {
                assert_eq!(first(key, &all[..2]), before);
            }
        }
    }
}
