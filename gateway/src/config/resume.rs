//! `[resume]`: whether streams outlive their worker.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;

/// `[resume]`
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ResumeFile {
    /// Whether another worker goes on with a stream that its worker broke off (true).
    pub enabled: Option<bool>,
    /// Memory for what that takes: requests and token ids of running streams. Streams beyond it are not resumed.
    pub memory_bytes: Option<usize>,
}

impl ResumeFile {
    /// Bytes that may be kept; 0: nothing is resumed.
    pub fn memory(&self) -> usize {
        if self.enabled.unwrap_or(true) { self.memory_bytes.unwrap_or(limits::RESUME_BYTES) } else { 0 }
    }
}
