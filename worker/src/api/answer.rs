//! The JSON shapes of generations, whole and in chunks, as OpenAI's clients read them.

use std::sync::Arc;

use keyway_wire::extension::AnswerExtension;
use keyway_wire::openai::{PromptTokensDetails, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use super::kv_transfer;
use super::logprobs::Namer;
use super::request::{Call, Endpoint};
use super::running::Running;
use super::shape::Shape;
use super::stream::write_event;
use super::{App, Response};
use crate::answer::answer_format::CallDelta;
use crate::answer::output::StopReason;
use crate::answer::reader::Shown;

/// What all chunks of an answer share.
#[derive(Debug)]
pub(crate) struct AnswerHead {
    id: String,
    created: u64,
    model: String,
    system_fingerprint: String,
    endpoint: Endpoint,
    shape: Shape,
    app: Arc<App>,
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
    usage: UsageField,
    /// A chat's; a completion's choices have their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keyway: Option<AnswerExtension>,
    /// Where the prompt's KV is kept, if the request asked for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<Value>,
}

/// The field `usage`: a stream that will end with usage says `null` before.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum UsageField {
    Absent,
    Null(()),
    Counts(Usage),
}

impl UsageField {
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
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    /// The stop string or token that ended it (vLLM).
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct Message<'a> {
    role: &'static str,
    /// `null` where there are calls and nothing else.
    content: Option<&'a str>,
    /// What the model thought before, as vLLM and DeepSeek name it.
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

#[derive(Debug, Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

/// One piece of a choice, for a chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// A chat's first chunk.
    Role,
    /// A chunk between the first and the last, with more text, thoughts or calls.
    Text(&'a Shown),
    /// The last chunk, with the rest of the text.
    End(&'a Shown),
}

impl AnswerHead {
    pub(crate) fn new(app: &Arc<App>, call: &Call) -> Self {
        let prefix = if call.endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        Self {
            id: format!("{prefix}-{:032x}", fastrand::u128(..)),
            created: unix_seconds(),
            model: call.model.clone(),
            system_fingerprint: app.model.numerics_id.clone(),
            endpoint: call.endpoint,
            shape: call.shape.clone(),
            app: Arc::clone(app),
        }
    }

    /// The whole answer: each choice with its text.
    pub(crate) fn whole(
        &self,
        running: &mut [Running],
        texts: &[Shown],
        usage: Usage,
        keyway: Option<AnswerExtension>,
    ) -> Response {
        let chat = self.endpoint == Endpoint::Chat;
        let told = |choice: &mut Running| {
            let ids = self.shape.token_ids.then(|| match &keyway {
                Some(keyway) => keyway.ids.clone(),
                None => choice.untold.take_ids().ids,
            });
            (self.logprobs(choice, true), ids)
        };
        let told: Vec<_> = running.iter_mut().map(told).collect();
        let kv_transfer_params = kv_transfer::place(&self.app, running);
        let running: &[Running] = running;
        let mut prompt_logprobs = None;
        let mut choices = Vec::with_capacity(texts.len());
        for (index, ((choice, text), (logprobs, token_ids))) in
            running.iter().zip(texts).zip(told).enumerate()
        {
            let mut json = Choice { index, logprobs, token_ids, ..Choice::default() };
            json.finish_reason = choice.finish_reason();
            json.stop_reason = choice.output.stop_reason.as_ref();
            let scores = self.shape.prompt_logprobs.map(|_| self.namer().prompt(&choice.prompt_scores));
            if chat {
                json.message = Some(self.message(index, text));
                prompt_logprobs = scores;
            } else {
                json.text = Some(&text.content);
                json.prompt_logprobs = scores;
                json.prompt_token_ids = self.shape.token_ids.then_some(&choice.prompt);
            }
            choices.push(json);
        }
        let object = if chat { "chat.completion" } else { "text_completion" };
        let mut answer = self.answer(object, &choices, UsageField::Counts(usage), keyway);
        answer.prompt_logprobs = prompt_logprobs;
        answer.kv_transfer_params = kv_transfer_params;
        if chat && self.shape.token_ids {
            answer.prompt_token_ids = running.first().map(|choice| choice.prompt.as_slice());
        }
        super::json_response(&answer)
    }

    /// Appends one event with one piece of choice `index`.
    pub(crate) fn write_piece(
        &self,
        out: &mut Vec<u8>,
        index: usize,
        piece: Piece<'_>,
        running: &mut Running,
        usage: UsageField,
        keyway: Option<AnswerExtension>,
    ) {
        let chat = self.endpoint == Endpoint::Chat;
        let mut choice = Choice { index, ..Choice::default() };
        if let Piece::Text(_) | Piece::End(_) = piece {
            choice.logprobs = self.logprobs(running, false);
            // Where the extension is asked for, it has the ids.
            choice.token_ids = self.shape.token_ids.then(|| match &keyway {
                Some(keyway) => keyway.ids.clone(),
                None => running.untold.take_ids().ids,
            });
        }
        match piece {
            Piece::Role => {
                choice.delta = Some(Delta { role: Some("assistant"), content: Some(""), ..Delta::default() });
            }
            Piece::Text(text) | Piece::End(text) if chat => choice.delta = Some(self.delta(index, text)),
            Piece::Text(text) | Piece::End(text) => choice.text = Some(&text.content),
        }
        if let Piece::End(_) = piece {
            choice.finish_reason = running.finish_reason();
            choice.stop_reason = running.output.stop_reason.as_ref();
        }
        write_event(out, &self.answer(self.chunk_object(), &[choice], usage, keyway));
    }

    /// Appends the event that carries the usage and no choice.
    pub(crate) fn write_usage(&self, out: &mut Vec<u8>, usage: Usage, keyway: Option<AnswerExtension>) {
        let usage = UsageField::Counts(usage);
        write_event(out, &self.answer::<Choice<'_>>(self.chunk_object(), &[], usage, keyway));
    }

    fn namer(&self) -> Namer<'_> {
        Namer { tokenizer: &self.app.text.tokenizer, as_ids: self.shape.tokens_as_ids }
    }

    /// The log probabilities of the tokens since the chunk before; absent from a chunk without tokens.
    fn logprobs(&self, running: &mut Running, always: bool) -> Option<Value> {
        self.shape.logprobs?;
        let (told, offset) = running.untold.take_told(&self.app.text.tokenizer);
        if told.is_empty() && !always {
            return None;
        }
        Some(match self.endpoint {
            Endpoint::Completion => self.namer().completion(&told, offset),
            _ => self.namer().chat(&told),
        })
    }

    fn message<'a>(&self, index: usize, text: &'a Shown) -> Message<'a> {
        let tool_calls: Vec<Value> = text
            .calls
            .iter()
            .map(|call| {
                json!({"id": self.call_id(index, call), "type": "function",
                "function": {"name": call.name, "arguments": call.arguments}})
            })
            .collect();
        let silent = text.content.is_empty() && !tool_calls.is_empty();
        Message {
            role: "assistant",
            content: (!silent).then_some(&text.content),
            reasoning_content: &text.reasoning,
            refusal: None,
            tool_calls,
        }
    }

