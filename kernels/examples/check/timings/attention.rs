//! Attention at the shapes of the roofline table: 32 query heads on 8 KV heads of 128, or 128 on a latent,
//! over pages that lie scattered. How it is cut into blocks is the caller's.

use half::bf16;
use keyway_kernels::cuda::matmul::Unit;
use keyway_kernels::cuda::paged_attention::{
    self, AttentionCut, AttentionPlan, Batch, CutFor, HeadKind, KvType, Pages, Sequence,
};
use keyway_kernels::cuda::{Launch, Slice};

use super::{PAGE_SIZE, Work};
use crate::cases::Lab;

/// A step that gives every sequence one token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decode {
    pub(crate) sequences: usize,
    pub(crate) context: usize,
    pub(crate) page_size: usize,
    pub(crate) kv_type: KvType,
    pub(crate) kind: HeadKind,
}

impl Default for Decode {
    fn default() -> Self {
        Self {
            sequences: 32,
            context: 4096,
            page_size: PAGE_SIZE,
            kv_type: KvType::Bf16,
            kind: HeadKind::Dim128,
        }
    }
}

/// A batch whose data are on the device.
pub(crate) struct Attention {
    sequences: Vec<Sequence>,
    cache: Pages,
    tables: Slice<u32>,
    q: Slice<bf16>,
    out: Slice<bf16>,
    heads: usize,
    bytes: u64,
    operations: u64,
}

impl Attention {
    /// One token of every sequence.
    pub(crate) fn decode(lab: &mut Lab<'_>, d: Decode) -> Result<Self, String> {
        let pages = d.context.div_ceil(d.page_size);
        let sequence = |i: usize| Sequence { query: i, tokens: 1, start: d.context - 1, table: i * pages };
        let sequences: Vec<Sequence> = (0..d.sequences).map(sequence).collect();
        let mut made = Self::new(lab, sequences, d.sequences * pages, d)?;
        let values = if d.kind == HeadKind::Latent { 0 } else { d.kind.value_dim() };
        let positions = (d.sequences * d.context) as u64;
        let size = if d.kv_type == KvType::Fp8 { 1 } else { 2 };
        made.bytes = positions * (made.cache.kv_heads * (d.kind.key_dim() + values) * size) as u64;
        made.operations = positions * (2 * made.heads * (d.kind.key_dim() + d.kind.value_dim())) as u64;
        Ok(made)
    }

    /// A prompt alone, nothing cached.
    pub(crate) fn prefill(lab: &mut Lab<'_>, tokens: usize) -> Result<Self, String> {
        let sequence = Sequence { query: 0, tokens, start: 0, table: 0 };
        let mut made = Self::new(lab, vec![sequence], tokens / PAGE_SIZE, Decode::default())?;
        made.bytes = 2 * 8 * 128 * 2 * tokens as u64;
        made.operations = 2 * 32 * 128 * (tokens * (tokens + 1)) as u64;
        Ok(made)
    }

    fn new(lab: &mut Lab<'_>, sequences: Vec<Sequence>, pages: usize, by: Decode) -> Result<Self, String> {
        let Decode { page_size, kv_type, kind, .. } = by;
        let latent = kind == HeadKind::Latent;
        let (heads, kv_heads) = if latent { (128, 1) } else { (32, 8) };
        let tokens: usize = sequences.iter().map(|s| s.tokens).sum();
        let size = if kv_type == KvType::Fp8 { 1 } else { 2 };
        let vectors = pages * page_size * kv_heads * size;
        let values = if latent { None } else { Some(lab.filled_evenly(vectors * kind.value_dim(), 4)?) };
        let keys = lab.filled_evenly(vectors * kind.key_dim(), 3)?;
        // Scattered: 7919 is a prime that shares no factor with a number of pages below it times a power of
        // two.
        let table: Vec<u32> = (0..pages).map(|i| ((i * 7919) % pages) as u32).collect();
        Ok(Self {
            cache: Pages { keys, values, kv_type, kind, kv_heads, page_size },
            tables: lab.upload(&table)?,
            q: lab.filled_evenly(tokens * heads * kind.key_dim() * 2, 5)?.cast(),
            out: lab.poisoned(tokens * heads * kind.value_dim())?,
            sequences,
            heads,
            bytes: 0,
            operations: 0,
        })
    }

    /// How the worker cuts it.
    pub(crate) fn chosen(&self, lab: &Lab<'_>, processors: usize) -> AttentionCut {
        let Pages { kind, kv_type, kv_heads, .. } = self.cache;
        let group = self.heads / kv_heads;
        AttentionCut::choose(
            &self.sequences,
            &CutFor { kind, kv_type, kv_heads, group, unit: unit(lab), processors },
        )
    }

    /// Cut so, with states joined at fixed positions or, `carried`, where blocks end.
    pub(crate) fn launches(
        &self,
        lab: &mut Lab<'_>,
        cut: AttentionCut,
        carried: bool,
    ) -> Result<Vec<Launch>, String> {
        let Pages { kind, kv_heads, .. } = self.cache;
        let plan = if carried { AttentionPlan::carried } else { AttentionPlan::new };
        let plan = plan(&self.sequences, self.heads / kv_heads, None, cut);
        let batch = Batch {
            plan: &plan,
            items: lab.upload(&plan.items)?,
            merges: lab.upload(&plan.merges)?,
            tables: self.tables,
            q: self.q,
            q_stride: self.heads * kind.key_dim(),
            heads: self.heads,
            sinks: None,
            window: None,
            processors: lab.processors(),
            unit: unit(lab),
            scale: 1.0 / (kind.key_dim() as f32).sqrt(),
            kv_scale: [1.0; 2],
            out: self.out,
            partials: lab.poisoned(plan.partial_floats(kv_heads, kind.value_dim(), lab.processors()))?,
        };
        Ok(paged_attention::launch(&self.cache, &batch))
    }

    /// As the worker launches it.
    pub(crate) fn work(&self, lab: &mut Lab<'_>, processors: usize) -> Result<Work, String> {
        let launches = self.launches(lab, self.chosen(lab, processors), false)?;
        Ok(Work { launches, bytes: self.bytes, operations: self.operations })
    }
}

fn unit(lab: &Lab<'_>) -> Unit {
    if lab.has_warpgroups() { Unit::Warpgroup } else { Unit::Warp }
}
