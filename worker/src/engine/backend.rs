//! The seam between the engine and the arithmetic: one call runs one step of a batch over a paged KV cache,
//! or starts it. The scheduler never sees a tensor, the backend never sees a request.

use std::fmt;
use std::time::Duration;

pub use keyway_kernels::cuda::gather::PENDING;
pub use keyway_kernels::cuda::rules::Rule;
pub use keyway_kernels::cuda::sample::{Parameters, Score};

/// Layers whose KV is kept for the same positions share block tables: a cache group. What a group keeps
/// decides when its blocks may be given back and how much of a prefix must be cached to go on from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheGroup {
    /// Keys and values of every position.
    Full,
    /// One compressed latent per position, shared by all heads (multi-head latent attention); of every
    /// position.
    MlaLatent,
    /// Keys and values of the last `window` positions, the current one among them.
    SlidingWindow {
        /// Positions, at least 1.
        window: usize,
    },
}

/// Stands in a sliding window's block table for a block that no token of the chunk, nor of any later one,
/// sees a position of: it was given back. A backend never reads it.
pub const NO_BLOCK: u32 = u32::MAX;

/// One sequence's part of a step: its next tokens, and the blocks its KV lives in.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// New token ids, at least one: a piece of the prompt, or the last sampled token. In [`Backend::start`]
    /// that may be [`PENDING`] `| r`: what row `r` of the step started before draws.
    pub tokens: &'a [u32],
    /// Absolute position of `tokens[0]`. The KV of every position before it that its group still keeps is in
    /// the blocks, or is written there by another chunk of the same step, in whatever order the chunks stand.
    pub start: usize,
    /// A block table for each of [`Backend::cache_groups`], in that order: entry `i` of each holds positions
    /// `i * block_size ..`; all cover `start + tokens.len()` positions.
    pub tables: &'a [&'a [u32]],
    /// Whether the logits after this chunk's last token are wanted.
    pub wants_logits: bool,
}

/// How a row's token is drawn: with the very choice of `sampler.rs` for the same logits, once these are
/// changed as `token_rules.rs` and `grammar.rs` change them.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    /// The request's sampling parameters, its seed, and the token's position.
    pub by: Parameters,
    /// What changes the logits before.
    pub rules: Option<Rules<'a>>,
    /// A bit for each id, the lowest first: set if it may come.
    pub mask: Option<&'a [u32]>,
    /// How many of the likeliest tokens are wanted with the token's own score, at most 20, where one is. Only
    /// of logits that nothing changes.
    pub score: Option<usize>,
}

/// A sequence's rules. Their list is the backend's to keep from step to step, with every token that it draws.
#[derive(Clone, Copy)]
pub struct Rules<'a> {
    /// Whose they are: a number that no other sequence has, or had.
    pub sequence: u64,
    /// Tokens that the sequence has generated, the last of the row's chunk among them if there are any;
    /// `None`: the list has no counts of them.
    pub generated: Option<usize>,
    /// Whether what is held back still is.
    pub holds: bool,
    /// On repetition, frequency and presence.
    pub penalties: [f32; 3],
    /// Makes the list, with all tokens that are no placeholders: where the backend does not have it.
    pub list: &'a dyn RuleList,
}

/// Makes a sequence's list of rules.
pub trait RuleList {
    /// The list, each id once.
    fn list(&self) -> Vec<Rule>;
}

impl From<Parameters> for Draw<'_> {
    fn from(by: Parameters) -> Self {
        Self { by, rules: None, mask: None, score: None }
    }
}

impl fmt::Debug for Rules<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// What a started step comes to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutput {
    /// The tokens that were drawn, in the order of their rows.
    pub tokens: Vec<u32>,
    /// What was wanted of drawn tokens' scores, in that order.
    pub scores: Vec<Score>,
    /// The other rows' logits, `[rows, vocab_size]`.
    pub logits: Vec<f32>,
}

/// What the KV of a backend's blocks is when it is copied. Blocks may go between backends for which this is
/// equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLayout {
    /// Number type, order, sizes and cache groups, in words that are compared and shown.
    pub words: String,
    /// By cache group, the bytes of one block.
    pub block_bytes: Vec<usize>,
}

