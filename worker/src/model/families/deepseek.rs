//! DeepSeek-V2 and V3 (and R1): latent attention, dense layers first, experts in groups beside a shared one.
//!
//! Multi-token-prediction layers behind the last are left out, as in Hugging Face's code. FP8 weights are
//! computed with at their exact values; activations are not quantised.

use keyway_kernels::moe::{GroupScore, Groups, Routing, Scoring};
use keyway_kernels::rope::{Pairing, RopeScaling};

use super::shared::{NAMES, Parts, assemble, dense, experts, fp8_blocks, layers, multiple};
use crate::model::ModelError;
use crate::model::config::{
    Attention, Config, Experts, FeedForward, Gate, Latent, LayerShape, RawConfig, refuse, size,
};

pub(super) fn v2(raw: &RawConfig) -> Result<Config, ModelError> {
    expect("scoring_func", raw.scoring_func.as_deref(), "softmax")?;
    if raw.norm_topk_prob == Some(true) {
        // Hugging Face's code ignores it, DeepSeek's own does not.
        return refuse("norm_topk_prob", "true is not supported for DeepSeek-V2");
    }
    let groups = match raw.topk_method.as_deref().unwrap_or("greedy") {
        "greedy" => None,
        "group_limited_greedy" => Some(groups(raw, GroupScore::Max)?),
        other => {
            return refuse(
                "topk_method",
                format!("`{other}` is not supported; supported are greedy and group_limited_greedy"),
            );
        }
    };
    let routing = Routing {
        top: size("num_experts_per_tok", raw.num_experts_per_tok)?,
        scoring: Scoring::SoftmaxAll,
        renormalise: false,
        scale: raw.routed_scaling_factor.unwrap_or(1.0),
        groups,
    };
    let layers = layers_of(raw, routing, raw.first_k_dense_replace.unwrap_or(0))?;
    deepseek(raw, layers, Pairing::Interleaved)
}

pub(super) fn v3(raw: &RawConfig) -> Result<Config, ModelError> {
    expect("scoring_func", raw.scoring_func.as_deref(), "sigmoid")?;
    expect("topk_method", raw.topk_method.as_deref(), "noaux_tc")?;
    let routing = Routing {
        top: size("num_experts_per_tok", raw.num_experts_per_tok)?,
        scoring: Scoring::Sigmoid,
        renormalise: raw.norm_topk_prob.unwrap_or(true),
        scale: raw.routed_scaling_factor.unwrap_or(2.5),
        groups: Some(groups(raw, GroupScore::TopTwoSum)?),
    };
    let layers = layers_of(raw, routing, raw.first_k_dense_replace.unwrap_or(3))?;
    let interleaved = raw.rope_interleave.unwrap_or(true);
    deepseek(raw, layers, if interleaved { Pairing::Interleaved } else { Pairing::Halves })
}

fn deepseek(raw: &RawConfig, layers: Vec<LayerShape>, pairing: Pairing) -> Result<Config, ModelError> {
    let parts = Parts {
        attention: Attention::Latent(latent(raw)?),
        layers,
        pairing,
        names: &NAMES,
        quantisation: fp8_blocks(raw)?,
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
    };
    assemble(raw, parts)
}

fn latent(raw: &RawConfig) -> Result<Latent, ModelError> {
    let heads = size("num_attention_heads", raw.num_attention_heads)?;
    if raw.num_key_value_heads.is_some_and(|kv_heads| kv_heads != heads) {
        return refuse("num_key_value_heads", format!("must be {heads}, as num_attention_heads"));
    }
    let nope_dim = size("qk_nope_head_dim", raw.qk_nope_head_dim)?;
    let rope_dim = multiple("qk_rope_head_dim", raw.qk_rope_head_dim)?;
    Ok(Latent {
        heads,
        query_rank: raw.q_lora_rank.map(|rank| size("q_lora_rank", Some(rank))).transpose()?,
        rank: multiple("kv_lora_rank", raw.kv_lora_rank)?,
        nope_dim,
        rope_dim,
        value_dim: size("v_head_dim", raw.v_head_dim)?,
        bias: raw.attention_bias.unwrap_or(false),
        scale: (stretch(raw)?.powi(2) / ((nope_dim + rope_dim) as f64).sqrt()) as f32,
    })
}

/// What YaRN multiplies queries and keys by: `0.1 mscale_all_dim ln(factor) + 1`, its square the scores.
fn stretch(raw: &RawConfig) -> Result<f64, ModelError> {
    let all_dim = raw.rope().and_then(|rope| rope.mscale_all_dim).unwrap_or(0.0);
    match raw.rope_stretch()? {
        RopeScaling::Yarn { factor, .. } if factor > 1.0 => Ok(0.1 * all_dim * factor.ln() + 1.0),
        RopeScaling::None | RopeScaling::Yarn { .. } => Ok(1.0),
        _ => refuse("rope_scaling", "for DeepSeek only yarn is supported"),
    }
}

fn layers_of(raw: &RawConfig, routing: Routing, dense_first: usize) -> Result<Vec<LayerShape>, ModelError> {
    if raw.moe_layer_freq.is_some_and(|every| every != 1) {
        return refuse("moe_layer_freq", "only 1 is supported");
    }
    let sparse = || -> Result<FeedForward, ModelError> {
        let width = size("moe_intermediate_size", raw.moe_intermediate_size)?;
        let shared = size("n_shared_experts", raw.n_shared_experts)?;
        experts(Experts {
            count: size("n_routed_experts", raw.n_routed_experts)?,
            width,
            routing,
            correction_bias: routing.scoring == Scoring::Sigmoid,
            biases: false,
            gate: Gate::Silu,
            shared_width: Some(width * shared),
        })
    };
    layers(raw, |_| None, |layer| if layer < dense_first { dense(raw) } else { sparse() })
}

fn groups(raw: &RawConfig, by: GroupScore) -> Result<Groups, ModelError> {
    Ok(Groups { count: size("n_group", raw.n_group)?, keep: size("topk_group", raw.topk_group)?, by })
}

fn expect(key: &'static str, value: Option<&str>, only: &str) -> Result<(), ModelError> {
    match value {
        Some(value) if value != only => {
            refuse(key, format!("`{value}` is not supported; supported is {only}"))
        }
        _ => Ok(()),
    }
}
