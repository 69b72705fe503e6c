//! A model's weights, packed for the kernels. `loader.rs` fills them in.

use keyway_kernels::compute::Compute;
use keyway_kernels::elementwise::add_bias;
use keyway_kernels::matmul::{self, PackedMatrix};
use keyway_kernels::rope::Rope;

use super::config::{Experts, Grouped, Latent};
use super::experts::Bank;
use super::feed_forward::sized;

/// A model's weights in memory, its matrices packed for the CPU.
#[derive(Debug)]
pub(super) struct Weights {
    /// Token embeddings `[vocab, hidden]`.
    pub(super) embedding: PackedMatrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// The head `[vocab, hidden]`; `None`: the embeddings are used.
    pub(super) head: Option<PackedMatrix>,
    pub(super) rope: Rope,
}

/// The weights of one decoder layer: attention, a feed-forward part, and the norm before each.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Vec<f32>,
    pub(super) attention: AttentionWeights,
    pub(super) post_norm: Vec<f32>,
    pub(super) feed_forward: FeedForwardWeights,
}

/// The attention of a layer.
#[derive(Debug)]
pub(super) enum AttentionWeights {
    Grouped(Box<GroupedWeights>),
    Latent(Box<LatentWeights>),
}

/// The weights of one layer's grouped-query attention, packed for the CPU.
#[derive(Debug)]
pub(super) struct GroupedWeights {
    pub(super) shape: Grouped,
    /// Rows of queries, then keys, then values.
    pub(super) qkv: Linear,
    /// Norms of each query head and of each key head.
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    /// One logit per query head.
    pub(super) sinks: Option<Vec<f32>>,
    pub(super) output: Linear,
}

/// Multi-head latent attention, absorbed.
#[derive(Debug)]
pub(super) struct LatentWeights {
    pub(super) shape: Latent,
    /// To the queries' bottleneck, and its norm.
    pub(super) query_down: Option<(Linear, Vec<f32>)>,
    /// To the queries; of each head first what is not rotated.
    pub(super) query: Linear,
    /// To the latent, then the rotated key all heads share.
    pub(super) kv_down: Linear,
    pub(super) latent_norm: Vec<f32>,
    /// Per head, from a query's unrotated part to the latent's space `[rank, nope_dim]`: a product with the
    /// latent is then a product with the key.
    pub(super) absorb: Vec<PackedMatrix>,
    /// Per head, from an attended latent to its value `[value_dim, rank]`.
    pub(super) expand: Vec<PackedMatrix>,
    pub(super) output: Linear,
}

/// A product with an optional bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
}

/// The feed-forward part of a layer.
#[derive(Debug)]
pub(super) enum FeedForwardWeights {
    Dense(Mlp),
    Experts(Box<ExpertsWeights>),
}

/// A mixture of experts.
#[derive(Debug)]
pub(super) struct ExpertsWeights {
    pub(super) shape: Experts,
    pub(super) router: Linear,
    pub(super) correction_bias: Option<Vec<f32>>,
    pub(super) experts: Bank,
    /// Serves every token beside the chosen ones.
    pub(super) shared: Option<Mlp>,
}

/// A gated feed-forward network.
#[derive(Debug)]
pub(super) struct Mlp {
    /// Rows of the gate, then of the up projection.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

impl Linear {
    /// Maps `x` `[rows, inputs]` to `out` `[rows, outputs]`.
    pub(super) fn run(&self, compute: &Compute, x: &[f32], out: &mut [f32]) {
        matmul::cpu(compute, x, &self.weight, out);
        if let Some(bias) = &self.bias {
            add_bias(compute, out, bias);
        }
    }

    /// The same into a buffer, sized to fit.
    pub(super) fn run_into<'a>(&self, compute: &Compute, x: &[f32], out: &'a mut Vec<f32>) -> &'a mut [f32] {
        let out = sized(out, x.len() / self.weight.inputs() * self.weight.outputs());
        self.run(compute, x, out);
        out
    }
}

impl Weights {
    /// Whether no other rank holds an expert that is not here.
    pub(super) fn holds_all_experts(&self) -> bool {
        let held = |layer: &Layer| match &layer.feed_forward {
            FeedForwardWeights::Dense(_) => true,
            FeedForwardWeights::Experts(experts) => experts.experts.networks.iter().all(Option::is_some),
        };
        self.layers.iter().all(held)
    }

    /// Memory of the matrices, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, PackedMatrix::bytes);
        self.embedding.bytes() + head + self.layers.iter().map(Layer::bytes).sum::<usize>()
    }
}

impl Layer {
    fn bytes(&self) -> usize {
        self.attention.bytes() + self.feed_forward.bytes()
    }
}

impl AttentionWeights {
    fn bytes(&self) -> usize {
        match self {
            Self::Grouped(grouped) => grouped.qkv.weight.bytes() + grouped.output.weight.bytes(),
            Self::Latent(latent) => {
                let down = latent.query_down.as_ref().map_or(0, |(down, _)| down.weight.bytes());
                let heads =
                    latent.absorb.iter().chain(&latent.expand).map(PackedMatrix::bytes).sum::<usize>();
                let linears = [&latent.query, &latent.kv_down, &latent.output];
                down + heads + linears.iter().map(|linear| linear.weight.bytes()).sum::<usize>()
            }
        }
    }
}

impl FeedForwardWeights {
    fn bytes(&self) -> usize {
        let mlp = |mlp: &Mlp| mlp.gate_up.weight.bytes() + mlp.down.weight.bytes();
        match self {
            Self::Dense(dense) => mlp(dense),
            Self::Experts(experts) => {
                let held = experts.experts.networks.iter().flatten();
                let served = held.chain(&experts.shared).map(mlp).sum::<usize>();
                experts.router.weight.bytes() + served
            }
        }
    }
}
