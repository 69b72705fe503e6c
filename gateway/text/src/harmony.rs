//! The format gpt-oss answers in, "harmony" (OpenAI's cookbook, "OpenAI harmony response format"), from token
//! ids to text by channel. An answer is messages, each `<|start|>ROLE[ to=RECIPIENT]<|channel|>CHANNEL[
//! to=RECIPIENT][ <|constrain|>TYPE]<|message|>TEXT<|end|>`, where the prompt holds the first one's
//! beginning, `<|return|>` ends the last, and `<|call|>` ends a call.
//!
//! No text is lost: a header without its message is shown as content. Not here: prompts, which are the chat
//! template's, and a call's arguments as JSON.

use std::sync::Arc;

use crate::{Decoder, TextError, Tokenizer};

/// Ids of a header, at most: role, recipient, channel and type. What is longer is text without a header.
const HEADER_IDS_MAX: usize = 128;

/// Between two messages for the same reader.
const SEPARATOR: &str = "\n";

/// Ids of the format's special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HarmonyTokens {
    start: u32,
    channel: u32,
    constrain: u32,
    message: u32,
    end: u32,
    return_: u32,
    call: u32,
}

/// For whom a piece of text is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HarmonyChannel {
    /// The model's reasoning (`analysis`).
    Reasoning,
    /// The answer: `final`, what the model says before it calls (`commentary`), and whatever has no channel.
    Content,
    /// A call's arguments, with the recipient, such as `functions.get_weather`.
    Call(Arc<str>),
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HarmonyPiece {
    /// For whom it is.
    pub channel: HarmonyChannel,
    /// Its text; empty only where a call begins.
    pub text: String,
    /// Whether a message begins with it.
    pub begins: bool,
}

/// Reads one answer, id by id.
#[derive(Debug)]
pub struct HarmonyParser {
    tokenizer: Arc<Tokenizer>,
    tokens: HarmonyTokens,
    state: State,
    /// The message before, if it had text: the next one for the same reader is set off from it.
    last: Option<HarmonyChannel>,
}

#[derive(Debug)]
enum State {
    /// Ids since `<|start|>`, or since the last message's end; the first `given` of them are the prompt's.
    Header {
        ids: Vec<u32>,
        given: usize,
        started: bool,
    },
    Message {
        channel: HarmonyChannel,
        decoder: Decoder,
        shown: bool,
    },
}

// === impl HarmonyTokens ===

impl HarmonyTokens {
    /// The tokenizer's, if it has them all.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        Some(Self {
            start: tokenizer.token_id("<|start|>")?,
            channel: tokenizer.token_id("<|channel|>")?,
            constrain: tokenizer.token_id("<|constrain|>")?,
            message: tokenizer.token_id("<|message|>")?,
            end: tokenizer.token_id("<|end|>")?,
            return_: tokenizer.token_id("<|return|>")?,
            call: tokenizer.token_id("<|call|>")?,
        })
    }

    /// Whether the id ends the model's turn: `<|return|>` and `<|call|>`.
    pub fn ends_turn(&self, id: u32) -> bool {
        id == self.return_ || id == self.call
    }
}

// === impl HarmonyParser ===

impl HarmonyParser {
    /// A parser for what follows `prompt`, which may end inside a header or a message.
    pub fn new(tokenizer: Arc<Tokenizer>, tokens: HarmonyTokens, prompt: &[u32]) -> Result<Self, TextError> {
        let state = State::Header { ids: Vec::new(), given: 0, started: false };
        let mut parser = Self { tokenizer, tokens, state, last: None };
        if let Some(start) = prompt.iter().rposition(|id| *id == tokens.start) {
            // What the prompt itself says is not the answer's.
            parser.push_all(&prompt[start..])?;
            match &mut parser.state {
                State::Message { shown, .. } => *shown = false,
                State::Header { ids, given, .. } => *given = ids.len(),
            }
            parser.last = None;
        }
        Ok(parser)
    }

    /// Takes the next id; returns the text that is now certain.
    pub fn push(&mut self, id: u32) -> Result<Vec<HarmonyPiece>, TextError> {
        self.push_all(&[id])
    }

    /// Takes the next ids; however they are cut, the pieces joined are the same.
    pub fn push_all(&mut self, ids: &[u32]) -> Result<Vec<HarmonyPiece>, TextError> {
        let mut pieces = Vec::new();
        for id in ids {
            self.take(*id, &mut pieces)?;
        }
        Ok(pieces)
    }

    /// The text still withheld, when no id will follow.
    pub fn finish(&mut self) -> Result<Vec<HarmonyPiece>, TextError> {
        let mut pieces = Vec::new();
        self.end(&mut pieces)?;
        Ok(pieces)
    }

