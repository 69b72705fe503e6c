//! A generation's tokens as text: decoded, cut at stop strings, counted. Not JSON, not HTTP.

use std::sync::Arc;

use keyway_text::{Decoder, TextError, Tokenizer};

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
    decoder: Decoder,
    stop: StopMatcher,
    /// Text of a resumed output that its client does not have yet.
    owed: String,
    /// Tokens taken, resumed ones and the end-of-sequence token included.
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
            owed: String::new(),
            completion_tokens: 0,
            cached_tokens: 0,
            finish: None,
        })
    }

    /// Takes the tokens of an output that was broken off, none of which ended it. What follows begins behind the
    /// first `emitted` bytes of their text; how much they give depends on the stop strings and on characters that
    /// are not complete.
    pub(crate) fn resume(&mut self, ids: &[u32], emitted: usize) -> Result<(), ResumeError> {
        let mut text = String::new();
        for id in ids {
            let (shown, stopped) = self.stop.push(&self.decoder.push(*id)?);
            if stopped {
                return Err(ResumeError::Complete);
            }
            text.push_str(&shown);
        }
        if emitted > text.len() {
            return Err(ResumeError::MoreThanGiven(text.len()));
        }
        if !text.is_char_boundary(emitted) {
            return Err(ResumeError::InsideCharacter);
        }
        self.owed = text.split_off(emitted);
        self.completion_tokens = ids.len();
        Ok(())
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
        let (shown, stopped) = self.stop.push(&text);
        let mut text = std::mem::take(&mut self.owed);
        text.push_str(&shown);
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

#[cfg(test)]
mod tests {
    use keyway_text::TextModel;
    use proptest::prelude::*;

    use super::*;

    fn output(stops: &[String]) -> TextOutput {
        TextOutput::new(TextModel::builtin().tokenizer, &[104, 105], stops.to_vec()).unwrap()
    }

    /// The text shown of `ids`, the last of which reaches `max_tokens`, and how many were taken.
    fn take(output: &mut TextOutput, ids: &[u32]) -> String {
        let mut text = String::new();
        for (i, id) in ids.iter().enumerate() {
            let finish = (i + 1 == ids.len()).then_some(FinishReason::Length);
            text.push_str(&output.push(TokenEvent { token: *id, cached_tokens: 0, finish }).unwrap());
            if output.finish.is_some() {
                break;
            }
        }
        text
    }

    proptest! {
        /// Cut after any token, also inside a character or a stop string, with all or only some of the text shown.
        #[test]
        fn a_resumed_output_shows_what_was_missing(
            text in "[abé€😀]{1,20}", garbage in prop::collection::vec(0xC0u32..0x100, 0..3),
            stops in prop::collection::vec("[abé€]{2,4}", 0..3), shown_less in 0usize..3,
        ) {
            let ids: Vec<u32> = text.bytes().map(u32::from).chain(garbage).collect();
            let mut unbroken = output(&stops);
            let all = take(&mut unbroken, &ids);
            for cut in 0..unbroken.completion_tokens {
                let mut broken = output(&stops);
                let mut shown = String::new();
                for id in &ids[..cut] {
                    let event = TokenEvent { token: *id, cached_tokens: 0, finish: None };
                    shown.push_str(&broken.push(event).unwrap());
                }
                let kept = shown.char_indices().rev().nth(shown_less).map_or(shown.len(), |(at, _)| at);
                shown.truncate(kept);
                let mut resumed = output(&stops);
                resumed.resume(&ids[..cut], shown.len()).unwrap();
                shown.push_str(&take(&mut resumed, &ids[cut..]));
                prop_assert_eq!(&shown, &all);
                prop_assert_eq!(resumed.completion_tokens, unbroken.completion_tokens);
                prop_assert_eq!(resumed.finish, unbroken.finish);
            }
        }
    }
}
