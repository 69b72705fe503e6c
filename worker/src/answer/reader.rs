//! Token ids to the parts of an answer: what the model says, what it thinks, and which functions it calls.
//! Not stop strings, not JSON. How a model writes the three is `answer_format.rs`, and for gpt-oss
//! `keyway_text::HarmonyParser`.
//!
//! Where a request offers no functions, calls of gpt-oss go where its thoughts go, each behind `to=RECIPIENT
//! `: they are no content. So do its calls of tools of its own.

use std::sync::Arc;

use keyway_text::{Decoder, HarmonyChannel, HarmonyParser, HarmonyPiece, TextError, TextModel};

use crate::answer::answer_format::{
    AnswerFormat, CallDelta, CallFormat, CallReader, Formats, Found, Function, ReasoningFormat, ThinkSplitter,
};

/// Ids at the end of a prompt that may open the thoughts.
const OPENING_IDS: usize = 16;

/// More of an answer. Where the order counts, the reasoning comes first, the calls last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<CallDelta>,
}

/// What a request wants told apart.
#[derive(Debug, Clone)]
pub(crate) struct ReadOptions {
    pub(crate) format: AnswerFormat,
    pub(crate) reasoning: ReasoningFormat,
    /// How calls are written; none are told without functions.
    pub(crate) calls: CallFormat,
    pub(crate) functions: Arc<[Function]>,
    /// Whether there may be more than one call.
    pub(crate) parallel_calls: bool,
    /// Whether special tokens have text.
    pub(crate) special_tokens: bool,
}

/// Makes thoughts, content and calls of one generation's ids, as they come.
#[derive(Debug)]
pub(crate) struct Reader {
    format: Format,
    calls_max: usize,
}

#[derive(Debug)]
enum Format {
    Text {
        decoder: Decoder,
        thoughts: Option<ThinkSplitter>,
        calls: Option<CallReader>,
    },
    Harmony {
        parser: HarmonyParser,
        /// Of the last piece that went to the reasoning.
        thought: Option<HarmonyChannel>,
        /// Whether calls are told, and how many there were.
        calls: Option<usize>,
    },
}

// === impl Shown ===

impl Shown {
    pub(crate) fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.calls.is_empty()
    }

    pub(crate) fn append(&mut self, more: Self) {
        self.reasoning.push_str(&more.reasoning);
        self.content.push_str(&more.content);
        for call in more.calls {
            match self.calls.last_mut() {
                Some(last) if last.index == call.index => last.arguments.push_str(&call.arguments),
                _ => self.calls.push(call),
            }
        }
    }

    /// Drops up to `bytes` of text from the front; returns how many, or `None` if that cuts a character.
    pub(crate) fn drop_front(&mut self, bytes: usize) -> Option<usize> {
        let thoughts = bytes.min(self.reasoning.len());
        let said = (bytes - thoughts).min(self.content.len());
        self.reasoning = self.reasoning.get(thoughts..)?.to_owned();
        self.content = self.content.get(said..)?.to_owned();
        Some(thoughts + said)
    }
}

// === impl ReadOptions ===

impl Default for ReadOptions {
    /// Everything is content: no thoughts and no calls are told, and special tokens have no text.
    fn default() -> Self {
        Self {
            format: AnswerFormat::Text,
            reasoning: ReasoningFormat::None,
            calls: CallFormat::None,
            functions: Arc::from([]),
            parallel_calls: true,
            special_tokens: false,
        }
    }
}

impl ReadOptions {
    /// A chat's answer by a model's formats.
    pub(crate) fn chat(formats: Formats) -> Self {
        let Formats { answer, reasoning, calls } = formats;
        Self { format: answer, reasoning, calls, ..Self::default() }
    }

    fn calls(&self) -> Option<CallReader> {
        if self.functions.is_empty() { None } else { CallReader::new(self.calls, &self.functions) }
    }
}

// === impl Reader ===

impl Reader {
    /// A reader of what follows `prompt`.
    pub(crate) fn new(text: &TextModel, prompt: &[u32], options: &ReadOptions) -> Result<Self, TextError> {
        let tokenizer = Arc::clone(&text.tokenizer);
        let format = match text.harmony.filter(|_| options.format == AnswerFormat::Harmony) {
            Some(tokens) => Format::Harmony {
                parser: HarmonyParser::new(tokenizer, tokens, prompt)?,
                thought: None,
                calls: (!options.functions.is_empty() && options.calls != CallFormat::None).then_some(0),
            },
            None => Format::Text {
                thoughts: match options.reasoning {
                    ReasoningFormat::None => None,
                    ReasoningFormat::Think => Some(ThinkSplitter::new(opens_thoughts(text, prompt)?)),
                    ReasoningFormat::ThinkOpen => Some(ThinkSplitter::new(true)),
                },
                decoder: Decoder::with_special(tokenizer, prompt, options.special_tokens)?,
                calls: options.calls(),
            },
        };
        Ok(Self { format, calls_max: if options.parallel_calls { usize::MAX } else { 1 } })
    }

    /// Takes the next id; returns what is now certain, often nothing.
    pub(crate) fn push(&mut self, id: u32) -> Result<Shown, TextError> {
        let shown = match &mut self.format {
            Format::Text { decoder, thoughts, calls } => {
                let text = decoder.push(id)?;
                parts(&text, thoughts.as_mut(), calls.as_mut())
            }
            Format::Harmony { parser, thought, calls } => sorted(parser.push(id)?, thought, calls),
        };
        Ok(self.bounded(shown))
    }

