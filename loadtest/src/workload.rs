//! What is asked, by number: request `row` of a workload has the same blocks and lengths whenever it is asked
//! for. Makes no text and knows no times.

pub mod agents;
pub mod body;
pub mod conversation;
pub mod dist;
pub mod live;
pub mod prompt;
pub mod scale;
pub mod synthetic;
pub mod texts;

use crate::{
    random::{Purpose, Rng},
    trace::Trace,
    workload::{
        dist::Tokens,
        live::Answers,
        scale::{Block, Scale},
        synthetic::Synthetic,
        texts::{Answer, Texts, Utterance},
    },
};

/// Top bit of the ids of blocks that belong to one request only: no cache can ever reuse them, and ids of
/// traces and shared prefixes are below it.
const UNSHARED: u64 = 1 << 63;

/// One request; of a conversation, its newest turn.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The prompt as blocks of text, in order; of a conversation the newest turn's alone.
    pub blocks: Vec<Block>,
    /// Tokens to generate, at least 1.
    pub output_tokens: u64,
    /// Its words, where a file gives them; else they are made from the blocks.
    pub said: Option<Utterance>,
    /// Nothing that was said before stands in front of it: a trace's turn that does not go on from the last.
    pub begins_history: bool,
}

/// Where requests come from.
#[derive(Debug)]
pub enum Workload {
    /// The rows of a trace, shrunk.
    Trace {
        /// The rows, in the trace's own lengths.
        trace: Trace,
        /// How much they shrink.
        scale: Scale,
        /// Whose answers the prompts carry.
        answers: Answers,
    },
    /// Requests drawn from distributions.
    Synthetic(Synthetic),
    /// Conversations whose turns are drawn from distributions.
    MultiTurn(Synthetic),
    /// Conversations from a file.
    Texts {
        /// The turns of the file's conversations, with their text.
        texts: Texts,
        /// Length of an answer that the file leaves open.
        output: Tokens,
        /// Decides the lengths that `output` draws.
        seed: u64,
        /// Bytes of text for one token, as measured.
        bytes_per_token: f64,
    },
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
    /// Makes request number `row`, the same one at every call.
    pub fn ask(&self, row: usize) -> Ask {
        match self {
            Self::Trace { trace, scale, answers: Answers::Recorded } => trace_ask(trace, *scale, row),
            Self::Trace { trace, scale, answers: Answers::Live } => live::turn(trace, *scale, row),
            Self::Synthetic(synthetic) => synthetic.ask(row),
            Self::MultiTurn(synthetic) => synthetic.turn(row),
            Self::Texts { texts, output, seed, bytes_per_token } => {
                let (conversation, turn) = conversation::split(row);
                let turn = &texts.conversations[conversation][turn];
                let drawn = || u64::from(output.draw(&mut Rng::at(*seed, Purpose::OutputLength, row as u64)));
                let text = match &turn.said {
                    Utterance::Text(text) => text,
                    Utterance::Messages(messages) => messages.get(),
                };
                Ask {
                    blocks: texts::blocks(text, *bytes_per_token),
                    output_tokens: match turn.answer {
                        Answer::Bytes(bytes) => ((bytes as f64 / bytes_per_token).round() as u64).max(1),
                        Answer::Tokens(tokens) => tokens,
                        Answer::Open => drawn(),
                    },
                    said: Some(turn.said.clone()),
                    begins_history: false,
                }
            }
        }
    }

    /// Whether requests are turns of conversations.
    pub fn is_conversational(&self) -> bool {
        matches!(self, Self::MultiTurn(_) | Self::Texts { .. })
    }

    /// Whether requests carry the server's own answers to those before them.
    pub fn carries_answers(&self) -> bool {
        self.is_conversational() || matches!(self, Self::Trace { answers: Answers::Live, .. })
    }

    /// Puts `mark` in front of what a file says; what is made from numbers has words of its seed alone.
    #[must_use]
    pub fn marked(self, mark: &str) -> Self {
        match self {
            Self::Texts { texts, output, seed, bytes_per_token } => {
                Self::Texts { texts: texts.marked(mark), output, seed, bytes_per_token }
            }
            other => other,
        }
    }

    /// Takes in what calibration has measured.
    pub fn calibrate(&mut self, measured: f64) {
        if let Self::Texts { bytes_per_token, .. } = self {
            *bytes_per_token = measured;
        }
    }

    /// A hash of the file that it comes from; 0 without one.
    pub fn file_hash(&self) -> u64 {
        match self {
            Self::Trace { trace, .. } => trace.hash(),
            Self::Texts { texts, .. } => texts.hash,
            Self::Synthetic(_) | Self::MultiTurn(_) => 0,
        }
    }

    /// Tokens of a full block.
    pub fn block_tokens(&self) -> u32 {
        match self {
            Self::Trace { scale, .. } => scale.block_tokens(),
            Self::Synthetic(_) | Self::MultiTurn(_) | Self::Texts { .. } => {
                crate::workload::synthetic::BLOCK_TOKENS
            }
        }
    }
}

/// Row number `row` of `trace`, shrunk.
pub fn trace_ask(trace: &Trace, scale: Scale, row: usize) -> Ask {
    let request = &trace.rows[row];
    let blocks = scale.blocks(row, request).collect();
    Ask { blocks, output_tokens: scale.output_tokens(request), said: None, begins_history: false }
}

/// The id of a block that no other request has. `row` < 2^39, `block` < 2^24.
pub fn unshared_id(row: usize, block: u32) -> u64 {
    UNSHARED | (row as u64) << 24 | u64::from(block)
}

/// Whether `id` is from [`unshared_id`].
pub fn is_unshared(id: u64) -> bool {
    id & UNSHARED != 0
}
