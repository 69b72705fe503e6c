//! What is known of one worker's cache besides the blocks themselves, which are in the index: whether its KV
//! events are trusted, how its blocks are cut, how much it holds. Written by `kv_events.rs`, `scrape.rs` and
//! the truth loop in `routing.rs`; read at every choice, so most of it is atomic.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use keyway_core::{capacity::Capacity, index::WorkerId};
use parking_lot::Mutex;

use crate::{config::KvSource, limits::KV_SILENCE_MAX};

/// Answers that are looked back on to tell a systematic error from chance.
const DRIFT_ANSWERS: u32 = 16;

/// Answers without a word on the cache after which that is told.
const UNREPORTED_ANSWERS: u32 = 16;
/// Instead of their number: some answers have one.
const REPORTS: u32 = u32::MAX;

/// The state of one worker's cache, as the gateway knows it.
#[derive(Debug)]
pub struct Residency {
    /// Its identity in the index for blocks of tokens, as large as its own; for blocks of text it is the
    /// worker's.
    pub token_id: WorkerId,
    /// The same for blocks of tokens in any of its tiers, where it has KV events, which may tell of others
    /// than the first.
    pub any_tier_id: WorkerId,
    source: Option<KvSource>,
    /// Whether it says itself where they come from.
    announces: AtomicBool,
    trusted: AtomicBool,
    block_size: AtomicU32,
    /// Whether its events say the size of its blocks.
    announced: AtomicBool,
    /// Answers that did not say how much was cached of a prompt of which something had to be, as long as none
    /// has said it.
    unreported: AtomicU32,
    /// Prompt tokens that it has found in its cache, by its metrics, plus one; 0: it was not heard yet.
    found: AtomicU64,
    /// When the last batch of events came, and when one was found to be missing; milliseconds since the
    /// start, plus one.
    last_batch: AtomicU64,
    owed: AtomicU64,
    /// Blocks that went, by its events.
    removed: AtomicU64,
    /// What its cache holds, if its events do not tell.
    pub capacity: Mutex<Capacity>,
    drift: Mutex<Drift>,
}

/// Predictions that came true, or did not, of late.
#[derive(Debug, Default)]
struct Drift {
    answers: u32,
    wrong: u32,
    /// Of the wrong ones, those whose prompts had other numbers of tokens, and those of which nothing was
    /// cached.
    other_tokens: u32,
    nothing_cached: u32,
    /// Whether an answer told of cached tokens.
    found: bool,
    told: bool,
}

/// What became of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was right, within a block.
    Right,
    /// It failed, and the worker's events say why: blocks went or came before the worker began.
    Explained,
    /// It failed, and the worker counts other numbers of tokens in the prompt.
    OtherTokens,
    /// It failed, and nothing was cached.
    NothingCached,
    /// It failed, though the prompt had as many tokens as expected and some were cached.
    Wrong,
}

impl Residency {
    /// Of a worker that has said nothing yet.
    pub fn new(
        (token_id, any_tier_id): (WorkerId, WorkerId),
        source: Option<KvSource>,
        block_size: u32,
    ) -> Self {
        Self {
            token_id,
            any_tier_id,
            source,
            announces: AtomicBool::new(false),
            trusted: AtomicBool::new(false),
            block_size: AtomicU32::new(block_size.max(1)),
            announced: AtomicBool::new(false),
            unreported: AtomicU32::new(0),
            found: AtomicU64::new(0),
            last_batch: AtomicU64::new(0),
            owed: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            capacity: Mutex::default(),
            drift: Mutex::default(),
        }
    }

    /// Where its KV events come from.
    pub fn source(&self) -> Option<&KvSource> {
        self.source.as_ref()
    }

    /// Whether it has KV events, as far as is known.
    pub fn has_events(&self) -> bool {
        self.source.is_some() || self.announces.load(Relaxed)
    }

    /// Notes whether it says itself where its KV events come from.
    pub fn set_announces(&self, announces: bool) {
        self.announces.store(announces, Relaxed);
    }

