//! A model's heads as attention's kernels see them.

use keyway_kernels::cuda::paged_attention::HeadKind;

use crate::model::config::{Attention, Grouped, Latent};

/// Heads, and what scores are multiplied by.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadShape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) kind: HeadKind,
    pub(super) scale: f32,
}

impl HeadShape {
    /// `None` if no kernel has them.
    pub(super) fn of(attention: &Attention) -> Option<Self> {
        match *attention {
            Attention::Grouped(Grouped { heads, kv_heads, head_dim, .. }) => {
                let kinds = [HeadKind::Dim64, HeadKind::Dim128];
                let kind = kinds.into_iter().find(|kind| kind.key_dim() == head_dim)?;
                Some(Self { heads, kv_heads, kind, scale: 1.0 / (head_dim as f32).sqrt() })
            }
            Attention::Latent(Latent { heads, rank, rope_dim, scale, .. }) => {
                let kind = HeadKind::Latent;
                let known = rank == kind.value_dim() && rank + rope_dim == kind.key_dim();
                known.then_some(Self { heads, kv_heads: 1, kind, scale })
            }
        }
    }

    /// Elements of a row of queries, as attention reads them.
    pub(super) fn queries(&self) -> usize {
        self.heads * self.kind.key_dim()
    }

    /// Elements of a row that attention gives.
    pub(super) fn attended(&self) -> usize {
        self.heads * self.kind.value_dim()
    }
}