    /// What is still withheld, when no id will follow.
    pub(crate) fn finish(&mut self) -> Result<Shown, TextError> {
        let shown = match &mut self.format {
            Format::Text { decoder, thoughts, calls } => {
                let text = decoder.finish()?;
                let mut shown = parts(&text, thoughts.as_mut(), calls.as_mut());
                let mut found = Found::default();
                if let Some(thoughts) = thoughts {
                    let (thought, said) = thoughts.finish();
                    shown.reasoning.push_str(&thought);
                    say(&said, calls.as_mut(), &mut found);
                }
                if let Some(calls) = calls {
                    calls.finish(&mut found);
                }
                shown.append(Shown { content: found.content, calls: found.calls, ..Shown::default() });
                shown
            }
            Format::Harmony { parser, thought, calls } => sorted(parser.finish()?, thought, calls),
        };
        Ok(self.bounded(shown))
    }

    /// Whether what follows is certainly within the thoughts.
    pub(crate) fn thinks(&self) -> bool {
        matches!(&self.format, Format::Text { thoughts: Some(thoughts), .. } if thoughts.is_thinking())
    }

    fn bounded(&self, mut shown: Shown) -> Shown {
        shown.calls.retain(|call| call.index < self.calls_max);
        shown
    }
}

/// Whether a prompt ends inside the thoughts.
pub(crate) fn opens_thoughts(text: &TextModel, prompt: &[u32]) -> Result<bool, TextError> {
    let end = &prompt[prompt.len().saturating_sub(OPENING_IDS)..];
    Ok(ThinkSplitter::is_open(&text.tokenizer.decode_all(end)?))
}

fn parts(text: &str, thoughts: Option<&mut ThinkSplitter>, calls: Option<&mut CallReader>) -> Shown {
    let (reasoning, said) = match thoughts {
        Some(thoughts) => thoughts.push(text),
        None => (String::new(), text.to_owned()),
    };
    let mut found = Found::default();
    say(&said, calls, &mut found);
    Shown { reasoning, content: found.content, calls: found.calls }
}

fn say(text: &str, calls: Option<&mut CallReader>, found: &mut Found) {
    match calls {
        Some(calls) => calls.push(text, found),
        None => found.content.push_str(text),
    }
}

fn sorted(
    pieces: Vec<HarmonyPiece>,
    thought: &mut Option<HarmonyChannel>,
    calls: &mut Option<usize>,
) -> Shown {
    let mut shown = Shown::default();
    for HarmonyPiece { channel, text, begins } in pieces {
        if channel == HarmonyChannel::Content {
            shown.content.push_str(&text);
            continue;
        }
        if let (HarmonyChannel::Call(recipient), Some(count)) = (&channel, calls.as_mut())
            && let Some(name) = recipient.strip_prefix("functions.")
        {
            *count += usize::from(begins);
            let name = begins.then(|| name.to_owned());
            let call = CallDelta { index: count.saturating_sub(1), name, arguments: text };
            shown.append(Shown { calls: vec![call], ..Shown::default() });
            continue;
        }
        if thought.as_ref() != Some(&channel) || matches!(channel, HarmonyChannel::Call(_)) && begins {
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
    use crate::answer::output::tests::gpt_oss;

    fn read(answer: &str, options: &ReadOptions) -> Shown {
        let text = gpt_oss();
        let mut reader = Reader::new(&text, &[], options).unwrap();
        let mut shown = Shown::default();
        for id in text.tokenizer.encode(answer, false).unwrap() {
            shown.append(reader.push(id).unwrap());
        }
        shown.append(reader.finish().unwrap());
        shown
    }

    fn harmony(functions: bool) -> ReadOptions {
        let function = Function { name: "f".to_owned(), parameters: serde_json::Value::Null };
        let functions = if functions { Arc::from([function]) } else { Arc::from([]) };
        let format = AnswerFormat::Harmony;
        ReadOptions { format, calls: CallFormat::Json, functions, ..ReadOptions::default() }
    }

    const ANSWER: &str = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
        <|constrain|>json<|message|>{\"a\": 1}<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>";

    #[test]
    fn thoughts_and_calls_are_apart_from_the_answer() {
        let shown = read(ANSWER, &harmony(false));
        assert_eq!(shown.reasoning, "Hm.\nto=functions.f {\"a\": 1}");
        assert_eq!((shown.content.as_str(), shown.calls.len()), ("Done.", 0));
        let shown = read(ANSWER, &harmony(true));
        assert_eq!((shown.reasoning.as_str(), shown.content.as_str()), ("Hm.", "Done."));
        let call = CallDelta { index: 0, name: Some("f".to_owned()), arguments: "{\"a\": 1}".to_owned() };
        assert_eq!(shown.calls, [call]);
    }

    #[test]
    fn a_plain_completion_is_read_plainly() {
        let answer = "<|channel|>analysis<|message|>Hm.";
        assert_eq!(read(answer, &ReadOptions::default()).content, "analysisHm.");
        let options = ReadOptions { special_tokens: true, ..ReadOptions::default() };
        assert_eq!(read(answer, &options).content, answer);
    }

    #[test]
    fn thoughts_that_the_prompt_opened_are_thoughts() {
        let text = TextModel::builtin();
        let options = ReadOptions { reasoning: ReasoningFormat::Think, ..ReadOptions::default() };
        let read = |prompt: &str| {
            let ids = text.tokenizer.encode(prompt, false).unwrap();
            let mut reader = Reader::new(&text, &ids, &options).unwrap();
            let mut shown = Shown::default();
            for byte in b"Hm.</think>Yes" {
                shown.append(reader.push(u32::from(*byte)).unwrap());
            }
            shown.append(reader.finish().unwrap());
            (shown.reasoning, shown.content)
        };
        assert_eq!(read("assistant\n<think>\n"), ("Hm.".to_owned(), "Yes".to_owned()));
        assert_eq!(read("assistant\n"), (String::new(), "Hm.</think>Yes".to_owned()));
    }
}
