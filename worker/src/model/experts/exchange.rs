//! A rank's part in the layers that ranks compute together: which rank holds what, how often each expert was
//! asked, and a layer's exchanges. Starting and watching ranks is `group.rs`' business, what else a step
//! takes `joint.rs`'.

use std::fmt;
use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Fabric, FabricError, Phase};
use keyway_kernels::moe::Placement;
use keyway_kernels::moe::parallel::{LayerTokens, Parallel, Times, tokens_max};

use super::{Bank, Held};
use crate::model::feed_forward::Inner;

/// Where the experts of this rank's tokens are.
pub(in crate::model) struct Exchange {
    /// `None`: the group failed.
    pub(in crate::model) fabric: Option<Box<dyn Fabric>>,
    /// By layer; `None` for layers without experts.
    pub(super) placements: Vec<Option<Placement>>,
    /// By layer, the slots of each expert among this rank's tokens, on rank 0 among the others' too. Sending
    /// them to rank 0 sets them to 0, and choosing new placements halves them.
    pub(super) loads: Vec<Vec<u64>>,
    /// Rows that this rank's experts served.
    pub(super) served: u64,
    pub(in crate::model) deadline: Duration,
    /// Set while all ranks take the same step: how many tokens the rank with the most of them has.
    pub(in crate::model) widest: Option<Widest>,
    parallel: Parallel,
    compute: Compute,
}

/// Tokens of the rank that has the most of them in a step. Every rank joins as many exchanges as these need,
/// with empty messages where it has fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) struct Widest {
    /// In each layer but the last.
    pub(in crate::model) rows: usize,
    /// In the last, where only tokens whose logits are wanted have a purpose.
    pub(in crate::model) wanted: usize,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("fabric", &self.fabric).finish_non_exhaustive()
    }
}

impl Exchange {
    /// Computes what the others send with `compute`.
    pub(super) fn new(placements: Vec<Option<Placement>>, deadline: Duration, compute: Compute) -> Self {
        let experts = |placement: &Option<Placement>| placement.as_ref().map_or(0, Placement::experts);
        Self {
            fabric: None,
            loads: placements.iter().map(|placement| vec![0; experts(placement)]).collect(),
            placements,
            served: 0,
            deadline,
            widest: None,
            parallel: Parallel::default(),
            compute,
        }
    }

    /// Runs a layer's experts, as far as they are here, and has the others run theirs; `seen` is told of each
    /// exchange where its time went and how many rows each rank served for this one.
    pub(super) fn run(
        &mut self,
        compute: &Compute,
        bank: &Bank,
        inner: &mut Inner,
        tokens: LayerTokens<'_>,
        out: &mut [f32],
        mut seen: impl FnMut(Times, &mut dyn Iterator<Item = usize>),
    ) -> Result<(), FabricError> {
        let LayerTokens { layer, top, .. } = tokens;
        let last = layer as usize + 1 == self.placements.len();
        let (Some(fabric), Some(placement)) = (&mut self.fabric, &self.placements[layer as usize]) else {
            // A group is started before every step, and the layer has experts.
            return Ok(());
        };
        for id in tokens.ids {
            self.loads[layer as usize][*id as usize] += 1;
        }
        let (width, count) = (bank.hidden, tokens.ids.len() / top);
        let most = tokens_max(fabric.capacity(), bank.networks.len(), top, width).max(1);
        let widest = self.widest.map_or(count, |widest| if last { widest.wanted } else { widest.rows });
        let compute = &self.compute.clone().with_isa(compute.isa());
        for first in (0..widest).step_by(most) {
            let piece = first.min(count)..(first + most).min(count);
            let slots = piece.start * top..piece.end * top;
            let values = piece.start * width..piece.end * width;
            let (ids, weights) = (&tokens.ids[slots.clone()], &tokens.weights[slots]);
            let tokens = LayerTokens { layer, top, x: &tokens.x[values.clone()], ids, weights };
            let mut held = Held { compute, bank: |l| (l == layer).then_some(bank), inner };
            let (out, deadline) = (&mut out[values], self.deadline);
            self.parallel.run(compute, &mut **fabric, placement, tokens, &mut held, out, deadline)?;
            self.served += self.parallel.rows_served() as u64;
            seen(self.parallel.times(), &mut self.parallel.rows_by_rank());
        }
        Ok(())
    }

    /// Tells rank 0 what this rank's experts did in a step, and begins to count anew.
    pub(in crate::model) fn tell_counts(&mut self) -> Result<(), FabricError> {
        let Self { fabric: Some(fabric), loads, served, deadline, .. } = self else { return Ok(()) };
        let words = 1 + loads.iter().map(Vec::len).sum::<usize>();
        let (first, message) = fabric.outbox(0, words)?.split_at_mut(1);
        first[0] = std::mem::take(served) as u32;
        for (word, load) in message.iter_mut().zip(loads.iter_mut().flatten()) {
            *word = std::mem::take(load) as u32;
        }
        fabric.exchange(Phase::Result, *deadline)
    }
}
