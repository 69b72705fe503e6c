//! Launches `rope.cu`: turns new queries and keys, and writes keys and values to their pages.

use half::bf16;

use super::constants::choice;
use super::constants::numbers::{PACKET, PACKET_BYTES};
use super::constants::rope::{HEAD_THREADS, THREADS};
use super::paged_attention::{HeadKind, KvType, Pages};
use super::rms_norm::{self, NormRows};
use super::{Argument, Kernel, Launch, Slice};
use crate::heads::Heads;
use crate::rope::Pairing;

/// A slot that takes nothing: the token's keys and values are not kept.
pub const NO_SLOT: u32 = choice::NO_SLOT;
/// At whose multiples `rope_heads` reads.
const ALIGNED: u64 = PACKET_BYTES as u64;
/// Blocks of `rope_heads` that fill a device; more of them read a token's angles more often.
const BLOCKS: usize = 2112;

/// RMSNorms of each query head and each key head before they are turned.
#[derive(Debug, Clone, Copy)]
pub struct Norms {
    /// `[key_dim]` of the queries.
    pub queries: Slice<bf16>,
    /// `[key_dim]` of the keys.
    pub keys: Slice<bf16>,
    /// What keeps their divisors from 0.
    pub eps: f32,
}

/// New tokens as projections left them: rows `[heads * key_dim | kv_heads * key_dim | kv_heads * value_dim]`,
/// the last part absent for latents.
#[derive(Debug, Clone, Copy)]
pub struct ProjectedTokens {
    /// The rows; queries are turned in place. What becomes of keys that are normalised there is left open.
    pub x: Slice<bf16>,
    /// Distance between rows, in elements.
    pub stride: usize,
    /// Keys and values, where they are not in these rows, and the distance between their own rows.
    pub kv: Option<(Slice<bf16>, usize)>,
    /// How many query heads each row begins with.
    pub heads: usize,
    /// Norms of the heads, where the model has them: of keys in the same rows alone.
    pub norms: Option<Norms>,
    /// Cosines and sines `[tokens, half]`.
    pub angles: [Slice<f32>; 2],
    /// Elements of a head before the part that turns.
    pub rotated_from: usize,
    /// Which elements are pairs.
    pub pairing: Pairing,
    /// Per token, page times page size plus offset, or [`NO_SLOT`].
    pub slots: Slice<u32>,
}

impl ProjectedTokens {
    /// Elements of a half of what turns.
    fn half(&self) -> usize {
        self.angles[0].len / self.slots.len
    }

    /// Whether `rope_heads` takes them: all parts of all heads are packets.
    fn in_packets(&self, pages: &Pages) -> bool {
        let norms = self.norms.into_iter().flat_map(|norms| [norms.queries.offset, norms.keys.offset]);
        pages.kind != HeadKind::Latent
            && self.kv.is_none()
            && [self.stride, self.rotated_from, self.half()].iter().all(|n| n.is_multiple_of(PACKET))
            && self
                .angles
                .iter()
                .map(|angles| angles.offset)
                .chain(norms)
                .all(|at| at.is_multiple_of(ALIGNED))
            && self.x.offset.is_multiple_of(ALIGNED)
    }
}

/// Normalises, turns and writes; FP8 pages get the values over `kv_scale`. Norms are launches of their own
/// where heads do not go through in packets. None if there are no tokens.
///
/// # Panics
/// If shapes disagree, or the pairs' number is odd.
pub fn launch(tokens: &ProjectedTokens, pages: &Pages, kv_scale: [f32; 2]) -> Vec<Launch> {
    let ProjectedTokens { x, stride, kv, heads, norms, angles, rotated_from, slots, .. } = *tokens;
    let (key_dim, kv_heads) = (pages.kind.key_dim(), pages.kv_heads);
    let value_dim = if pages.kind == HeadKind::Latent { 0 } else { pages.kind.value_dim() };
    let count = slots.len;
    if count == 0 {
        return Vec::new();
    }
    let half = tokens.half();
    let (own_queries, own_kv) = (heads * key_dim, kv_heads * (key_dim + value_dim));
    assert!(
        x.len == count * stride
            && stride.is_multiple_of(2)
            && stride >= own_queries + if kv.is_some() { 0 } else { own_kv }
            && kv.is_none_or(|(kv, stride)| {
                kv.len == count * stride && stride.is_multiple_of(2) && stride >= own_kv
            })
            && norms.is_none_or(|n| kv.is_none() && n.queries.len == key_dim && n.keys.len == key_dim)
            && angles.iter().all(|a| a.len == count * half)
            && half.is_multiple_of(2)
            && rotated_from.is_multiple_of(2)
            && rotated_from + 2 * half <= key_dim,
        "rope: shapes disagree"
    );
    if tokens.in_packets(pages) {
        return vec![heads_in_packets(tokens, pages, kv_scale)];
    }
    let mut launches = Vec::new();
    if let Some(Norms { queries, keys, eps }) = norms {
        for (weight, first, count_of) in [(queries, 0, heads), (keys, heads, kv_heads)] {
            let heads = Heads { stride, first: first * key_dim, count: count_of, pitch: key_dim };
            launches.extend(rms_norm::launch(
                x,
                None,
                weight,
                eps,
                NormRows { rows: count, width: key_dim, heads },
                x,
            ));
        }
    }
    launches.push(any_heads(tokens, pages, kv_scale, [key_dim, value_dim]));
    launches
}

