//! The attention of a layer, as it is stored.

use keyway_kernels::matmul::PackedMatrix;

use super::Loader;
use crate::model::ModelError;
use crate::model::config::{Attention, Grouped, Latent};
use crate::model::stored::{Rows, Stored, pack};
use crate::model::weights::{AttentionWeights, GroupedWeights, LatentWeights};

impl Loader<'_> {
    /// `name` is that of the layer's attention.
    pub(super) fn attention(&mut self, name: &str) -> Result<AttentionWeights, ModelError> {
        match self.config.attention {
            Attention::Grouped(shape) => Ok(AttentionWeights::Grouped(Box::new(self.grouped(name, shape)?))),
            Attention::Latent(shape) => Ok(AttentionWeights::Latent(Box::new(self.latent(name, shape)?))),
        }
    }

    fn grouped(&mut self, name: &str, shape: Grouped) -> Result<GroupedWeights, ModelError> {
        let Grouped { heads, kv_heads, head_dim, .. } = shape;
        let part = |part: &str| format!("{name}.{part}");
        let qk_norm = if shape.qk_norm {
            let q_norm = self.vector(&part("q_norm.weight"), head_dim)?;
            Some((q_norm, self.vector(&part("k_norm.weight"), head_dim)?))
        } else {
            None
        };
        let sinks = if shape.sinks { Some(self.vector(&part("sinks"), heads)?) } else { None };
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let (q, k, v) = (part("q_proj"), part("k_proj"), part("v_proj"));
        let qkv = [(q.as_str(), queries), (k.as_str(), keys), (v.as_str(), keys)];
        Ok(GroupedWeights {
            shape,
            qkv: self.linear(&qkv, self.config.hidden, shape.qkv_bias)?,
            qk_norm,
            sinks,
            output: self.linear(&[(&part("o_proj"), self.config.hidden)], queries, shape.output_bias)?,
        })
    }

    fn latent(&mut self, name: &str, shape: Latent) -> Result<LatentWeights, ModelError> {
        let Latent { heads, rank, nope_dim, rope_dim, value_dim, bias, .. } = shape;
        let hidden = self.config.hidden;
        let part = |part: &str| format!("{name}.{part}");
        let queries = heads * (nope_dim + rope_dim);
        let (query_down, query) = match shape.query_rank {
            None => (None, self.linear(&[(&part("q_proj"), queries)], hidden, false)?),
            Some(rank) => {
                let down = self.linear(&[(&part("q_a_proj"), rank)], hidden, bias)?;
                let norm = self.vector(&part("q_a_layernorm.weight"), rank)?;
                (Some((down, norm)), self.linear(&[(&part("q_b_proj"), queries)], rank, false)?)
            }
        };
        let kv_down = self.linear(&[(&part("kv_a_proj_with_mqa"), rank + rope_dim)], hidden, bias)?;
        let latent_norm = self.vector(&part("kv_a_layernorm.weight"), rank)?;
        // Of each head the rows that make its key, then those that make its value.
        let up = self.stored(&part("kv_b_proj.weight"), heads * (nope_dim + value_dim), rank)?;
        let first = |head: usize| head * (nope_dim + value_dim);
        let values =
            |head: usize| Rows { from: &up, first: first(head) + nope_dim, step: 1, count: value_dim };
        Ok(LatentWeights {
            shape,
            query_down,
            query,
            kv_down,
            latent_norm,
            absorb: (0..heads).map(|head| transposed(&up, first(head), nope_dim, rank)).collect(),
            expand: (0..heads).map(|head| pack(&[values(head)], rank, None)).collect(),
            output: self.linear(&[(&part("o_proj"), hidden)], heads * value_dim, bias)?,
        })
    }
}

/// Rows `first..first + rows` as columns: `[width, rows]`. FP8 becomes f32, since its blocks would lie
/// across.
fn transposed(stored: &Stored<'_>, first: usize, rows: usize, width: usize) -> PackedMatrix {
    let mut values = vec![0.0; rows * width];
    for (n, row) in values.chunks_exact_mut(width).enumerate() {
        stored.copy_row(first + n, row);
    }
    PackedMatrix::pack(width, rows, stored.kept_as(), |n, row| {
        for (value, from) in row.iter_mut().zip(values.chunks_exact(width)) {
            *value = from[n];
        }
    })
}
