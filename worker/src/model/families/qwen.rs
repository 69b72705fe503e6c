//! Qwen2 and Qwen2.5 (biases on queries, keys and values), Qwen3 (normalised query and key heads) and
//! Qwen3-MoE.

use keyway_kernels::moe::{Routing, Scoring};

use super::shared::{Parts, assemble, dense, experts, fp8_blocks, grouped, layers};
use crate::model::ModelError;
use crate::model::config::{Config, Experts, FeedForward, Gate, Grouped, RawConfig, size};

/// Layers from this one on have the window, where the configuration does not say.
const MAX_WINDOW_LAYERS: usize = 28;

pub(super) fn qwen2(raw: &RawConfig) -> Result<Config, ModelError> {
    let attention = Grouped { qkv_bias: true, output_bias: false, ..grouped(raw, false)? };
    let layers = layers(raw, |layer| window(raw, layer), |_| dense(raw))?;
    assemble(raw, Parts::new(attention, layers))
}

pub(super) fn qwen3(raw: &RawConfig) -> Result<Config, ModelError> {
    let attention = Grouped { qk_norm: true, ..grouped(raw, false)? };
    let layers = layers(raw, |layer| window(raw, layer), |_| dense(raw))?;
    assemble(raw, Parts { quantisation: fp8_blocks(raw)?, ..Parts::new(attention, layers) })
}

pub(super) fn qwen3_moe(raw: &RawConfig) -> Result<Config, ModelError> {
    let attention = Grouped { qk_norm: true, ..grouped(raw, false)? };
    // In this family all layers have it, or none.
    let layers = layers(raw, |_| used_window(raw), |layer| feed_forward(raw, layer))?;
    assemble(raw, Parts { quantisation: fp8_blocks(raw)?, ..Parts::new(attention, layers) })
}

/// Qwen writes a window's size even where it is not used.
fn used_window(raw: &RawConfig) -> Option<usize> {
    raw.sliding_window.given().filter(|_| raw.use_sliding_window.unwrap_or(false))
}

fn window(raw: &RawConfig, layer: usize) -> Option<usize> {
    let slides = match &raw.layer_types {
        Some(kinds) => kinds.get(layer).is_some_and(|kind| kind == "sliding_attention"),
        None => layer >= raw.max_window_layers.unwrap_or(MAX_WINDOW_LAYERS),
    };
    used_window(raw).filter(|_| slides)
}

fn feed_forward(raw: &RawConfig, layer: usize) -> Result<FeedForward, ModelError> {
    let step = raw.decoder_sparse_step.unwrap_or(1);
    let sparse = step > 0
        && (layer + 1).is_multiple_of(step)
        && !raw.mlp_only_layers.iter().flatten().any(|dense| *dense == layer);
    if !sparse {
        return dense(raw);
    }
    experts(Experts {
        count: size("num_experts", raw.num_experts.or(raw.num_local_experts))?,
        width: size("moe_intermediate_size", raw.moe_intermediate_size)?,
        routing: Routing {
            top: size("num_experts_per_tok", raw.num_experts_per_tok)?,
            scoring: Scoring::SoftmaxAll,
            renormalise: raw.norm_topk_prob.unwrap_or(false),
            scale: 1.0,
            groups: None,
        },
        correction_bias: false,
        biases: false,
        gate: Gate::Silu,
        shared_width: None,
    })
}
