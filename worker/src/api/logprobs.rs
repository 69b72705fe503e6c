//! Log probabilities as JSON: OpenAI's shapes of chats and of completions, and vLLM's of prompts.

use keyway_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::engine::logprobs::TokenScore;

/// What JSON says of a token that cannot come: it has no infinities (vLLM's number too).
const LOGPROB_MIN: f32 = -9999.0;

/// A token of the text, with its score if it has one: the first of a prompt has none.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) id: u32,
    pub(crate) score: Option<TokenScore>,
}

/// Writes tokens into `logprobs`: by their text or, where the request asks for it, by their ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Namer<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    /// Whether they are named `token_id:N`.
    pub(crate) as_ids: bool,
}

impl Told {
    /// Characters of text that begin in the token: a character's later bytes count for nothing.
    pub(crate) fn chars(&self, tokenizer: &Tokenizer) -> usize {
        if tokenizer.is_special(self.id) {
            return 0;
        }
        tokenizer.token_bytes(self.id).iter().filter(|byte| **byte & 0xC0 != 0x80).count()
    }
}

impl Namer<'_> {
    fn name(self, id: u32) -> String {
        if self.as_ids {
            return format!("token_id:{id}");
        }
        String::from_utf8_lossy(self.tokenizer.token_bytes(id)).into_owned()
    }

    /// `logprobs` of a chat's choice.
    pub(crate) fn chat(self, told: &[Told]) -> Value {
        let entry = |id: u32, logprob: f32| json!({"token": self.name(id), "logprob": finite(logprob), "bytes": self.tokenizer.token_bytes(id)});
        let content = told.iter().filter_map(|told| told.score.as_ref()).map(|score| {
            let mut own = entry(score.id, score.logprob);
            own["top_logprobs"] = score.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect();
            own
        });
        json!({"content": content.collect::<Value>(), "refusal": null})
    }

    /// `logprobs` of a completion's choice; `offset` characters of the text come before.
    pub(crate) fn completion(self, told: &[Told], mut offset: usize) -> Value {
        let (mut tokens, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
        for one in told {
            tokens.push(self.name(one.id));
            logprobs.push(one.score.as_ref().map(|score| finite(score.logprob)));
            tops.push(one.score.as_ref().map(|score| self.top(score)));
            offsets.push(offset);
            offset += one.chars(self.tokenizer);
        }
        json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }

    /// The likeliest tokens, and the token itself.
    fn top(self, score: &TokenScore) -> Map<String, Value> {
        let all = score.top.iter().copied().chain([(score.id, score.logprob)]);
        all.map(|(id, logprob)| (self.name(id), finite(logprob).into())).collect()
    }

    /// `prompt_logprobs`: for each of the prompt's tokens but the first a map from ids.
    pub(crate) fn prompt(self, scores: &[TokenScore]) -> Value {
        let entry = |logprob: f32, rank: u32, id: u32| json!({"logprob": finite(logprob), "rank": rank, "decoded_token": self.name(id)});
        let one = |score: &TokenScore| {
            let top = score.top.iter().zip(1..).map(|((id, l), rank)| (id.to_string(), entry(*l, rank, *id)));
            let own = (score.id.to_string(), entry(score.logprob, score.rank, score.id));
            Value::Object(top.chain([own]).collect())
        };
        std::iter::once(Value::Null).chain(scores.iter().map(one)).collect()
    }
}

fn finite(logprob: f32) -> f32 {
    // Not a number where a whole row is impossible.
    if logprob >= LOGPROB_MIN { logprob } else { LOGPROB_MIN }
}
