//! Mixtral: Mistral's attention, experts in every layer.

use keyway_kernels::moe::{Routing, Scoring};

use super::shared::{Parts, assemble, experts, grouped, layers};
use crate::model::ModelError;
use crate::model::config::{Config, ExpertNames, Experts, Gate, Names, RawConfig, size};

const NAMES: Names = Names {
    feed_forward: "block_sparse_moe",
    router: "gate",
    experts: ExpertNames::Apart(["w1", "w3", "w2"]),
};

pub(super) fn mixtral(raw: &RawConfig) -> Result<Config, ModelError> {
    let feed_forward = Experts {
        count: size("num_local_experts", raw.num_local_experts)?,
        width: size("intermediate_size", raw.intermediate_size)?,
        routing: Routing {
            top: size("num_experts_per_tok", raw.num_experts_per_tok)?,
            scoring: Scoring::SoftmaxAll,
            renormalise: true,
            scale: 1.0,
            groups: None,
        },
        correction_bias: false,
        biases: false,
        gate: Gate::Silu,
        shared_width: None,
    };
    let layers = layers(raw, |_| raw.sliding_window.given(), |_| experts(feed_forward))?;
    let parts = Parts::new(grouped(raw, false)?, layers);
    assemble(raw, Parts { names: &NAMES, norm_eps: 1e-5, rope_theta: 1e6, ..parts })
}
