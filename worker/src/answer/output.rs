//! A generation's tokens as text: read, cut at stop strings, counted. Not JSON, not HTTP.

use keyway_text::{TextError, TextModel};

use crate::answer::reader::{ReadOptions, Reader, Shown};
use crate::answer::stop::{StopMatcher, StopStrings};
use crate::engine::sequence::{FinishReason, TokenEvent};

/// Why an output cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResumeError {
    /// A stop string is complete.
    #[error("the output is complete")]
    Complete,
    /// The client has more than the tokens give.
    #[error("the ids give {0} bytes of text so far")]
    MoreThanGiven(usize),
    /// What the client has ends inside a character.
    #[error("the text cannot be cut there: it is inside a character")]
    InsideCharacter,
    #[error(transparent)]
    Text(#[from] TextError),
}

/// The text side of one generation.
#[derive(Debug)]
pub(crate) struct TextOutput {
    reader: Reader,
    /// Stop strings end the answer, not the reasoning.
    stop: StopMatcher,
    /// Text of a resumed output that its client does not have yet.
    owed: Shown,
    /// Whether a resumed output's client has the beginning of a call.
    pub(crate) has_calls: bool,
    /// Tokens taken, resumed ones and the end-of-sequence token included.
    pub(crate) completion_tokens: usize,
    pub(crate) cached_tokens: usize,
    /// Tokens of the thoughts, among those taken.
    pub(crate) reasoning_tokens: usize,
    /// Whether a stop token's text is shown.
    shows_stop_token: bool,
    /// Set with the last piece of text.
    pub(crate) finish: Option<FinishReason>,
    /// The stop string or token that ended it.
    pub(crate) stop_reason: Option<StopReason>,
}

/// What a request named as an end, and came.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason {
    Text(String),
    Token(u32),
}

impl TextOutput {
    /// The text of what follows `prompt`, as it is.
    #[cfg(test)]
    pub(crate) fn new(text: &TextModel, prompt: &[u32], stops: Vec<String>) -> Result<Self, TextError> {
        let stops = StopStrings { texts: stops, ..StopStrings::default() };
        Self::with(text, prompt, stops, &ReadOptions::default())
    }

    /// The text of what follows `prompt`.
    pub(crate) fn with(
        text: &TextModel,
        prompt: &[u32],
        stops: StopStrings,
        options: &ReadOptions,
    ) -> Result<Self, TextError> {
        Ok(Self {
            reader: Reader::new(text, prompt, options)?,
            shows_stop_token: stops.shown,
            stop: StopMatcher::new(stops),
            owed: Shown::default(),
            has_calls: false,
            completion_tokens: 0,
            cached_tokens: 0,
            reasoning_tokens: 0,
            finish: None,
            stop_reason: None,
        })
    }

    /// Bytes of text that are there before any token has come.
    pub(crate) fn echoed_bytes(&self) -> usize {
        self.owed.content.len()
    }

    /// Puts text in front of all: the prompt's, where a client wants it echoed.
    pub(crate) fn echo(&mut self, text: &str) {
        self.owed.content.insert_str(0, text);
    }

    /// Takes the tokens of an output that was broken off, none of which ended it. What follows begins behind
    /// the first `emitted` bytes of their text; how much they give depends on the stop strings and on
    /// characters that are not complete. Of calls, the client has what the ids give.
    pub(crate) fn resume(&mut self, ids: &[u32], emitted: usize) -> Result<(), ResumeError> {
        let mut rest = emitted;
        for id in ids {
            self.completion_tokens += 1;
            let read = self.reader.push(*id)?;
            let mut shown = self.cut(read);
            if self.stop_reason.is_some() {
                return Err(ResumeError::Complete);
            }
            rest -= shown.drop_front(rest).ok_or(ResumeError::InsideCharacter)?;
            self.has_calls |= !shown.calls.is_empty();
            shown.calls.clear();
            self.owed.append(shown);
        }
        if rest > 0 {
            return Err(ResumeError::MoreThanGiven(emitted - rest));
        }
        Ok(())
    }

    /// Takes the next token; returns the text to show now, often none. Once `finish` is set, no more tokens
    /// must come.
    pub(crate) fn push(&mut self, event: &TokenEvent) -> Result<Shown, TextError> {
        self.completion_tokens += 1;
        self.cached_tokens = event.cached_tokens;
        let thinks = self.reader.thinks();
        let mut read = match event.finish {
            // The end-of-sequence token has no text, whatever the tokenizer thinks of it.
            Some(FinishReason::Stop) => Shown::default(),
            Some(FinishReason::StopToken) if !self.shows_stop_token => Shown::default(),
            _ => self.reader.push(event.token)?,
        };
        if event.finish.is_some() {
            read.append(self.reader.finish()?);
        }
        self.reasoning_tokens += usize::from(thinks || !read.reasoning.is_empty());
        let new = self.cut(read);
        let mut shown = self.owed();
        shown.append(new);
        self.finish = if self.stop_reason.is_some() { Some(FinishReason::Stop) } else { event.finish };
        if self.finish.is_some() {
            shown.content.push_str(&self.stop.finish());
        }
        if self.finish == Some(FinishReason::StopToken) {
            self.stop_reason = Some(StopReason::Token(event.token));
        }
        Ok(shown)
    }

    /// Text that a client is owed before any token comes.
    pub(crate) fn owed(&mut self) -> Shown {
        std::mem::take(&mut self.owed)
    }

    /// Withholds what may begin a stop string, and notes one that is complete.
    fn cut(&mut self, read: Shown) -> Shown {
        let (content, stopped) = self.stop.push(&read.content, self.completion_tokens);
        self.stop_reason = stopped.map(|text| StopReason::Text(text.to_owned()));
        Shown { content, ..read }
    }
}

impl FinishReason {
    /// What OpenAI's API calls it in a choice's `finish_reason`.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Stop | Self::StopToken | Self::Complete => "stop",
            Self::Length => "length",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
