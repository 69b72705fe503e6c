//! The families of models: for each architecture that Hugging Face names, how its `config.json` becomes a
//! [`Config`]. A family that needs no new part is one short file and a line here.

mod deepseek;
mod gpt_oss;
mod llama;
mod mixtral;
mod qwen;
mod shared;

pub(super) use self::shared::NAMES;
use super::ModelError;
use super::config::{Config, RawConfig, refuse};

type Family = fn(&RawConfig) -> Result<Config, ModelError>;

const FAMILIES: [(&str, Family); 9] = [
    ("LlamaForCausalLM", llama::llama),
    ("MistralForCausalLM", llama::mistral),
    ("Qwen2ForCausalLM", qwen::qwen2),
    ("Qwen3ForCausalLM", qwen::qwen3),
    ("Qwen3MoeForCausalLM", qwen::qwen3_moe),
    ("MixtralForCausalLM", mixtral::mixtral),
    ("GptOssForCausalLM", gpt_oss::gpt_oss),
    ("DeepseekV2ForCausalLM", deepseek::v2),
    ("DeepseekV3ForCausalLM", deepseek::v3),
];

/// The checked shape of the model that `raw` describes.
pub(super) fn config(raw: &RawConfig) -> Result<Config, ModelError> {
    let architecture = raw.architectures.first().map_or("", String::as_str);
    if let Some((_, family)) = FAMILIES.iter().find(|(name, _)| *name == architecture) {
        return family(raw);
    }
    let supported = FAMILIES.map(|(name, _)| name).join(", ");
    refuse("architectures", format!("`{architecture}` is not supported; supported are {supported}"))
}

#[cfg(test)]
mod tests;
