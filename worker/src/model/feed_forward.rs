//! The feed-forward part of a layer: one gated network, or the experts a router chooses for each token.

use keyway_kernels::compute::Compute;
use keyway_kernels::elementwise::{add_assign, clamped_gate_mul, silu_mul};
use keyway_kernels::fabric::FabricError;
use keyway_kernels::moe::parallel::LayerTokens;
use keyway_kernels::moe::{self, Grouping};

use super::config::Gate;
use super::experts::Spread;
use super::weights::{ExpertsWeights, FeedForwardWeights, Mlp};

/// Memory that is used again from step to step.
#[derive(Debug, Default)]
pub(super) struct FeedForwardBuffers {
    inner: Inner,
    /// The router's logits, `[tokens, experts]`.
    router: Vec<f32>,
    /// The experts that each token chose, `[tokens, top]`; `weights` are theirs.
    ids: Vec<u32>,
    weights: Vec<f32>,
    grouping: Grouping,
    /// Inputs and outputs of the experts, in the grouping's order: `[tokens * top, hidden]`.
    gathered: Vec<f32>,
    expert_out: Vec<f32>,
    /// What the shared expert gives, `[tokens, hidden]`.
    shared_out: Vec<f32>,
    /// The ranks that share the experts, if they are spread.
    pub(super) group: Option<Spread>,
}

/// Between the two products of a gated network.
#[derive(Debug, Default)]
pub(super) struct Inner {
    /// `[rows, 2 * inner width]`.
    gate_up: Vec<f32>,
    /// What the activation makes of it, `[rows, inner width]`.
    gated: Vec<f32>,
}

/// Resizes without clearing: the callers write every element.
pub(super) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::default());
    buffer
}

impl FeedForwardBuffers {
    /// Maps `x` `[tokens, hidden]` to `out` of the same shape. An error is another rank's.
    pub(super) fn run(
        &mut self,
        compute: &Compute,
        layer: usize,
        weights: &FeedForwardWeights,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        match weights {
            FeedForwardWeights::Dense(mlp) => self.inner.run(compute, mlp, Gate::Silu, x, out),
            FeedForwardWeights::Experts(weights) => {
                self.route(compute, weights, x);
                let top = weights.shape.routing.top;
                if let Some(group) = &mut self.group {
                    let (ids, weights_of_ids) = (&self.ids, &self.weights);
                    let tokens = LayerTokens { layer: layer as u32, top, x, ids, weights: weights_of_ids };
                    group.run(compute, &weights.experts, &mut self.inner, tokens, out)?;
                } else {
                    self.run_experts(compute, weights, x);
                    let places = &self.grouping.places;
                    moe::combine(compute, &self.expert_out, places, &self.weights, top, out);
                }
                if let Some(shared) = &weights.shared {
                    let shared_out = sized(&mut self.shared_out, out.len());
                    self.inner.run(compute, shared, Gate::Silu, x, shared_out);
                    add_assign(compute, out, shared_out);
                }
            }
        }
        Ok(())
    }

    /// Takes part in a layer in which only other ranks have tokens, if there are ranks.
    pub(super) fn join(
        &mut self,
        compute: &Compute,
        layer: usize,
        weights: &FeedForwardWeights,
    ) -> Result<(), FabricError> {
        let (FeedForwardWeights::Experts(weights), Some(group)) = (weights, &mut self.group) else {
            return Ok(());
        };
        let top = weights.shape.routing.top;
        let none = LayerTokens { layer: layer as u32, top, x: &[], ids: &[], weights: &[] };
        group.run(compute, &weights.experts, &mut self.inner, none, &mut [])
    }

    fn route(&mut self, compute: &Compute, weights: &ExpertsWeights, x: &[f32]) {
        let (experts, routing) = (weights.shape.count, weights.shape.routing);
        let logits = weights.router.run_into(compute, x, &mut self.router);
        let slots = logits.len() / experts * routing.top;
        let ids = sized(&mut self.ids, slots);
        let bias = weights.correction_bias.as_deref();
        moe::route(compute, logits, experts, &routing, bias, ids, sized(&mut self.weights, slots));
    }

    fn run_experts(&mut self, compute: &Compute, weights: &ExpertsWeights, x: &[f32]) {
        let (hidden, top) = (weights.router.weight.inputs(), weights.shape.routing.top);
        self.grouping.group(&self.ids, weights.shape.count);
        let slots = &self.grouping.slots;
        let gathered = sized(&mut self.gathered, slots.len() * hidden);
        for (row, slot) in gathered.chunks_exact_mut(hidden).zip(slots) {
            row.copy_from_slice(&x[*slot as usize / top * hidden..][..hidden]);
        }
        let out = sized(&mut self.expert_out, slots.len() * hidden);
        let bank = &weights.experts;
        for (expert, ends) in bank.networks.iter().zip(self.grouping.offsets.windows(2)) {
            let rows = ends[0] * hidden..ends[1] * hidden;
            // Without a group, all are held.
            if let Some(expert) = expert.as_ref().filter(|_| !rows.is_empty()) {
                let x = &gathered[rows.clone()];
                self.inner.run(compute, expert, bank.gate, x, &mut out[rows]);
            }
        }
    }
}

impl Inner {
    pub(super) fn run(&mut self, compute: &Compute, mlp: &Mlp, gate: Gate, x: &[f32], out: &mut [f32]) {
        let gate_up = mlp.gate_up.run_into(compute, x, &mut self.gate_up);
        let gated = sized(&mut self.gated, gate_up.len() / 2);
        let width = mlp.down.weight.inputs();
        match gate {
            Gate::Silu => silu_mul(compute, gate_up, width, gated),
            Gate::Clamped(by) => clamped_gate_mul(compute, gate_up, width, by, gated),
        }
        mlp.down.run(compute, gated, out);
    }
}
