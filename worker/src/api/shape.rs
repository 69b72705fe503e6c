//! The fields that say what an answer holds beside its text: how many choices, log probabilities, token ids,
//! usage.

use serde_json::Value;

use super::error::ApiError;
use super::params::Params;
use super::request::Endpoint;
use crate::limits::{CHOICES_MAX, TOP_LOGPROBS_MAX};

/// What an answer holds.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// Choices of each prompt.
    pub(crate) n: usize,
    /// How many of the likeliest tokens to tell with each token's log probability.
    pub(crate) logprobs: Option<usize>,
    /// The same for the prompt, in a field of its own (vLLM).
    pub(crate) prompt_logprobs: Option<usize>,
    /// Whether the text begins with the prompt's.
    pub(crate) echo: bool,
    pub(crate) token_ids: bool,
    /// Whether tokens in log probabilities are named `token_id:N`.
    pub(crate) tokens_as_ids: bool,
    /// Whether a stream ends with a chunk of usage.
    pub(crate) include_usage: bool,
    /// Whether each chunk tells the usage so far.
    pub(crate) continuous_usage: bool,
}

impl Shape {
    /// Whether the answer is streamed, and what it holds.
    pub(super) fn take(params: &mut Params, endpoint: Endpoint) -> Result<(bool, Self), ApiError> {
        let (stream, include_usage, continuous_usage) = take_stream(params)?;
        if endpoint.is_of_agents() {
            return Ok((stream, Self::plain()));
        }
        let n = params.take_bounded("n", 1, CHOICES_MAX)?.unwrap_or(1);
        let is_chat = endpoint != Endpoint::Completion;
        let echo = !is_chat && params.take_bool("echo")?.unwrap_or(false);
        if !is_chat {
            take_best_of(params, n)?;
        }
        let shape = Self {
            n,
            logprobs: if is_chat { take_chat_logprobs(params)? } else { take_completion_logprobs(params)? },
            prompt_logprobs: params.take_bounded("prompt_logprobs", 0, TOP_LOGPROBS_MAX)?,
            echo,
            token_ids: params.take_bool("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: params.take_bool("return_tokens_as_token_ids")?.unwrap_or(false),
            include_usage,
            continuous_usage,
        };
        if stream && shape.prompt_logprobs.is_some() {
            let what = "'prompt_logprobs' does not go with 'stream'.";
            return Err(ApiError::invalid_value("prompt_logprobs", what));
        }
        Ok((stream, shape))
    }

    /// What the answers of agents' APIs hold: one text, and its usage always.
    pub(super) const fn plain() -> Self {
        Self {
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            echo: false,
            token_ids: false,
            tokens_as_ids: false,
            include_usage: true,
            continuous_usage: false,
        }
    }

    /// Whether an answer without a token makes sense.
    pub(super) fn may_be_empty(&self) -> bool {
        self.echo || self.prompt_logprobs.is_some()
    }

    /// How many of the likeliest tokens are wanted for the prompt's, whatever for.
    pub(super) fn prompt_scores(&self) -> Option<usize> {
        self.prompt_logprobs.max(self.logprobs.filter(|_| self.echo))
    }
}

fn take_stream(params: &mut Params) -> Result<(bool, bool, bool), ApiError> {
    let stream = params.take_bool("stream")?.unwrap_or(false);
    let Some(options) = params.take_object("stream_options")? else { return Ok((stream, false, false)) };
    if !stream {
        let what = "'stream_options' is only allowed when 'stream' is true.";
        return Err(ApiError::invalid_value("stream_options", what));
    }
    let mut options = Params::new(options);
    let include_usage = options.take_bool("include_usage")?.unwrap_or(false);
    // Padding against traffic analysis; without it the text is the same.
    options.take_bool("include_obfuscation")?;
    let continuous = options.take_bool("continuous_usage_stats")?.unwrap_or(false);
    options.finish()?;
    Ok((stream, include_usage, include_usage && continuous))
}

/// A boolean, and a number beside it.
fn take_chat_logprobs(params: &mut Params) -> Result<Option<usize>, ApiError> {
    let wanted = params.take_bool("logprobs")?.unwrap_or(false);
    let top = params.take_bounded("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
    if !wanted && top.is_some_and(|top| top > 0) {
        let what = "'top_logprobs' needs 'logprobs' to be true.";
        return Err(ApiError::invalid_value("top_logprobs", what));
    }
    Ok(wanted.then_some(top.unwrap_or(0)))
}

/// A number. OpenAI's own bound is 5; engines' clients ask for more.
fn take_completion_logprobs(params: &mut Params) -> Result<Option<usize>, ApiError> {
    match params.take("logprobs") {
        None | Some(Value::Bool(false)) => Ok(None),
        Some(value) => {
            let mut one = Params::new([("logprobs".to_owned(), value)].into_iter().collect());
            one.take_bounded("logprobs", 0, TOP_LOGPROBS_MAX)
        }
    }
}

/// Taking the best of more candidates than are answered is not supported.
fn take_best_of(params: &mut Params, n: usize) -> Result<(), ApiError> {
    match params.take_bounded("best_of", 1, CHOICES_MAX)? {
        Some(best_of) if best_of != n => {
            let what = "This worker does not support 'best_of' other than 'n'. Leave it out.";
            Err(ApiError::unsupported("best_of", what))
        }
        _ => Ok(()),
    }
}
