//! Token ids to the text of an answer's two fields: what the model says, and, for gpt-oss, what it thinks. Not stop
//! strings, not JSON.
//!
//! Calls of gpt-oss go where its thoughts go, each behind `to=RECIPIENT `: they are no content, and this worker makes no
//! tool calls of them.

use std::sync::Arc;

use keyway_text::{Decoder, HarmonyChannel, HarmonyParser, HarmonyPiece, TextError, TextModel};

/// Text for the two fields. Where their order counts, the reasoning comes first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) reasoning: String,
    pub(crate) content: String,
}

/// Reads one generation.
#[derive(Debug)]
pub(crate) struct Reader {
    format: Format,
}

#[derive(Debug)]
enum Format {
    Plain(Decoder),
    Harmony {
        parser: HarmonyParser,
        /// Of the last piece that went to the reasoning.
        thought: Option<HarmonyChannel>,
    },
}

// === impl Shown ===

impl Shown {
    pub(crate) fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty()
    }

    pub(crate) fn append(&mut self, more: &Self) {
        self.reasoning.push_str(&more.reasoning);
        self.content.push_str(&more.content);
    }

    /// Drops up to `bytes` from the front; returns how many, or `None` if that cuts a character.
    pub(crate) fn drop_front(&mut self, bytes: usize) -> Option<usize> {
        let thoughts = bytes.min(self.reasoning.len());
        let said = (bytes - thoughts).min(self.content.len());
        self.reasoning = self.reasoning.get(thoughts..)?.to_owned();
        self.content = self.content.get(said..)?.to_owned();
        Some(thoughts + said)
    }
}

// === impl Reader ===

impl Reader {
    /// A reader of what follows `prompt`. `formatted` answers are read by the model's format, if it has one.
    pub(crate) fn new(text: &TextModel, prompt: &[u32], formatted: bool) -> Result<Self, TextError> {
        let tokenizer = Arc::clone(&text.tokenizer);
        let format = match text.harmony.filter(|_| formatted) {
            Some(tokens) => {
                Format::Harmony { parser: HarmonyParser::new(tokenizer, tokens, prompt)?, thought: None }
            }
            None => Format::Plain(Decoder::new(tokenizer, prompt)?),
        };
        Ok(Self { format })
    }

    /// Takes the next id; returns the text that is now certain, often none.
    pub(crate) fn push(&mut self, id: u32) -> Result<Shown, TextError> {
        match &mut self.format {
            Format::Plain(decoder) => Ok(Shown { content: decoder.push(id)?, ..Shown::default() }),
            Format::Harmony { parser, thought } => Ok(sorted(parser.push(id)?, thought)),
        }
    }

    /// The text still withheld, when no id will follow.
    pub(crate) fn finish(&mut self) -> Result<Shown, TextError> {
        match &mut self.format {
            Format::Plain(decoder) => Ok(Shown { content: decoder.finish()?, ..Shown::default() }),
            Format::Harmony { parser, thought } => Ok(sorted(parser.finish()?, thought)),
        }
    }
}

fn sorted(pieces: Vec<HarmonyPiece>, thought: &mut Option<HarmonyChannel>) -> Shown {
    let mut shown = Shown::default();
    for HarmonyPiece { channel, text } in pieces {
        if channel == HarmonyChannel::Content {
            shown.content.push_str(&text);
            continue;
        }
        if thought.as_ref() != Some(&channel) {
            if thought.is_some() {
                shown.reasoning.push('\n');
            }
            if let HarmonyChannel::Call(recipient) = &channel {
                shown.reasoning.push_str("to=");
                shown.reasoning.push_str(recipient);
                shown.reasoning.push(' ');
            }
            *thought = Some(channel);
        }
        shown.reasoning.push_str(&text);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::gpt_oss;

    fn read(answer: &str, formatted: bool) -> Shown {
        let text = gpt_oss();
        let mut reader = Reader::new(&text, &[], formatted).unwrap();
        let mut shown = Shown::default();
        for id in text.tokenizer.encode(answer, false).unwrap() {
            shown.append(&reader.push(id).unwrap());
        }
        shown.append(&reader.finish().unwrap());
        shown
    }

    #[test]
    fn thoughts_and_calls_are_apart_from_the_answer() {
        let answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
            <|constrain|>json<|message|>{\"a\": 1}<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>";
        let shown = read(answer, true);
        assert_eq!(shown.reasoning, "Hm.\nto=functions.f {\"a\": 1}");
        assert_eq!(shown.content, "Done.");
    }

    #[test]
    fn a_plain_completion_is_read_plainly() {
        let shown = read("<|channel|>analysis<|message|>Hm.", false);
        assert_eq!((shown.reasoning.as_str(), shown.content.as_str()), ("", "analysisHm."));
    }
}
