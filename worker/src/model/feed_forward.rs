//! The feed-forward part of a layer: one gated network, or the experts a router chooses for each token.

use keyway_kernels::compute::Compute;
use keyway_kernels::elementwise::silu_mul;
use keyway_kernels::matmul::{self, PackedMatrix};
use keyway_kernels::moe::{self, Grouping, Routing, Scoring};

use super::weights::{FeedForwardWeights, Mlp};

/// Memory that is used again from step to step.
#[derive(Debug, Default)]
pub(super) struct FeedForwardBuffers {
    /// `[rows, 2 * inner width]`.
    gate_up: Vec<f32>,
    /// `[rows, inner width]`.
    gated: Vec<f32>,
    /// `[tokens, experts]`.
    router: Vec<f32>,
    /// `[tokens, top]`.
    ids: Vec<u32>,
    weights: Vec<f32>,
    grouping: Grouping,
    /// Inputs and outputs of the experts, in the grouping's order: `[tokens * top, hidden]`.
    gathered: Vec<f32>,
    expert_out: Vec<f32>,
}

/// Resizes without clearing: the callers write every element.
pub(super) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::default());
    buffer
}

impl FeedForwardBuffers {
    /// Maps `x` `[tokens, hidden]` to `out` of the same shape.
    pub(super) fn run(
        &mut self,
        compute: &Compute,
        weights: &FeedForwardWeights,
        x: &[f32],
        out: &mut [f32],
    ) {
        match weights {
            FeedForwardWeights::Dense(mlp) => {
                run_mlp(compute, mlp, x, &mut self.gate_up, &mut self.gated, out);
            }
            FeedForwardWeights::Experts { router, experts, top, renormalise } => {
                self.route(compute, router, *top, *renormalise, x);
                self.run_experts(compute, experts, x, router.inputs(), *top);
                let places = &self.grouping.places;
                moe::combine(compute, &self.expert_out, places, &self.weights, *top, out);
            }
        }
    }

    fn route(&mut self, compute: &Compute, router: &PackedMatrix, top: usize, renormalise: bool, x: &[f32]) {
        let (experts, tokens) = (router.outputs(), x.len() / router.inputs());
        let logits = sized(&mut self.router, tokens * experts);
        matmul::cpu(compute, x, router, logits);
        let ids = sized(&mut self.ids, tokens * top);
        let routing = Routing { top, scoring: Scoring::SoftmaxAll, renormalise, scale: 1.0, groups: None };
        let weights = sized(&mut self.weights, tokens * top);
        moe::route(compute, logits, experts, &routing, None, ids, weights);
        self.grouping.group(ids, experts);
    }

    fn run_experts(&mut self, compute: &Compute, experts: &[Mlp], x: &[f32], hidden: usize, top: usize) {
        let slots = &self.grouping.slots;
        let gathered = sized(&mut self.gathered, slots.len() * hidden);
        for (row, slot) in gathered.chunks_exact_mut(hidden).zip(slots) {
            row.copy_from_slice(&x[*slot as usize / top * hidden..][..hidden]);
        }
        let out = sized(&mut self.expert_out, slots.len() * hidden);
        for (expert, ends) in experts.iter().zip(self.grouping.offsets.windows(2)) {
            let rows = ends[0] * hidden..ends[1] * hidden;
            if !rows.is_empty() {
                let x = &gathered[rows.clone()];
                run_mlp(compute, expert, x, &mut self.gate_up, &mut self.gated, &mut out[rows]);
            }
        }
    }
}

fn run_mlp(
    compute: &Compute,
    mlp: &Mlp,
    x: &[f32],
    gate_up: &mut Vec<f32>,
    gated: &mut Vec<f32>,
    out: &mut [f32],
) {
    let (rows, width) = (x.len() / mlp.gate_up.inputs(), mlp.down.inputs());
    let gate_up = sized(gate_up, rows * 2 * width);
    matmul::cpu(compute, x, &mlp.gate_up, gate_up);
    let gated = sized(gated, rows * width);
    silu_mul(compute, gate_up, width, gated);
    matmul::cpu(compute, gated, &mlp.down, out);
}
