//! What a choice is made from: the request, the workers that may be chosen, and the turn. Who is chosen is
//! [`crate::pick`]'s.

use keyway_wire::block_hash::BlockHash;
use keyway_wire::spans::Spans;

use crate::index::WorkerId;
use crate::load::LoadSnapshot;
use crate::media::{Media, more_tokens};
use crate::transfers::Transfer;

/// A worker that may be chosen.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name in the index, for blocks as the request has them.
    pub worker: WorkerId,
    /// Its name where it is drawn among equals: the same whether a prompt's blocks are of text or of tokens,
    /// as a session's turns may be of either.
    pub drawn_as: WorkerId,
    /// What it is doing.
    pub load: LoadSnapshot,
    /// Milliseconds of prefill that wait for it in front of the gateway, before this request.
    pub ahead_ms: f64,
    /// Leading blocks of the request's chain that it holds, from [`crate::PrefixIndex::matched`].
    pub matched_blocks: u32,
    /// Blocks behind those that it does not hold itself and can fetch: from its host's memory or a disk.
    pub fetched_blocks: u32,
    /// Where they can be fetched from. `None` where that is not known, or is not to count.
    pub source: Option<Source>,
    /// Whether it and others like it fetch from each other what they hold ([`crate::peers`]).
    pub exchanges: bool,
    /// What a copy of the request's hottest prefix would be used for here.
    pub reuse: Reuse,
    /// Tokens of active sessions that the request's own would displace here
    /// ([`crate::working_sets::WorkingSets::displaced`]).
    pub crowded_tokens: f64,
    /// Prompt tokens that it computes in a millisecond.
    pub tokens_per_ms: f64,
    /// Its share of new work against other workers, for policies that do not look at costs; a positive
    /// number, usually 1. One that is not makes the worker a last resort for all.
    pub weight: f64,
}

/// Where a worker can fetch blocks of a prompt that are not in its own cache.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Source {
    /// A name in the index: its own for blocks in any tier, or that of another worker.
    pub worker: WorkerId,
    /// Whether it is another worker.
    pub is_peer: bool,
    /// What fetching takes.
    pub transfer: Transfer,
}

/// What those who come later would find of a request's prompt, where it is sent to a worker that lacks it.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Reuse {
    /// Prompt tokens that this worker would have to compute of a prefix that others hold and that is used
    /// often.
    pub tokens: f64,
    /// Uses of that prefix, lately, that another one was in the way of at its holder.
    pub uses: f64,
}

/// What the choice needs to know of a request.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct RequestView<'a> {
    /// Names of the prompt's prefixes: of each full block, or of spans of them.
    pub chain: &'a [BlockHash],
    /// Tokens of the whole prompt (an estimate will do).
    pub prompt_tokens: u64,
    /// Tokens of one block, as far as it is text (an estimate will do).
    pub block_tokens: f64,
    /// What stands in the chain that is no text.
    pub media: &'a [Media],
    /// Its session's name, hashed, where the client gives one: it decides where nothing else does.
    pub session: Option<u64>,
}

/// What makes one choice differ from the next where nothing else does.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Goes up from choice to choice: whose turn it is in round robin, and among equally loaded workers.
    pub counter: u64,
    /// Bits drawn anew for each choice, for random policies and for prompts with no block and no session.
    pub random: u64,
}

impl Source {
    /// A worker's other tiers, all of which are `any_tier` in the index, at so many prompt tokens in a
    /// millisecond.
    pub fn tiers(any_tier: WorkerId, tokens_per_ms: f64) -> Self {
        let transfer = Transfer { handover_ms: 0.0, ms_per_token: 1.0 / tokens_per_ms };
        Self { worker: any_tier, is_peer: false, transfer }
    }
}

impl Candidate {
    /// A worker of which nothing is known to match yet, and for which no request waits.
    pub fn new(worker: WorkerId, load: LoadSnapshot, tokens_per_ms: f64, weight: f64) -> Self {
        Self {
            worker,
            drawn_as: worker,
            load,
            ahead_ms: 0.0,
            matched_blocks: 0,
            fetched_blocks: 0,
            source: None,
            exchanges: false,
            reuse: Reuse::default(),
            crowded_tokens: 0.0,
            tokens_per_ms,
            weight,
        }
    }

    /// Leading blocks of the request's chain that it need not compute.
    pub fn held_blocks(&self) -> u32 {
        self.matched_blocks + self.fetched_blocks
    }

    /// The worker, in the index, from which it would fetch.
    pub fn peer(&self) -> Option<WorkerId> {
        self.source.filter(|source| source.is_peer && self.fetched_blocks > 0).map(|source| source.worker)
    }

    /// The same without what it could fetch from another worker.
    #[must_use]
    pub fn without_peer(self) -> Self {
        if self.peer().is_some() { Self { fetched_blocks: 0, source: None, ..self } } else { self }
    }
}

impl<'a> RequestView<'a> {
    /// Prompt tokens that this worker would fetch from another tier.
    pub fn fetched_tokens(&self, candidate: &Candidate) -> u64 {
        match candidate.fetched_blocks {
            0 => 0,
            _ => self.matched_tokens(candidate.held_blocks()) - self.matched_tokens(candidate.matched_blocks),
        }
    }

    /// The prefixes that a worker can go on with. Each computes at least the last token anew, and with it the
    /// block that it stands in: of a prompt of whole blocks that is the last of them.
    pub fn reusable(&self) -> &'a [BlockHash] {
        let all_but_one = self.prompt_tokens.saturating_sub(1) as f64 - self.more_tokens(f64::MAX);
        // 1e-9 forgives the division.
        let most = (all_but_one / self.block_tokens + 1e-9) as usize;
        &self.chain[..self.chain.len().min(self.spans().names(most))]
    }

    /// How its chain's names stand.
    pub fn spans(&self) -> Spans {
        Spans::of(self.chain)
    }

    /// The name of the longest prefix that has one of at most so many blocks.
    pub(crate) fn name_within(&self, blocks: usize) -> Option<BlockHash> {
        self.chain.get(self.spans().names(blocks).checked_sub(1)?).copied()
    }

    /// Prompt tokens in this many leading blocks; always less than the whole prompt.
    pub fn matched_tokens(&self, blocks: u32) -> u64 {
        let tokens =
            (f64::from(blocks) * self.block_tokens + self.more_tokens(f64::from(blocks))).round() as u64;
        tokens.min(self.prompt_tokens.saturating_sub(1))
    }

    /// [`RequestView::matched_tokens`] as costs count them: not rounded, as each of many candidates is asked
    /// and a whole number takes longer than the rest of its cost.
    #[inline]
    pub(crate) fn cached_tokens(&self, blocks: u32) -> f64 {
        let most = (self.prompt_tokens as f64 - 1.0).max(0.0);
        (f64::from(blocks) * self.block_tokens + self.more_tokens(f64::from(blocks))).min(most)
    }

    /// Tokens that so many leading blocks have beyond those of so much text.
    #[inline]
    fn more_tokens(&self, blocks: f64) -> f64 {
        if self.media.is_empty() { 0.0 } else { more_tokens(self.media, blocks) }
    }
}
