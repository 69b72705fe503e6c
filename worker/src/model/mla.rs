//! Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434), in the absorbed form: the cache
//! holds one latent and one rotated key per position, shared by all heads; the matrices that would make each
//! head's keys and values from the latent are applied to queries and results instead.

use keyway_kernels::heads::Heads;
use keyway_kernels::kv_cache::KvCache;
use keyway_kernels::matmul::{self, PackedMatrix};
use keyway_kernels::paged_attention::{self, Queries};
use keyway_kernels::rms_norm;
use keyway_kernels::rope;

use super::config::Latent;
use super::decoder::{Buffers, LayerStep, Span};
use super::feed_forward::sized;
use super::weights::LatentWeights;

/// Of the two norms inside: their code leaves the model's own epsilon aside.
pub(super) const NORM_EPS: f32 = 1e-6;

/// Memory that is used again from step to step.
#[derive(Debug, Default)]
pub(super) struct LatentBuffers {
    /// The queries' bottleneck, `[rows, query_rank]`.
    query_down: Vec<f32>,
    /// What is cached, `[rows, rank + rope_dim]`.
    latent: Vec<f32>,
    /// Queries in the latent's space, `[rows, heads * (rank + rope_dim)]`.
    absorbed: Vec<f32>,
    /// Of all heads, `[rows, heads * value_dim]`.
    values: Vec<f32>,
    /// One head's input and output, row after row.
    head_in: Vec<f32>,
    head_out: Vec<f32>,
}

impl LatentWeights {
    /// Rotated queries of every row into `b.projected`, and what is to be cached into `b.latent`.
    pub(super) fn project(&self, step: &LayerStep<'_>, b: &mut Buffers) {
        let Latent { heads, rank, nope_dim, rope_dim, .. } = self.shape;
        let (compute, pairing) = (step.compute, step.config.rope.pairing);
        let query_input: &[f32] = match &self.query_down {
            None => &b.normed,
            Some((down, norm)) => {
                let stride = down.weight.outputs();
                let bottleneck = down.run_into(compute, &b.normed, &mut b.latent.query_down);
                let whole = Heads { stride, first: 0, count: 1, pitch: stride };
                rms_norm::cpu_heads(compute, bottleneck, whole, norm, NORM_EPS);
                bottleneck
            }
        };
        let queries = self.query.run_into(compute, query_input, &mut b.projected);
        let (stride, pitch) = (heads * (nope_dim + rope_dim), nope_dim + rope_dim);
        let rotated = Heads { stride, first: nope_dim, count: heads, pitch };
        rope::cpu(compute, queries, rotated, pairing, &b.cos, &b.sin);

        let latent = self.kv_down.run_into(compute, &b.normed, &mut b.latent.latent);
        let stride = rank + rope_dim;
        let normed = Heads { stride, first: 0, count: 1, pitch: rank };
        rms_norm::cpu_heads(compute, latent, normed, &self.latent_norm, NORM_EPS);
        let rotated = Heads { stride, first: rank, count: 1, pitch: rope_dim };
        rope::cpu(compute, latent, rotated, pairing, &b.cos, &b.sin);
    }

    /// Writes every row's latent.
    pub(super) fn write(&self, step: &LayerStep<'_>, cache: &mut KvCache, b: &Buffers) {
        let stride = self.kv_down.weight.outputs();
        step.for_each_run(&b.spans, |row, count, block, offset| {
            for i in 0..count {
                cache.write_latent(block, offset + i, &b.latent.latent[(row + i) * stride..][..stride]);
            }
        });
    }

    /// What each row gathers from the positions it sees, into `b.update`.
    pub(super) fn attend(&self, step: &LayerStep<'_>, cache: &KvCache, b: &mut Buffers) {
        let Latent { heads, rank, rope_dim, value_dim, scale, .. } = self.shape;
        self.absorb_queries(step, b);
        let key_dim = rank + rope_dim;
        let (stride, width) = (heads * key_dim, heads * rank);
        let rows = b.latent.absorbed.len() / stride;
        let attended = sized(&mut b.attended, rows * width);
        let queries = |span: &Span| Queries {
            rows: &b.latent.absorbed[span.first_row * stride..],
            stride,
            heads,
            start: span.start,
            blocks: step.table(span.chunk),
            window: step.window,
            sinks: None,
        };
        let sequences: Vec<_> = b.spans.iter().map(|span| (queries(span), span.rows)).collect();
        paged_attention::batch(step.compute, cache, &sequences, scale, attended);
        let values = sized(&mut b.latent.values, rows * heads * value_dim);
        let (head_in, head_out) = (&mut b.latent.head_in, &mut b.latent.head_out);
        for (head, expand) in self.expand.iter().enumerate() {
            let from = Columns { stride: width, first: head * rank };
            let to = Columns { stride: heads * value_dim, first: head * value_dim };
            run_head(step, expand, (attended, from), (values, to), head_in, head_out);
        }
        self.output.run_into(step.compute, values, &mut b.update);
    }

    /// Takes the queries' unrotated parts into the latent's space, and the rotated ones along.
    fn absorb_queries(&self, step: &LayerStep<'_>, b: &mut Buffers) {
        let Latent { heads, rank, nope_dim, rope_dim, .. } = self.shape;
        let (query_dim, key_dim) = (nope_dim + rope_dim, rank + rope_dim);
        let queries = &b.projected;
        let absorbed = sized(&mut b.latent.absorbed, queries.len() / query_dim * key_dim);
        for (query, absorbed) in queries.chunks_exact(query_dim).zip(absorbed.chunks_exact_mut(key_dim)) {
            absorbed[rank..].copy_from_slice(&query[nope_dim..]);
        }
        let (head_in, head_out) = (&mut b.latent.head_in, &mut b.latent.head_out);
        for (head, absorb) in self.absorb.iter().enumerate() {
            let from = Columns { stride: heads * query_dim, first: head * query_dim };
            let to = Columns { stride: heads * key_dim, first: head * key_dim };
            run_head(step, absorb, (queries, from), (absorbed, to), head_in, head_out);
        }
    }
}

/// One head's part of every row.
#[derive(Clone, Copy)]
struct Columns {
    stride: usize,
    first: usize,
}

/// Maps one head's part of every row of `from` to its part of `to`.
fn run_head(
    step: &LayerStep<'_>,
    weight: &PackedMatrix,
    (from, from_at): (&[f32], Columns),
    (to, to_at): (&mut [f32], Columns),
    head_in: &mut Vec<f32>,
    head_out: &mut Vec<f32>,
) {
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    let rows = from.len() / from_at.stride;
    let head_in = sized(head_in, rows * inputs);
    for (row, from) in head_in.chunks_exact_mut(inputs).zip(from.chunks_exact(from_at.stride)) {
        row.copy_from_slice(&from[from_at.first..][..inputs]);
    }
    let head_out = sized(head_out, rows * outputs);
    matmul::cpu(step.compute, head_in, weight, head_out);
    for (row, to) in head_out.chunks_exact(outputs).zip(to.chunks_exact_mut(to_at.stride)) {
        to[to_at.first..][..outputs].copy_from_slice(row);
    }
}
