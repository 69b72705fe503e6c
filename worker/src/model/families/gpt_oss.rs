//! gpt-oss: attention sinks, a sliding window in every other layer, biases everywhere, a clamped gate,
//! experts in MXFP4.

use keyway_kernels::elementwise::ClampedGate;
use keyway_kernels::moe::{Routing, Scoring};

use super::shared::{Parts, assemble, experts, grouped, layers};
use crate::model::ModelError;
use crate::model::config::{
    Config, ExpertNames, Experts, Gate, Grouped, Names, Quantisation, RawConfig, refuse, size,
};

const NAMES: Names = Names { feed_forward: "mlp", router: "router", experts: ExpertNames::Fused };

pub(super) fn gpt_oss(raw: &RawConfig) -> Result<Config, ModelError> {
    let limit = raw.swiglu_limit.unwrap_or(7.0);
    if !limit.is_finite() || limit <= 0.0 {
        return refuse("swiglu_limit", format!("is {limit}; must be above 0"));
    }
    let gate = ClampedGate { alpha: raw.swiglu_alpha.unwrap_or(1.702), limit };
    let feed_forward = Experts {
        count: size("num_local_experts", raw.num_local_experts.or(raw.num_experts))?,
        width: size("intermediate_size", raw.intermediate_size)?,
        routing: Routing {
            top: size("num_experts_per_tok", raw.num_experts_per_tok)?,
            scoring: Scoring::SoftmaxTop,
            renormalise: false,
            scale: 1.0,
            groups: None,
        },
        correction_bias: false,
        biases: true,
        gate: Gate::Clamped(gate),
        shared_width: None,
    };
    let window = size("sliding_window", raw.sliding_window.given())?;
    let layers = layers(raw, |layer| slides(raw, layer).then_some(window), |_| experts(feed_forward))?;
    let attention = Grouped { sinks: true, ..grouped(raw, true)? };
    let parts = Parts::new(attention, layers);
    let quantisation = quantisation(raw)?;
    assemble(raw, Parts { names: &NAMES, quantisation, norm_eps: 1e-5, rope_theta: 150_000.0, ..parts })
}

/// Every other layer, the first among them, where the configuration does not say.
fn slides(raw: &RawConfig, layer: usize) -> bool {
    match &raw.layer_types {
        Some(kinds) => kinds.get(layer).is_some_and(|kind| kind == "sliding_attention"),
        None => layer.is_multiple_of(2),
    }
}

fn quantisation(raw: &RawConfig) -> Result<Quantisation, ModelError> {
    match raw.quantization_config.as_ref().map(|config| config.quant_method.as_deref()) {
        None => Ok(Quantisation::None),
        Some(Some("mxfp4")) => Ok(Quantisation::Mxfp4Experts),
        Some(_) => refuse("quantization_config", "for gpt-oss only `quant_method` mxfp4 is supported"),
    }
}
