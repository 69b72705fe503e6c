//! The experts of a layer, as far as this process holds them, and how a layer's tokens find theirs when ranks
//! share them: `experts/group.rs` is rank 0's end, `experts/rank.rs` that of the others, `experts/store.rs`
//! loads single experts. Starting processes is `expert_parallel.rs`' business, the exchange
//! `kernels/src/moe/parallel.rs`'.

mod exchange;
mod group;
mod note;
mod options;
mod rank;
mod store;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Fabric, FabricError};
use keyway_kernels::moe::Placement;
use keyway_kernels::moe::parallel::{Experts, LayerTokens, capacity_for};

pub(super) use self::exchange::{Exchange, Widest};
pub(crate) use self::group::{ExpertGroup, GroupError, GroupOptions, NoRanks, Supervisor};
pub(crate) use self::note::Attention;
pub(super) use self::note::{Note, Place};
pub use self::options::ExpertParallelOptions;
pub(crate) use self::rank::ExpertRank;
pub use self::rank::RankError;
pub(crate) use self::store::Store;
use super::config::{Config, FeedForward, Gate};
use super::feed_forward::Inner;
use super::weights::Mlp;

/// One layer's experts, as far as this process holds them.
#[derive(Debug)]
pub(super) struct Bank {
    /// Width of a token.
    pub(super) hidden: usize,
    pub(super) gate: Gate,
    /// By expert; `None`: another rank holds it.
    pub(super) networks: Vec<Option<Mlp>>,
}

impl Bank {
    /// Lets go of all but what is `held`.
    fn keep(&mut self, held: impl Fn(usize) -> bool) {
        for (_, network) in self.networks.iter_mut().enumerate().filter(|(expert, _)| !held(*expert)) {
            *network = None;
        }
    }
}

/// This process' end of a group that shares the experts.
#[derive(Debug)]
pub(super) enum Spread {
    /// Rank 0's, which starts the group, and again after a failure.
    Lead(Box<ExpertGroup>),
    /// Another rank's, which runs attention too.
    Rank(Box<Exchange>),
}

impl Spread {
    /// Runs a layer's experts, here and elsewhere; without tokens, those of the others. An error is another
    /// rank's.
    pub(super) fn run(
        &mut self,
        compute: &Compute,
        bank: &Bank,
        inner: &mut Inner,
        tokens: LayerTokens<'_>,
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        match self {
            Self::Lead(group) => group.run(compute, bank, inner, tokens, out),
            Self::Rank(exchange) => exchange.run(compute, bank, inner, tokens, out, |_, _| {}),
        }
    }

    pub(super) fn fabric(&mut self) -> Option<&mut dyn Fabric> {
        let exchange = match self {
            Self::Lead(group) => &mut group.exchange,
            Self::Rank(exchange) => &mut **exchange,
        };
        exchange.fabric.as_mut().map(|fabric| &mut **fabric as &mut dyn Fabric)
    }
}

/// What a rank computes with while a layer runs.
pub(super) struct Held<'a, F> {
    pub(super) compute: &'a Compute,
    /// From a layer's number to its experts; `None` for a layer without experts.
    pub(super) bank: F,
    pub(super) inner: &'a mut Inner,
}

impl<'a, F: Fn(u32) -> Option<&'a Bank>> Experts for Held<'a, F> {
    fn shape(&self, layer: u32) -> Option<(usize, usize)> {
        (self.bank)(layer).map(|bank| (bank.hidden, bank.networks.len()))
    }

    fn holds(&self, layer: u32, expert: usize) -> bool {
        (self.bank)(layer).is_some_and(|bank| bank.networks.get(expert).is_some_and(Option::is_some))
    }

    fn run(&mut self, layer: u32, expert: usize, x: &[f32], out: &mut [f32]) {
        // Asked only for what `holds` and `shape` answered for.
        if let Some(bank) = (self.bank)(layer)
            && let Some(network) = &bank.networks[expert]
        {
            self.inner.run(self.compute, network, bank.gate, x, out);
        }
    }
}

/// By layer, how many experts it has; 0 without.
pub(super) fn counts(config: &Config) -> Vec<usize> {
    let count = |feed_forward| match feed_forward {
        FeedForward::Dense { .. } => 0,
        FeedForward::Experts(shape) => shape.count,
    };
    config.layers.iter().map(|layer| count(layer.feed_forward)).collect()
}

/// The placements that a group begins with, by layer; `None` for layers without experts.
pub(super) fn even(config: &Config, ranks: usize) -> Vec<Option<Placement>> {
    let place = |experts: usize| (experts > 0).then(|| Placement::even(experts, ranks));
    counts(config).into_iter().map(place).collect()
}

/// Words of a message that takes `tokens` tokens of any layer at once.
pub(super) fn words_for(config: &Config, tokens: usize) -> usize {
    let of_layer = |feed_forward| match feed_forward {
        FeedForward::Dense { .. } => 0,
        FeedForward::Experts(shape) => capacity_for(tokens, shape.count, shape.routing.top, config.hidden),
    };
    config.layers.iter().map(|layer| of_layer(layer.feed_forward)).max().unwrap_or(0)
}