    /// Only the fields that have something.
    fn delta<'a>(&self, index: usize, text: &'a Shown) -> Delta<'a> {
        Delta {
            role: None,
            content: (!text.content.is_empty()).then_some(&text.content),
            reasoning_content: (!text.reasoning.is_empty()).then_some(&text.reasoning),
            tool_calls: text.calls.iter().map(|call| self.call_delta(index, call)).collect(),
        }
    }

    /// Id, type and name come with a call's beginning only.
    fn call_delta(&self, index: usize, call: &CallDelta) -> Value {
        match &call.name {
            Some(name) => json!({"index": call.index, "id": self.call_id(index, call), "type": "function",
                "function": {"name": name, "arguments": call.arguments}}),
            None => json!({"index": call.index, "function": {"arguments": call.arguments}}),
        }
    }

    /// Unique among all answers' calls.
    fn call_id(&self, index: usize, call: &CallDelta) -> String {
        let random = self.id.rsplit('-').next().unwrap_or_default();
        format!("call_{}{index:02x}{:02x}", &random[..random.len().min(20)], call.index)
    }

    const fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Completion => "text_completion",
            _ => "chat.completion.chunk",
        }
    }

    fn answer<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: UsageField,
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
            prompt_logprobs: None,
            prompt_token_ids: None,
            keyway,
            kv_transfer_params: None,
        }
    }
}

pub(super) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
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