    fn take(&mut self, id: u32, pieces: &mut Vec<HarmonyPiece>) -> Result<(), TextError> {
        let HarmonyTokens { start, channel, message, end, .. } = self.tokens;
        if id == start || id == end || self.tokens.ends_turn(id) {
            self.end(pieces)?;
            self.state = State::Header { ids: Vec::new(), given: 0, started: id == start };
            return Ok(());
        }
        match &mut self.state {
            State::Header { ids, .. } if id == message => {
                let channel = self.tokens.channel_of(&self.tokenizer, ids)?;
                let decoder = Decoder::new(Arc::clone(&self.tokenizer), &[])?;
                // A call is one even if it has no arguments.
                let begins = matches!(channel, HarmonyChannel::Call(_));
                self.state = State::Message { channel, decoder, shown: false };
                if begins {
                    self.show(String::new(), pieces);
                }
            }
            State::Header { ids, given, .. } => {
                ids.push(id);
                if ids.len() - *given > HEADER_IDS_MAX {
                    self.headless(pieces)?;
                }
            }
            // A channel inside a message: its end was forgotten.
            State::Message { .. } if id == channel => {
                self.end(pieces)?;
                self.state = State::Header { ids: vec![id], given: 0, started: true };
            }
            State::Message { decoder, .. } => {
                let text = decoder.push(id)?;
                self.show(text, pieces);
            }
        }
        Ok(())
    }

    /// Ends the message or header at hand.
    fn end(&mut self, pieces: &mut Vec<HarmonyPiece>) -> Result<(), TextError> {
        if let State::Header { ids, .. } = &self.state {
            if ids.is_empty() {
                return Ok(());
            }
            self.headless(pieces)?;
        }
        if let State::Message { decoder, .. } = &mut self.state {
            let text = decoder.finish()?;
            self.show(text, pieces);
            if let State::Message { channel, shown: true, .. } = &self.state {
                self.last = Some(channel.clone());
            }
        }
        self.state = State::Header { ids: Vec::new(), given: 0, started: false };
        Ok(())
    }

    /// Takes a header that has no message for content. Its role alone is none.
    fn headless(&mut self, pieces: &mut Vec<HarmonyPiece>) -> Result<(), TextError> {
        let State::Header { ids, given, started } = &mut self.state else { return Ok(()) };
        let (prompt, answer) = ids.split_at(*given);
        let mut decoder = Decoder::new(Arc::clone(&self.tokenizer), prompt)?;
        let mut text = String::new();
        for id in answer {
            text.push_str(&decoder.push(*id)?);
        }
        let started = *started;
        self.state = State::Message { channel: HarmonyChannel::Content, decoder, shown: false };
        if !(started && text == "assistant") {
            self.show(text, pieces);
        }
        Ok(())
    }

    fn show(&mut self, text: String, pieces: &mut Vec<HarmonyPiece>) {
        let State::Message { channel, shown, .. } = &mut self.state else { return };
        let call = matches!(channel, HarmonyChannel::Call(_));
        let begins = !std::mem::replace(shown, *shown || call || !text.is_empty());
        if text.is_empty() && !(call && begins) {
            return;
        }
        let again = begins && !call && self.last.as_ref() == Some(channel);
        let text = if again { format!("{SEPARATOR}{text}") } else { text };
        match pieces.last_mut() {
            Some(piece) if piece.channel == *channel && !(call && begins) => piece.text.push_str(&text),
            _ => pieces.push(HarmonyPiece { channel: channel.clone(), text, begins }),
        }
    }
}

impl HarmonyTokens {
    /// For whom a message with this header is.
    fn channel_of(&self, tokenizer: &Tokenizer, header: &[u32]) -> Result<HarmonyChannel, TextError> {
        let header = header.split(|id| *id == self.constrain).next().unwrap_or_default();
        let (role, channel) = match header.iter().position(|id| *id == self.channel) {
            Some(at) => header.split_at(at),
            None => (header, &header[..0]),
        };
        let (role, channel) = (tokenizer.decode(role)?, tokenizer.decode(channel)?);
        let recipient =
            |text: &str| text.split_whitespace().find_map(|w| w.strip_prefix("to=").map(Arc::from));
        if let Some(recipient) = recipient(&channel).or_else(|| recipient(&role)) {
            return Ok(HarmonyChannel::Call(recipient));
        }
        Ok(match channel.split_whitespace().next() {
            Some("analysis") => HarmonyChannel::Reasoning,
            _ => HarmonyChannel::Content,
        })
    }
}

#[cfg(test)]
mod tests;
