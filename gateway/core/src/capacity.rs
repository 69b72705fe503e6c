//! How many tokens a worker's cache is believed to hold: what the worker says of itself, and less where its
//! answers show that it has forgotten what that would let it keep. Only for workers whose events do not tell;
//! the index then models an LRU cache of this size.
//!
//! Both directions are needed. A model that is too large sends prompts to where their prefix is gone; one
//! that is too small sends them away from where it is. So a forgotten prefix shrinks the belief at once, and
//! each prefix that was found lets it grow a little again (additive increase, multiplicative decrease). One
//! that was not expected any more lets it grow by as much: a belief that is far too small expects nothing,
//! and would never learn.

/// What is left of the belief after a prefix turned out to be forgotten.
const SHRINK: f64 = 0.875;
/// Of a cache whose size is told: while the model holds less than this share of it, a prefix that is not
/// there is as likely one that another request has yet to compute. So it says little of the size.
const TELLING_FROM: f64 = 0.5;
/// Tokens by which the belief grows for each token that was found as predicted.
const GROWTH: f64 = 0.125;
/// Tokens that any cache holds: a few prompts. Below, nothing would ever be matched and so nothing learned.
const MIN_TOKENS: f64 = 4096.0;

/// The belief about one worker.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Capacity {
    /// As the worker says; `None`: unknown.
    told: Option<f64>,
    /// As its answers show; `None`: nothing speaks against what it says.
    learned: Option<f64>,
}

impl Capacity {
    /// The worker says how many tokens its cache holds, or (`None`) does not say it any more.
    pub fn tell(&mut self, tokens: Option<u64>) {
        let told = tokens.map(|tokens| tokens as f64);
        if told != self.told {
            // Another cache: what was learned of the old one says nothing.
            *self = Self { told, learned: None };
        }
    }

    /// Tokens it is believed to hold; `None`: unknown.
    pub fn tokens(&self) -> Option<u64> {
        self.learned.or(self.told).map(|tokens| tokens as u64)
    }

    /// Tokens it holds as the worker says, whatever its answers show; where it says nothing, as they show.
    /// While sessions evict each other's, answers show a fraction of the cache.
    pub fn whole(&self) -> Option<u64> {
        self.told.or(self.learned).map(|tokens| tokens as u64)
    }

    /// An answer reported `reported` cached tokens where `predicted` were expected while the model held
    /// `resident` tokens of this worker. `slack` is what may be missing for other reasons: a block.
    pub fn observe(&mut self, predicted: u64, reported: u64, slack: u64, resident: u64) {
        let now = self.learned.or(self.told).unwrap_or(f64::INFINITY);
        if reported + slack < predicted {
            let is_telling = self.told.is_none() || resident as f64 >= now * TELLING_FROM;
            let held = if is_telling { now.min(resident as f64) } else { now };
            let shrunk = (held * SHRINK).max(MIN_TOKENS);
            self.learned = Some(shrunk.min(now));
        } else if let (Some(learned), 1..) = (self.learned, reported) {
            let (found, beyond) = (predicted.min(reported), reported.saturating_sub(predicted));
            // What is found beyond the prediction is there, and was taken for forgotten.
            let taken_away = if beyond > slack { beyond } else { 0 };
            let grown = learned + GROWTH * found as f64 + taken_away as f64;
            // Beyond what it says there is nothing to learn.
            self.learned = Some(grown).filter(|grown| self.told.is_none_or(|told| *grown < told));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_holds_until_answers_speak_against_it() {
        let mut capacity = Capacity::default();
        assert_eq!(capacity.tokens(), None);
        capacity.tell(Some(100_000));
        capacity.observe(5_000, 5_000, 16, 90_000);
        assert_eq!(capacity.tokens(), Some(100_000));
        capacity.observe(5_000, 0, 16, 80_000);
        assert_eq!((capacity.tokens(), capacity.whole()), (Some(70_000), Some(100_000)));
        // The same again is no news; another size is another cache.
        capacity.tell(Some(100_000));
        assert_eq!(capacity.tokens(), Some(70_000));
        capacity.tell(Some(50_000));
        assert_eq!(capacity.tokens(), Some(50_000));
    }

    /// Two requests that begin alike come at once, and the second is computed first.
    #[test]
    fn what_is_missed_while_the_model_is_nearly_empty_says_little_of_a_size_that_is_told() {
        let mut capacity = Capacity::default();
        capacity.tell(Some(1_000_000));
        capacity.observe(512, 0, 32, 2_000);
        assert_eq!(capacity.tokens(), Some(875_000));
        // Where others fill the cache too, it says so time and again.
        let answers = (1..20).find(|_| {
            capacity.observe(10_000, 0, 32, 200_000);
            capacity.tokens() < Some(200_000)
        });
        assert_eq!(answers, Some(7));
        assert_eq!(capacity.tokens(), Some(175_000));
    }

    #[test]
    fn a_block_less_is_no_sign_of_forgetting() {
        let mut capacity = Capacity::default();
        capacity.observe(1_000, 984, 16, 50_000);
        assert_eq!(capacity.tokens(), None);
        capacity.observe(1_000, 983, 16, 50_000);
        assert_eq!(capacity.tokens(), Some(43_750));
    }

    /// A cache of 30,000 tokens that says nothing: the belief ends up near its size, from above and from
    /// below.
    #[test]
    fn the_belief_finds_the_size_and_stays_near_it() {
        let mut capacity = Capacity::default();
        let mut seen = Vec::new();
        for round in 0..400 {
            let resident = capacity.tokens().unwrap_or(500_000);
            // What was used least recently of what is believed to be there is asked for.
            let reported = if resident > 30_000 { 0 } else { 2_000 };
            capacity.observe(2_000, reported, 16, resident);
            if round > 100 {
                seen.push(capacity.tokens().unwrap());
            }
        }
        assert!(seen.iter().all(|tokens| (24_000..33_000).contains(tokens)), "{seen:?}");
    }

    /// A slow minute taught that next to nothing is there; nothing is expected since.
    #[test]
    fn a_belief_that_is_far_too_small_grows_by_what_is_found() {
        let mut capacity = Capacity::default();
        capacity.tell(Some(1_000_000));
        for _ in 0..50 {
            capacity.observe(10_000, 0, 16, 8_000);
        }
        assert_eq!(capacity.tokens(), Some(4096));
        let answers = (0..).take_while(|_| {
            capacity.observe(0, 4_000, 16, 4_000);
            capacity.learned.is_some()
        });
        assert_eq!(answers.count(), 248);
        assert_eq!(capacity.tokens(), Some(1_000_000));
    }

    #[test]
    fn the_belief_never_dies() {
        let mut capacity = Capacity::default();
        for _ in 0..100 {
            capacity.observe(10_000, 0, 16, 8_000);
        }
        assert_eq!(capacity.tokens(), Some(4096));
    }
}
