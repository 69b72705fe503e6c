//! How long the KV of a prompt takes from the worker that computed it to the one that answers, learned from
//! how soon that one's first tokens come. What it is worth to a choice is [`crate::legs`]'s.
//!
//! A pair's time is a line: something for each handover, and something for each token. Both are medians
//! (Theil and Sen's: of the slopes between two handovers each, and of what is left of each), so a stalled
//! batch or a prompt that was there after all moves neither.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::index::WorkerId;

/// Handovers that a line goes by, the newest.
const SAMPLES_MAX: usize = 24;
/// Handovers before a line counts. Of three the median is none that had a connection to make first.
const SAMPLES_MIN: usize = 3;
/// Slopes before they say what a token takes.
const SLOPES_MIN: usize = 6;
/// Two handovers tell what a token takes if one has this many times as many as the other.
const APART: f64 = 1.25;
/// A line without a new handover for so long is no longer believed: who looked too slow is tried again.
const BELIEVED_FOR: Duration = Duration::from_secs(600);
/// Pairs that are known at most, each of about half a kilobyte. Others go by what all pairs say together.
const PAIRS_MAX: usize = 4_096;
/// How often in a row nothing comes between two before they are passed over, and for how long. Blocks leave a
/// cache between two requests at times; three times in a row is another cause.
const MISSED_MAX: u32 = 3;
const MISSED_FOR: Duration = Duration::from_secs(60);
/// Bounds of what a token takes, in milliseconds: no network is faster, no slower one is worth it.
const MS_PER_TOKEN: (f64, f64) = (1e-6, 1e3);

/// Time of a handover: `handover_ms + tokens * ms_per_token`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// Milliseconds of each handover, however little is fetched.
    pub handover_ms: f64,
    /// Milliseconds for each prompt token that is fetched.
    pub ms_per_token: f64,
}

impl Default for Transfer {
    /// Before any was seen: 128 KiB of KV a token (eight billion parameters, grouped queries, 16 bits) over
    /// 100 Gbit/s, and of the handovers that people report (36 to 197 ms) the quick ones. Too quick a guess
    /// is corrected by the first handovers; too slow a one would never be tried.
    fn default() -> Self {
        Self { handover_ms: 36.0, ms_per_token: 0.0105 }
    }
}

impl Transfer {
    /// Milliseconds until so many tokens are there.
    pub fn ms(&self, tokens: f64) -> f64 {
        self.handover_ms + tokens * self.ms_per_token
    }
}

/// What is known of the handovers between workers.
#[derive(Debug, Default)]
pub struct Transfers {
    pairs: HashMap<(WorkerId, WorkerId), Handovers>,
    all: Handovers,
    /// Pairs between which nothing came the last time: how often in a row, and when last.
    missed: HashMap<(WorkerId, WorkerId), (u32, Duration)>,
}

/// The newest handovers, and their line.
#[derive(Debug, Default)]
struct Handovers {
    /// Tokens and milliseconds of each.
    seen: VecDeque<(f64, f64)>,
    line: Option<Transfer>,
    newest: Duration,
}

impl Transfers {
    /// `to` said its first token so many milliseconds after it was told to fetch so many tokens of KV at
    /// `from`. `queue_ms` of these it had other prompts to compute.
    pub fn observe(
        &mut self,
        now: Duration,
        (from, to): (WorkerId, WorkerId),
        tokens: u64,
        (ms, queue_ms): (f64, f64),
    ) {
        let ms = ms - queue_ms.max(0.0);
        if !ms.is_finite() {
            return;
        }
        let seen = (tokens as f64, ms.max(0.0));
        self.all.add(now, seen);
        if self.pairs.len() >= PAIRS_MAX && !self.pairs.contains_key(&(from, to)) {
            self.pairs.retain(|_, handovers| handovers.is_believed(now));
        }
        if self.pairs.len() < PAIRS_MAX || self.pairs.contains_key(&(from, to)) {
            self.pairs.entry((from, to)).or_default().add(now, seen);
        }
    }

    /// What a handover between these two takes: by their own, else by all that were seen, else by a guess.
    pub fn between(&self, now: Duration, from: WorkerId, to: WorkerId) -> Transfer {
        let own = self.pairs.get(&(from, to));
        let line = |handovers: &Handovers| handovers.line.filter(|_| handovers.is_believed(now));
        own.and_then(line).or_else(|| line(&self.all)).unwrap_or_default()
    }

