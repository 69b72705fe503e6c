//! A generation's tokens as text: decoded, cut at stop strings, counted. Not JSON, not HTTP.

use std::sync::Arc;

use keyway_text::{Decoder, TextError, Tokenizer};

use crate::sequence::{FinishReason, TokenEvent};
use crate::stop::StopMatcher;

/// The text side of one generation.
#[derive(Debug)]
pub(crate) struct TextOutput {
    decoder: Decoder,
    stop: StopMatcher,
    /// Tokens taken, the end-of-sequence token included.
    pub(crate) completion_tokens: usize,
    pub(crate) cached_tokens: usize,
    /// Set with the last piece of text.
    pub(crate) finish: Option<FinishReason>,
}

impl TextOutput {
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        prompt: &[u32],
        stops: Vec<String>,
    ) -> Result<Self, TextError> {
        Ok(Self {
            decoder: Decoder::new(tokenizer, prompt)?,
            stop: StopMatcher::new(stops),
            completion_tokens: 0,
            cached_tokens: 0,
            finish: None,
        })
    }

    /// Takes the next token; returns the text to show now, often empty. Once `finish` is set, no more tokens must
    /// come.
    pub(crate) fn push(&mut self, event: TokenEvent) -> Result<String, TextError> {
        self.completion_tokens += 1;
        self.cached_tokens = event.cached_tokens;
        let mut text = match event.finish {
            // The end-of-sequence token has no text, whatever the tokenizer thinks of it.
            Some(FinishReason::Stop) => String::new(),
            _ => self.decoder.push(event.token)?,
        };
        if event.finish.is_some() {
            text.push_str(&self.decoder.finish()?);
        }
        let (mut text, stopped) = self.stop.push(&text);
        self.finish = if stopped { Some(FinishReason::Stop) } else { event.finish };
        if self.finish.is_some() {
            text.push_str(&self.stop.finish());
        }
        Ok(text)
    }
}

impl FinishReason {
    /// OpenAI's word.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}
