//! How hot prefixes are: how often, lately, a request came that holders of one part of its prompt are told
//! apart by, and how much each of those left to compute. It says what a further copy of a prefix would be
//! used for; what that is worth to a choice is [`crate::cost`]'s, and who holds what is the index's.
//!
//! A prefix is counted at the block where some worker's match ends: there and nowhere else a request has to
//! choose between following the copies and making one more. Bounded: a full set gives up what is least hot.

use std::time::Duration;

use keyway_wire::block_hash::BlockHash;

use crate::candidate::{Candidate, RequestView, Reuse};

/// Time constant of what counts as lately. A prefix is expected to be used again as often as it was used
/// within it.
const MEMORY_S: f64 = 120.0;
/// Time before the first use that counts as without any: two uses that happen to come together are no rate
/// yet.
const UNSEEN_S: f64 = 5.0;
/// Lengths of matches that a request is counted at, the longest first: beyond that holders are a crowd of one
/// each.
const MAX_LENGTHS: usize = 8;
/// Entries that one hash may lie in.
const WAYS: usize = 4;
/// Sets at most: a fleet has no more prefixes that are hot at a time than its workers can keep busy.
const MAX_SETS: usize = 2048;

/// How often one prefix was used lately. An entry with no uses is free.
#[derive(Clone, Copy, Default)]
struct Entry {
    block: u64,
    /// When it was last used, in milliseconds.
    at_ms: u32,
    /// When it was first used.
    since_ms: u32,
    /// Requests with a match that ended at this block; each counts less with time ([`MEMORY_S`]).
    uses: f32,
    /// Prompt tokens computed behind it, of its uses and faded with them.
    tokens: f32,
}

/// Prefixes by the hash of their last block.
pub(super) struct Heat {
    sets: Vec<[Entry; WAYS]>,
}

/// The distinct lengths of the candidates' matches, from the longest, and how many hold so much and no more.
#[derive(Clone, Copy, Debug, Default)]
pub struct MatchLengths {
    of: [(u32, u32); MAX_LENGTHS],
    len: usize,
}

/// The hottest prefix of a request that not all candidates hold; of no blocks, if none is hot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hottest {
    blocks: u32,
    tokens: f64,
    /// Uses to come that another one would be in the way of at its holders, times the tokens that a worker
    /// computes in a millisecond.
    contended: f64,
}

impl Heat {
    /// As many as fit into so many bytes.
    pub(super) fn new(byte_budget: usize) -> Self {
        let sets = (byte_budget / size_of::<[Entry; WAYS]>()).min(MAX_SETS);
        // A power of two, so that a hash's lower bits name its set.
        let sets = if sets == 0 { 0 } else { 1 << sets.ilog2() };
        Self { sets: vec![[Entry::default(); WAYS]; sets] }
    }

    pub(super) fn bytes(&self) -> usize {
        self.sets.capacity() * size_of::<[Entry; WAYS]>()
    }

    /// A request with so many tokens to compute was sent, when the candidates held what they say.
    pub(super) fn used(
        &mut self,
        now: Duration,
        request: &RequestView<'_>,
        lengths: &MatchLengths,
        uncached_tokens: u64,
    ) {
        if self.sets.is_empty() {
            return;
        }
        for (blocks, _) in lengths.with_holders() {
            let Some(block) = request.name_within(blocks as usize) else { continue };
            let entry = self.entry(block, now);
            entry.fade(now);
            entry.uses += 1.0;
            entry.tokens += uncached_tokens as f32;
        }
    }

    /// The hottest of the prefixes that a request has in common with what candidates hold: these lengths of
    /// it, so many candidates in `all`. `share` of all requests are this gateway's; others use it as often,
    /// in proportion.
    pub(super) fn hottest(
        &self,
        now: Duration,
        request: &RequestView<'_>,
        lengths: &MatchLengths,
        (all, share): (usize, f64),
    ) -> Hottest {
        let mut hottest = Hottest::default();
        for (blocks, holders) in lengths.with_holders().filter(|(_, holders)| (*holders as usize) < all) {
            let Some(entry) = request.name_within(blocks as usize).and_then(|block| self.find(block)) else {
                continue;
            };
            let (uses, tokens) = entry.faded(now);
            let per_use = tokens / uses.max(f64::MIN_POSITIVE);
            let uses = uses / share;
            // As often again, each time with this share of time in which another use keeps its holder busy.
            let contended = uses * (uses / entry.seen_ms(now) * per_use / f64::from(holders));
            if contended > hottest.contended {
                hottest = Hottest { blocks, tokens: request.cached_tokens(blocks), contended };
            }
        }
        hottest
    }

