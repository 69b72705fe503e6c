//! The forward pass: a step of a batch through every layer, over a paged KV cache.
//!
//! All rows of a step, whichever sequence they belong to, go through each product together; only attention
//! looks at sequences. No operation mixes rows in an order that depends on the batch, hence the bits do not
//! either.

use keyway_kernels::compute::Compute;
use keyway_kernels::elementwise::add_assign;
use keyway_kernels::fabric::FabricError;
use keyway_kernels::kv_cache::KvCache;
use keyway_kernels::{matmul, rms_norm};

use super::cache_plan::Place;
use super::config::Config;
use super::feed_forward::{FeedForwardBuffers, sized};
use super::mla::LatentBuffers;
use super::weights::{AttentionWeights, FeedForwardWeights, Weights};
use crate::engine::backend::Chunk;

/// A model that computes.
#[derive(Debug)]
pub(super) struct Decoder {
    pub(super) compute: Compute,
    pub(super) config: Config,
    pub(super) weights: Weights,
}

/// Rows of the current step that belong to one chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) chunk: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// Absolute position of the first row.
    pub(super) start: usize,
}

/// Memory that is used again from step to step; grows to the largest step's need.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) spans: Vec<Span>,
    /// The residual stream `[rows, hidden]`.
    x: Vec<f32>,
    /// The stream normalised, `[rows, hidden]`: at the end of a step the final hidden states.
    pub(super) normed: Vec<f32>,
    /// Queries of every row, and behind them, in grouped attention, its keys and values.
    pub(super) projected: Vec<f32>,
    /// Of each row's position, `[rows, rope_dim / 2]`.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    /// `[rows, heads * value_dim]`.
    pub(super) attended: Vec<f32>,
    /// What a layer's halves add to the stream, `[rows, hidden]`.
    pub(super) update: Vec<f32>,
    pub(super) latent: LatentBuffers,
    pub(super) feed_forward: FeedForwardBuffers,
}

/// What a layer's attention knows of the step.
#[derive(Debug)]
pub(super) struct LayerStep<'a> {
    pub(super) compute: &'a Compute,
    pub(super) config: &'a Config,
    pub(super) window: Option<usize>,
    chunks: &'a [Chunk<'a>],
    group: usize,
    block_size: usize,
}

impl<'a> LayerStep<'a> {
    /// The block table of a chunk for this layer.
    pub(super) fn table(&self, chunk: usize) -> &'a [u32] {
        self.chunks[chunk].tables[self.group]
    }

    /// Calls `write(row, count, block, offset)` for every run of rows whose positions are in one block.
    pub(super) fn for_each_run(&self, spans: &[Span], mut write: impl FnMut(usize, usize, u32, usize)) {
        for span in spans {
            let (table, mut t) = (self.table(span.chunk), 0);
            while t < span.rows {
                let position = span.start + t;
                let offset = position % self.block_size;
                let count = (self.block_size - offset).min(span.rows - t);
                write(span.first_row + t, count, table[position / self.block_size], offset);
                t += count;
            }
        }
    }
}

