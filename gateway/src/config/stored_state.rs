//! `[stored_state]`: whether requests go to the worker that stores what they name.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;

/// `[stored_state]`: whether requests go to the worker that stores what they name.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StoredStateFile {
    /// Whether what a response, a file or the like is stored by is remembered by its id, and requests that
    /// name it go there (true).
    pub enabled: Option<bool>,
    /// Memory for those ids; the oldest are forgotten first.
    pub memory_bytes: Option<usize>,
    /// Seconds for which one is remembered.
    pub keep_seconds: Option<u64>,
}

/// `[stored_state]`, validated; defaults stand for what the file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredStateConfig {
    /// Bytes for ids; 0: none is remembered.
    pub memory_bytes: usize,
    /// How long one is remembered.
    pub keep: Duration,
}

impl From<&StoredStateFile> for StoredStateConfig {
    fn from(file: &StoredStateFile) -> Self {
        let memory_bytes = file.memory_bytes.unwrap_or(limits::STORED_IDS_BYTES);
        Self {
            memory_bytes: if file.enabled.unwrap_or(true) { memory_bytes } else { 0 },
            keep: file.keep_seconds.map_or(limits::STORED_KEEP, Duration::from_secs),
        }
    }
}