impl BlockLayout {
    /// Bytes of the largest block.
    pub(crate) fn block_bytes_max(&self) -> usize {
        self.block_bytes.iter().max().copied().unwrap_or(0)
    }
}

/// Why the KV of a block was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this backend does not copy the KV of blocks")]
pub struct CopyError;

/// Why a step was not carried out, for those who wait for it. What it would have written to the KV cache is
/// not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StepError(pub String);

/// Runs a model. A token's logits depend only on the tokens before it, bit for bit: never on the batch, the
/// chunking, the block numbers, or whether the KV of earlier positions came from this request or another.
pub trait Backend: Send {
    /// Width of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Positions per KV block.
    fn block_size(&self) -> usize;

    /// Number of KV blocks, one pool for all groups; valid block numbers are `0..num_blocks`.
    fn num_blocks(&self) -> usize;

    /// What is kept for which positions; at least one group. Where one of them is not a sliding window, it
    /// comes first.
    fn cache_groups(&self) -> &[CacheGroup];

    /// Writes the KV of every chunk's tokens and appends to `logits` (cleared first) one row of
    /// `vocab_size` per chunk that wants it, in the chunks' order.
    ///
    /// # Errors
    /// If a part of the backend outside of this process failed for longer than it is worth waiting. A later
    /// step may succeed.
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError>;

    /// Whether it draws tokens and computes while the host goes on. Only then are [`Backend::start`] and
    /// [`Backend::finish`] there.
    fn draws(&self) -> bool {
        false
    }

    /// Starts a step and does not wait for it. `draws` has an entry for each chunk that wants logits, a row:
    /// how its token is drawn, or `None` if the logits are wanted. The step started before may still be under
    /// way, if it gives no logits; no further one.
    ///
    /// # Errors
    /// If the backend failed. No step is under way then.
    fn start(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<(), StepError> {
        let _ = (chunks, draws);
        Err(StepError("this backend does not start steps".to_owned()))
    }

    /// Waits for the step that was started first of those that are under way; its `output`, replaced.
    ///
    /// # Errors
    /// If the backend failed. No step is under way then.
    fn finish(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        let _ = output;
        Err(StepError("this backend does not start steps".to_owned()))
    }

    /// How often [`Backend::keep_alive`] wants to be called while nothing is to be computed; `None`: never.
    fn keep_alive_every(&self) -> Option<Duration> {
        None
    }

    /// Tells whatever the backend has outside of this process that it is still needed.
    fn keep_alive(&mut self) {}

    /// Says that no step comes before something arrives: the ranks that compute together with this one need
    /// not wait for it.
    fn rest(&mut self) {}

    /// Whether all KV that was written is gone, in whatever way, since this was last asked. A step over it
    /// fails.
    fn cache_was_lost(&mut self) -> bool {
        false
    }

    /// How the KV of its blocks is laid out; `None` where it cannot be copied.
    fn block_layout(&self) -> Option<BlockLayout> {
        None
    }

    /// Appends the KV of `block`, which stands in a table of `group`, to `out`: as many bytes as
    /// [`Backend::block_layout`] says.
    ///
    /// # Errors
    /// If it has no [`Backend::block_layout`].
    fn copy_block(&self, group: usize, block: u32, out: &mut Vec<u8>) -> Result<(), CopyError> {
        let _ = (group, block, out);
        Err(CopyError)
    }

    /// Writes a block that another backend of equal weights and layout has copied.
    ///
    /// # Errors
    /// If it has no [`Backend::block_layout`], or there are not as many bytes as that says.
    fn write_block(&mut self, group: usize, block: u32, bytes: &[u8]) -> Result<(), CopyError> {
        let _ = (group, block, bytes);
        Err(CopyError)
    }

    /// The final hidden states, behind the last normalisation, from which the last step's logits were made: a
    /// row of equal width for each row of logits. `None` where a backend does not keep them.
    fn hidden(&self) -> Option<&[f32]> {
        None
    }
}
