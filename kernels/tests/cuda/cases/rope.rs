//! Rotation and paged writes: queries in place, keys and values in their pages, nothing else touched.

use half::bf16;
use keyway_kernels::cuda::paged_attention::{HeadKind, KvType, Pages};
use keyway_kernels::cuda::rms_norm::{self, NormRows};
use keyway_kernels::cuda::rope::{NO_SLOT, Norms, ProjectedTokens, launch};
use keyway_kernels::heads::Heads;
use keyway_kernels::quant::e4m3;
use keyway_kernels::rope::{Pairing, oracle};

use super::{BF16, Lab, values, wide};

const PAGE_SIZE: usize = 8;
const PAGES: usize = 5;

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    for kv_type in [KvType::Bf16, KvType::Fp8] {
        one(lab, HeadKind::Dim64, kv_type, Pairing::Halves, 0, 32)?;
        one(lab, HeadKind::Dim128, kv_type, Pairing::Interleaved, 0, 64)?;
        // A part of each head turns: between two parts that do not, and DeepSeek's last 64.
        one(lab, HeadKind::Dim128, kv_type, Pairing::Halves, 16, 20)?;
        one(lab, HeadKind::Latent, kv_type, Pairing::Interleaved, 512, 32)?;
        apart(lab, kv_type)?;
        lab.clear();
        let (halves, interleaved) = (Pairing::Halves, Pairing::Interleaved);
        // The whole of a head, parts of it, and what does not go through in packets.
        for turns in
            [(halves, 0, 32), (interleaved, 0, 32), (halves, 8, 24), (interleaved, 16, 8), (halves, 6, 10)]
        {
            forms(lab, HeadKind::Dim64, kv_type, turns, (5, 2))?;
        }
        for turns in [(halves, 0, 64), (interleaved, 0, 64), (halves, 0, 32), (halves, 16, 20)] {
            forms(lab, HeadKind::Dim128, kv_type, turns, (6, 3))?;
        }
    }
    Ok(())
}

fn one(
    lab: &mut Lab<'_>,
    kind: HeadKind,
    kv_type: KvType,
    pairing: Pairing,
    rotated_from: usize,
    half: usize,
) -> Result<(), String> {
    let what = format!("{kind:?} {kv_type:?} {pairing:?} {rotated_from}+2*{half}");
    let latent = kind == HeadKind::Latent;
    let (heads, kv_heads) = if latent { (3, 1) } else { (4, 2) };
    let (key_dim, value_dim) = (kind.key_dim(), if latent { 0 } else { kind.value_dim() });
    // Two elements behind each row that are nobody's.
    let stride = (heads + kv_heads) * key_dim + kv_heads * value_dim + 2;
    let slots = [3, NO_SLOT, 17, 38];
    let x = values(half as u64, slots.len() * stride);
    let turns: Vec<f32> = (0..slots.len() * half).map(|i| i as f32 * 0.37).collect();
    let cos: Vec<f32> = turns.iter().map(|t| t.cos()).collect();
    let sin: Vec<f32> = turns.iter().map(|t| t.sin()).collect();
    let scale = if kv_type == KvType::Fp8 { [0.5, 0.25] } else { [1.0; 2] };

    let bytes = if kv_type == KvType::Fp8 { 1 } else { 2 };
    let keys = lab.poisoned::<u8>(PAGES * PAGE_SIZE * kv_heads * key_dim * bytes)?;
    let values =
        if latent { None } else { Some(lab.poisoned(PAGES * PAGE_SIZE * kv_heads * value_dim * bytes)?) };
    let pages = Pages { keys, values, kv_type, kind, kv_heads, page_size: PAGE_SIZE };
    let device_x = lab.upload(&x)?;
    let angles = [lab.upload(&cos)?, lab.upload(&sin)?];
    let tokens = ProjectedTokens {
        x: device_x,
        stride,
        kv: None,
        heads,
        norms: None,
        angles,
        rotated_from,
        pairing,
        slots: lab.upload(&slots)?,
    };
    lab.launch(launch(&tokens, &pages, scale))?;

    let turned = turned(&x, stride, heads + kv_heads, key_dim, pairing, rotated_from, [&cos, &sin]);
    let out = lab.download(device_x)?;
    let row_scale = 150.0;
    for (row, (out, x)) in out.chunks(stride).zip(x.chunks(stride)).enumerate() {
        let (q, rest) = out.split_at(heads * key_dim);
        let exact = &turned[row * stride..][..q.len()];
        lab.close(&format!("{what}: queries"), q, exact, |i| exact[i].abs() * BF16 + row_scale * 1e-6)?;
        lab.same(&format!("{what}: what is not a query"), rest, &x[heads * key_dim..])?;
    }
    let (vectors, dim) = (heads * key_dim, key_dim);
    written(lab, &what, keys, &slots, kv_heads, dim, kv_type, scale[0], |row, i| {
        turned[row * stride + vectors + i]
    })?;
    if let Some(pages) = values {
        let at = (heads + kv_heads) * key_dim;
        written(lab, &what, pages, &slots, kv_heads, value_dim, kv_type, scale[1], |row, i| {
            f64::from(x[row * stride + at + i].to_f32())
        })?;
    }
    Ok(())
}

