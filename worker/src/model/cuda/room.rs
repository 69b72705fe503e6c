//! The memory of a step on a device: buffers that grow to the largest step's need and stay.

use half::bf16;
use keyway_kernels::cuda::matmul::ProductCut;
use keyway_kernels::cuda::sample::{self, SCORE_WORDS};
use keyway_kernels::cuda::{Device, DeviceError, Element, Slice};

use super::experts::{ExpertRoom, ExpertWidths};
use super::heads::HeadShape;
use super::latent::{LatentRoom, LatentWidths};
use super::rules::RuleLists;
use super::weights::DeviceWeights;
use crate::model::config::{Attention, Config, FeedForward, Latent, LayerShape};

/// A buffer on the device that is replaced by a larger one when a step needs more.
#[derive(Debug, Default)]
pub(super) struct Grown {
    /// The device's number of it; `None` as long as nothing was needed.
    buffer: Option<u64>,
    bytes: usize,
}

impl Grown {
    /// Makes room for `bytes`; what was in it is gone if it grows.
    /// Returns how often it moved: 0 or 1.
    pub(super) fn reserve(&mut self, device: &mut dyn Device, bytes: usize) -> Result<u64, DeviceError> {
        if bytes <= self.bytes {
            return Ok(0);
        }
        if let Some(old) = self.buffer.take() {
            self.bytes = 0;
            device.free(old);
        }
        self.buffer = Some(device.allocate(bytes)?);
        self.bytes = bytes;
        Ok(1)
    }

    /// The same, all 0 where it moves.
    pub(super) fn reserve_zeros(
        &mut self,
        device: &mut dyn Device,
        bytes: usize,
    ) -> Result<u64, DeviceError> {
        let moved = self.reserve(device, bytes)?;
        if let (Some(buffer), true) = (self.buffer, moved > 0) {
            device.zero(buffer, self.bytes)?;
        }
        Ok(moved)
    }

    /// The same, but what was in it stays.
    fn reserve_keeping(&mut self, device: &mut dyn Device, bytes: usize) -> Result<u64, DeviceError> {
        let (Some(old), true) = (self.buffer, bytes > self.bytes) else { return self.reserve(device, bytes) };
        let mut kept = vec![0; self.bytes];
        device.read(old, 0, &mut kept)?;
        let moved = self.reserve(device, bytes)?;
        device.write(self.buffer.unwrap_or(0), 0, &kept)?;
        Ok(moved)
    }

    /// `len` elements from byte `offset` on, for which there is room.
    pub(super) fn slice<T: Element>(&self, offset: usize, len: usize) -> Slice<T> {
        debug_assert!(offset + len * size_of::<T>() <= self.bytes, "a step's buffer is too short");
        Slice::new(self.buffer.unwrap_or(0), offset as u64, len)
    }

    /// All of it, as whole elements of `T`.
    pub(super) fn whole<T: Element>(&self) -> Slice<T> {
        self.slice(0, self.bytes / size_of::<T>())
    }
}

/// Rows of the widths that a model's step needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    pub(super) hidden: usize,
    /// Queries, and in grouped attention keys and values.
    pub(super) qkv: usize,
    /// What attention reads and gives.
    pub(super) queries: usize,
    pub(super) attended: usize,
    pub(super) latent: LatentWidths,
    /// Inner width of the widest gated network that all rows go through.
    pub(super) inner: usize,
    pub(super) vocab: usize,
    pub(super) experts: ExpertWidths,
}

impl Widths {
    pub(super) fn new(config: &Config, heads: &HeadShape) -> Self {
        let inner = |layer: &LayerShape| match layer.feed_forward {
            FeedForward::Dense { width } => width,
            FeedForward::Experts(experts) => experts.shared_width.unwrap_or(0),
        };
        Self {
            hidden: config.hidden,
            qkv: match config.attention {
                Attention::Grouped(grouped) => (grouped.heads + 2 * grouped.kv_heads) * grouped.head_dim,
                Attention::Latent(Latent { heads, nope_dim, rope_dim, .. }) => heads * (nope_dim + rope_dim),
            },
            queries: heads.queries(),
            attended: heads.attended(),
            latent: LatentWidths::new(config),
            inner: config.layers.iter().map(inner).max().unwrap_or(0),
            vocab: config.vocab_size,
            experts: ExpertWidths::new(config),
        }
    }
}

