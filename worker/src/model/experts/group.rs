//! Rank 0's end of a group of ranks that share a model's experts: it runs attention and everything else,
//! sends the tokens to the ranks that hold their experts, and starts the group anew when one of them fails.
//! Where ranks hold no state but weights, a step that failed is run again and no answer changes; where they
//! run attention too, their KV is lost, and is computed again.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Cause, Fabric, FabricError, Phase};
use keyway_kernels::moe::Placement;
use keyway_kernels::moe::parallel::{LayerTokens, Times, write_note};

use super::note::{Attention, Note, Place};
use super::store::keep_held;
use super::{Bank, Exchange, Store};
use crate::limits::EXPERT_LOAD_MAX;
use crate::metrics::ExpertMetrics;
#[cfg(feature = "cuda")]
use crate::model::ExpertParallelOptions;
use crate::model::feed_forward::Inner;
use crate::model::weights::Weights;
use crate::model::{ModelError, ModelSource, Quantize};

/// Slots of a layer that were counted before its placement is looked at again: enough that 1 % is told from 2
/// %.
const REBALANCE_EVERY: u64 = 1 << 16;
/// A placement is changed if that makes the busiest rank's load at least this much smaller.
const WORTH_MOVING: f64 = 0.95;

/// Starts a group's other ranks.
pub(crate) trait Supervisor: Send + fmt::Debug {
    /// Ends what is left of the group before and starts all ranks; rank 0's end. The error says what went
    /// wrong.
    fn start(&mut self) -> Result<Box<dyn Fabric>, NoRanks>;
}

/// Why a group's other ranks are not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoRanks {
    /// The system has no memory for the group, or starts no process.
    #[error(transparent)]
    System(#[from] io::Error),
    /// Ranks on other machines were not heard of in time, or are of another group.
    #[error("not all ranks at {addrs:?} have joined: {source}")]
    Join { addrs: Vec<SocketAddr>, source: io::Error },
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
    /// What ranks need that run attention too; `None`: rank 0 alone runs it.
    pub(crate) attention: Option<Attention>,
}

impl GroupOptions {
    /// Of ranks whose devices compute.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_devices(options: &ExpertParallelOptions) -> Self {
        let ExpertParallelOptions { size, deadline, retries, .. } = *options;
        Self { ranks: size, deadline, retries, redundant: 0, threads: NonZeroUsize::MIN, attention: None }
    }
}

