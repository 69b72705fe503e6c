//! What the ranks of a group agree on before they exchange anything: how large a round is, who holds what,
//! and how many rounds a step takes with which tokens. Plain values, the same on every rank.

use half::bf16;
use keyway_kernels::cuda::peer::Layout;
use keyway_kernels::moe::Placement;

use crate::limits::{GPU_ROUND_BYTES_MAX, GPU_ROUND_TOKENS_MAX};
use crate::model::config::{Config, Experts, FeedForward};
use crate::model::cuda::step::ladder;
use crate::model::{ModelError, StepWords};

/// What the ranks of a model's group agree on; all compute the same.
#[derive(Debug, Clone)]
pub(in crate::model) struct Plan {
    pub(in crate::model) layout: Layout,
    pub(in crate::model) placement: Placement,
    /// The widest layer's inner width of an expert.
    pub(super) inner: usize,
    /// The layers with experts, and how many layers there are.
    layers: Vec<usize>,
    of: usize,
}

/// The tokens of a step, by rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::model::cuda) struct Load {
    /// In each layer but the last.
    pub(in crate::model::cuda) rows: Vec<usize>,
    /// In the last, where only rows whose logits are wanted have a purpose.
    pub(in crate::model::cuda) wanted: Vec<usize>,
}

// === impl Plan ===

impl Plan {
    /// `tokens_max`: of a rank in a round. The error says what cannot be shared.
    pub(in crate::model) fn new(
        config: &Config,
        ranks: usize,
        tokens_max: usize,
    ) -> Result<Self, ModelError> {
        let experts = |(layer, feed_forward)| match feed_forward {
            FeedForward::Dense { .. } => None,
            FeedForward::Experts(experts) => Some((layer, experts)),
        };
        let of_layers = config.layers.iter().map(|layer| layer.feed_forward).enumerate();
        let layers: Vec<(usize, Experts)> = of_layers.filter_map(experts).collect();
        let Some((_, Experts { count, routing, .. })) = layers.first().copied() else {
            return Err(ModelError::Device("a model without experts has none to share".into()));
        };
        if layers.iter().any(|(_, other)| (other.count, other.routing.top) != (count, routing.top)) {
            let reason =
                "layers with different numbers of experts are not shared by GPUs: run with --device cpu";
            return Err(ModelError::Device(reason.into()));
        }
        let inner = layers.iter().map(|(_, experts)| experts.width).max().unwrap_or(0);
        let of = |tokens| Layout {
            ranks,
            held: count.div_ceil(ranks),
            tokens,
            top: routing.top,
            width: config.hidden,
        };
        let mut tokens = tokens_max.clamp(1, GPU_ROUND_TOKENS_MAX);
        while tokens > 1 && room_bytes(&of(tokens), inner) > GPU_ROUND_BYTES_MAX {
            tokens /= 2;
        }
        of(tokens).check().map_err(|error| ModelError::Device(error.to_string()))?;
        Ok(Self {
            layout: of(tokens),
            placement: Placement::even(count, ranks),
            inner,
            layers: layers.into_iter().map(|(layer, _)| layer).collect(),
            of: config.layers.len(),
        })
    }

    /// The tokens of all ranks in each round of a layer in which these are a rank's.
    pub(in crate::model::cuda) fn rounds(&self, tokens: &[usize]) -> impl Iterator<Item = usize> {
        let most = self.layout.tokens;
        let widest = tokens.iter().max().copied().unwrap_or(0);
        (0..widest)
            .step_by(most)
            .map(move |first| tokens.iter().map(|all| all.saturating_sub(first).min(most)).sum())
    }

    /// The ranks' tokens in a layer of a step.
    pub(in crate::model::cuda) fn tokens<'a>(&self, load: &'a Load, layer: usize) -> &'a [usize] {
        if layer + 1 == self.of { &load.wanted } else { &load.rows }
    }

    /// The layers with experts, each with its ranks' tokens in a step.
    pub(in crate::model::cuda) fn layers<'a>(
        &'a self,
        load: &'a Load,
    ) -> impl Iterator<Item = (usize, &'a [usize])> {
        self.layers.iter().map(|layer| (*layer, self.tokens(load, *layer)))
    }

    /// How many rounds a step takes, and in how many layers.
    pub(in crate::model::cuda) fn rounds_of(&self, load: &Load) -> [u32; 2] {
        let of_layers = self.layers(load).map(|(_, tokens)| self.rounds(tokens).count() as u32);
        of_layers
            .filter(|rounds| *rounds > 0)
            .fold([0, 0], |[all, layers], rounds| [all + rounds, layers + 1])
    }

    /// The layer of a step's round of this number, from 0 on.
    pub(in crate::model::cuda) fn layer_of(&self, load: &Load, round: u32) -> Option<u32> {
        let mut end = 0;
        let mut of_layers = self.layers(load);
        of_layers.find_map(|(layer, tokens)| {
            end += self.rounds(tokens).count() as u32;
            (round < end).then_some(layer as u32)
        })
    }

    /// How many experts a rank holds.
    pub(super) fn held(&self, rank: usize) -> usize {
        (0..self.placement.experts()).filter(|expert| self.placement.holds(rank, *expert)).count()
    }
}

/// What a rank's room takes, its mailbox included, in bytes.
fn room_bytes(layout: &Layout, inner: usize) -> usize {
    layout.mailbox_bytes() + layout.rows() * (2 * layout.width + inner) * size_of::<bf16>()
}

// === impl Load ===

impl Load {
    /// Of ranks of which only the first has tokens.
    pub(in crate::model::cuda) fn of_first(ranks: usize, rows: usize, wanted: usize) -> Self {
        let first = |tokens| (0..ranks).map(|rank| if rank == 0 { tokens } else { 0 }).collect();
        Self { rows: first(rows), wanted: first(wanted) }
    }

    /// Of each rank's part of a joint step, rounded up so that steps have few forms.
    pub(in crate::model::cuda) fn of_parts(parts: &[StepWords]) -> Self {
        let up = |tokens: usize| if tokens == 0 { 0 } else { ladder(tokens) };
        Self {
            rows: parts.iter().map(|part| up(part.rows)).collect(),
            wanted: parts.iter().map(|part| up(part.wanted)).collect(),
        }
    }

    /// In words, for other ranks.
    pub(in crate::model::cuda) fn words(&self) -> impl Iterator<Item = u32> {
        self.rows.iter().chain(&self.wanted).map(|tokens| *tokens as u32)
    }

    /// What such words say; `None` if they are of another number of ranks.
    pub(in crate::model::cuda) fn read(words: &[u32], ranks: usize) -> Option<Self> {
        let (rows, wanted) = words.split_at_checked(ranks)?;
        let sizes = |words: &[u32]| words.iter().map(|word| *word as usize).collect();
        (wanted.len() == ranks).then(|| Self { rows: sizes(rows), wanted: sizes(wanted) })
    }
}
