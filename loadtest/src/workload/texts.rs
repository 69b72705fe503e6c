//! Prompts read from files: conversations in ShareGPT's JSON, and JSON lines of one's own. Decides no times.
//!
//! ShareGPT: a list of objects with `conversations`, a list of `from` (`human`, `gpt`, `system`) and `value`.
//! Own lines: `{"prompt": "…"}` or `{"messages": […]}`, with `max_tokens` if `--osl` shall not decide.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    limits,
    workload::{conversation, scale::Block},
};

/// Bytes of text that one block of the reference caches stands for.
const BLOCK_BYTES: usize = 64;

/// Why a file was refused.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file that could not be read.
        path: PathBuf,
        /// The system's own error, with which the message ends.
        source: std::io::Error,
    },
    /// It is not what it should be.
    #[error("{path}{place}: {reason}")]
    Content {
        /// The file that was refused.
        path: PathBuf,
        /// Such as `, line 3`.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// What a person says.
#[derive(Debug, Clone)]
pub enum Utterance {
    /// Text, as one message of the user.
    Text(Arc<str>),
    /// A list of messages in JSON, as it is.
    Messages(Arc<RawValue>),
}

/// How long the answer shall be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// As long as this many bytes of text.
    Bytes(usize),
    /// This many tokens, as its line in the file says; at least 1.
    Tokens(u64),
    /// As the options say.
    Open,
}

/// One turn of a file.
#[derive(Debug, Clone)]
pub struct Turn {
    /// The prompt, or its newest message.
    pub said: Utterance,
    /// How long the answer to it shall be.
    pub answer: Answer,
}

/// The conversations of a file, each of at least one turn; at least one.
#[derive(Debug, Clone)]
pub struct Texts {
    /// The turns of each conversation, in the order of the file.
    pub conversations: Vec<Vec<Turn>>,
    /// Hash of the file.
    pub hash: u64,
}

#[derive(Deserialize)]
struct Shared<'a> {
    #[serde(borrow, default)]
    conversations: Vec<SharedTurn<'a>>,
}

#[derive(Deserialize)]
struct SharedTurn<'a> {
    #[serde(borrow)]
    from: std::borrow::Cow<'a, str>,
    value: String,
}

#[derive(Deserialize)]
struct OwnLine {
    prompt: Option<String>,
    messages: Option<Box<RawValue>>,
    #[serde(alias = "output_tokens", alias = "output_length")]
    max_tokens: Option<u64>,
}

impl Texts {
    /// Reads ShareGPT's JSON. What comes before a conversation's first human turn, and conversations without
    /// a human turn that was answered, are left out.
    pub fn sharegpt(path: &Path) -> Result<Self, TextError> {
        let text = read(path)?;
        let content = |reason: String| TextError::Content { path: path.into(), place: String::new(), reason };
        let shared: Vec<Shared<'_>> = serde_json::from_str(&text)
            .map_err(|e| content(format!("not a ShareGPT list of conversations: {e}")))?;
        let conversations: Vec<_> = shared.into_iter().map(turns).filter(|turns| !turns.is_empty()).collect();
        if conversations.is_empty() {
            return Err(content("no conversation in it has a `human` turn followed by a `gpt` turn".into()));
        }
        Ok(Self { conversations, hash: xxh3_64(text.as_bytes()) })
    }

    /// Reads JSON lines of one's own: each is a conversation of one turn.
    pub fn lines(path: &Path) -> Result<Self, TextError> {
        let text = read(path)?;
        let content = |line: usize, reason: String| TextError::Content {
            path: path.into(),
            place: format!(", line {}", line + 1),
            reason,
        };
        let mut conversations = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let own: OwnLine =
                serde_json::from_str(line).map_err(|e| content(i, format!("not a request: {e}")))?;
            let said = match (own.prompt, own.messages) {
                (Some(prompt), None) if !prompt.is_empty() => Utterance::Text(prompt.into()),
                (None, Some(messages)) if messages.get().starts_with('[') => {
                    Utterance::Messages(messages.into())
                }
                _ => return Err(content(i, "give either `prompt`, a text, or `messages`, a list".into())),
            };
            let answer = own.max_tokens.map_or(Answer::Open, |tokens| Answer::Tokens(tokens.max(1)));
            conversations.push(vec![Turn { said, answer }]);
        }
        if conversations.is_empty() {
            return Err(content(0, "there is no request in the file".into()));
        }
        Ok(Self { conversations, hash: xxh3_64(text.as_bytes()) })
    }
}

