//! The JSON shapes of generations, whole and in chunks, as OpenAI's clients read them.

use keyway_wire::extension::AnswerExtension;
use keyway_wire::openai::{PromptTokensDetails, Usage};
use serde::Serialize;

use super::request::Endpoint;
use super::{App, Response};
use crate::reader::Shown;
use crate::sequence::FinishReason;

/// What all chunks of an answer share.
#[derive(Debug)]
pub(crate) struct AnswerHead {
    id: String,
    created: u64,
    model: String,
    system_fingerprint: String,
    endpoint: Endpoint,
}

#[derive(Debug, Serialize)]
struct Answer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    usage: UsageField<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keyway: Option<AnswerExtension>,
}

/// The field `usage`: a stream that will end with usage says `null` before.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(untagged)]
enum UsageField<'a> {
    Absent,
    Null(()),
    Counts(&'a Usage),
}

impl UsageField<'_> {
    const fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

#[derive(Debug, Default, Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    /// Always `null`: not supported.
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    /// What the model thought before, as vLLM and DeepSeek name it.
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    refusal: Option<()>,
}

#[derive(Debug, Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
}

/// One piece of a choice, for a chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// A chat's first chunk.
    Role,
    /// More text.
    Text(&'a Shown),
    /// The last chunk, with the rest of the text.
    End(&'a Shown, FinishReason),
}

/// What a chunk carries beside its choice.
#[derive(Debug)]
pub(crate) struct ChunkExtras {
    /// Whether to say that usage comes later.
    pub(crate) null_usage: bool,
    pub(crate) keyway: Option<AnswerExtension>,
}

impl AnswerHead {
    pub(crate) fn new(app: &App, endpoint: Endpoint) -> Self {
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self {
            id: format!("{prefix}-{:032x}", fastrand::u128(..)),
            created: now.as_secs(),
            model: app.model.name.clone(),
            system_fingerprint: app.model.numerics_id.clone(),
            endpoint,
        }
    }

    /// The whole answer: each choice's text and end.
    pub(crate) fn whole<'a>(
        &self,
        outputs: &'a [(Shown, FinishReason)],
        usage: &Usage,
        keyway: Option<AnswerExtension>,
    ) -> Response {
        let choice = |(index, (text, finish)): (usize, &'a (Shown, FinishReason))| {
            let base = Choice { index, finish_reason: Some(finish.as_str()), ..Choice::default() };
            match self.endpoint {
                Endpoint::Chat => Choice { message: Some(message(text)), ..base },
                Endpoint::Completion => Choice { text: Some(&text.content), ..base },
            }
        };
        let choices: Vec<Choice<'a>> = outputs.iter().enumerate().map(choice).collect();
        let object = if self.endpoint == Endpoint::Chat { "chat.completion" } else { "text_completion" };
        super::json_response(&self.answer(object, &choices, UsageField::Counts(usage), keyway))
    }

    /// Appends one event with one piece of choice `index`.
    pub(crate) fn write_piece(&self, out: &mut Vec<u8>, index: usize, piece: Piece<'_>, extras: ChunkExtras) {
        let chat = self.endpoint == Endpoint::Chat;
        let base = Choice { index, ..Choice::default() };
        let role = || Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
        let choice = match piece {
            Piece::Role => Choice { delta: Some(role()), ..base },
            Piece::Text(text) if chat => Choice { delta: Some(delta(text)), ..base },
            Piece::Text(text) => Choice { text: Some(&text.content), ..base },
            Piece::End(text, finish) => Choice {
                delta: chat.then(|| delta(text)),
                text: (!chat).then_some(&text.content),
                finish_reason: Some(finish.as_str()),
                ..base
            },
        };
        let usage = if extras.null_usage { UsageField::Null(()) } else { UsageField::Absent };
        write_event(out, &self.answer(self.chunk_object(), &[choice], usage, extras.keyway));
    }

    /// Appends the event that carries the usage and no choice.
    pub(crate) fn write_usage(&self, out: &mut Vec<u8>, usage: &Usage, keyway: Option<AnswerExtension>) {
        let usage = UsageField::Counts(usage);
        write_event(out, &self.answer::<Choice<'_>>(self.chunk_object(), &[], usage, keyway));
    }

    const fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completion => "text_completion",
        }
    }

    fn answer<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: UsageField<'a>,
        keyway: Option<AnswerExtension>,
    ) -> Answer<'a, C> {
        Answer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.system_fingerprint,
            choices,
            usage,
            keyway,
        }
    }
}

fn message(text: &Shown) -> Message<'_> {
    Message { role: "assistant", content: &text.content, reasoning_content: &text.reasoning, refusal: None }
}

/// Only the fields that have text.
fn delta(text: &Shown) -> Delta<'_> {
    Delta {
        role: None,
        content: (!text.content.is_empty()).then_some(&text.content),
        reasoning_content: (!text.reasoning.is_empty()).then_some(&text.reasoning),
    }
}

fn write_event(out: &mut Vec<u8>, answer: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    // Writing plain structs to memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, answer);
    out.extend_from_slice(b"\n\n");
}

/// Token counts of an answer, over all its choices.
pub(crate) fn usage(prompt: usize, completion: usize, cached: usize) -> Usage {
    Usage {
        prompt_tokens: prompt as u64,
        completion_tokens: completion as u64,
        total_tokens: (prompt + completion) as u64,
        prompt_tokens_details: Some(PromptTokensDetails { cached_tokens: Some(cached as u64) }),
    }
}
