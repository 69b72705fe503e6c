//! One generation's state, from its prompt to its last token, and the handle on which its client listens. No
//! decisions: the scheduler moves it, the engine extends it.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::block_manager::BlockTable;
use crate::sampler::Sampling;

/// What a client asks of the engine, in token ids.
#[derive(Debug, Clone)]
pub(crate) struct GenerationRequest {
    /// Token ids, at least one.
    pub(crate) prompt: Vec<u32>,
    /// Tokens that were generated before, elsewhere: the generation goes on behind them. Fewer than `max_tokens`.
    pub(crate) output_ids: Vec<u32>,
    /// Tokens to generate at most, `output_ids` among them; at least one.
    pub(crate) max_tokens: usize,
    /// Whether to go on after an end-of-sequence token.
    pub(crate) ignore_eos: bool,
    /// How tokens are chosen.
    pub(crate) sampling: Sampling,
    /// Separates prefix caches: only requests with an equal salt share KV.
    pub(crate) salt: Arc<[u8]>,
    /// The lower, the sooner.
    pub(crate) priority: i64,
}

/// Who comes first: the lower rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// What the client asked for.
    pub(crate) priority: i64,
    /// Counts newcomers; set by the scheduler.
    pub(crate) arrival: u64,
}

/// Why a generation ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    /// An end-of-sequence token, or a stop string.
    Stop,
    /// `max_tokens`.
    Length,
}

/// One generated token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenEvent {
    /// The token's id.
    pub(crate) token: u32,
    /// Prompt tokens whose KV this generation did not compute itself; the same in each of its events.
    pub(crate) cached_tokens: usize,
    /// Present in the last event.
    pub(crate) finish: Option<FinishReason>,
}

/// The client's end of a generation. Dropping it aborts the generation at the next step, wherever it stands.
///
/// The channel is not bounded, because the engine must not wait for a slow reader; it holds at most one message of a
/// few words per token, and a generation has at most the model's context of them.
#[derive(Debug)]
pub(crate) struct Generation {
    events: UnboundedReceiver<TokenEvent>,
}

impl Generation {
    /// The next token. `None` after the last one, or if the engine failed before it.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        self.events.poll_recv(context)
    }
}

/// A generation inside the engine.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// The prompt, then what was generated.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) rank: Rank,
    /// Leading tokens whose KV is in `table`; 0 while waiting.
    pub(crate) computed: usize,
    pub(crate) table: BlockTable,
    pub(crate) salt: Arc<[u8]>,
    pub(crate) sampling: Sampling,
    /// Set once, at the first admission.
    pub(crate) cached_tokens: Option<usize>,
    pub(crate) arrived: Instant,
    pub(crate) last_token: Option<Instant>,
    /// Why it ended; it leaves at the end of that step.
    pub(crate) finish: Option<FinishReason>,
    ignore_eos: bool,
    max_len: usize,
    events: UnboundedSender<TokenEvent>,
    /// Its place among the live sequences, given back on drop.
    _slot: OwnedSemaphorePermit,
}

impl Sequence {
    /// A waiting sequence and its client's end.
    pub(crate) fn new(
        request: GenerationRequest,
        slot: OwnedSemaphorePermit,
        now: Instant,
    ) -> (Self, Generation) {
        let (sender, receiver) = unbounded_channel();
        let prompt_len = request.prompt.len();
        let mut tokens = request.prompt;
        tokens.extend(request.output_ids);
        let sequence = Self {
            max_len: prompt_len + request.max_tokens,
            tokens,
            prompt_len,
            rank: Rank { priority: request.priority, arrival: 0 },
            computed: 0,
            table: BlockTable::default(),
            salt: request.salt,
            sampling: request.sampling,
            cached_tokens: None,
            arrived: now,
            last_token: None,
            finish: None,
            ignore_eos: request.ignore_eos,
            events: sender,
            _slot: slot,
        };
        (sequence, Generation { events: receiver })
    }

    /// Tokens whose KV is still to be computed. One means decode (or the last piece of a prefill).
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether the client is gone.
    pub(crate) fn aborted(&self) -> bool {
        self.events.is_closed()
    }

    /// Appends a sampled token and tells the client.
    pub(crate) fn push(&mut self, token: u32, is_eos: bool) {
        self.tokens.push(token);
        if is_eos && !self.ignore_eos {
            self.finish = Some(FinishReason::Stop);
        } else if self.tokens.len() >= self.max_len {
            self.finish = Some(FinishReason::Length);
        }
        let cached_tokens = self.cached_tokens.unwrap_or(0);
        // A client that is gone is noticed at the next step.
        let _ = self.events.send(TokenEvent { token, cached_tokens, finish: self.finish });
    }
}
