//! The worker extension: what a request to `keyway-worker` and its answer may carry beside OpenAI's fields,
//! so that a generation broken off on one worker goes on exactly on another. Fields only; the worker gives
//! them their meaning.

use serde::{Deserialize, Serialize};

/// The field that holds the extension, in a request's body, in a stream's chunks and in whole answers.
pub const FIELD: &str = "keyway";

/// A request's extension; `{}` asks for token ids in the answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestExtension {
    /// Seed of the sampling; beats the request's `seed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// The ids generated so far. Present, even if empty: this request resumes a generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_ids: Option<Vec<u32>>,
    /// Bytes of text (UTF-8) that the client has of those ids, of a chat's `reasoning_content` and `content`
    /// together; at most what they give. Calls of functions are not counted: the client has what the ids give
    /// of them.
    #[serde(default)]
    pub emitted_bytes: u64,
}

/// An answer's, or a stream chunk's, extension.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerExtension {
    /// The ids taken since the chunk before: all chunks' joined, behind the request's `output_ids`, are the
    /// output.
    pub ids: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_fields_stay_absent() {
        let empty: RequestExtension = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, RequestExtension::default());
        let resumed = RequestExtension { output_ids: Some(vec![]), seed: Some(u64::MAX), emitted_bytes: 3 };
        let json = serde_json::to_string(&resumed).unwrap();
        assert_eq!(json, r#"{"seed":18446744073709551615,"output_ids":[],"emitted_bytes":3}"#);
        assert_eq!(serde_json::from_str::<RequestExtension>(&json).unwrap(), resumed);
    }
}