/// Latents in rows of their own: what they are beside the queries.
fn apart(lab: &mut Lab<'_>, kv_type: KvType) -> Result<(), String> {
    let (heads, dim, half) = (3, HeadKind::Latent.key_dim(), 32);
    let (queries, stride) = (heads * dim, (heads + 1) * dim);
    let slots = [3, NO_SLOT, 17, 38];
    let x = values(9, slots.len() * stride);
    let angles: Vec<f32> = (0..slots.len() * half).map(|i| (i as f32 * 0.37).cos()).collect();
    let mut results = Vec::new();
    for own in [false, true] {
        let keys = lab.upload(&vec![0_u8; PAGES * PAGE_SIZE * dim * 2])?;
        let kind = HeadKind::Latent;
        let pages = Pages { keys, values: None, kv_type, kind, kv_heads: 1, page_size: PAGE_SIZE };
        let part = |from: usize, to: usize| -> Vec<bf16> {
            x.chunks(stride).flat_map(|row| row[from..to].to_vec()).collect()
        };
        let (x, kv) = if own {
            let kv = lab.upload(&part(queries, stride))?;
            (lab.upload(&part(0, queries))?, Some((kv, dim)))
        } else {
            (lab.upload(&x)?, None)
        };
        let tokens = ProjectedTokens {
            x,
            stride: if own { queries } else { stride },
            kv,
            heads,
            norms: None,
            angles: [lab.upload(&angles)?, lab.upload(&angles)?],
            rotated_from: 512,
            pairing: Pairing::Interleaved,
            slots: lab.upload(&slots)?,
        };
        lab.launch(launch(&tokens, &pages, [1.0; 2]))?;
        let turned = lab.download(x)?;
        let turned = turned.chunks(tokens.stride).flat_map(|row| row[..queries].to_vec());
        results.push((turned.collect::<Vec<bf16>>(), lab.download(keys)?));
    }
    lab.same("queries without latents beside them", &results[1].0, &results[0].0)?;
    lab.same("latents in rows of their own", &results[1].1, &results[0].1)
}

