//! A row of logits to log probabilities: a token's own, its rank, and the likeliest ones. Of the model's
//! distribution as it is, before temperature, penalties and masks, as vLLM tells it by default.

use std::cmp::Ordering;

use keyway_kernels::cuda::sample::Score;
use keyway_kernels::scalar::{argmax, exp};

/// The weight of the likeliest token in a sum, whose parts are whole numbers: the same in whatever order it
/// is made.
const UNIT: f32 = (1u64 << 40) as f32;

/// What the model thought of one token, and of those it liked better.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenScore {
    pub(crate) id: u32,
    /// Natural logarithm of the probability.
    pub(crate) logprob: f32,
    /// Tokens that are at least as likely, itself among them.
    pub(crate) rank: u32,
    /// The likeliest tokens with their log probabilities, the likeliest first; as many as were asked for.
    pub(crate) top: Vec<(u32, f32)>,
}

impl TokenScore {
    /// The score of token `id` in its row, with the `top` likeliest. A function of the row alone, in the bits
    /// of [`TokenScore::new`] of what a GPU says of it.
    pub(crate) fn of(row: &[f32], id: u32, top: usize) -> Self {
        let maximum = row[argmax(row)];
        // The conversion makes 0 of what is no number.
        let weight = |logit: &f32| (exp(logit - maximum) * UNIT) as u64;
        let logit = row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let score = Score {
            logit,
            maximum,
            total: row.iter().map(weight).sum(),
            rank: row.iter().filter(|other| **other >= logit).count() as u32,
            top: likeliest(row, top).into_iter().map(|id| (id, row[id as usize])).collect(),
        };
        Self::new(id, &score)
    }

    /// The score of token `id` from what its row said.
    pub(crate) fn new(id: u32, score: &Score) -> Self {
        let normaliser = f64::from(score.maximum) + (score.total as f64 / f64::from(UNIT)).ln();
        let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
        let top = score.top.iter().map(|(id, logit)| (*id, logprob(*logit))).collect();
        Self { id, logprob: logprob(score.logit), rank: score.rank, top }
    }
}

/// The ids of the `count` largest values, the largest first, among equals, both zeros among them, the lower
/// id; what is no number last.
fn likeliest(row: &[f32], count: usize) -> Vec<u32> {
    let count = count.min(row.len());
    if count == 0 {
        return Vec::new();
    }
    // Adding 0 makes one of both zeros, and one kind of what is no number.
    let key = |id: &u32| Some(row[*id as usize] + 0.0).filter(|logit| !logit.is_nan());
    let order = |a: &u32, b: &u32| key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    ids.select_nth_unstable_by(count - 1, order);
    ids.truncate(count);
    ids.sort_unstable_by(order);
    ids
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_known_row() {
        // Probabilities 1/8, 1/2, 1/8, 1/4.
        let row = [0.0, 4f32.ln(), 0.0, 2f32.ln()];
        let score = TokenScore::of(&row, 3, 3);
        assert!((score.logprob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!((score.id, score.rank), (3, 2));
        let ids: Vec<u32> = score.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 0]);
        assert_eq!(TokenScore::of(&row, 0, 0).rank, 4, "equals count");
    }

    proptest! {
        #[test]
        fn probabilities_add_up_and_shifts_do_not_matter(
            row in prop::collection::vec(-30f32..30.0, 1..200), shift in -8i32..8,
        ) {
            let all = TokenScore::of(&row, 0, row.len());
            let sum: f64 = all.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
            prop_assert!((sum - 1.0).abs() < 1e-4, "{sum}");
            prop_assert!(all.top.is_sorted_by(|a, b| a.1 >= b.1));
            let shifted: Vec<f32> = row.iter().map(|logit| logit + shift as f32 * 16.0).collect();
            let again = TokenScore::of(&shifted, 0, 0);
            prop_assert!((again.logprob - all.logprob).abs() < 1e-3);
        }
    }
}
