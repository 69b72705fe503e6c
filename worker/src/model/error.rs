//! Why a model cannot be loaded: what is at fault and what to do about it.

use std::path::PathBuf;

/// A model that cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file that was to be read.
        path: PathBuf,
        /// The reason that the system gives.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file at fault, or the name of one in the program itself.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// `config.json` asks for something this worker does not compute.
    #[error("config.json: `{key}`: {reason}")]
    Config {
        /// The key at fault.
        key: &'static str,
        /// What is wrong with its value, and what is supported.
        reason: String,
    },
    /// The checkpoint lacks a tensor that the configuration implies.
    #[error("the checkpoint has no tensor `{name}`; config.json implies one of shape {shape:?}")]
    MissingTensor {
        /// The name by which the model's family knows it.
        name: String,
        /// The shape that the configuration implies.
        shape: Vec<usize>,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor `{name}` has shape {found:?}, config.json implies {expected:?}")]
    TensorShape {
        /// The tensor's name in the checkpoint.
        name: String,
        /// The shape that it has in the checkpoint.
        found: Vec<usize>,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
    },
    /// A tensor's number type is not read where it stands.
    #[error(
        "tensor `{name}` has type {dtype}, which is not supported there; F32, F16 and BF16 are everywhere"
    )]
    TensorType {
        /// The tensor's name in the checkpoint.
        name: String,
        /// Its type, as safetensors spells it.
        dtype: String,
    },
    /// A tensor holds values that cannot be computed with.
    #[error("tensor `{name}`: {reason}")]
    TensorValue {
        /// The tensor's name in the checkpoint.
        name: String,
        /// What is wrong with them.
        reason: String,
    },
    /// A device does not do what a model needs.
    #[error("{0}")]
    Device(String),
    /// The KV cache cannot be made as asked.
    #[error("KV cache: {0}")]
    KvCache(String),
}