/// Heads in packets and not, norms on the way and before: the same queries and the same pages.
fn forms(
    lab: &mut Lab<'_>,
    kind: HeadKind,
    kv_type: KvType,
    (pairing, rotated_from, half): (Pairing, usize, usize),
    (heads, kv_heads): (usize, usize),
) -> Result<(), String> {
    let (dim, slots) = (kind.key_dim(), [3, NO_SLOT, 17, 38]);
    let (rows, width) = (slots.len(), (heads + 2 * kv_heads) * dim);
    let x = values(half as u64, rows * width);
    let turns: Vec<f32> = (0..rows * half).map(|i| i as f32 * 0.37).collect();
    let turns = [turns.iter().map(|t| t.cos()).collect::<Vec<_>>(), turns.iter().map(|t| t.sin()).collect()];
    let angles = [lab.upload(&turns[0])?, lab.upload(&turns[1])?];
    let (queries, keys) = (lab.upload(&values(71, dim))?, lab.upload(&values(72, dim))?);
    let norms = Norms { queries, keys, eps: 1e-6 };
    let slots = lab.upload(&slots)?;
    let mut results = Vec::new();
    // Rows whose distance is no multiple of 8 do not go through in packets, nor does a norm take them.
    for (normed, before, more) in [(false, false, 2), (false, false, 0), (true, true, 0), (true, false, 0)] {
        let stride = width + more;
        let rows_of = x.chunks(width).flat_map(|row| [row, &vec![bf16::ONE; more]].concat());
        let x = lab.upload(&rows_of.collect::<Vec<bf16>>())?;
        if before {
            for (weight, first, count) in [(queries, 0, heads), (keys, heads, kv_heads)] {
                let heads = Heads { stride, first: first * dim, count, pitch: dim };
                let of = NormRows { rows, width: dim, heads };
                lab.launch(rms_norm::launch(x, None, weight, norms.eps, of, x))?;
            }
        }
        let bytes = PAGES * PAGE_SIZE * kv_heads * dim * if kv_type == KvType::Fp8 { 1 } else { 2 };
        let (keys, values) = (lab.poisoned::<u8>(bytes)?, lab.poisoned::<u8>(bytes)?);
        let pages = Pages { keys, values: Some(values), kv_type, kind, kv_heads, page_size: PAGE_SIZE };
        let norms = (normed && !before).then_some(norms);
        let tokens =
            ProjectedTokens { x, stride, kv: None, heads, norms, angles, rotated_from, pairing, slots };
        lab.launch(launch(&tokens, &pages, [0.5, 0.25]))?;
        let out = lab.download(x)?;
        let out = out.chunks(stride).flat_map(|row| row[..heads * dim].to_vec()).collect::<Vec<bf16>>();
        results.push((out, lab.download(keys)?, lab.download(values)?));
    }
    let what = format!("{kind:?} {kv_type:?} {pairing:?} {rotated_from}+2*{half}");
    for (pair, of) in results.chunks(2).zip(["in packets", "with norms on the way"]) {
        lab.same(&format!("queries {of}, {what}"), &pair[1].0, &pair[0].0)?;
        lab.same(&format!("keys {of}, {what}"), &pair[1].1, &pair[0].1)?;
        lab.same(&format!("values {of}, {what}"), &pair[1].2, &pair[0].2)?;
    }
    lab.clear();
    Ok(())
}

/// The rows with their first `count` heads turned, in float64.
fn turned(
    x: &[bf16],
    stride: usize,
    count: usize,
    dim: usize,
    pairing: Pairing,
    from: usize,
    angles: [&[f32]; 2],
) -> Vec<f64> {
    let x = wide(x);
    let half = angles[0].len() / (x.len() / stride);
    let mut out: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
    for row in 0..x.len() / stride {
        let of_row = row * half..(row + 1) * half;
        for head in 0..count {
            let at = row * stride + head * dim + from;
            let part = oracle(
                &x[at..at + 2 * half],
                pairing,
                &angles[0][of_row.clone()],
                &angles[1][of_row.clone()],
            );
            out[at..at + 2 * half].copy_from_slice(&part);
        }
    }
    out
}

/// Every vector of the pages: the token's whose slot it is, else poison.
#[allow(clippy::too_many_arguments, reason = "one page layout, described once")]
fn written(
    lab: &mut Lab<'_>,
    what: &str,
    pages: keyway_kernels::cuda::Slice<u8>,
    slots: &[u32],
    kv_heads: usize,
    dim: usize,
    kv_type: KvType,
    scale: f32,
    exact: impl Fn(usize, usize) -> f64,
) -> Result<(), String> {
    let bytes = lab.download(pages)?;
    let size = if kv_type == KvType::Fp8 { 1 } else { 2 };
    for (vector, bytes) in bytes.chunks(dim * size).enumerate() {
        let (page, head, offset) =
            (vector / PAGE_SIZE / kv_heads, vector / PAGE_SIZE % kv_heads, vector % PAGE_SIZE);
        let Some(row) = slots.iter().position(|slot| *slot as usize == page * PAGE_SIZE + offset) else {
            lab.same(&format!("{what}: a slot of nobody"), bytes, &vec![0xff; bytes.len()])?;
            continue;
        };
        let exact: Vec<f64> = (0..dim).map(|i| exact(row, head * dim + i)).collect();
        let stored: Vec<f32> = match kv_type {
            KvType::Bf16 => bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            KvType::Fp8 => bytes.iter().map(|b| e4m3(*b) * scale).collect(),
        };
        // E4M3 has 4 bits and steps of 2^-9 below 2^-6; the outliers lie below its 448.
        let tolerance = |i: usize| match kv_type {
            KvType::Bf16 => f64::abs(exact[i]) * BF16 + 1.5e-4,
            KvType::Fp8 => f64::abs(exact[i]) / 16.0 * 1.01 + f64::from(scale) / 1024.0 + 1.5e-4,
        };
        lab.close(&format!("{what}: a written vector"), &stored, &exact, tolerance)?;
    }
    Ok(())
}
