//! Rank 0's end of a group of ranks that share a model's experts: it runs attention and everything else, sends the
//! tokens to the ranks that hold their experts, and starts the group anew when one of them fails. Ranks hold no state
//! but weights, so a step that failed is run again and nobody's answer changes.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Fabric, FabricError, Phase};
use keyway_kernels::moe::Placement;
use keyway_kernels::moe::parallel::{Parallel, Tokens, tokens_max, write_note};

use super::{Bank, Held, Store};
use crate::limits::EXPERT_LOAD_MAX;
use crate::metrics::ExpertMetrics;
use crate::model::feed_forward::Inner;
use crate::model::weights::{FeedForwardWeights, Weights};
use crate::model::{ModelError, ModelSource, Quantize};

/// Slots of a layer that were counted before its placement is looked at again: enough that 1 % is told from 2 %.
const REBALANCE_EVERY: u64 = 1 << 16;
/// A placement is changed if that makes the busiest rank's load at least this much smaller.
const WORTH_MOVING: f64 = 0.95;

/// Starts a group's other ranks.
pub(crate) trait Supervisor: Send + fmt::Debug {
    /// Ends what is left of the group before and starts all ranks; rank 0's end. The error says what went wrong.
    fn start(&mut self) -> Result<Box<dyn Fabric>, String>;
}

/// How a group behaves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupOptions {
    /// How many ranks there are, rank 0 included.
    pub(crate) ranks: usize,
    /// How long a rank may take for its part of an exchange.
    pub(crate) deadline: Duration,
    /// How often a step that failed is run again before its requests fail.
    pub(crate) retries: usize,
    /// Experts that each rank holds beyond its share: further holders of those that serve the most tokens.
    pub(crate) redundant: usize,
    /// Threads that compute this rank's experts, the others' share left to them.
    pub(crate) threads: NonZeroUsize,
}

/// A group that cannot serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct GroupError(pub(crate) String);

/// Rank 0's end of a group.
#[derive(Debug)]
pub(crate) struct ExpertGroup {
    options: GroupOptions,
    supervisor: Box<dyn Supervisor>,
    /// `None`: it failed, and is started at the next need.
    fabric: Option<Box<dyn Fabric>>,
    store: Store,
    /// By layer; `None` for layers without experts.
    placements: Vec<Option<Placement>>,
    /// By layer, the slots of each expert, those of long ago counting less.
    loads: Vec<Vec<u64>>,
    /// Slots of all layers since the placements were looked at.
    counted: u64,
    parallel: Parallel,
    compute: Compute,
    metrics: Arc<ExpertMetrics>,
    failures: usize,
}

/// What rank 0 tells the others beside tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// Nothing is to be done; rank 0 is there.
    KeepAlive,
    /// Who shall hold what: behind the first word, the model's fingerprint and each layer's masks of holders.
    Place,
}

impl Note {
    const fn word(self) -> u32 {
        match self {
            Self::KeepAlive => 1,
            Self::Place => 2,
        }
    }

    pub(super) fn of(note: &[u32]) -> Option<Self> {
        [Self::KeepAlive, Self::Place].into_iter().find(|kind| note.first() == Some(&kind.word()))
    }
}

/// The placements in a note; `None` if they are not for this model, whose experts by layer are `layers`.
pub(super) fn placements(
    note: &[u32],
    ranks: usize,
    layers: &[usize],
    fingerprint: [u32; 2],
) -> Option<Vec<Option<Placement>>> {
    let mut masks = note.get(1..)?.strip_prefix(&fingerprint)?;
    let mut placements = Vec::new();
    for experts in layers {
        let (of_layer, rest) = masks.split_at_checked(*experts)?;
        masks = rest;
        let placement =
            if *experts == 0 { None } else { Some(Placement::from_holders(ranks, of_layer.to_vec()).ok()?) };
        placements.push(placement);
    }
    masks.is_empty().then_some(placements)
}

