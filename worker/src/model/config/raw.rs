//! The keys of `config.json` and `generation_config.json` that are read, as they are spelled there. Meaning
//! and checks are one level up.

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawConfig {
    pub(super) architectures: Vec<String>,
    pub(super) vocab_size: Option<usize>,
    pub(super) hidden_size: Option<usize>,
    pub(super) intermediate_size: Option<usize>,
    pub(super) num_hidden_layers: Option<usize>,
    pub(super) num_attention_heads: Option<usize>,
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) max_position_embeddings: Option<usize>,
    pub(super) rms_norm_eps: Option<f32>,
    pub(super) hidden_act: Option<String>,
    pub(super) attention_bias: bool,
    pub(super) mlp_bias: bool,
    pub(super) tie_word_embeddings: bool,
    pub(super) eos_token_id: Option<TokenIds>,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_scaling: Option<RawRope>,
    pub(super) rope_parameters: Option<RawRope>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) sliding_window: Option<usize>,
    pub(super) use_sliding_window: Option<bool>,
    pub(super) layer_types: Vec<String>,
    pub(super) quantization_config: Option<serde_json::Value>,
    pub(super) num_experts: Option<usize>,
    pub(super) num_local_experts: Option<usize>,
    pub(super) num_experts_per_tok: Option<usize>,
    pub(super) moe_intermediate_size: Option<usize>,
    pub(super) norm_topk_prob: bool,
    pub(super) decoder_sparse_step: Option<usize>,
    pub(super) mlp_only_layers: Option<Vec<usize>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawRope {
    pub(super) rope_type: Option<String>,
    #[serde(rename = "type")]
    pub(super) older_type: Option<String>,
    pub(super) rope_theta: Option<f64>,
    pub(super) factor: Option<f64>,
    pub(super) low_freq_factor: Option<f64>,
    pub(super) high_freq_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawGeneration {
    pub(super) eos_token_id: Option<TokenIds>,
}

/// One token id or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(super) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}
