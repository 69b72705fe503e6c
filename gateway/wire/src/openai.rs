//! The two OpenAI shapes every part reads or writes: the error body and the usage block.
//! Requests are not typed here: the gateway must not drop fields it does not know.

use serde::{Deserialize, Serialize};

/// `{"error": {...}}`, the body of every error answer and of a stream's terminal error event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What went wrong; OpenAI's clients look for it under this one key.
    pub error: ErrorDetail,
}

/// What went wrong, in the fields OpenAI's clients read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// One sentence for a person, which says what to do.
    pub message: String,
    /// Class of error, such as `invalid_request_error` or `server_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The request field at fault, where there is one.
    pub param: Option<String>,
    /// Stable machine-readable code, such as `model_not_found`.
    pub code: Option<String>,
}

impl ErrorBody {
    /// An error with no `param`.
    pub fn new(kind: &str, code: &str, message: impl Into<String>) -> Self {
        Self {
            error: ErrorDetail {
                message: message.into(),
                kind: kind.to_owned(),
                param: None,
                code: Some(code.to_owned()),
            },
        }
    }

    /// Names the request field at fault.
    #[must_use]
    pub fn with_param(mut self, param: &str) -> Self {
        self.error.param = Some(param.to_owned());
        self
    }

    /// The body as JSON text in one line.
    pub fn to_json(&self) -> String {
        // Strings and options always serialise.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The terminal event of a stream that failed after it began: `data: {...}` and the blank line.
    pub fn to_event(&self) -> String {
        format!("data: {}\n\n", self.to_json())
    }
}

/// Token counts of one answer. `prompt_tokens` includes the cached ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the whole prompt, template included.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens generated, as the engine counts them; 0 where it does not say.
    #[serde(default)]
    pub completion_tokens: u64,
    /// Prompt and generated tokens together, as the engine adds them up; 0 where it does not say.
    #[serde(default)]
    pub total_tokens: u64,
    /// Where the prompt's tokens came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// How many of `prompt_tokens` the engine did not have to compute.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was found in the worker's prefix cache.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
}

impl Usage {
    /// The same with so many cached prompt tokens.
    #[must_use]
    pub fn with_cached(self, tokens: u64) -> Self {
        let details = PromptTokensDetails { cached_tokens: Some(tokens) };
        Self { prompt_tokens_details: Some(details), ..self }
    }

    /// Cached prompt tokens, if the engine reports them.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details.as_ref().and_then(|d| d.cached_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_four_fields_openai_clients_read() {
        let body =
            ErrorBody::new("invalid_request_error", "model_not_found", "no such model").with_param("model");
        assert_eq!(
            body.to_json(),
            r#"{"error":{"message":"no such model","type":"invalid_request_error","param":"model","code":"model_not_found"}}"#
        );
        assert!(body.to_event().starts_with("data: {") && body.to_event().ends_with("}\n\n"));
    }

    #[test]
    fn usage_reads_engines_that_omit_the_details_or_null_them() {
        let plain: Usage =
            serde_json::from_str(r#"{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}"#).unwrap();
        assert_eq!(plain.cached_tokens(), None);
        let null: Usage =
            serde_json::from_str(r#"{"prompt_tokens":5,"prompt_tokens_details":null}"#).unwrap();
        assert_eq!(null.cached_tokens(), None);
        let full: Usage = serde_json::from_str(r#"{"prompt_tokens_details":{"cached_tokens":16}}"#).unwrap();
        assert_eq!(full.cached_tokens(), Some(16));
    }
}
