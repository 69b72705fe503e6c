//! Grouped-query attention of one layer: projections, rotation, the cache, the scores.

use keyway_kernels::heads::Heads;
use keyway_kernels::kv_cache::KvCache;
use keyway_kernels::paged_attention::{self, Queries};
use keyway_kernels::rms_norm;
use keyway_kernels::rope;

use super::config::Grouped;
use super::decoder::{Buffers, LayerStep, Span};
use super::feed_forward::sized;
use super::weights::GroupedWeights;

impl GroupedWeights {
    /// Queries, keys and values of every row, into `b.projected`: normalised where the model does so, and
    /// rotated.
    pub(super) fn project(&self, step: &LayerStep<'_>, b: &mut Buffers) {
        let Grouped { heads, kv_heads, head_dim, .. } = self.shape;
        let (compute, config) = (step.compute, step.config);
        let stride = self.qkv.weight.outputs();
        let qkv = self.qkv.run_into(compute, &b.normed, &mut b.projected);
        let queries = Heads { stride, first: 0, count: heads, pitch: head_dim };
        let keys = Heads { stride, first: heads * head_dim, count: kv_heads, pitch: head_dim };
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            rms_norm::cpu_heads(compute, qkv, queries, q_norm, config.norm_eps);
            rms_norm::cpu_heads(compute, qkv, keys, k_norm, config.norm_eps);
        }
        let rotated = Heads { count: heads + kv_heads, ..queries };
        rope::cpu(compute, qkv, rotated, config.rope.pairing, &b.cos, &b.sin);
    }

    /// Writes every row's keys and values.
    pub(super) fn write(&self, step: &LayerStep<'_>, cache: &mut KvCache, b: &Buffers) {
        let Grouped { heads, kv_heads, head_dim, .. } = self.shape;
        let stride = self.qkv.weight.outputs();
        let (keys, values) = (heads * head_dim, (heads + kv_heads) * head_dim);
        step.for_each_run(&b.spans, |row, count, block, offset| {
            let rows = &b.projected[row * stride..];
            cache.write_run(block, offset, count, stride, (&rows[keys..], &rows[values..]));
        });
    }

    /// What each row gathers from the positions it sees, into `b.update`.
    pub(super) fn attend(&self, step: &LayerStep<'_>, cache: &KvCache, b: &mut Buffers) {
        let Grouped { heads, head_dim, .. } = self.shape;
        let (stride, width) = (self.qkv.weight.outputs(), heads * head_dim);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attended = sized(&mut b.attended, b.projected.len() / stride * width);
        let queries = |span: &Span| Queries {
            rows: &b.projected[span.first_row * stride..],
            stride,
            heads,
            start: span.start,
            blocks: step.table(span.chunk),
            window: step.window,
            sinks: self.sinks.as_deref(),
        };
        let sequences: Vec<_> = b.spans.iter().map(|span| (queries(span), span.rows)).collect();
        paged_attention::batch(step.compute, cache, &sequences, scale, attended);
        self.output.run_into(step.compute, attended, &mut b.update);
    }
}
