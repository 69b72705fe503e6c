//! One generation's state, from its prompt to its last token, and the handle on which its client listens. No
//! decisions: the scheduler moves it, the engine extends it.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::engine::backend::PENDING;
use crate::engine::block_manager::{BlockTable, Lookup};
use crate::engine::grammar::{Broken, Grammar, Next};
use crate::engine::holds::{Hold, Holder, Imported};
use crate::engine::logprobs::TokenScore;
use crate::engine::sampler::Sampling;
use crate::engine::token_rules::{RuleState, TokenRules};

/// What a client asks of the engine, in token ids.
#[derive(Debug, Clone)]
pub(crate) struct GenerationRequest {
    /// Token ids, at least one.
    pub(crate) prompt: Vec<u32>,
    /// Tokens that were generated before, elsewhere: the generation goes on behind them. Fewer than
    /// `max_tokens`.
    pub(crate) output_ids: Vec<u32>,
    /// Tokens to generate at most, `output_ids` among them. With 0 the prompt is computed and that is all.
    pub(crate) max_tokens: usize,
    /// Whether to go on after an end-of-sequence token.
    pub(crate) ignore_eos: bool,
    /// How tokens are chosen.
    pub(crate) sampling: Sampling,
    /// What changes the logits before.
    pub(crate) rules: TokenRules,
    /// The form that the answer must have, from its beginning.
    pub(crate) grammar: Option<Grammar>,
    /// How many of the likeliest tokens to tell with each token's own log probability; `None` tells nothing.
    pub(crate) logprobs: Option<usize>,
    /// The same for the prompt's tokens, which are then all computed, cached or not.
    pub(crate) prompt_logprobs: Option<usize>,
    /// Whether the final hidden state behind the prompt is wanted.
    pub(crate) hidden: bool,
    /// Separates prefix caches: only requests with an equal salt share KV.
    pub(crate) salt: Arc<[u8]>,
    /// The lower, the sooner.
    pub(crate) priority: i64,
    /// Whether the prompt's KV is to be held beyond the end, for another worker to fetch.
    pub(crate) keep: bool,
    /// What came of the prompt's KV from another worker.
    pub(crate) imported: Option<Imported>,
}

impl Default for GenerationRequest {
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            output_ids: Vec::new(),
            max_tokens: 1,
            ignore_eos: false,
            sampling: Sampling::default(),
            rules: TokenRules::default(),
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
            hidden: false,
            salt: Arc::from([]),
            priority: 0,
            keep: false,
            imported: None,
        }
    }
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
    /// A token that the request names.
    StopToken,
    /// The answer's form lets nothing follow.
    Complete,
    /// As many tokens as the request's `max_tokens` allows.
    Length,
}

/// What a client hears of its generation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// The prompt is computed. Comes first, and only if the request asked for something that is in it.
    Prompt(PromptOutcome),
    /// The prompt's KV is held, as the request asked for. Comes before the first token.
    Kept(Arc<Hold>),
    /// A generated token; the last one says why the generation ended.
    Token(TokenEvent),
    /// The answer's form cannot be kept, for this reason. The last event.
    Failed(String),
    /// The backend failed, for this reason: another worker may go on. The last event.
    BrokenOff(String),
}

/// What a request asked of its prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PromptOutcome {
    /// The score of each token of the prompt but the first; empty if not asked for.
    pub(crate) scores: Vec<TokenScore>,
    /// The final hidden state behind the prompt's last token; empty if not asked for.
    pub(crate) hidden: Vec<f32>,
    pub(crate) cached_tokens: usize,
    /// Whether this was all.
    pub(crate) is_last: bool,
}

/// One generated token, as its client hears of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenEvent {
    /// The token's id in the model's vocabulary.
    pub(crate) token: u32,
    /// Prompt tokens whose KV this generation did not compute itself; the same in each of its events.
    pub(crate) cached_tokens: usize,
    /// If the request asked for it.
    pub(crate) score: Option<Box<TokenScore>>,
    /// Present in the last event.
    pub(crate) finish: Option<FinishReason>,
}

