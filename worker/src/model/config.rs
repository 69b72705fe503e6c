//! What a model is: `config.json` of a Hugging Face checkpoint, checked, in old and in transformers-5
//! spelling, and the end tokens of `generation_config.json`. Everything this worker would compute wrongly is
//! refused here.

mod raw;

use std::fs;
use std::path::Path;

use keyway_kernels::kv_cache::KvShape;
use keyway_kernels::rope::RopeScaling;
use serde::de::DeserializeOwned;

use self::raw::{RawConfig, RawGeneration, RawRope, TokenIds};
use super::ModelError;

/// Upper bound of any size read from a configuration: keeps products of three far from overflow.
const SIZE_MAX: usize = 1 << 20;
const ARCHITECTURES: &str =
    "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM";

/// A decoder's shape. Its `Debug` form enters the numerics id: every field that changes a result belongs
/// here.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) vocab_size: usize,
    pub(super) hidden: usize,
    /// Query heads.
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Positions the model was made for.
    pub(super) max_positions: usize,
    pub(super) norm_eps: f32,
    pub(super) rope_theta: f64,
    pub(super) rope_scaling: RopeScaling,
    /// The head is the embedding.
    pub(super) tied_embeddings: bool,
    pub(super) qkv_bias: bool,
    pub(super) output_bias: bool,
    /// Every query and key head is normalised before its rotation (Qwen3).
    pub(super) qk_norm: bool,
    /// One per layer.
    pub(super) layers: Vec<FeedForward>,
    pub(super) eos_token_ids: Vec<u32>,
}

/// The feed-forward part of a layer; `width` is its inner width.
#[derive(Debug, Clone, Copy)]
pub(super) enum FeedForward {
    Dense { width: usize },
    Experts { count: usize, top: usize, width: usize, renormalise: bool },
}

/// A reason to refuse `key`.
fn refuse<T>(key: &'static str, reason: impl Into<String>) -> Result<T, ModelError> {
    Err(ModelError::Config { key, reason: reason.into() })
}

impl Config {
    /// Reads `config.json`, and `generation_config.json` if there is one.
    pub(super) fn read(dir: &Path) -> Result<Self, ModelError> {
        let mut config = Self::from_raw(read_json(&dir.join("config.json"))?)?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let generation: RawGeneration = read_json(&generation)?;
            config.eos_token_ids.extend(generation.eos_token_id.map(TokenIds::into_vec).unwrap_or_default());
        }
        config.eos_token_ids.sort_unstable();
        config.eos_token_ids.dedup();
        Ok(config)
    }

    fn from_raw(raw: RawConfig) -> Result<Self, ModelError> {
        let architecture = raw.architectures.first().map_or("", String::as_str);
        let (qkv_bias, qk_norm, has_experts) = match architecture {
            "LlamaForCausalLM" | "MistralForCausalLM" => (raw.attention_bias, false, false),
            "Qwen2ForCausalLM" => (true, false, false),
            "Qwen3ForCausalLM" => (raw.attention_bias, true, false),
            "Qwen3MoeForCausalLM" => (raw.attention_bias, true, true),
            other => {
                return refuse(
                    "architectures",
                    format!("`{other}` is not supported; supported are {ARCHITECTURES}"),
                );
            }
        };
        refuse_what_is_not_computed(&raw)?;
        let hidden = size("hidden_size", raw.hidden_size)?;
        let heads = size("num_attention_heads", raw.num_attention_heads)?;
        let head_dim = size("head_dim", raw.head_dim.or(Some(hidden / heads)))?;
        let kv_heads = size("num_key_value_heads", raw.num_key_value_heads.or(Some(heads)))?;
        if !heads.is_multiple_of(kv_heads) {
            return refuse("num_key_value_heads", format!("{heads} heads are not a multiple of {kv_heads}"));
        }
        if !head_dim.is_multiple_of(KvShape::GRANULE) {
            return refuse("head_dim", format!("{head_dim} is not a multiple of {}", KvShape::GRANULE));
        }
        let layers = size("num_hidden_layers", raw.num_hidden_layers)?;
        let layers =
            (0..layers).map(|i| feed_forward(&raw, has_experts, i)).collect::<Result<Vec<_>, _>>()?;
        let (rope_theta, rope_scaling) = rope(&raw)?;
        Ok(Self {
            vocab_size: size("vocab_size", raw.vocab_size)?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            max_positions: size("max_position_embeddings", raw.max_position_embeddings)?,
            norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            tied_embeddings: raw.tie_word_embeddings,
            qkv_bias,
            // Qwen2's bias is on queries, keys and values only.
            output_bias: raw.attention_bias && architecture != "Qwen2ForCausalLM",
            qk_norm,
            layers,
            eos_token_ids: raw.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
        })
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = fs::read(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
    serde_json::from_slice(&text)
        .map_err(|e| ModelError::Malformed { path: path.into(), reason: e.to_string() })
}

fn size(key: &'static str, value: Option<usize>) -> Result<usize, ModelError> {
    match value {
        None => refuse(key, "is missing"),
        Some(value) if value == 0 || value > SIZE_MAX => {
            refuse(key, format!("is {value}; must be in 1..={SIZE_MAX}"))
        }
        Some(value) => Ok(value),
    }
}

fn refuse_what_is_not_computed(raw: &RawConfig) -> Result<(), ModelError> {
    let activation = raw.hidden_act.as_deref().unwrap_or("silu");
    if activation != "silu" {
        return refuse("hidden_act", format!("`{activation}` is not supported; supported is silu"));
    }
    if raw.mlp_bias {
        return refuse("mlp_bias", "a bias in the feed-forward part is not supported");
    }
    // Qwen writes a window's size even where it is not used.
    let sliding = raw.sliding_window.is_some() && raw.use_sliding_window.unwrap_or(true);
    if sliding || raw.layer_types.iter().any(|kind| kind != "full_attention") {
        return refuse("sliding_window", "only full attention is supported");
    }
    if raw.quantization_config.is_some() {
        return refuse(
            "quantization_config",
            "quantised checkpoints are not supported; use the F32, F16 or BF16 one",
        );
    }
    if raw.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        return refuse("partial_rotary_factor", "rotating a part of a head is not supported");
    }
    Ok(())
}

