//! The forward pass on the CPU: a step of a batch through every layer, over a paged KV cache.
//!
//! All rows of a step, whichever sequence they belong to, go through each product together; only attention
//! looks at sequences. No operation mixes rows in an order that depends on the batch, hence the bits do not
//! either.

use keyway_kernels::compute::Compute;
use keyway_kernels::elementwise::{add_assign, add_bias};
use keyway_kernels::heads::Heads;
use keyway_kernels::isa::Isa;
use keyway_kernels::kv_cache::{KvCache, KvShape};
use keyway_kernels::matmul;
use keyway_kernels::paged_attention::{self, Queries};
use keyway_kernels::rms_norm;
use keyway_kernels::rope::{self, Pairing};

use super::config::Config;
use super::feed_forward::{FeedForwardBuffers, sized};
use super::weights::{Layer, Linear, Weights};
use super::{KvLayout, ModelError};
use crate::backend::{Backend, CacheGroup, Chunk};

/// A model and its KV cache on the CPU.
#[derive(Debug)]
pub struct CpuBackend {
    model: Model,
    kv: KvLayout,
    /// One per layer.
    caches: Vec<KvCache>,
    buffers: Buffers,
}

#[derive(Debug)]
struct Model {
    compute: Compute,
    config: Config,
    weights: Weights,
}

/// Rows of the current step that belong to one chunk.
#[derive(Debug, Clone, Copy)]
struct Span {
    chunk: usize,
    first_row: usize,
    rows: usize,
    /// Absolute position of the first row.
    start: usize,
}

/// Memory that is used again from step to step; grows to the largest step's need.
#[derive(Debug, Default)]
struct Buffers {
    spans: Vec<Span>,
    /// The residual stream `[rows, hidden]`.
    x: Vec<f32>,
    /// `[rows, hidden]`.
    normed: Vec<f32>,
    /// `[rows, (heads + 2 * kv_heads) * head_dim]`.
    qkv: Vec<f32>,
    /// Of each row's position, `[rows, head_dim / 2]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// `[rows, heads * head_dim]`.
    attended: Vec<f32>,
    /// What a layer's halves add to the stream, `[rows, hidden]`.
    update: Vec<f32>,
    feed_forward: FeedForwardBuffers,
}

impl CpuBackend {
    pub(super) fn new(config: Config, weights: Weights, kv: KvLayout) -> Result<Self, ModelError> {
        let KvLayout { block_size, num_blocks } = kv;
        if block_size == 0 || !block_size.is_multiple_of(KvShape::GRANULE) {
            let granule = KvShape::GRANULE;
            let reason =
                format!("a block size of {block_size} is not supported; use a multiple of {granule}");
            return Err(ModelError::KvCache(reason));
        }
        let Config { kv_heads, head_dim, .. } = config;
        let shape = KvShape { kv_heads, key_dim: head_dim, value_dim: head_dim, block_size, num_blocks };
        let caches: Option<Vec<KvCache>> = config.layers.iter().map(|_| KvCache::new(shape)).collect();
        let Some(caches) = caches else {
            let bytes = shape.bytes_per_token() as u128
                * (config.layers.len() as u128 * num_blocks as u128 * block_size as u128);
            let reason =
                format!("{num_blocks} blocks take {} MiB, which is not there; ask for fewer", bytes >> 20);
            return Err(ModelError::KvCache(reason));
        };
        let model = Model { compute: Compute::single(), config, weights };
        Ok(Self { model, kv, caches, buffers: Buffers::default() })
    }

    /// The same model computing with another instruction set: slower or faster, equal bits.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.model.compute = self.model.compute.with_isa(isa);
        self
    }

    /// The same model computing on other threads: slower or faster, equal bits.
    #[must_use]
    pub fn with_compute(mut self, compute: Compute) -> Self {
        self.model.compute = compute;
        self
    }
}

impl Backend for CpuBackend {
    fn vocab_size(&self) -> usize {
        self.model.config.vocab_size
    }

    fn block_size(&self) -> usize {
        self.kv.block_size
    }

    fn num_blocks(&self) -> usize {
        self.kv.num_blocks
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &[CacheGroup::Full]
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        logits.clear();
        assert!(chunks.iter().all(|chunk| !chunk.tokens.is_empty()), "step: a chunk has no tokens");
        if chunks.is_empty() {
            return;
        }
        let Self { model, kv, caches, buffers } = self;
        model.begin(chunks, buffers);
        let last = caches.len() - 1;
        for (i, (layer, cache)) in model.weights.layers.iter().zip(caches).enumerate() {
            model.project_qkv(layer, buffers);
            model.write_kv(chunks, kv.block_size, cache, buffers);
            if i == last {
                // Behind the last layer's KV only rows whose logits are wanted have a purpose.
                keep_wanted(chunks, model.config.hidden, buffers);
                if buffers.spans.is_empty() {
                    return;
                }
            }
            model.attend(layer, chunks, cache, buffers);
            model.feed_forward(layer, buffers);
        }
        model.head(buffers, logits);
    }
}