impl Texts {
    /// The same, each conversation's first words behind `mark`, which is letters and spaces. Messages without
    /// a text stay as they are.
    #[must_use]
    pub fn marked(mut self, mark: &str) -> Self {
        for first in self.conversations.iter_mut().filter_map(|turns| turns.first_mut()) {
            first.said = match &first.said {
                Utterance::Text(text) => Utterance::Text(format!("{mark}{text}").into()),
                Utterance::Messages(list) => match marked_messages(list, mark) {
                    Some(marked) => Utterance::Messages(marked.into()),
                    None => continue,
                },
            };
        }
        self
    }

    /// Whether no conversation has a second turn.
    pub fn is_single_turn(&self) -> bool {
        self.conversations.iter().all(|turns| turns.len() == 1)
    }

    /// Whether every request is one text.
    pub fn is_plain(&self) -> bool {
        self.is_single_turn()
            && self.conversations.iter().flatten().all(|turn| matches!(turn.said, Utterance::Text(_)))
    }

    /// The number of turns of each conversation, cut to `most` (its mean counts).
    pub fn turns(&self, most: Option<crate::workload::dist::Tokens>) -> Vec<usize> {
        let most = most.map_or(usize::MAX, |most| most.0.mean() as usize);
        self.conversations.iter().map(|turns| turns.len().min(most).max(1)).collect()
    }
}

fn read(path: &Path) -> Result<String, TextError> {
    let text = fs::read_to_string(path).map_err(|source| TextError::Io { path: path.into(), source })?;
    if text.len() > limits::TEXT_FILE_BYTES_MAX {
        let reason = format!("larger than {} bytes: cut it", limits::TEXT_FILE_BYTES_MAX);
        return Err(TextError::Content { path: path.into(), place: String::new(), reason });
    }
    Ok(text)
}

/// A message as far as its text.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

/// A part of a message's content, as far as its text.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow)]
    text: Option<&'a RawValue>,
}

/// The messages with `mark` in front of their first text; `None` if they have none. All other bytes stay.
fn marked_messages(list: &RawValue, mark: &str) -> Option<Box<RawValue>> {
    let json = list.get();
    let messages: Vec<Message<'_>> = serde_json::from_str(json).ok()?;
    let text = messages.iter().find_map(|message| {
        let content = message.content?.get();
        if content.starts_with('"') {
            return Some(content);
        }
        let parts: Vec<Part<'_>> = serde_json::from_str(content).ok()?;
        parts.iter().find_map(|part| part.text.map(RawValue::get).filter(|text| text.starts_with('"')))
    })?;
    // The text lies within the list, behind its quote.
    let begin = text.as_ptr().addr() - json.as_ptr().addr() + 1;
    let (before, behind) = json.split_at_checked(begin)?;
    RawValue::from_string(format!("{before}{mark}{behind}")).ok()
}

/// Each human turn with the answer behind it.
fn turns(shared: Shared<'_>) -> Vec<Turn> {
    let pairs = shared.conversations.windows(2).filter(|pair| {
        matches!(&*pair[0].from, "human" | "user")
            && matches!(&*pair[1].from, "gpt" | "chatgpt" | "assistant")
    });
    let turn = |pair: &[SharedTurn<'_>]| Turn {
        said: Utterance::Text(pair[0].value.as_str().into()),
        answer: Answer::Bytes(pair[1].value.len()),
    };
    pairs.filter(|pair| !pair[0].value.is_empty()).map(turn).take(conversation::TURNS_MAX).collect()
}

