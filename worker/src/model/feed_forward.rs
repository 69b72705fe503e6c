//! The feed-forward part of a layer: one gated network, or the experts a router chooses for each token.

use keyway_kernels::elementwise::silu_mul;
use keyway_kernels::isa::Isa;
use keyway_kernels::matmul::{self, PackedMatrix};
use keyway_kernels::moe::{self, Grouping};

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
    pub(super) fn run(&mut self, isa: Isa, weights: &FeedForwardWeights, x: &[f32], out: &mut [f32]) {
        match weights {
            FeedForwardWeights::Dense(mlp) => {
                run_mlp(isa, mlp, x, &mut self.gate_up, &mut self.gated, out);
            }
            FeedForwardWeights::Experts { router, experts, top, renormalise } => {
                self.route(isa, router, *top, *renormalise, x);
                self.run_experts(isa, experts, x, router.inputs(), *top);
                let places = &self.grouping.places;
                moe::combine(isa, &self.expert_out, places, &self.weights, *top, out);
            }
        }
    }

    fn route(&mut self, isa: Isa, router: &PackedMatrix, top: usize, renormalise: bool, x: &[f32]) {
        let (experts, tokens) = (router.outputs(), x.len() / router.inputs());
        let logits = sized(&mut self.router, tokens * experts);
        matmul::cpu(isa, x, router, logits);
        let ids = sized(&mut self.ids, tokens * top);
        moe::route(isa, logits, experts, renormalise, ids, sized(&mut self.weights, tokens * top));
        self.grouping.group(ids, experts);
    }

    fn run_experts(&mut self, isa: Isa, experts: &[Mlp], x: &[f32], hidden: usize, top: usize) {
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
                run_mlp(isa, expert, x, &mut self.gate_up, &mut self.gated, &mut out[rows]);
            }
        }
    }
}

fn run_mlp(isa: Isa, mlp: &Mlp, x: &[f32], gate_up: &mut Vec<f32>, gated: &mut Vec<f32>, out: &mut [f32]) {
    let (rows, width) = (x.len() / mlp.gate_up.inputs(), mlp.down.inputs());
    let gate_up = sized(gate_up, rows * 2 * width);
    matmul::cpu(isa, x, &mlp.gate_up, gate_up);
    let gated = sized(gated, rows * width);
    silu_mul(isa, gate_up, width, gated);
    matmul::cpu(isa, gated, &mlp.down, out);
}
