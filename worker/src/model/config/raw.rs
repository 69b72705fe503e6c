//! The keys of `config.json` and `generation_config.json` that are read, as they are spelled there. Meaning
//! and checks are elsewhere.

use serde::{Deserialize, Deserializer};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::model) struct RawConfig {
    pub(in crate::model) architectures: Vec<String>,
    pub(in crate::model) vocab_size: Option<usize>,
    pub(in crate::model) hidden_size: Option<usize>,
    pub(in crate::model) intermediate_size: Option<usize>,
    pub(in crate::model) num_hidden_layers: Option<usize>,
    pub(in crate::model) num_attention_heads: Option<usize>,
    pub(in crate::model) num_key_value_heads: Option<usize>,
    pub(in crate::model) head_dim: Option<usize>,
    pub(in crate::model) max_position_embeddings: Option<usize>,
    pub(in crate::model) rms_norm_eps: Option<f32>,
    pub(in crate::model) hidden_act: Option<String>,
    pub(in crate::model) attention_bias: Option<bool>,
    pub(in crate::model) mlp_bias: bool,
    pub(in crate::model) tie_word_embeddings: bool,
    pub(in crate::model) eos_token_id: Option<TokenIds>,
    pub(in crate::model) quantization_config: Option<RawQuantisation>,

    pub(in crate::model) rope_theta: Option<f64>,
    pub(in crate::model) rope_scaling: Option<RawRope>,
    pub(in crate::model) rope_parameters: Option<RawRope>,
    pub(in crate::model) partial_rotary_factor: Option<f64>,
    pub(in crate::model) rope_interleave: Option<bool>,

    pub(in crate::model) sliding_window: RawWindow,
    pub(in crate::model) use_sliding_window: Option<bool>,
    pub(in crate::model) max_window_layers: Option<usize>,
    pub(in crate::model) layer_types: Option<Vec<String>>,

    pub(in crate::model) num_experts: Option<usize>,
    pub(in crate::model) num_local_experts: Option<usize>,
    pub(in crate::model) num_experts_per_tok: Option<usize>,
    pub(in crate::model) moe_intermediate_size: Option<usize>,
    pub(in crate::model) norm_topk_prob: Option<bool>,
    pub(in crate::model) decoder_sparse_step: Option<usize>,
    pub(in crate::model) mlp_only_layers: Option<Vec<usize>>,
    pub(in crate::model) swiglu_alpha: Option<f32>,
    pub(in crate::model) swiglu_limit: Option<f32>,

    pub(in crate::model) q_lora_rank: Option<usize>,
    pub(in crate::model) kv_lora_rank: Option<usize>,
    pub(in crate::model) qk_nope_head_dim: Option<usize>,
    pub(in crate::model) qk_rope_head_dim: Option<usize>,
    pub(in crate::model) v_head_dim: Option<usize>,
    pub(in crate::model) first_k_dense_replace: Option<usize>,
    pub(in crate::model) moe_layer_freq: Option<usize>,
    pub(in crate::model) n_routed_experts: Option<usize>,
    pub(in crate::model) n_shared_experts: Option<usize>,
    pub(in crate::model) n_group: Option<usize>,
    pub(in crate::model) topk_group: Option<usize>,
    pub(in crate::model) topk_method: Option<String>,
    pub(in crate::model) scoring_func: Option<String>,
    pub(in crate::model) routed_scaling_factor: Option<f32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::model) struct RawRope {
    pub(in crate::model) rope_type: Option<String>,
    #[serde(rename = "type")]
    pub(in crate::model) older_type: Option<String>,
    pub(in crate::model) rope_theta: Option<f64>,
    pub(in crate::model) factor: Option<f64>,
    pub(in crate::model) low_freq_factor: Option<f64>,
    pub(in crate::model) high_freq_factor: Option<f64>,
    pub(in crate::model) original_max_position_embeddings: Option<f64>,
    pub(in crate::model) partial_rotary_factor: Option<f64>,
    pub(in crate::model) beta_fast: Option<f64>,
    pub(in crate::model) beta_slow: Option<f64>,
    pub(in crate::model) truncate: Option<bool>,
    pub(in crate::model) attention_factor: Option<f64>,
    pub(in crate::model) mscale: Option<f64>,
    pub(in crate::model) mscale_all_dim: Option<f64>,
}

impl RawRope {
    pub(in crate::model) fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.older_type.as_deref())
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::model) struct RawQuantisation {
    pub(in crate::model) quant_method: Option<String>,
    pub(in crate::model) fmt: Option<String>,
    pub(in crate::model) activation_scheme: Option<String>,
    pub(in crate::model) weight_block_size: Option<Vec<usize>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawGeneration {
    pub(super) eos_token_id: Option<TokenIds>,
}

/// One token id or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(in crate::model) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(in crate::model) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// A sliding window. Absent and null are told apart: Mistral has a window where nothing is said.
#[derive(Debug, Default, Clone, Copy)]
pub(in crate::model) enum RawWindow {
    #[default]
    Absent,
    Null,
    Of(usize),
}

impl RawWindow {
    pub(in crate::model) fn given(self) -> Option<usize> {
        match self {
            Self::Absent | Self::Null => None,
            Self::Of(window) => Some(window),
        }
    }
}

impl<'de> Deserialize<'de> for RawWindow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Null, Self::Of))
    }
}