impl ExpertGroup {
    /// A group for the experts of `source`, of which rank 0's model has loaded its share; not started.
    pub(crate) fn new(
        source: &ModelSource,
        quantize: Quantize,
        options: GroupOptions,
        supervisor: Box<dyn Supervisor>,
        metrics: Arc<ExpertMetrics>,
    ) -> Result<Self, ModelError> {
        let store = Store::open(source, quantize)?;
        let layers = store.experts();
        Ok(Self {
            placements: store.even(options.ranks),
            loads: layers.iter().map(|experts| vec![0; *experts]).collect(),
            options,
            supervisor,
            fabric: None,
            store,
            counted: 0,
            parallel: Parallel::default(),
            compute: Compute::new(options.threads),
            metrics,
            failures: 0,
        })
    }

    /// Starts the ranks, if they are not there, and tells them which experts are theirs.
    pub(in crate::model) fn ensure(&mut self) -> Result<(), GroupError> {
        while self.fabric.is_none() {
            match self.supervisor.start() {
                Ok(fabric) => {
                    self.fabric = Some(fabric);
                    let Err(error) = self.place() else { break };
                    self.fail(&error)?;
                }
                Err(reason) => {
                    self.failures += 1;
                    if self.failures > self.options.retries {
                        self.failures = 0;
                        return Err(GroupError(format!(
                            "the expert-parallel group does not start: {reason}"
                        )));
                    }
                    tracing::warn!("the expert-parallel group does not start: {reason}");
                }
            }
        }
        self.metrics.up.set(1);
        Ok(())
    }

    /// Takes note that the group failed: it is to be started anew, or, after too many times, whoever waits is to be
    /// told.
    pub(in crate::model) fn fail(&mut self, error: &FabricError) -> Result<(), GroupError> {
        self.metrics.up.set(0);
        self.metrics.failures.with_label_values(&[&error.rank.to_string()]).inc();
        self.fabric = None;
        self.failures += 1;
        if self.failures > self.options.retries {
            self.failures = 0;
            tracing::error!("{error}; requests in flight fail");
            return Err(GroupError(error.to_string()));
        }
        tracing::warn!("{error}; the group is started again, and the step run again");
        self.metrics.restarts.inc();
        Ok(())
    }

    /// Takes note that a step is through; now and then, lets experts move.
    pub(in crate::model) fn step_done(&mut self, weights: &mut Weights) -> Result<(), GroupError> {
        self.failures = 0;
        if self.options.redundant == 0 || self.counted < REBALANCE_EVERY * self.loads.len() as u64 {
            return Ok(());
        }
        self.rebalance(weights)
    }

    /// Tells the ranks that rank 0 is still there.
    pub(in crate::model) fn keep_alive(&mut self) -> Result<(), GroupError> {
        self.ensure()?;
        let Some(fabric) = &mut self.fabric else { return Ok(()) };
        let told = write_note(&mut **fabric, &[Note::KeepAlive.word()])
            .and_then(|()| fabric.exchange(Phase::Dispatch, self.options.deadline));
        match told {
            Ok(()) => Ok(()),
            Err(error) => self.fail(&error).and_then(|()| self.ensure()),
        }
    }

    /// Between two signs of life the ranks must hear from rank 0 more often than their deadline.
    pub(in crate::model) fn keep_alive_every(&self) -> Duration {
        (self.options.deadline / 4).min(Duration::from_secs(1))
    }

    /// Runs a layer's experts, as far as they are here, and has the others run theirs.
    #[allow(clippy::too_many_arguments, reason = "a layer's whole input")]
    pub(in crate::model) fn run(
        &mut self,
        compute: &Compute,
        bank: &Bank,
        inner: &mut Inner,
        tokens: Tokens<'_>,
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        let Tokens { layer, top, .. } = tokens;
        let (Some(fabric), Some(placement)) = (&mut self.fabric, &self.placements[layer as usize]) else {
            // `ensure` comes before every step, and the layer has experts.
            return Ok(());
        };
        for id in tokens.ids {
            self.loads[layer as usize][*id as usize] += 1;
        }
        self.counted += tokens.ids.len() as u64;
        self.metrics.record_ids(tokens.ids);
        let width = bank.hidden;
        let most = tokens_max(fabric.capacity(), bank.networks.len(), top, width).max(1);
        let compute = &self.compute.clone().with_isa(compute.isa());
        let pieces = tokens.x.chunks(most * width).zip(out.chunks_mut(most * width));
        let slots = tokens.ids.chunks(most * top).zip(tokens.weights.chunks(most * top));
        for ((x, out), (ids, weights)) in pieces.zip(slots) {
            let mut held = Held { compute, bank: |l| (l == layer).then_some(bank), inner };
            let piece = Tokens { layer, top, x, ids, weights };
            let deadline = self.options.deadline;
            self.parallel.run(compute, &mut **fabric, placement, piece, &mut held, out, deadline)?;
            self.metrics.record_layer(self.parallel.times(), self.parallel.rows_by_rank());
        }
        Ok(())
    }

