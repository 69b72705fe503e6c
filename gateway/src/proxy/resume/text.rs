//! What a client has of another engine's stream, by its text: from it follows what a continuation is asked
//! for with (`continue_final_message` of vLLM and SGLang, a completion's prompt and text), and its chunks
//! become those of the one stream that the client sees. Up to a seam chunks pass as they came and are only
//! looked at; behind it they are written anew.

mod seam;
mod seen;

use bytes::Bytes;
use serde_json::{Map, Value as Json, json};

use self::{seam::Seam, seen::Seen};
use super::{Obstacle, memory::Reservation};
use crate::sse::events;

/// Bytes of text for which room is asked at once.
const TEXT_STEP: usize = 4 << 10;
/// Fields of a request that bound its answer, each with as many tokens as it may have in all.
const BUDGETS: [&str; 2] = ["max_completion_tokens", "max_tokens"];
/// What a completion has without one, at vLLM and SGLang as at OpenAI
/// (<https://platform.openai.com/docs/api-reference/completions/create>).
const COMPLETION_BUDGET: u64 = 16;

/// A stream so far.
#[derive(Debug)]
pub(super) struct TextHistory {
    /// The request, as its first worker was sent it.
    plain: Bytes,
    chat: bool,
    name: Name,
    began: bool,
    text: String,
    /// Tokens of the answer, as the worker says; where it does not, one for each chunk with text.
    tokens: u64,
    /// How many of them are white space at the end, which a continuation says again.
    space_tokens: u64,
    /// Of the prompt alone, where a worker has said it.
    prompt_tokens: Option<u64>,
    /// Whether the chunk that says why the output ended has passed.
    ended: bool,
    /// Whether the chunk that has the usage alone has passed.
    usage_told: bool,
    seam: Option<Seam>,
    /// Set where the account cannot be kept any longer.
    lost: Option<Obstacle>,
    room: Reservation,
}

/// What tells one answer's chunks from another's.
#[derive(Debug, Default)]
struct Name {
    id: Option<Json>,
    created: Option<Json>,
}

impl TextHistory {
    /// Nothing yet of the answer to this request.
    pub(super) fn new(plain: Bytes, chat: bool, room: Reservation) -> Self {
        Self {
            plain,
            chat,
            name: Name::default(),
            began: false,
            text: String::new(),
            tokens: 0,
            space_tokens: 0,
            prompt_tokens: None,
            ended: false,
            usage_told: false,
            seam: None,
            lost: None,
            room,
        }
    }

    /// Whether the client has seen something.
    pub(super) fn has_begun(&self) -> bool {
        self.began
    }

    /// The request for the rest.
    pub(super) fn rest(&self) -> Result<Bytes, Obstacle> {
        if let Some(obstacle) = self.lost {
            return Err(obstacle);
        }
        if !self.began {
            return Ok(self.plain.clone());
        }
        let mut body = self.body().ok_or(Obstacle::Unreadable)?;
        self.put_text(&mut body)?;
        let mut bounded = false;
        for name in BUDGETS {
            if let Some(budget) = body.get(name).and_then(Json::as_u64) {
                // One token at least is what an engine gives; what is too much is not passed on.
                let left = if self.ended { 1 } else { budget.saturating_sub(self.told()).max(1) };
                body.insert(name.to_owned(), left.into());
                bounded = true;
            }
        }
        if self.ended && !bounded {
            body.insert("max_tokens".to_owned(), 1.into());
        }
        if let Some(least) = body.get("min_tokens").and_then(Json::as_u64) {
            let left = if self.ended { 0 } else { least.saturating_sub(self.told()) };
            body.insert("min_tokens".to_owned(), left.into());
        }
        Ok(serde_json::to_vec(&body).map_err(|_| Obstacle::Unreadable)?.into())
    }

    /// The request, with what bounds its answer.
    fn body(&self) -> Option<Map<String, Json>> {
        let mut body: Map<String, Json> = serde_json::from_slice(&self.plain).ok()?;
        if !self.chat {
            body.entry("max_tokens").or_insert(COMPLETION_BUDGET.into());
        }
        Some(body)
    }

    /// Puts the text so far behind the prompt. Where there is none, the request is the same once more.
    fn put_text(&self, body: &mut Map<String, Json>) -> Result<(), Obstacle> {
        let text = self.text.trim_end();
        if text.is_empty() {
            return Ok(());
        }
        if self.chat {
            let messages =
                body.get_mut("messages").and_then(Json::as_array_mut).ok_or(Obstacle::Unreadable)?;
            messages.push(json!({"role": "assistant", "content": text}));
            body.insert("continue_final_message".to_owned(), true.into());
            body.insert("add_generation_prompt".to_owned(), false.into());
            return Ok(());
        }
        let prompt = match body.get_mut("prompt") {
            Some(Json::Array(prompts)) if prompts.len() == 1 => prompts.first_mut(),
            prompt => prompt,
        };
        let Some(Json::String(prompt)) = prompt else { return Err(Obstacle::PromptIds) };
        prompt.push_str(text);
        Ok(())
    }