fn feed_forward(raw: &RawConfig, has_experts: bool, layer: usize) -> Result<FeedForward, ModelError> {
    let step = raw.decoder_sparse_step.unwrap_or(1);
    let sparse = has_experts
        && step > 0
        && (layer + 1).is_multiple_of(step)
        && !raw.mlp_only_layers.iter().flatten().any(|dense| *dense == layer);
    if !sparse {
        return Ok(FeedForward::Dense { width: size("intermediate_size", raw.intermediate_size)? });
    }
    let count = size("num_experts", raw.num_experts.or(raw.num_local_experts))?;
    let top = size("num_experts_per_tok", raw.num_experts_per_tok)?;
    if top > count {
        return refuse("num_experts_per_tok", format!("{top} of {count} experts"));
    }
    let width = size("moe_intermediate_size", raw.moe_intermediate_size)?;
    Ok(FeedForward::Experts { count, top, width, renormalise: raw.norm_topk_prob })
}

/// Base and scaling: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before).
fn rope(raw: &RawConfig) -> Result<(f64, RopeScaling), ModelError> {
    let rope = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref());
    let theta = rope.and_then(|rope| rope.rope_theta).or(raw.rope_theta).unwrap_or(10_000.0);
    if !theta.is_finite() || theta <= 1.0 {
        return refuse("rope_theta", format!("is {theta}; must be above 1"));
    }
    Ok((theta, rope.map_or(Ok(RopeScaling::None), scaling)?))
}

fn scaling(rope: &RawRope) -> Result<RopeScaling, ModelError> {
    let need = |name: &str, value: Option<f64>| match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => refuse("rope_parameters", format!("`{name}` is {value}; must be above 0")),
        None => refuse("rope_parameters", format!("`{name}` is missing")),
    };
    if rope.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        return refuse(
            "rope_parameters",
            "`partial_rotary_factor`: rotating a part of a head is not supported",
        );
    }
    match rope.rope_type.as_deref().or(rope.older_type.as_deref()) {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need("factor", rope.factor)? }),
        Some("llama3") => {
            let low_freq_factor = need("low_freq_factor", rope.low_freq_factor)?;
            let high_freq_factor = need("high_freq_factor", rope.high_freq_factor)?;
            if high_freq_factor <= low_freq_factor {
                return refuse("rope_parameters", "`high_freq_factor` must be above `low_freq_factor`");
            }
            Ok(RopeScaling::Llama3 {
                factor: need("factor", rope.factor)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position: need(
                    "original_max_position_embeddings",
                    rope.original_max_position_embeddings,
                )?,
            })
        }
        Some(other) => refuse(
            "rope_parameters",
            format!("rope type `{other}` is not supported; supported are default, linear and llama3"),
        ),
        None => {
            refuse("rope_parameters", "names no `rope_type`; one for each kind of layer is not supported")
        }
    }
}

#[cfg(test)]
mod tests;