/// All buffers of a step.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// What the host says of the step.
    pub(super) inputs: Grown,
    /// The residual stream, and the rows of it that are kept for the head.
    pub(super) residual: Grown,
    pub(super) kept: Grown,
    pub(super) normed: Grown,
    pub(super) qkv: Grown,
    /// Queries of the rows that are kept.
    pub(super) queries: Grown,
    pub(super) attended: Grown,
    pub(super) update: Grown,
    pub(super) gate_up: Grown,
    pub(super) gated: Grown,
    pub(super) latent: LatentRoom,
    pub(super) experts: ExpertRoom,
    /// Sums of parts that are joined afterwards: of products, then of rows from which tokens are drawn.
    pub(super) partials: Grown,
    /// What goes back to the host: final hidden states in bf16, behind them logits in f32.
    pub(super) output: Grown,
    /// What rows drew, a word each: the next step reads it, whether or not the host has.
    pub(super) drawn: Grown,
    /// Their log-probabilities, which kernels write and nothing reads.
    pub(super) logprobs: Grown,
    /// What was wanted of their scores.
    pub(super) scores: Grown,
    /// What changes rows' logits before their tokens are drawn.
    pub(super) rules: RuleLists,
    /// How often a buffer was replaced: launches that were made before name buffers that are gone.
    pub(super) moves: u64,
}

impl Room {
    /// For a step of `rows` rows, of which `wanted` go through the head, and attention's `partials` floats.
    pub(super) fn reserve(
        &mut self,
        device: &mut dyn Device,
        widths: &Widths,
        weights: &DeviceWeights,
        [rows, wanted, partials]: [usize; 3],
    ) -> Result<(), DeviceError> {
        let Widths { hidden, qkv, queries, attended, latent, inner, vocab, experts } = *widths;
        let row = size_of::<bf16>();
        for (buffer, elements) in [
            (&mut self.residual, rows * hidden),
            (&mut self.kept, wanted * hidden),
            (&mut self.normed, rows * hidden),
            (&mut self.qkv, rows * qkv),
            (&mut self.queries, wanted * queries),
            (&mut self.attended, rows * attended),
            (&mut self.update, rows * hidden),
            (&mut self.gate_up, rows * 2 * inner),
            (&mut self.gated, rows * inner),
        ] {
            self.moves += buffer.reserve(device, elements * row)?;
        }
        self.moves += self.latent.reserve(device, &latent, rows)?;
        self.moves += self.experts.reserve(device, (experts, hidden), rows)?;
        let of_product =
            |shape| [rows, wanted].map(|rows| ProductCut::choose(shape, rows).partial_floats(shape, rows));
        let partials = weights.shapes().flat_map(of_product).fold(partials, usize::max);
        let partials = partials.max(sample::work_words(wanted, vocab));
        self.moves += self.partials.reserve(device, partials * size_of::<f32>())?;
        self.moves += self.output.reserve(device, wanted * (hidden * row + vocab * size_of::<f32>()))?;
        let words = wanted.max(1) * size_of::<u32>();
        self.moves += self.drawn.reserve_keeping(device, words)?;
        self.moves += self.logprobs.reserve(device, words)?;
        self.moves += self.scores.reserve(device, words * SCORE_WORDS)?;
        Ok(())
    }

    /// Copies what the host says of a step.
    pub(super) fn tell(&mut self, device: &mut dyn Device, words: &[u32]) -> Result<(), DeviceError> {
        // Tables grow with every few tokens: seldom anew.
        self.moves += self.inputs.reserve(device, size_of_val(words).next_power_of_two())?;
        device.overwrite(self.inputs.whole(), words)
    }
}