    /// Whether the index holds exactly what its events say.
    pub fn trusted(&self) -> bool {
        self.trusted.load(Relaxed)
    }

    /// Notes it; returns whether that is a change.
    pub fn set_trusted(&self, trusted: bool) -> bool {
        self.trusted.swap(trusted, Relaxed) != trusted
    }

    /// Tokens in one of its blocks.
    pub fn block_size(&self) -> u32 {
        self.block_size.load(Relaxed)
    }

    /// Its events say how large its blocks are.
    pub fn announce_block_size(&self, tokens: u32) {
        self.announced.store(true, Relaxed);
        self.set_block_size(tokens);
    }

    /// Whether they have said it: then what its metrics say of that does not count.
    pub fn is_block_size_announced(&self) -> bool {
        self.announced.load(Relaxed)
    }

    /// An answer said how much of its prompt was cached.
    pub fn reports(&self) {
        if self.unreported.load(Relaxed) != REPORTS {
            self.unreported.store(REPORTS, Relaxed);
        }
    }

    /// Its metrics say how many tokens it has found in its cache so far; how many more than last time, if its
    /// answers do not say it.
    pub fn found_since(&self, tokens: u64) -> Option<u64> {
        let before = self.found.swap(tokens.saturating_add(1), Relaxed).checked_sub(1)?;
        let is_silent = (UNREPORTED_ANSWERS..REPORTS).contains(&self.unreported.load(Relaxed));
        // It has begun anew if they are fewer.
        Some(tokens.checked_sub(before).unwrap_or(tokens)).filter(|_| is_silent)
    }

    /// An answer did not, of which so many tokens were predicted; whether that is to be told, which it is
    /// once.
    pub fn reports_nothing(&self, predicted: u64) -> bool {
        let before = self.unreported.load(Relaxed);
        if before == REPORTS || predicted <= 2 * u64::from(self.block_size()) {
            return false;
        }
        self.unreported.store((before + 1).min(REPORTS - 1), Relaxed);
        before + 1 == UNREPORTED_ANSWERS
    }

    /// Notes how many tokens are in one of its blocks; 0 changes nothing.
    pub fn set_block_size(&self, tokens: u32) {
        if tokens > 0 {
            self.block_size.store(tokens, Relaxed);
        }
    }

    /// A batch of events came, or the stream is new.
    pub fn batch_came(&self, now: Duration) {
        self.last_batch.store(mark(now), Relaxed);
    }

    /// An answer whose prompt was sent at `sent` has ended, and it stored blocks: events must have come
    /// since.
    pub fn blocks_stored(&self, sent: Duration, now: Duration) {
        if self.last_batch.load(Relaxed) < mark(sent) {
            self.owed.store(mark(now), Relaxed);
        }
    }

    /// Whether events have been missing for too long.
    pub fn is_silent(&self, now: Duration) -> bool {
        let owed = self.owed.load(Relaxed);
        owed > self.last_batch.load(Relaxed) && mark(now) > owed + KV_SILENCE_MAX.as_millis() as u64
    }

    /// Whether a batch of events came at `at` or since.
    pub fn batch_since(&self, at: Duration) -> bool {
        self.last_batch.load(Relaxed) >= mark(at)
    }

    /// Blocks that have gone from its cache so far, by its events.
    pub fn removed(&self) -> u64 {
        self.removed.load(Relaxed)
    }

    /// Replaces that number by the one that its events have come to now.
    pub fn set_removed(&self, blocks: u64) {
        self.removed.store(blocks, Relaxed);
    }