impl Model {
    /// Lays out the step's rows, and fills in embeddings and the angles of their positions.
    fn begin(&self, chunks: &[Chunk<'_>], b: &mut Buffers) {
        let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
        let (hidden, half) = (self.config.hidden, self.config.head_dim / 2);
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

    /// Queries, keys and values of every row: normalised where the model does so, and rotated.
    fn project_qkv(&self, layer: &Layer, b: &mut Buffers) {
        let Config { heads, kv_heads, head_dim, norm_eps, .. } = self.config;
        let normed = sized(&mut b.normed, b.x.len());
        rms_norm::cpu(&self.compute, &b.x, &layer.input_norm, norm_eps, normed);
        self.linear(&layer.qkv, normed, &mut b.qkv);
        let stride = layer.qkv.weight.outputs();
        let queries = Heads { stride, first: 0, count: heads, pitch: head_dim };
        let keys = Heads { stride, first: heads * head_dim, count: kv_heads, pitch: head_dim };
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            rms_norm::cpu_heads(&self.compute, &mut b.qkv, queries, q_norm, norm_eps);
            rms_norm::cpu_heads(&self.compute, &mut b.qkv, keys, k_norm, norm_eps);
        }
        let rotated = Heads { count: heads + kv_heads, ..queries };
        rope::cpu(&self.compute, &mut b.qkv, rotated, Pairing::Halves, &b.cos, &b.sin);
    }

    fn write_kv(&self, chunks: &[Chunk<'_>], block_size: usize, cache: &mut KvCache, b: &Buffers) {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let width = (heads + 2 * kv_heads) * head_dim;
        for span in &b.spans {
            let rows = b.qkv[span.first_row * width..].chunks_exact(width).take(span.rows);
            for (t, row) in rows.enumerate() {
                let position = span.start + t;
                let (keys, values) = row[heads * head_dim..].split_at(kv_heads * head_dim);
                let block = chunks[span.chunk].tables[0][position / block_size];
                cache.write(block, position % block_size, keys, values);
            }
        }
    }

    /// Adds to the stream what attention gives.
    fn attend(&self, layer: &Layer, chunks: &[Chunk<'_>], cache: &KvCache, b: &mut Buffers) {
        let Config { heads, head_dim, hidden, .. } = self.config;
        let (stride, width) = (layer.qkv.weight.outputs(), heads * head_dim);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attended = sized(&mut b.attended, b.x.len() / hidden * width);
        for span in &b.spans {
            let queries = Queries {
                rows: &b.qkv[span.first_row * stride..],
                stride,
                heads,
                start: span.start,
                blocks: chunks[span.chunk].tables[0],
                window: None,
                sinks: None,
            };
            let out = &mut attended[span.first_row * width..][..span.rows * width];
            paged_attention::cpu(&self.compute, cache, queries, scale, out);
        }
        self.linear(&layer.output, attended, &mut b.update);
        add_assign(&self.compute, &mut b.x, &b.update);
    }

    /// Adds to the stream what the feed-forward part gives.
    fn feed_forward(&self, layer: &Layer, b: &mut Buffers) {
        let normed = sized(&mut b.normed, b.x.len());
        rms_norm::cpu(&self.compute, &b.x, &layer.post_norm, self.config.norm_eps, normed);
        let update = sized(&mut b.update, b.x.len());
        b.feed_forward.run(&self.compute, &layer.feed_forward, normed, update);
        add_assign(&self.compute, &mut b.x, update);
    }

    fn head(&self, b: &mut Buffers, logits: &mut Vec<f32>) {
        let normed = sized(&mut b.normed, b.x.len());
        rms_norm::cpu(&self.compute, &b.x, &self.weights.norm, self.config.norm_eps, normed);
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embedding);
        let rows = b.x.len() / self.config.hidden;
        matmul::cpu(&self.compute, normed, head, sized(logits, rows * self.config.vocab_size));
    }

    fn linear(&self, linear: &Linear, x: &[f32], out: &mut Vec<f32>) {
        let out = sized(out, x.len() / linear.weight.inputs() * linear.weight.outputs());
        matmul::cpu(&self.compute, x, &linear.weight, out);
        if let Some(bias) = &linear.bias {
            add_bias(&self.compute, out, bias);
        }
    }
}

/// Keeps, of all rows, the last one of each chunk that wants logits: in the stream, the queries and the
/// spans.
fn keep_wanted(chunks: &[Chunk<'_>], hidden: usize, b: &mut Buffers) {
    let stride = b.qkv.len() / (b.x.len() / hidden);
    let mut kept = 0;
    b.spans.retain_mut(|span| {
        if !chunks[span.chunk].wants_logits {
            return false;
        }
        let row = span.first_row + span.rows - 1;
        b.x.copy_within(row * hidden..(row + 1) * hidden, kept * hidden);
        b.qkv.copy_within(row * stride..(row + 1) * stride, kept * stride);
        *span = Span { chunk: span.chunk, first_row: kept, rows: 1, start: span.start + span.rows - 1 };
        kept += 1;
        true
    });
    b.x.truncate(kept * hidden);
    b.qkv.truncate(kept * stride);
}