/// The client's end of a generation. Dropping it aborts the generation at the next step, wherever it stands.
///
/// The channel is not bounded, because the engine must not wait for a slow reader; it holds at most one
/// message of a few words per token, and a generation has at most the model's context of them.
#[derive(Debug)]
pub(crate) struct Generation {
    events: UnboundedReceiver<Event>,
}

impl Generation {
    /// The next event. `None` after the last one, or if the engine failed before it.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll_recv(context)
    }
}

/// A generation inside the engine.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// The prompt, then what was generated. The last may be a placeholder: see [`Sequence::expect`].
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) rank: Rank,
    /// Leading tokens whose KV is in `table`; 0 while waiting.
    pub(crate) computed: usize,
    pub(crate) table: BlockTable,
    /// What is cached of it while it waits.
    pub(crate) lookup: Lookup,
    pub(crate) salt: Arc<[u8]>,
    pub(crate) sampling: Sampling,
    pub(crate) rules: RuleState,
    pub(crate) grammar: Option<Grammar>,
    /// Likeliest tokens to tell with each token; `None` tells no score.
    pub(crate) logprobs: Option<usize>,
    /// Set once, at the first admission.
    pub(crate) cached_tokens: Option<usize>,
    /// What came of its KV from elsewhere, until it is admitted.
    pub(crate) imported: Option<Imported>,
    /// Holds its prompt once that is computed, if the request asks for it.
    pub(crate) keeper: Option<Holder>,
    pub(crate) arrived: Instant,
    pub(crate) last_token: Option<Instant>,
    /// Why it ended; it leaves at the end of that step.
    pub(crate) finish: Option<FinishReason>,
    /// Whether the last of `tokens` is being drawn and not known yet.
    pending: bool,
    prompt_wish: PromptWish,
    ignore_eos: bool,
    max_len: usize,
    events: UnboundedSender<Event>,
    /// Its place among the live sequences, given back on drop.
    _slot: OwnedSemaphorePermit,
}