    /// Notes what became of a prediction by tokens, and whether the answer told of cached ones. If most of
    /// them fail it is no accident: says once what to look at.
    pub fn drifts(&self, outcome: Outcome, found: bool) -> Option<&'static str> {
        let mut drift = self.drift.lock();
        drift.answers += 1;
        drift.found |= found;
        drift.wrong += u32::from(!matches!(outcome, Outcome::Right | Outcome::Explained));
        drift.other_tokens += u32::from(outcome == Outcome::OtherTokens);
        drift.nothing_cached += u32::from(outcome == Outcome::NothingCached);
        if drift.answers < DRIFT_ANSWERS {
            return None;
        }
        let seen = std::mem::take(&mut *drift);
        drift.told = seen.told;
        if 2 * seen.wrong <= seen.answers || std::mem::replace(&mut drift.told, true) {
            return None;
        }
        Some(if 2 * seen.other_tokens > seen.wrong {
            "it counts other numbers of prompt tokens, so its chat template or tokenizer differs from the one given here"
        } else if 2 * seen.nothing_cached > seen.wrong && !seen.found {
            "it found nothing cached, so its prefix cache is off, or it adds a salt of its own"
        } else {
            "the prompts have as many tokens as expected, so compare the block size, what else shares its cache, and whether that \
             is too small for what is asked at a time"
        })
    }
}

/// Never 0, which means never.
fn mark(at: Duration) -> u64 {
    at.as_millis() as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn residency() -> Residency {
        Residency::new((WorkerId(1), WorkerId(1)), None, 16)
    }

    #[test]
    fn a_worker_that_stores_blocks_and_says_nothing_is_silent_after_a_while() {
        let residency = residency();
        let at = Duration::from_secs;
        assert!(!residency.is_silent(at(100)), "nobody asked it for anything");
        residency.blocks_stored(at(10), at(11));
        assert!(!residency.is_silent(at(12)) && residency.is_silent(at(17)));
        residency.batch_came(at(18));
        assert!(!residency.is_silent(at(100)));
        // Its events came while it worked.
        residency.batch_came(at(21));
        residency.blocks_stored(at(20), at(22));
        assert!(!residency.is_silent(at(100)));
    }

    #[test]
    fn only_a_systematic_error_is_told_and_only_once() {
        let residency = residency();
        let right = |wrong| if wrong { Outcome::Wrong } else { Outcome::Right };
        assert!((0..160).all(|i| residency.drifts(right(i % 4 == 0), true).is_none()));
        let told = |outcome| (0..160).filter_map(|_| residency.drifts(outcome, true)).count();
        assert_eq!(told(Outcome::Explained), 0, "a cache that is too small for its load is no error");
        assert_eq!(told(Outcome::Wrong), 1);
    }

    #[test]
    fn what_most_of_the_failures_share_is_named() {
        for (outcome, found, word) in [
            (Outcome::OtherTokens, true, "template"),
            (Outcome::NothingCached, false, "salt"),
            (Outcome::NothingCached, true, "too small"),
            (Outcome::Wrong, true, "block size"),
        ] {
            let residency = residency();
            // A right answer, and a failure of another kind, change nothing.
            residency.drifts(Outcome::Right, found);
            residency.drifts(Outcome::Wrong, found);
            let told: Vec<_> = (0..16).filter_map(|_| residency.drifts(outcome, false)).collect();
            assert!(told.len() == 1 && told[0].contains(word), "{told:?}");
        }
    }

    #[test]
    fn a_worker_that_never_says_what_was_cached_is_told_of_once() {
        let silent = residency();
        assert!(!(0..100).any(|_| silent.reports_nothing(32)), "as little may be nothing");
        assert_eq!((0..100).filter(|_| silent.reports_nothing(33)).count(), 1);
        assert_eq!([100, 130, 20].map(|found| silent.found_since(found)), [None, Some(30), Some(20)]);
        let other = residency();
        assert!(!(0..15).any(|_| other.reports_nothing(100)));
        other.reports();
        assert!(!(0..100).any(|_| other.reports_nothing(100)));
        assert_eq!([100, 130].map(|found| other.found_since(found)), [None, None], "its answers say it");
    }

    #[test]
    fn no_block_is_empty() {
        let residency = residency();
        residency.set_block_size(0);
        assert_eq!(residency.block_size(), 16);
    }
}
