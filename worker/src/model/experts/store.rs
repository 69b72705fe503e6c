//! An open checkpoint from which single experts are loaded: what a rank holds changes while it runs.

use keyway_kernels::moe::Placement;
use xxhash_rust::xxh3::xxh3_64;

use super::{Bank, counts, even};
use crate::model::config::{Config, FeedForward};
use crate::model::tensor::TensorSource;
use crate::model::weights::{FeedForwardWeights, Weights};
use crate::model::{ModelError, ModelSource, Quantize, loader, open};

/// A model's experts where they are stored.
pub(crate) struct Store {
    source: Box<dyn TensorSource + Send>,
    config: Config,
    quantize: Quantize,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("quantize", &self.quantize).finish_non_exhaustive()
    }
}

impl Store {
    pub(crate) fn open(source: &ModelSource, quantize: Quantize) -> Result<Self, ModelError> {
        let (_, config, source) = open(source)?;
        Ok(Self::over(source, config, quantize))
    }

    /// Over tensors that are open already.
    pub(in crate::model) fn over(
        source: Box<dyn TensorSource + Send>,
        config: Config,
        quantize: Quantize,
    ) -> Self {
        Self { source, config, quantize }
    }

    /// The configuration of the model whose experts these are.
    pub(in crate::model) fn config(&self) -> &Config {
        &self.config
    }

    /// By layer: how many experts it has, 0 without.
    pub(in crate::model) fn experts(&self) -> Vec<usize> {
        counts(&self.config)
    }

    /// Names the model's shape and how it is quantised: ranks of one group must agree on it.
    pub(in crate::model) fn fingerprint(&self) -> [u32; 2] {
        let hash = xxh3_64(format!("{:?} {}", self.config, self.quantize).as_bytes());
        [hash as u32, (hash >> 32) as u32]
    }

    /// The placements that a group of `ranks` begins with.
    pub(in crate::model) fn even(&self, ranks: usize) -> Vec<Option<Placement>> {
        even(&self.config, ranks)
    }

    /// A layer's experts, none of them loaded; `None` if it has none.
    pub(in crate::model) fn empty_bank(&self, layer: usize) -> Option<Bank> {
        match self.config.layers.get(layer)?.feed_forward {
            FeedForward::Dense { .. } => None,
            FeedForward::Experts(shape) => Some(Bank {
                hidden: self.config.hidden,
                gate: shape.gate,
                networks: (0..shape.count).map(|_| None).collect(),
            }),
        }
    }

    /// Loads what `bank` lacks of `held`.
    pub(in crate::model) fn load(
        &self,
        layer: usize,
        bank: &mut Bank,
        held: impl Fn(usize) -> bool,
    ) -> Result<(), ModelError> {
        let lacking = |expert: usize| held(expert) && bank.networks[expert].is_none();
        if (0..bank.networks.len()).any(&lacking) {
            let loaded = loader::experts(&*self.source, &self.config, self.quantize, layer, &lacking)?;
            for (network, loaded) in bank.networks.iter_mut().zip(loaded) {
                *network = loaded.or(network.take());
            }
        }
        Ok(())
    }

    /// Loads what a whole model lacks of what `rank` shall hold.
    pub(in crate::model) fn load_held(
        &self,
        weights: &mut Weights,
        placements: &[Option<Placement>],
        rank: usize,
    ) -> Result<(), ModelError> {
        for (layer, bank, placement) in banks(weights, placements) {
            self.load(layer, bank, |expert| placement.holds(rank, expert))?;
        }
        Ok(())
    }
}

/// Lets go, in a whole model, of what `rank` shall not hold.
pub(in crate::model) fn keep_held(weights: &mut Weights, placements: &[Option<Placement>], rank: usize) {
    for (_, bank, placement) in banks(weights, placements) {
        bank.keep(|expert| placement.holds(rank, expert));
    }
}

/// The layers with experts.
fn banks<'a>(
    weights: &'a mut Weights,
    placements: &'a [Option<Placement>],
) -> impl Iterator<Item = (usize, &'a mut Bank, &'a Placement)> {
    let layers = weights.layers.iter_mut().zip(placements).enumerate();
    layers.filter_map(|(layer, (weights, placement))| match (&mut weights.feed_forward, placement) {
        (FeedForwardWeights::Experts(experts), Some(placement)) => {
            Some((layer, &mut experts.experts, placement))
        }
        _ => None,
    })
}
