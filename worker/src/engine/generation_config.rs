//! What a model says about generating with it: `generation_config.json` of a checkpoint, and the random
//! model's equivalent. End-of-sequence ids are not read here but with the model.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::limits::RANDOM_MAX_NEW_TOKENS;

/// Defaults for parameters that a request leaves out.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct GenerationConfig {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    /// Tokens to generate at most; without it, as many as the context holds.
    pub(crate) max_new_tokens: Option<usize>,
    /// Ids that are never generated.
    pub(crate) suppress_tokens: Option<Vec<u32>>,
}

/// Why a model's defaults are not known.
#[derive(Debug, thiserror::Error)]
pub enum GenerationConfigError {
    /// The checkpoint has a file that cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The checkpoint's `generation_config.json`.
        path: PathBuf,
        /// The reason that the system gives.
        source: io::Error,
    },
    /// The checkpoint's file is no JSON, or a field has a value of another type.
    #[error("{} is malformed: {source}", path.display())]
    Malformed {
        /// The checkpoint's `generation_config.json`.
        path: PathBuf,
        /// Where the text is wrong, and how.
        source: serde_json::Error,
    },
    /// The same of the model in the program.
    #[error("the built-in model's defaults: {0}")]
    Builtin(#[source] serde_json::Error),
}

impl GenerationConfig {
    /// The random model's. Its weights are random, so it would speak in bytes that are no text: all ids are
    /// suppressed but printable ASCII, the newline and the ends of sequence.
    pub(crate) fn random(vocab_size: usize, eos_token_ids: &[u32]) -> Self {
        let speakable = |id: &u32| *id == 10 || (32..127).contains(id) || eos_token_ids.contains(id);
        Self {
            max_new_tokens: Some(RANDOM_MAX_NEW_TOKENS),
            suppress_tokens: Some((0..vocab_size as u32).filter(|id| !speakable(id)).collect()),
            ..Self::default()
        }
    }

    /// Reads `dir/generation_config.json`; a checkpoint without one has no defaults.
    pub(crate) fn from_dir(dir: &Path) -> Result<Self, GenerationConfigError> {
        let path = dir.join("generation_config.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(GenerationConfigError::Read { path, source }),
        };
        Self::from_json(&text).map_err(|source| GenerationConfigError::Malformed { path, source })
    }

    /// The text of a `generation_config.json`.
    pub(crate) fn from_json(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_random_model_speaks_ascii() {
        let suppressed = GenerationConfig::random(320, &[256, 258]).suppress_tokens.unwrap();
        let allowed: Vec<u32> = (0..320).filter(|id| !suppressed.contains(id)).collect();
        assert_eq!(allowed.len(), 1 + 95 + 2);
        assert_eq!((allowed[0], allowed[1], allowed[95], allowed[97]), (10, 32, 126, 258));
    }

    #[test]
    fn a_checkpoints_file_is_optional_and_errors_name_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::from_dir(dir.path()).unwrap(), GenerationConfig::default());
        let path = dir.path().join("generation_config.json");
        std::fs::write(
            &path,
            r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "suppress_tokens": [1]}"#,
        )
        .unwrap();
        let config = GenerationConfig::from_dir(dir.path()).unwrap();
        assert_eq!(
            (config.temperature, config.top_k, config.suppress_tokens),
            (Some(0.6), Some(20), Some(vec![1]))
        );
        std::fs::write(&path, "{").unwrap();
        let malformed = GenerationConfig::from_dir(dir.path()).unwrap_err();
        assert!(malformed.to_string().contains("generation_config.json is malformed: EOF"), "{malformed}");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let unread = GenerationConfig::from_dir(dir.path()).unwrap_err();
        assert!(matches!(unread, GenerationConfigError::Read { .. }), "{unread}");
        assert!(unread.to_string().starts_with(&format!("cannot read {}: ", path.display())), "{unread}");
    }
}