/// A group that cannot serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    /// Its ranks cannot begin to serve.
    #[error("the expert-parallel group does not start: {0}")]
    Start(#[source] Box<dyn Error + Send + Sync>),
    /// A rank failed too often.
    #[error(transparent)]
    Rank(#[from] FabricError),
}

/// Rank 0's end of a group.
#[derive(Debug)]
pub(crate) struct ExpertGroup {
    options: GroupOptions,
    supervisor: Box<dyn Supervisor>,
    /// Without a fabric the group failed, and is started at the next need.
    pub(in crate::model) exchange: Exchange,
    store: Store,
    metrics: Arc<ExpertMetrics>,
    failures: usize,
    /// How often a group ended, and with it what its ranks kept.
    losses: u64,
    /// Slots of all layers since the placements were looked at.
    counted: u64,
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
        Ok(Self::over(Store::open(source, quantize)?, options, supervisor, metrics))
    }

    /// A group for the experts of `store`.
    pub(crate) fn over(
        store: Store,
        options: GroupOptions,
        supervisor: Box<dyn Supervisor>,
        metrics: Arc<ExpertMetrics>,
    ) -> Self {
        let compute = Compute::new(options.threads);
        let exchange = Exchange::new(store.even(options.ranks), options.deadline, compute);
        Self { options, supervisor, exchange, store, metrics, failures: 0, losses: 0, counted: 0 }
    }

    /// Changes whenever a group ended, and with it what its ranks kept.
    pub(in crate::model) fn losses(&self) -> u64 {
        self.losses
    }

    /// Starts the ranks, if they are not there, and tells them which experts are theirs.
    pub(in crate::model) fn ensure(&mut self) -> Result<(), GroupError> {
        while self.exchange.fabric.is_none() {
            match self.supervisor.start() {
                Ok(fabric) => {
                    self.exchange.fabric = Some(fabric);
                    let Err(error) = self.place() else { break };
                    self.fail(&error)?;
                }
                Err(error) => self.does_not_start(error)?,
            }
        }
        self.metrics.up.set(1);
        Ok(())
    }

    /// Takes note that a group cannot begin to serve: it is to be started anew, or, after too many times, the
    /// error is for the requests that wait.
    pub(in crate::model) fn does_not_start(
        &mut self,
        reason: impl Error + Send + Sync + 'static,
    ) -> Result<(), GroupError> {
        self.failures += 1;
        if self.failures > self.options.retries {
            self.failures = 0;
            return Err(GroupError::Start(Box::new(reason)));
        }
        tracing::warn!("the expert-parallel group does not start: {reason}");
        Ok(())
    }

    /// Takes note that the group failed: it is to be started anew, or, after too many times, the error is for
    /// the requests that wait.
    pub(in crate::model) fn fail(&mut self, error: &FabricError) -> Result<(), GroupError> {
        self.metrics.up.set(0);
        self.metrics.failures.with_label_values(&[&error.rank.to_string()]).inc();
        self.lose();
        self.failures += 1;
        if self.failures > self.options.retries {
            self.failures = 0;
            tracing::error!("{error}; requests in flight fail");
            return Err(error.clone().into());
        }
        tracing::warn!("{error}; the group is started again, and the step run again");
        self.metrics.restarts.inc();
        Ok(())
    }

    fn lose(&mut self) {
        self.exchange.fabric = None;
        self.losses += 1;
    }

    /// Ends the group, whose fault it is not.
    pub(in crate::model) fn end(&mut self) {
        self.metrics.up.set(0);
        self.lose();
    }

    /// Counts what `layers` layers came to that devices computed: by rank the rows of each of its experts, in
    /// all; and where the time went, in all.
    pub(in crate::model) fn count<'a>(
        &self,
        placement: &Placement,
        by_rank: impl Iterator<Item = &'a [u32]> + Clone,
        times: Option<Times>,
        layers: u32,
    ) {
        for (rank, rows) in by_rank.clone().enumerate() {
            let held = (0..placement.experts()).filter(|expert| placement.holds(rank, *expert));
            for (expert, rows) in held.zip(rows) {
                self.metrics.record_expert(expert, u64::from(*rows));
            }
        }
        self.metrics.record_rows(by_rank.map(|rows| rows.iter().map(|rows| *rows as usize).sum()));
        if let Some(Times { dispatch, compute, combine }) = times {
            // The device adds them up: each layer counts with the mean.
            let mean = |all: Duration| all / layers.max(1);
            let times = Times { dispatch: mean(dispatch), compute: mean(compute), combine: mean(combine) };
            for _ in 0..layers {
                self.metrics.record_times(times);
            }
        }
    }

    /// Takes note that a step is through, of experts that stay where they are.
    pub(in crate::model) fn step_through(&mut self) {
        self.failures = 0;
    }

    /// Takes note that a step is through; now and then, lets experts move.
    pub(in crate::model) fn step_done(&mut self, weights: &mut Weights) -> Result<(), GroupError> {
        self.step_through();
        let enough = REBALANCE_EVERY * self.exchange.loads.len() as u64;
        if self.options.redundant == 0 || self.counted < enough {
            return Ok(());
        }
        self.rebalance(weights)
    }

    /// Tells the ranks that rank 0 is still there.
    pub(in crate::model) fn keep_alive(&mut self) -> Result<(), GroupError> {
        self.ensure()?;
        let Some(fabric) = &mut self.exchange.fabric else { return Ok(()) };
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
        tokens: LayerTokens<'_>,
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        let Self { exchange, metrics, counted, .. } = self;
        metrics.record_ids(tokens.ids);
        *counted += tokens.ids.len() as u64;
        let joint = exchange.widest.is_some();
        exchange.run(compute, bank, inner, tokens, out, |times, rows| {
            metrics.record_times(times);
            if !joint {
                metrics.record_rows(rows);
            }
        })
    }

    /// Takes in what the other ranks' experts did in a step.
    pub(in crate::model) fn count_others(&mut self) -> Result<(), FabricError> {
        let Self { exchange, metrics, counted, .. } = self;
        let Exchange { fabric: Some(fabric), loads, served, deadline, .. } = exchange else { return Ok(()) };
        fabric.exchange(Phase::Result, *deadline)?;
        let words = 1 + loads.iter().map(Vec::len).sum::<usize>();
        let mut rows = vec![std::mem::take(served) as usize];
        for rank in 1..fabric.size() {
            let [others_served, others @ ..] = fabric.inbox(rank) else {
                let cause = Cause::Protocol("no word of what its experts did");
                return Err(fabric.fail(rank, Phase::Result, cause));
            };
            if others.len() + 1 != words {
                let cause = Cause::Protocol("word of another number of experts");
                return Err(fabric.fail(rank, Phase::Result, cause));
            }
            rows.push(*others_served as usize);
            let mut others = others.iter();
            for loads in &mut *loads {
                for ((expert, load), more) in loads.iter_mut().enumerate().zip(&mut others) {
                    *load += u64::from(*more);
                    *counted += u64::from(*more);
                    metrics.record_expert(expert, u64::from(*more));
                }
            }
        }
        metrics.record_rows(rows.into_iter());
        Ok(())
    }

    /// Has every rank of a new group load what it shall hold.
    fn place(&mut self) -> Result<(), FabricError> {
        self.tell_placements(EXPERT_LOAD_MAX)?;
        self.await_placements()
    }

    fn tell_placements(&mut self, deadline: Duration) -> Result<(), FabricError> {
        let Some(fabric) = &mut self.exchange.fabric else { return Ok(()) };
        let fingerprint = self.store.fingerprint();
        let note = Place::words(fingerprint, self.options.attention, &self.exchange.placements);
        write_note(&mut **fabric, &note)?;
        fabric.exchange(Phase::Dispatch, deadline)
    }

    /// Waits until every rank has loaded what it shall hold.
    fn await_placements(&mut self) -> Result<(), FabricError> {
        match &mut self.exchange.fabric {
            Some(fabric) => fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX),
            None => Ok(()),
        }
    }

    /// Gives the hottest experts further holders, where that pays.
    fn rebalance(&mut self, weights: &mut Weights) -> Result<(), GroupError> {
        self.counted = 0;
        let Exchange { placements, loads, .. } = &mut self.exchange;
        let old = placements.clone();
        for (placement, loads) in placements.iter_mut().zip(loads) {
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
        if *placements == old {
            return Ok(());
        }
        // The others load while rank 0 does, and wait for it as long as it takes.
        let told = self.tell_placements(self.options.deadline);
        let loaded = self.store.load_held(weights, &self.exchange.placements, 0);
        if loaded.is_err() {
            self.exchange.placements = old;
        }
        keep_held(weights, &self.exchange.placements, 0);
        if let Err(error) = loaded {
            tracing::warn!("experts stay where they are: {error}");
            self.lose();
            return self.ensure();
        }
        self.metrics.placements.inc();
        tracing::info!("experts are placed anew by their load");
        match told.and_then(|()| self.await_placements()) {
            Ok(()) => Ok(()),
            Err(error) => self.fail(&error).and_then(|()| self.ensure()),
        }
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
