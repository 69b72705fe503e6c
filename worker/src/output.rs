//! A generation's tokens as text: read, cut at stop strings, counted. Not JSON, not HTTP.

use keyway_text::{TextError, TextModel};

use crate::reader::{Reader, Shown};
use crate::sequence::{FinishReason, TokenEvent};
use crate::stop::StopMatcher;

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
    /// Tokens taken, resumed ones and the end-of-sequence token included.
    pub(crate) completion_tokens: usize,
    pub(crate) cached_tokens: usize,
    /// Set with the last piece of text.
    pub(crate) finish: Option<FinishReason>,
}

impl TextOutput {
    /// The text of what follows `prompt`. With `formatted`, the model's thoughts are told from its answer.
    pub(crate) fn new(
        text: &TextModel,
        prompt: &[u32],
        stops: Vec<String>,
        formatted: bool,
    ) -> Result<Self, TextError> {
        Ok(Self {
            reader: Reader::new(text, prompt, formatted)?,
            stop: StopMatcher::new(stops),
            owed: Shown::default(),
            completion_tokens: 0,
            cached_tokens: 0,
            finish: None,
        })
    }

    /// Takes the tokens of an output that was broken off, none of which ended it. What follows begins behind the
    /// first `emitted` bytes of their text; how much they give depends on the stop strings and on characters that
    /// are not complete.
    pub(crate) fn resume(&mut self, ids: &[u32], emitted: usize) -> Result<(), ResumeError> {
        let mut rest = emitted;
        for id in ids {
            let read = self.reader.push(*id)?;
            let (mut shown, stopped) = self.cut(read);
            if stopped {
                return Err(ResumeError::Complete);
            }
            rest -= shown.drop_front(rest).ok_or(ResumeError::InsideCharacter)?;
            self.owed.append(&shown);
        }
        if rest > 0 {
            return Err(ResumeError::MoreThanGiven(emitted - rest));
        }
        self.completion_tokens = ids.len();
        Ok(())
    }

    /// Takes the next token; returns the text to show now, often none. Once `finish` is set, no more tokens must
    /// come.
    pub(crate) fn push(&mut self, event: TokenEvent) -> Result<Shown, TextError> {
        self.completion_tokens += 1;
        self.cached_tokens = event.cached_tokens;
        let mut read = match event.finish {
            // The end-of-sequence token has no text, whatever the tokenizer thinks of it.
            Some(FinishReason::Stop) => Shown::default(),
            _ => self.reader.push(event.token)?,
        };
        if event.finish.is_some() {
            read.append(&self.reader.finish()?);
        }
        let (new, stopped) = self.cut(read);
        let mut shown = std::mem::take(&mut self.owed);
        shown.append(&new);
        self.finish = if stopped { Some(FinishReason::Stop) } else { event.finish };
        if self.finish.is_some() {
            shown.content.push_str(&self.stop.finish());
        }
        Ok(shown)
    }

    /// Withholds what may begin a stop string; whether one is complete.
    fn cut(&mut self, read: Shown) -> (Shown, bool) {
        let (content, stopped) = self.stop.push(&read.content);
        (Shown { reasoning: read.reasoning, content }, stopped)
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

#[cfg(test)]
pub(crate) mod tests;