impl Decoder {
    /// Computes a step: `slabs` and `places` say where each layer's cache is. `logits` gets a row per chunk
    /// that wants one. Without chunks, the step is that of other ranks. An error is another rank's; the step
    /// may then be run again.
    pub(super) fn step(
        &self,
        chunks: &[Chunk<'_>],
        slabs: &mut [KvCache],
        places: &[Place],
        b: &mut Buffers,
        logits: &mut Vec<f32>,
    ) -> Result<(), FabricError> {
        if chunks.is_empty() {
            return self.join(0, b);
        }
        self.begin(chunks, b);
        for (i, (layer, place)) in self.weights.layers.iter().zip(places).enumerate() {
            let cache = &mut slabs[place.slot];
            let step = LayerStep {
                compute: &self.compute,
                config: &self.config,
                window: self.config.layers[i].window,
                chunks,
                group: place.group,
                block_size: cache.shape().block_size,
            };
            self.normalise(&layer.input_norm, b);
            // Everything that the layer caches is written before anything attends: a chunk may read positions
            // that another chunk of the same step computes.
            match &layer.attention {
                AttentionWeights::Grouped(grouped) => {
                    grouped.project(&step, b);
                    grouped.write(&step, cache, b);
                }
                AttentionWeights::Latent(latent) => {
                    latent.project(&step, b);
                    latent.write(&step, cache, b);
                }
            }
            if i + 1 == self.weights.layers.len() {
                // Behind the last layer's KV only rows whose logits are wanted have a purpose.
                keep_wanted(chunks, self.config.hidden, b);
                if b.spans.is_empty() {
                    return self.join(i, b);
                }
            }
            self.attend(&layer.attention, &step, cache, b);
            self.normalise(&layer.post_norm, b);
            self.feed_forward(i, &layer.feed_forward, b)?;
        }
        self.head(b, logits);
        Ok(())
    }

    /// Takes part in the layers from `first` on, in which only other ranks have tokens, if there are ranks.
    fn join(&self, first: usize, b: &mut Buffers) -> Result<(), FabricError> {
        for (i, layer) in self.weights.layers.iter().enumerate().skip(first) {
            b.feed_forward.join(&self.compute, i, &layer.feed_forward)?;
        }
        Ok(())
    }

    /// Lays out the step's rows, and fills in embeddings and the angles of their positions.
    fn begin(&self, chunks: &[Chunk<'_>], b: &mut Buffers) {
        let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
        let (hidden, half) = (self.config.hidden, self.config.attention.rope_dim() / 2);
        b.spans.clear();
        let x = sized(&mut b.x, rows * hidden);
        let (cos, sin) = (sized(&mut b.cos, rows * half), sized(&mut b.sin, rows * half));
        let mut row = 0;
        for (i, chunk) in chunks.iter().enumerate() {
            b.spans.push(Span { chunk: i, first_row: row, rows: chunk.tokens.len(), start: chunk.start });
            for (t, token) in chunk.tokens.iter().enumerate() {
                self.weights.embedding.copy_row(*token as usize, &mut x[row * hidden..][..hidden]);
                let angles = row * half..(row + 1) * half;
                let position = chunk.start + t;
                self.weights.rope.angles(&self.compute, position, &mut cos[angles.clone()], &mut sin[angles]);
                row += 1;
            }
        }
    }

    /// Adds to the stream what attention gives.
    fn attend(&self, attention: &AttentionWeights, step: &LayerStep<'_>, cache: &KvCache, b: &mut Buffers) {
        match attention {
            AttentionWeights::Grouped(grouped) => grouped.attend(step, cache, b),
            AttentionWeights::Latent(latent) => latent.attend(step, cache, b),
        }
        add_assign(&self.compute, &mut b.x, &b.update);
    }

    /// Adds to the stream what the feed-forward part gives.
    fn feed_forward(
        &self,
        layer: usize,
        weights: &FeedForwardWeights,
        b: &mut Buffers,
    ) -> Result<(), FabricError> {
        let update = sized(&mut b.update, b.x.len());
        b.feed_forward.run(&self.compute, layer, weights, &b.normed, update)?;
        add_assign(&self.compute, &mut b.x, update);
        Ok(())
    }

    fn normalise(&self, norm: &[f32], b: &mut Buffers) {
        let normed = sized(&mut b.normed, b.x.len());
        rms_norm::cpu(&self.compute, &b.x, norm, self.config.norm_eps, normed);
    }

    fn head(&self, b: &mut Buffers, logits: &mut Vec<f32>) {
        self.normalise(&self.weights.norm, b);
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embedding);
        let rows = b.x.len() / self.config.hidden;
        matmul::cpu(&self.compute, &b.normed, head, sized(logits, rows * self.config.vocab_size));
    }
}

/// Keeps, of all rows, the last one of each chunk that wants logits: in the stream, the queries and the
/// spans.
fn keep_wanted(chunks: &[Chunk<'_>], hidden: usize, b: &mut Buffers) {
    let stride = b.projected.len() / (b.x.len() / hidden);
    let mut kept = 0;
    b.spans.retain_mut(|span| {
        if !chunks[span.chunk].wants_logits {
            return false;
        }
        let row = span.first_row + span.rows - 1;
        b.x.copy_within(row * hidden..(row + 1) * hidden, kept * hidden);
        b.projected.copy_within(row * stride..(row + 1) * stride, kept * stride);
        *span = Span { chunk: span.chunk, first_row: kept, rows: 1, start: span.start + span.rows - 1 };
        kept += 1;
        true
    });
    b.x.truncate(kept * hidden);
    b.projected.truncate(kept * stride);
}
