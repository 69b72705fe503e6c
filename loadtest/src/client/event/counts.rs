//! Token counts as each API writes them.

use keyway_wire::openai::{PromptTokensDetails, Usage};
use serde::Deserialize;

/// The fields of OpenAI's two forms and of Anthropic's.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct Counts {
    /// Of chat and completions.
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    /// Of responses, and of messages, which count here what no cache had.
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(super) struct Details {
    pub(super) cached_tokens: Option<u64>,
}

impl Counts {
    /// Those of a chat or a completion.
    pub(super) fn of_chat(prompt: Option<u64>, completion: Option<u64>, details: Option<Details>) -> Self {
        Self {
            prompt_tokens: prompt,
            completion_tokens: completion,
            prompt_tokens_details: details,
            ..Self::default()
        }
    }

    /// These counts, and for what they leave open those of the events before: Anthropic's streams tell the
    /// prompt's at their beginning and the answer's at their end.
    pub fn onto(&self, so_far: Option<&Usage>) -> Usage {
        let earlier = so_far.cloned().unwrap_or_default();
        let beside = [self.cache_read_input_tokens, self.cache_creation_input_tokens];
        let uncached = self.input_tokens.map(|input| input + beside.into_iter().flatten().sum::<u64>());
        let prompt_tokens = self.prompt_tokens.or(uncached).unwrap_or(earlier.prompt_tokens);
        let completion_tokens =
            self.completion_tokens.or(self.output_tokens).unwrap_or(earlier.completion_tokens);
        let details = self.prompt_tokens_details.or(self.input_tokens_details);
        let cached = details.and_then(|details| details.cached_tokens).or(self.cache_read_input_tokens);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: cached
                .or(earlier.cached_tokens())
                .map(|cached| PromptTokensDetails { cached_tokens: Some(cached) }),
        }
    }
}
