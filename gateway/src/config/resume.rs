//! `[resume]`: whether streams outlive their worker.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;

/// `[resume]`: whether streams outlive their worker.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ResumeFile {
    /// Whether another worker goes on with a stream that its worker broke off (true).
    pub enabled: Option<bool>,
    /// Memory for what that takes: requests and token ids of running streams. Streams beyond it are not
    /// resumed.
    pub memory_bytes: Option<usize>,
    /// Whether streams of other engines than keyway-worker are continued by their text, which needs
    /// `continue_final_message` of vLLM and SGLang at every such worker (false).
    pub continue_text: Option<bool>,
}

/// `[resume]`, validated; defaults stand for what the file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumeConfig {
    /// Bytes kept of running streams; 0: nothing is resumed.
    pub memory_bytes: usize,
    /// Whether streams are continued by their text.
    pub continue_text: bool,
}

impl From<&ResumeFile> for ResumeConfig {
    fn from(file: &ResumeFile) -> Self {
        let memory_bytes = file.memory_bytes.unwrap_or(limits::RESUME_BYTES);
        Self {
            memory_bytes: if file.enabled.unwrap_or(true) { memory_bytes } else { 0 },
            continue_text: file.continue_text.unwrap_or(false),
        }
    }
}