/// What a request wants of its prompt, as far as it is not told.
#[derive(Debug)]
struct PromptWish {
    /// Likeliest tokens with each score; `None` once nothing is to be scored.
    top: Option<usize>,
    /// Scores so far: of the prompt's second token, of its third, and so on.
    scores: Vec<TokenScore>,
    hidden: bool,
    told: bool,
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
        let rules = RuleState::new(request.rules, &request.prompt, &request.output_ids);
        let prompt_wish = PromptWish {
            top: request.prompt_logprobs.filter(|_| prompt_len > 1),
            scores: Vec::new(),
            hidden: request.hidden,
            told: request.prompt_logprobs.is_none() && !request.hidden && request.max_tokens > 0,
        };
        let mut tokens = request.prompt;
        tokens.extend(request.output_ids);
        let sequence = Self {
            max_len: prompt_len + request.max_tokens,
            tokens,
            prompt_len,
            rank: Rank { priority: request.priority, arrival: 0 },
            computed: 0,
            table: BlockTable::default(),
            lookup: Lookup::default(),
            salt: request.salt,
            sampling: request.sampling,
            rules,
            grammar: request.grammar,
            logprobs: request.logprobs,
            cached_tokens: None,
            imported: request.imported,
            keeper: None,
            arrived: now,
            last_token: None,
            finish: None,
            pending: false,
            prompt_wish,
            ignore_eos: request.ignore_eos,
            events: sender,
            _slot: slot,
        };
        (sequence, Generation { events: receiver })
    }

    /// Tokens whose KV is still to be computed. One means decode (or the last piece of a prefill). None of a
    /// sequence that ends with the token being drawn, whichever that is.
    pub(crate) fn remaining(&self) -> usize {
        if self.pending && self.tokens.len() >= self.max_len { 0 } else { self.tokens.len() - self.computed }
    }

    /// The leading tokens that are known: all but one that is being drawn.
    pub(crate) fn known(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - usize::from(self.pending)]
    }

    /// Puts a placeholder behind the tokens: row `row` of the step under way draws what [`Sequence::push`]
    /// will put in its place.
    pub(crate) fn expect(&mut self, row: usize) {
        debug_assert!(!self.pending);
        self.tokens.push(PENDING | row as u32);
        self.pending = true;
    }

    /// Takes the placeholder back, if there is one: no step draws the token any more.
    pub(crate) fn expect_no_more(&mut self) {
        if std::mem::take(&mut self.pending) {
            self.tokens.pop();
        }
    }

    /// Whether nothing but the next token, and what the model thought of it, is wanted of the model's logits.
    pub(crate) fn wants_a_token_only(&self) -> bool {
        self.prompt_wish.told && !self.is_scoring()
    }

    /// Whether the logits behind each of the next tokens are wanted, because the prompt is scored.
    pub(crate) fn is_scoring(&self) -> bool {
        self.prompt_wish.top.is_some()
    }

    /// How many tokens at the front may come out of the cache: what is scored must be computed.
    pub(crate) fn reusable(&self) -> usize {
        if self.is_scoring() { self.prompt_wish.scores.len() } else { usize::MAX }
    }

    /// Takes the logits behind the token at `position`, while the prompt is scored.
    pub(crate) fn score(&mut self, position: usize, row: &[f32]) {
        let Some(top) = self.prompt_wish.top else { return };
        // After a preemption, rows may come again.
        if position == self.prompt_wish.scores.len() && position + 1 < self.prompt_len {
            self.prompt_wish.scores.push(TokenScore::of(row, self.tokens[position + 1], top));
        }
    }

    /// Takes note that the prompt is computed, with the hidden state behind it; tells the client, if it asked
    /// for anything, and once.
    pub(crate) fn prompt_computed(&mut self, hidden: Option<&[f32]>) {
        self.prompt_wish.top = None;
        if std::mem::replace(&mut self.prompt_wish.told, true) {
            return;
        }
        let is_last = self.max_len == self.prompt_len;
        if is_last {
            self.finish = Some(FinishReason::Length);
        }
        let hidden = hidden.filter(|_| self.prompt_wish.hidden).unwrap_or_default().to_vec();
        let scores = std::mem::take(&mut self.prompt_wish.scores);
        let cached_tokens = self.cached_tokens.unwrap_or(0);
        self.tell(Event::Prompt(PromptOutcome { scores, hidden, cached_tokens, is_last }));
    }

    /// Takes note that its prompt is held, and tells the client.
    pub(crate) fn kept(&self, hold: Hold) {
        self.tell(Event::Kept(Arc::new(hold)));
    }

    /// Whether the client is gone.
    pub(crate) fn aborted(&self) -> bool {
        self.events.is_closed()
    }

    /// Tokens generated so far, here and elsewhere, with one that is being drawn.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Appends a sampled token, in its placeholder's place if there is one, and tells the client.
    pub(crate) fn push(&mut self, token: u32, is_eos: bool, score: Option<Box<TokenScore>>) {
        self.expect_no_more();
        self.tokens.push(token);
        self.rules.push(token);
        let complete = match &mut self.grammar {
            None => false,
            // A grammar lets the end come where the answer is complete.
            Some(_) if is_eos => true,
            Some(grammar) => match grammar.accept(token) {
                Ok(next) => next == Next::Nothing,
                Err(reason) => return self.fail(reason),
            },
        };
        if is_eos && (!self.ignore_eos || complete) {
            self.finish = Some(FinishReason::Stop);
        } else if complete {
            self.finish = Some(FinishReason::Complete);
        } else if self.rules.is_stop(token) {
            self.finish = Some(FinishReason::StopToken);
        } else if self.tokens.len() >= self.max_len {
            self.finish = Some(FinishReason::Length);
        }
        let cached_tokens = self.cached_tokens.unwrap_or(0);
        self.tell(Event::Token(TokenEvent { token, cached_tokens, score, finish: self.finish }));
    }

    /// Ends because the answer's form cannot be kept, or there is no memory for it.
    pub(crate) fn fail(&mut self, why: Broken) {
        self.finish = Some(FinishReason::Stop);
        self.tell(match why {
            Broken::Form(reason) => Event::Failed(reason),
            Broken::Memory => Event::BrokenOff(
                "the forms of all answers take the memory that this worker has for them".to_owned(),
            ),
        });
    }

    /// Ends because the backend failed.
    pub(crate) fn break_off(self, reason: String) {
        self.tell(Event::BrokenOff(reason));
    }

    fn tell(&self, event: Event) {
        // A client that is gone is noticed at the next step.
        let _ = self.events.send(event);
    }
}
