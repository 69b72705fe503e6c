//! What is asked, by number: request `row` of a workload has the same blocks and lengths whenever it is asked for.
//! Makes no text and knows no times.

use crate::{
    scale::{Block, Scale},
    synthetic::Synthetic,
    trace::Trace,
};

/// Top bit of the ids of blocks that belong to one request only: no cache can ever reuse them, and ids of traces and
/// shared prefixes are below it.
const UNSHARED: u64 = 1 << 63;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// The prompt.
    pub blocks: Vec<Block>,
    /// Tokens to generate, at least 1.
    pub output_tokens: u64,
}

/// Where requests come from.
#[derive(Debug)]
pub enum Workload {
    /// The rows of a trace, shrunk.
    Trace {
        /// The rows.
        trace: Trace,
        /// How much they shrink.
        scale: Scale,
    },
    /// Requests drawn from distributions.
    Synthetic(Synthetic),
}

// === impl Ask ===

impl Ask {
    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.tokens)).sum()
    }
}

// === impl Workload ===

impl Workload {
    /// Request number `row`.
    pub fn ask(&self, row: usize) -> Ask {
        match self {
            Self::Trace { trace, scale } => trace_ask(trace, *scale, row),
            Self::Synthetic(synthetic) => synthetic.ask(row),
        }
    }

    /// Tokens of a full block.
    pub fn block_tokens(&self) -> u32 {
        match self {
            Self::Trace { scale, .. } => scale.block_tokens(),
            Self::Synthetic(_) => crate::synthetic::BLOCK_TOKENS,
        }
    }
}

/// Row number `row` of `trace`, shrunk.
pub fn trace_ask(trace: &Trace, scale: Scale, row: usize) -> Ask {
    let request = &trace.rows[row];
    Ask { blocks: scale.blocks(row, request).collect(), output_tokens: scale.output_tokens(request) }
}

/// The id of a block that no other request has. `row` < 2^39, `block` < 2^24.
pub fn unshared_id(row: usize, block: u32) -> u64 {
    UNSHARED | (row as u64) << 24 | u64::from(block)
}

/// Whether `id` is from [`unshared_id`].
pub fn is_unshared(id: u64) -> bool {
    id & UNSHARED != 0
}