    /// Has every rank of a new group load what it shall hold.
    fn place(&mut self) -> Result<(), FabricError> {
        self.tell_placements(EXPERT_LOAD_MAX)?;
        self.await_placements()
    }

    fn tell_placements(&mut self, deadline: Duration) -> Result<(), FabricError> {
        let Some(fabric) = &mut self.fabric else { return Ok(()) };
        let mut note = vec![Note::Place.word()];
        note.extend(self.store.fingerprint());
        for placement in self.placements.iter().flatten() {
            note.extend(placement.holders());
        }
        write_note(&mut **fabric, &note)?;
        fabric.exchange(Phase::Dispatch, deadline)
    }

    /// Waits until every rank has loaded what it shall hold.
    fn await_placements(&mut self) -> Result<(), FabricError> {
        match &mut self.fabric {
            Some(fabric) => fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX),
            None => Ok(()),
        }
    }

    /// Gives the hottest experts further holders, where that pays.
    fn rebalance(&mut self, weights: &mut Weights) -> Result<(), GroupError> {
        self.counted = 0;
        let mut placements = self.placements.clone();
        for (placement, loads) in placements.iter_mut().zip(&mut self.loads) {
            let Some(placement) = placement else { continue };
            let room = loads.len().div_ceil(self.options.ranks) + self.options.redundant;
            let better = Placement::balanced(loads, self.options.ranks, room);
            if better.heaviest(loads) < placement.heaviest(loads) * WORTH_MOVING {
                *placement = better;
            }
            for load in loads {
                *load /= 2;
            }
        }
        if placements == self.placements {
            return Ok(());
        }
        let old = std::mem::replace(&mut self.placements, placements);
        // The others load while rank 0 does, and wait for it as long as it takes.
        let told = self.tell_placements(self.options.deadline);
        let loaded = self.load_own(weights);
        if loaded.is_err() {
            self.placements = old;
        }
        for (weights, placement) in weights.layers.iter_mut().zip(&self.placements) {
            if let (FeedForwardWeights::Experts(experts), Some(placement)) =
                (&mut weights.feed_forward, placement)
            {
                experts.experts.keep(|expert| placement.holds(0, expert));
            }
        }
        if let Err(error) = loaded {
            tracing::warn!("experts stay where they are: {error}");
            self.fabric = None;
            return self.ensure();
        }
        self.metrics.placements.inc();
        tracing::info!("experts are placed anew by their load");
        match told.and_then(|()| self.await_placements()) {
            Ok(()) => Ok(()),
            Err(error) => self.fail(&error).and_then(|()| self.ensure()),
        }
    }

    /// Loads what rank 0 lacks.
    fn load_own(&self, weights: &mut Weights) -> Result<(), ModelError> {
        for (layer, (weights, placement)) in weights.layers.iter_mut().zip(&self.placements).enumerate() {
            if let (FeedForwardWeights::Experts(experts), Some(placement)) =
                (&mut weights.feed_forward, placement)
            {
                self.store.load(layer, &mut experts.experts, |expert| placement.holds(0, expert))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
impl ExpertGroup {
    pub(in crate::model) fn rebalance_soon(&mut self) {
        self.counted = u64::MAX / 2;
    }

    pub(in crate::model) fn placements_changed(&self) -> u64 {
        self.metrics.placements.get()
    }
}