    /// Whether the budget of the request is spent, as far as tokens could be counted.
    fn is_spent(&self) -> bool {
        let Some(body) = self.body() else { return false };
        let budget = BUDGETS.iter().filter_map(|name| body.get(*name)?.as_u64()).min();
        budget.is_some_and(|budget| self.tokens >= budget)
    }

    /// Another worker's stream begins here.
    pub(super) fn goes_on(&mut self) {
        self.seam = Some(Seam {
            tokens: self.tokens,
            told: self.told(),
            space: self.text[self.text.trim_end().len()..].to_owned(),
            over: self.ended,
            silent: !self.ended && self.is_spent(),
        });
    }

    /// Takes whole events; returns what the client is to see of them. Up to a seam that is all of them, as
    /// they came.
    pub(super) fn tell(&mut self, bytes: &Bytes) -> Bytes {
        let mut out = self.seam.is_some().then(|| Vec::with_capacity(bytes.len()));
        for event in events(bytes) {
            let json = event.text().map(str::trim).filter(|data| data.starts_with('{'));
            if event.data.is_some() && event.text().is_none() {
                self.lost = Some(Obstacle::Unreadable);
            }
            match (json, &mut out) {
                (None, None) => {}
                // `[DONE]`, or a comment.
                (None, Some(out)) => out.extend_from_slice(event.raw),
                (Some(data), None) => self.note(data),
                (Some(data), Some(out)) => {
                    if let Some(chunk) = self.rewritten(data) {
                        self.note(&chunk);
                        event.write_with(Some(chunk.as_bytes()), out);
                    }
                }
            }
        }
        out.map_or_else(|| bytes.clone(), Bytes::from)
    }

    /// Takes note of what the client sees.
    fn note(&mut self, data: &str) {
        let Some(seen) = Seen::of(data) else {
            self.lost = Some(Obstacle::Unreadable);
            return;
        };
        if seen.error {
            return;
        }
        if !self.began {
            self.began = true;
            let read = |raw: Option<&str>| raw.and_then(|raw| serde_json::from_str(raw).ok());
            self.name = Name { id: read(seen.id), created: read(seen.created) };
        }
        self.ended |= seen.ends;
        self.usage_told |= seen.counts.is_some() && !seen.has_choice;
        let text = seen.text.filter(|text| !text.is_empty());
        let before = self.tokens;
        match seen.counts {
            Some(counts) => {
                self.tokens = counts.completion_tokens;
                self.prompt_tokens = Some(counts.prompt_tokens);
            }
            None => self.tokens += u64::from(text.is_some()),
        }
        self.lost = self.lost.or(seen.obstacle);
        if let Some(text) = text {
            let blank = text.trim_end().is_empty();
            let added = self.tokens.saturating_sub(before);
            self.space_tokens = if blank { self.space_tokens + added } else { 0 };
            self.keep(&text);
        }
    }

    /// Tokens of the text that another worker is sent.
    fn told(&self) -> u64 {
        self.tokens.saturating_sub(self.space_tokens)
    }

    fn keep(&mut self, text: &str) {
        if self.text.len() + text.len() > self.text.capacity() && self.lost.is_none() {
            let step = TEXT_STEP.max(text.len());
            if self.room.grow(step) {
                self.text.reserve_exact(step);
            } else {
                self.lost = Some(Obstacle::Memory);
            }
        }
        if self.lost.is_some() {
            self.text = String::new();
        } else {
            self.text.push_str(text);
        }
    }

    /// A chunk of a worker that goes on, as one of the stream that the client sees; `None` for what it has,
    /// or is not to have.
    fn rewritten(&mut self, data: &str) -> Option<String> {
        let Ok(mut chunk) = serde_json::from_str::<Map<String, Json>>(data) else {
            self.lost = Some(Obstacle::Unreadable);
            return Some(data.to_owned());
        };
        let seam = self.seam.as_mut()?;
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            return Some(data.to_owned());
        }
        for (field, name) in [("id", &self.name.id), ("created", &self.name.created)] {
            if let (Some(theirs), Some(name)) = (chunk.get_mut(field), name) {
                theirs.clone_from(name);
            }
        }
        if let Some(choice) = chunk.get_mut("choices").and_then(|choices| choices.get_mut(0)) {
            if seam.over || !seam.pass(choice, self.chat) {
                return None;
            }
        } else if self.usage_told && chunk.contains_key("usage") {
            return None;
        }
        if let Some(Json::Object(usage)) = chunk.get_mut("usage") {
            let count = |name: &str| usage.get(name).and_then(Json::as_u64).unwrap_or(0);
            let (prompt, completion) = (count("prompt_tokens"), count("completion_tokens"));
            let completion = if seam.over || seam.silent { seam.tokens } else { seam.told + completion };
            let prompt = self.prompt_tokens.unwrap_or(prompt.saturating_sub(seam.told));
            usage.insert("prompt_tokens".to_owned(), prompt.into());
            usage.insert("completion_tokens".to_owned(), completion.into());
            usage.insert("total_tokens".to_owned(), (prompt + completion).into());
        }
        serde_json::to_string(&chunk).ok()
    }
}

#[cfg(test)]
mod tests;
