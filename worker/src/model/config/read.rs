//! Reading the JSON files of a checkpoint, and the checks that every family's numbers go through.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::ModelError;
use super::raw::{RawGeneration, TokenIds};

/// Upper bound of any size read from a configuration: keeps products of three far from overflow.
const SIZE_MAX: usize = 1 << 20;

pub(super) fn json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = fs::read(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
    parsed(path, &text)
}

/// A file's JSON; `path` is for messages.
pub(super) fn parsed<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, ModelError> {
    serde_json::from_slice(text)
        .map_err(|e| ModelError::Malformed { path: path.into(), reason: e.to_string() })
}

/// The end tokens of `generation_config.json`, if there is one.
pub(super) fn generation_eos(dir: &Path) -> Result<Vec<u32>, ModelError> {
    let path = dir.join("generation_config.json");
    if !path.exists() {
        return Ok(Vec::new());
    }
    let generation: RawGeneration = json(&path)?;
    Ok(generation.eos_token_id.map(TokenIds::into_vec).unwrap_or_default())
}

/// A reason to refuse `key`.
pub(in crate::model) fn refuse<T>(key: &'static str, reason: impl Into<String>) -> Result<T, ModelError> {
    Err(ModelError::Config { key, reason: reason.into() })
}

/// A size that must be there, positive and sane.
pub(in crate::model) fn size(key: &'static str, value: Option<usize>) -> Result<usize, ModelError> {
    match value {
        None => refuse(key, "is missing"),
        Some(value) if value == 0 || value > SIZE_MAX => {
            refuse(key, format!("is {value}; must be in 1..={SIZE_MAX}"))
        }
        Some(value) => Ok(value),
    }
}