    fn find(&self, block: BlockHash) -> Option<&Entry> {
        let set = self.sets.get(self.set_of(block))?;
        set.iter().find(|entry| entry.block == block.0 && entry.uses > 0.0)
    }

    /// The block's entry, in place of the least hot of its set if it had none.
    fn entry(&mut self, block: BlockHash, now: Duration) -> &mut Entry {
        let set = self.set_of(block);
        let set = &mut self.sets[set];
        let known = set.iter().position(|entry| entry.block == block.0 && entry.uses > 0.0);
        let at = known.unwrap_or_else(|| {
            let heat = |entry: &Entry| entry.faded(now).0;
            let coldest = (0..WAYS).min_by(|&a, &b| heat(&set[a]).total_cmp(&heat(&set[b]))).unwrap_or(0);
            set[coldest] =
                Entry { block: block.0, at_ms: millis(now), since_ms: millis(now), ..Entry::default() };
            coldest
        });
        &mut set[at]
    }

    fn set_of(&self, block: BlockHash) -> usize {
        // The upper half: the simulator's hashes are neighbours in the lower one.
        (block.0 >> 32) as usize & self.sets.len().wrapping_sub(1)
    }
}

impl Entry {
    /// Uses and tokens by now.
    fn faded(&self, now: Duration) -> (f64, f64) {
        // Modulo 2^32 ms: after 49 days it starts again, and what was used 49 days ago counts as just used,
        // once.
        let elapsed_s = f64::from(millis(now).wrapping_sub(self.at_ms)) / 1e3;
        let decay = (-elapsed_s / MEMORY_S).exp();
        (f64::from(self.uses) * decay, f64::from(self.tokens) * decay)
    }

    /// Milliseconds in which its uses came, weighed as they are.
    fn seen_ms(&self, now: Duration) -> f64 {
        let age_s = f64::from(millis(now).wrapping_sub(self.since_ms)) / 1e3;
        (MEMORY_S * (1.0 - (-age_s / MEMORY_S).exp()) + UNSEEN_S) * 1e3
    }

    fn fade(&mut self, now: Duration) {
        let (uses, tokens) = self.faded(now);
        (self.uses, self.tokens, self.at_ms) = (uses as f32, tokens as f32, millis(now));
    }
}

impl Hottest {
    /// What a copy of it would be used for at this candidate.
    pub(crate) fn reuse(&self, request: &RequestView<'_>, candidate: &Candidate) -> Reuse {
        let Some(tokens) = self.lacked(request, candidate.matched_blocks) else { return Reuse::default() };
        Reuse { tokens, uses: self.contended / candidate.tokens_per_ms }
    }

    /// Tokens of it that a worker lacks which holds so many blocks; `None`: it lacks none.
    pub(crate) fn lacked(&self, request: &RequestView<'_>, matched_blocks: u32) -> Option<f64> {
        (matched_blocks < self.blocks).then(|| self.tokens - request.cached_tokens(matched_blocks))
    }

    /// Uses that a copy would be for, times the tokens that its worker computes in a millisecond.
    pub(crate) fn contended(&self) -> f64 {
        self.contended
    }
}

impl MatchLengths {
    /// Those of these candidates.
    pub fn of(candidates: &[Candidate]) -> Self {
        let mut found = Self::default();
        for candidate in candidates {
            found.add(candidate.matched_blocks);
        }
        found
    }

    /// One more holder of so many blocks.
    pub(crate) fn add(&mut self, blocks: u32) {
        self.add_holders(blocks, 1);
    }

    /// So many more holders of so many blocks.
    pub(crate) fn add_holders(&mut self, blocks: u32, holders: u32) {
        if blocks == 0 || holders == 0 {
            return;
        }
        let at = self.of[..self.len].iter().position(|(known, _)| *known <= blocks).unwrap_or(self.len);
        if at < self.len && self.of[at].0 == blocks {
            self.of[at].1 += holders;
        } else if at < MAX_LENGTHS {
            self.len = (self.len + 1).min(MAX_LENGTHS);
            self.of[at..self.len].rotate_right(1);
            self.of[at] = (blocks, holders);
        }
    }

    /// Each length, and how many hold at least so much.
    fn with_holders(&self) -> impl Iterator<Item = (u32, u32)> {
        self.of[..self.len].iter().scan(0, |holders, (blocks, count)| {
            *holders += count;
            Some((*blocks, *holders))
        })
    }
}

/// Whole milliseconds, modulo 2^32.
fn millis(now: Duration) -> u32 {
    now.as_millis() as u32
}

#[cfg(test)]
mod tests;