    /// What was to be fetched did not come. Returns whether the pair is therefore passed over from now on.
    pub fn missed(&mut self, now: Duration, pair: (WorkerId, WorkerId)) -> bool {
        if self.missed.len() >= PAIRS_MAX {
            self.missed.retain(|_, (_, at)| now.saturating_sub(*at) <= MISSED_FOR);
            if self.missed.len() >= PAIRS_MAX {
                return false;
            }
        }
        let (times, at) = self.missed.entry(pair).or_default();
        *times += 1;
        *at = now;
        *times == MISSED_MAX
    }

    /// What was to be fetched did come.
    pub fn came(&mut self, pair: (WorkerId, WorkerId)) {
        self.missed.remove(&pair);
    }

    /// Whether so little has come between these two lately that nothing is to be fetched. After a while it is
    /// tried again, once.
    pub fn is_passed_over(&self, now: Duration, pair: (WorkerId, WorkerId)) -> bool {
        let missed = self.missed.get(&pair);
        missed.is_some_and(|(times, at)| *times >= MISSED_MAX && now.saturating_sub(*at) <= MISSED_FOR)
    }

    /// Each pair with a line of its own.
    pub fn known(&self, now: Duration) -> impl Iterator<Item = ((WorkerId, WorkerId), Transfer)> {
        let believed = self.pairs.iter().filter(move |(_, handovers)| handovers.is_believed(now));
        believed.filter_map(|(pair, handovers)| Some((*pair, handovers.line?)))
    }

    /// A worker is gone for good.
    pub fn forget(&mut self, worker: WorkerId) {
        self.pairs.retain(|(from, to), _| *from != worker && *to != worker);
        self.missed.retain(|(from, to), _| *from != worker && *to != worker);
    }
}

impl Handovers {
    fn is_believed(&self, now: Duration) -> bool {
        now.saturating_sub(self.newest) <= BELIEVED_FOR
    }

    fn add(&mut self, now: Duration, seen: (f64, f64)) {
        if !self.is_believed(now) {
            self.seen.clear();
        }
        if self.seen.len() >= SAMPLES_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(seen);
        self.newest = now;
        self.line = (self.seen.len() >= SAMPLES_MIN).then(|| self.fit());
    }

    fn fit(&self) -> Transfer {
        let (bounds, guess) = (MS_PER_TOKEN, Transfer::default());
        let mut slopes = Vec::new();
        for (i, (tokens, ms)) in self.seen.iter().enumerate() {
            for (other_tokens, other_ms) in self.seen.iter().skip(i + 1) {
                let (less, more) = (tokens.min(*other_tokens), tokens.max(*other_tokens));
                if more > less * APART {
                    slopes.push((ms - other_ms) / (tokens - other_tokens));
                }
            }
        }
        // Prompts of one length say nothing of what a token takes: then all of it is as the guess has it,
        // slower or faster as a whole.
        let ms_per_token = if slopes.len() < SLOPES_MIN {
            let times = median(self.seen.iter().map(|(tokens, ms)| ms / guess.ms(*tokens)).collect());
            guess.ms_per_token * times
        } else {
            median(slopes)
        };
        let ms_per_token = ms_per_token.clamp(bounds.0, bounds.1);
        let rest = self.seen.iter().map(|(tokens, ms)| ms - tokens * ms_per_token).collect();
        Transfer { handover_ms: median(rest).max(0.0), ms_per_token }
    }
}