/// The text as blocks for the reference caches: equal pieces have equal ids.
pub fn blocks(text: &str, bytes_per_token: f64) -> Vec<Block> {
    let piece = |piece: &[u8]| Block {
        // Below the marks of the other kinds of ids.
        id: xxh3_64(piece) >> 4,
        tokens: ((piece.len() as f64 / bytes_per_token).round() as u32).max(1),
    };
    text.as_bytes().chunks(BLOCK_BYTES).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn sharegpt_conversations() {
        let text = r#"[
            {"id": "a", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"}, {"from": "human", "value": "more"}, {"from": "gpt", "value": "ok"}]},
            {"id": "b", "conversations": [{"from": "gpt", "value": "alone"}]}, {"id": "c"},
            {"id": "d", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]}]"#;
        let texts = Texts::sharegpt(file(text).path()).unwrap();
        let shape: Vec<Vec<Answer>> =
            texts.conversations.iter().map(|turns| turns.iter().map(|turn| turn.answer).collect()).collect();
        assert_eq!(shape, [vec![Answer::Bytes(5), Answer::Bytes(2)], vec![Answer::Bytes(0)]]);
        for bad in ["", "{}", "[]", r#"[{"conversations": [{"from": "human"}]}]"#] {
            assert!(Texts::sharegpt(file(bad).path()).is_err(), "{bad}");
        }
    }

    #[test]
    fn lines_of_one_s_own() {
        let text = "{\"prompt\": \"a\"}\n\n{\"messages\": [{\"role\": \"user\", \"content\": \"b\"}], \"max_tokens\": 7}\n";
        let texts = Texts::lines(file(text).path()).unwrap();
        let answers: Vec<_> = texts.conversations.iter().map(|turns| turns[0].answer).collect();
        assert_eq!(answers, [Answer::Open, Answer::Tokens(7)]);
        for (bad, want) in [
            ("{\"prompt\": \"a\"}\nnonsense", "line 2: not a request"),
            ("{\"prompt\": \"a\", \"messages\": []}", "line 1: give either"),
            ("{\"messages\": 3}", "line 1: give either"),
            ("\n", "no request"),
        ] {
            let error = Texts::lines(file(bad).path()).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn a_mark_stands_before_the_first_text_and_nothing_else_changes() {
        let text = concat!(
            r#"{"prompt": "a"}"#,
            "\n",
            r#"{"messages": [{"role":"system","content":""}, {"content":"b"}]}"#,
            "\n",
            r#"{"messages": [{"content": null}, {"content":[{"type":"image_url"},{"type":"text", "text":"c"}]}]}"#,
            "\n",
            r#"{"messages": [{"content": 7}]}"#,
        );
        let plain = Texts::lines(file(text).path()).unwrap();
        let said = |texts: &Texts| -> Vec<String> {
            let first = texts.conversations.iter().map(|turns| match &turns[0].said {
                Utterance::Text(text) => text.to_string(),
                Utterance::Messages(list) => list.get().to_owned(),
            });
            first.collect()
        };
        assert_eq!(said(&plain.clone().marked("")), said(&plain));
        let marked = said(&plain.marked("word "));
        assert_eq!(marked[0], "word a");
        assert_eq!(marked[1], r#"[{"role":"system","content":"word "}, {"content":"b"}]"#);
        assert_eq!(
            marked[2],
            r#"[{"content": null}, {"content":[{"type":"image_url"},{"type":"text", "text":"word c"}]}]"#
        );
        assert_eq!(marked[3], r#"[{"content": 7}]"#);
    }

    #[test]
    fn a_conversation_is_marked_once() {
        let turn = || Turn { said: Utterance::Text("x".into()), answer: Answer::Open };
        let texts = Texts { conversations: vec![vec![turn(), turn()]], hash: 0 }.marked("word ");
        let said = |i: usize| match &texts.conversations[0][i].said {
            Utterance::Text(text) => text.to_string(),
            Utterance::Messages(_) => unreachable!(),
        };
        assert_eq!((said(0), said(1)), ("word x".into(), "x".into()));
    }

    #[test]
    fn equal_beginnings_have_equal_blocks() {
        let (a, b) = ("x".repeat(200), "x".repeat(130) + "y");
        let (a, b) = (blocks(&a, 4.0), blocks(&b, 4.0));
        assert_eq!(a.iter().map(|block| block.tokens).collect::<Vec<_>>(), [16, 16, 16, 2]);
        assert_eq!((a[1], a[2] == b[2]), (b[1], false));
    }
}
