//! Requests whose answers' usage is no word on what their prompts found cached: nothing can be learned from
//! these.

use crate::json::Value;

/// Why it is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Untold {
    /// Several answers are asked for (`n`), and the usage is that of one whose siblings had filled the cache.
    Samples,
    /// Several prompts are in it, and the usage sums up some counts and not others.
    Batch,
    /// Log-probabilities of the prompt are asked for, for which the cache is not read.
    PromptLogprobs,
    /// The engine cuts the prompt.
    Truncated,
}

impl Untold {
    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Batch => "batch",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::Truncated => "truncated",
        }
    }

    /// Whether nothing of the prompt can be found by its beginning.
    pub fn finds_nothing(self) -> bool {
        matches!(self, Self::PromptLogprobs | Self::Truncated)
    }
}

/// What a body's fields say of it.
#[derive(Debug, Default)]
pub(super) struct Signs {
    samples: bool,
    prompt_logprobs: bool,
    truncates: bool,
    echoes: bool,
    logprobs: bool,
}

impl Signs {
    /// Takes a field; false if it is none of these.
    pub(super) fn take(&mut self, name: &str, value: Value<'_>) -> bool {
        match name {
            "n" | "best_of" => self.samples |= value.raw().parse().is_ok_and(|samples: u32| samples > 1),
            "prompt_logprobs" => self.prompt_logprobs |= value.raw() != "null",
            "truncate_prompt_tokens" => self.truncates |= value.raw() != "null",
            "echo" => self.echoes = value.raw() == "true",
            "logprobs" => self.logprobs = !matches!(value.raw(), "null" | "false"),
            _ => return false,
        }
        true
    }

    /// Why the answer's usage will not tell, if it will not.
    pub(super) fn untold(&self, prompt: Option<Value<'_>>) -> Option<Untold> {
        let several = || {
            let mut prompts = prompt?.items()?.map_while(Result::ok);
            // Ids of one prompt are numbers.
            prompts.next()?.raw().starts_with(['[', '"']).then(|| prompts.next().is_some())
        };
        if self.prompt_logprobs || (self.echoes && self.logprobs) {
            Some(Untold::PromptLogprobs)
        } else if self.truncates {
            Some(Untold::Truncated)
        } else if several() == Some(true) {
            Some(Untold::Batch)
        } else {
            self.samples.then_some(Untold::Samples)
        }
    }
}