/// The upper median; 0 of none.
fn median(mut of: Vec<f64>) -> f64 {
    let middle = of.len() / 2;
    if of.is_empty() { 0.0 } else { *of.select_nth_unstable_by(middle, f64::total_cmp).1 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAIR: (WorkerId, WorkerId) = (WorkerId(1), WorkerId(2));
    const NOW: Duration = Duration::from_secs(3_000);

    fn between(transfers: &Transfers, now: Duration) -> Transfer {
        transfers.between(now, PAIR.0, PAIR.1)
    }

    proptest! {
        /// Whatever the line is, it is found, a fifth of the handovers being off by far.
        #[test]
        fn a_line_is_learned(
            handover_ms in 0.0..300.0_f64, ms_per_token in 0.001..5.0_f64, tokens in prop::collection::vec(100_u64..60_000, 24),
            worst in 0.0..1e7_f64,
        ) {
            let mut transfers = Transfers::default();
            for (i, tokens) in tokens.iter().enumerate() {
                let ms = handover_ms + *tokens as f64 * ms_per_token;
                let ms = if i % 5 == 4 { worst } else { ms };
                transfers.observe(NOW, PAIR, *tokens, (ms + 70.0, 70.0));
            }
            let found = between(&transfers, NOW);
            for tokens in [500.0, 20_000.0] {
                let (want, got) = (handover_ms + tokens * ms_per_token, found.ms(tokens));
                prop_assert!((got / want - 1.0).abs() < 0.25 || (got - want).abs() < 20.0, "{found:?} {want}");
            }
        }

        #[test]
        fn whatever_comes_times_are_times(
            seen in prop::collection::vec((any::<u32>(), any::<f64>(), any::<f64>()), 0..60),
        ) {
            let mut transfers = Transfers::default();
            for (tokens, ms, queue_ms) in seen {
                transfers.observe(NOW, PAIR, u64::from(tokens), (ms, queue_ms));
                let ms = between(&transfers, NOW).ms(1e5);
                prop_assert!(ms.is_finite() && ms >= 0.0, "{ms}");
            }
        }
    }

    #[test]
    fn a_pair_that_is_not_known_goes_by_all_and_these_by_a_guess() {
        let mut transfers = Transfers::default();
        assert_eq!(between(&transfers, NOW), Transfer::default());
        let slow = (WorkerId(1), WorkerId(9));
        for tokens in [1_000, 2_000, 4_000, 8_000, 16_000, 32_000] {
            transfers.observe(NOW, slow, tokens, (100.0 + tokens as f64 * 0.5, 0.0));
        }
        let all = between(&transfers, NOW);
        assert!((all.ms_per_token - 0.5).abs() < 1e-6 && (all.handover_ms - 100.0).abs() < 1e-6);
        for tokens in [1_000, 2_000, 4_000, 8_000, 16_000, 32_000] {
            transfers.observe(NOW, PAIR, tokens, (10.0 + tokens as f64 * 0.01, 0.0));
        }
        assert!((between(&transfers, NOW).handover_ms - 10.0).abs() < 1e-6);
        assert!((transfers.between(NOW, slow.0, slow.1).handover_ms - 100.0).abs() < 1e-6);
        assert_eq!(transfers.known(NOW).count(), 2);
        // What was slow is tried again after a while, and who leaves is forgotten at once.
        assert_eq!(transfers.between(NOW + BELIEVED_FOR * 2, slow.0, slow.1), Transfer::default());
        transfers.forget(WorkerId(9));
        assert_eq!(transfers.known(NOW).count(), 1);
    }

    #[test]
    fn prompts_of_one_length_scale_the_guess() {
        let mut transfers = Transfers::default();
        let twice = 2.0 * Transfer::default().ms(5_000.0);
        (0..10).for_each(|_| transfers.observe(NOW, PAIR, 5_000, (twice, 0.0)));
        let found = between(&transfers, NOW);
        assert!((found.ms(5_000.0) - twice).abs() < 1e-6, "{found:?}");
        assert!((found.handover_ms - 2.0 * Transfer::default().handover_ms).abs() < 1e-6);
    }

    #[test]
    fn a_pair_between_which_nothing_comes_is_passed_over_for_a_while() {
        let mut transfers = Transfers::default();
        let at = |s: u64| NOW + Duration::from_secs(s);
        // One that comes in between begins the count anew.
        assert_eq!([0, 1].map(|s| transfers.missed(at(s), PAIR)), [false; 2]);
        transfers.came(PAIR);
        assert_eq!([2, 3, 4, 5].map(|s| transfers.missed(at(s), PAIR)), [false, false, true, false]);
        let passed = |transfers: &Transfers, s| transfers.is_passed_over(at(s), PAIR);
        assert!(passed(&transfers, 6) && !transfers.is_passed_over(at(6), (PAIR.1, PAIR.0)));
        assert!(passed(&transfers, 65) && !passed(&transfers, 66));
        // It is tried once: the next miss is enough.
        assert!(!transfers.missed(at(70), PAIR) && passed(&transfers, 71));
        transfers.came(PAIR);
        assert!(!passed(&transfers, 71));
        assert_eq!([80, 81, 82].map(|s| transfers.missed(at(s), PAIR)), [false, false, true]);
        transfers.forget(PAIR.1);
        assert!(!passed(&transfers, 83));
        for i in 0..2 * PAIRS_MAX as u32 {
            transfers.missed(NOW, (WorkerId(i), WorkerId(i + 1)));
        }
        assert_eq!(transfers.missed.len(), PAIRS_MAX);
    }

    #[test]
    fn pairs_are_bounded() {
        let mut transfers = Transfers::default();
        for i in 0..2 * PAIRS_MAX as u32 {
            transfers.observe(NOW, (WorkerId(i), WorkerId(i + 1)), 100, (5.0, 0.0));
        }
        assert_eq!(transfers.pairs.len(), PAIRS_MAX);
        let later = NOW + BELIEVED_FOR * 2;
        transfers.observe(later, (WorkerId(1), WorkerId(99)), 100, (5.0, 0.0));
        assert_eq!(transfers.pairs.len(), 1, "those that are no longer believed make room");
    }
}