/// Heads of any size, without norms.
fn any_heads(
    tokens: &ProjectedTokens,
    pages: &Pages,
    kv_scale: [f32; 2],
    [key_dim, value_dim]: [usize; 2],
) -> Launch {
    let ProjectedTokens { x, stride, kv, heads, angles, rotated_from, pairing, slots, .. } = *tokens;
    let kernel = if pages.kv_type == KvType::Fp8 { Kernel::rope_write_fp8 } else { Kernel::rope_write_bf16 };
    let (kv, kv_stride) = kv.unwrap_or_else(|| (x.starting_at(heads * key_dim), stride));
    let sizes = [stride, kv_stride, heads, pages.kv_heads, key_dim, value_dim, rotated_from, tokens.half()];
    let mut arguments = vec![
        x.into(),
        kv.into(),
        angles[0].into(),
        angles[1].into(),
        slots.into(),
        pages.keys.into(),
        pages.values.into(),
    ];
    arguments.extend(sizes.map(Argument::from));
    arguments.extend(ending(pairing, pages, kv_scale));
    Launch {
        kernel,
        grid: [slots.len as u32, 1, 1],
        cluster: 1,
        threads: THREADS as u32,
        shared_bytes: 0,
        arguments,
    }
}

/// Heads in packets, normalised if they are to be.
fn heads_in_packets(tokens: &ProjectedTokens, pages: &Pages, kv_scale: [f32; 2]) -> Launch {
    let ProjectedTokens { x, stride, heads, norms, angles, rotated_from, pairing, slots, .. } = *tokens;
    let kernel = if pages.kv_type == KvType::Fp8 { Kernel::rope_heads_fp8 } else { Kernel::rope_heads_bf16 };
    let dim = pages.kind.key_dim();
    let mut arguments = vec![
        x.into(),
        angles[0].into(),
        angles[1].into(),
        slots.into(),
        norms.map(|norms| norms.queries).into(),
        norms.map(|norms| norms.keys).into(),
        pages.keys.into(),
        pages.values.into(),
    ];
    arguments.extend([stride, heads, pages.kv_heads, dim, rotated_from, tokens.half()].map(Argument::from));
    arguments.extend(ending(pairing, pages, kv_scale));
    arguments.push(norms.map_or(0.0, |norms| norms.eps).into());
    // Few tokens have a block for as many heads as its lanes hold, many a block each.
    let parts = (heads + 2 * pages.kv_heads).div_ceil(HEAD_THREADS * PACKET / dim);
    Launch {
        kernel,
        grid: [(BLOCKS / slots.len).clamp(1, parts) as u32, slots.len as u32, 1],
        cluster: 1,
        threads: HEAD_THREADS as u32,
        shared_bytes: 0,
        arguments,
    }
}

/// What both kernels want to know of pairs and pages.
fn ending(pairing: Pairing, pages: &Pages, kv_scale: [f32; 2]) -> [Argument; 4] {
    let interleaved = u32::from(pairing == Pairing::Interleaved);
    let [key_by, value_by] = kv_scale.map(|scale| Argument::F32(1.0 / scale));
    [interleaved.into(), pages.page_size.trailing_zeros().into(), key_by, value_by]
}
