//! The built-in model: a small Qwen3-MoE that knows Keyway's handbook, with its weights, tokenizer and
//! defaults inside the program, so that a machine without a checkpoint gets true answers from the whole
//! engine. How it was trained: `worker/handbook/README.md`.

use super::ModelError;
use super::checkpoint::Checkpoint;
use super::config::Config;

/// Its files, as a Hugging Face directory has them.
const CONFIG: &str = include_str!("../../handbook/model/config.json");
pub(crate) const TOKENIZER: &str = include_str!("../../handbook/model/tokenizer.json");
pub(crate) const TOKENIZER_CONFIG: &str = include_str!("../../handbook/model/tokenizer_config.json");
pub(crate) const GENERATION_CONFIG: &str = include_str!("../../handbook/model/generation_config.json");
const WEIGHTS: &[u8] = include_bytes!("../../handbook/model/model.safetensors");

/// The built-in model's configuration, from the `config.json` in the program.
pub(super) fn config() -> Result<Config, ModelError> {
    Config::from_json(CONFIG)
}

/// The built-in model's tensors, from the safetensors file in the program.
pub(super) fn checkpoint() -> Result<Checkpoint, ModelError> {
    Checkpoint::embedded("the built-in model.safetensors", WEIGHTS)
}
