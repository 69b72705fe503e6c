//! Launches `rope.cu`: turns new queries and keys, and writes keys and values to their pages.

use half::bf16;

use super::paged_attention::{HeadKind, KvType, Pages};
use super::{Launch, Slice};
use crate::rope::Pairing;

/// A slot that takes nothing: the token's keys and values are not kept.
pub const NO_SLOT: u32 = u32::MAX;
const THREADS: u32 = 256;

/// New tokens as projections left them: rows `[heads * key_dim | kv_heads * key_dim | kv_heads * value_dim]`, the last part
/// absent for latents.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// The rows; queries are turned in place.
    pub x: Slice<bf16>,
    /// Distance between rows, in elements.
    pub stride: usize,
    /// Keys and values, where they are not in these rows, and the distance between their own rows.
    pub kv: Option<(Slice<bf16>, usize)>,
    /// Query heads.
    pub heads: usize,
    /// Cosines and sines `[tokens, half]`.
    pub angles: [Slice<f32>; 2],
    /// Elements of a head before the part that turns.
    pub rotated_from: usize,
    /// Which elements are pairs.
    pub pairing: Pairing,
    /// Per token, page times page size plus offset, or [`NO_SLOT`].
    pub slots: Slice<u32>,
}

/// Turns and writes; FP8 pages get the values over `kv_scale`. `None` if there are no tokens.
///
/// # Panics
/// If shapes disagree, or the pairs' number is odd.
pub fn launch(tokens: &Tokens, pages: &Pages, kv_scale: [f32; 2]) -> Option<Launch> {
    let Tokens { x, stride, kv, heads, angles, rotated_from, pairing, slots } = *tokens;
    let (key_dim, kv_heads) = (pages.kind.key_dim(), pages.kv_heads);
    let value_dim = if pages.kind == HeadKind::Latent { 0 } else { pages.kind.value_dim() };
    let count = slots.len;
    if count == 0 {
        return None;
    }
    let half = angles[0].len / count;
    let (own_queries, own_kv) = (heads * key_dim, kv_heads * (key_dim + value_dim));
    assert!(
        x.len == count * stride
            && stride.is_multiple_of(2)
            && stride >= own_queries + if kv.is_some() { 0 } else { own_kv }
            && kv.is_none_or(|(kv, stride)| {
                kv.len == count * stride && stride.is_multiple_of(2) && stride >= own_kv
            })
            && angles.iter().all(|a| a.len == count * half)
            && half.is_multiple_of(2)
            && rotated_from.is_multiple_of(2)
            && rotated_from + 2 * half <= key_dim,
        "rope: shapes disagree"
    );
    let name = if pages.kv_type == KvType::Fp8 { "rope_write_fp8" } else { "rope_write_bf16" };
    let (kv, kv_stride) = kv.unwrap_or_else(|| (x.starting_at(own_queries), stride));
    let sizes = [stride, kv_stride, heads, kv_heads, key_dim, value_dim, rotated_from, half];
    let mut arguments = vec![
        x.into(),
        kv.into(),
        angles[0].into(),
        angles[1].into(),
        slots.into(),
        pages.keys.into(),
        pages.values.into(),
    ];
    arguments.extend(sizes.map(super::Argument::from));
    let page_shift = pages.page_size.trailing_zeros();
    arguments.extend([u32::from(pairing == Pairing::Interleaved), page_shift].map(super::Argument::U32));
    arguments.extend(kv_scale.map(|scale| super::Argument::F32(1.0 / scale)));
    Some(Launch {
        module: "rope",
        kernel: name.into(),
        grid: [count as u32, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        arguments,
    })
}
