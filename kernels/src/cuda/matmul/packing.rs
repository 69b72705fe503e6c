//! Packs weights for `matmul.cu` and `matmul_sm90.cu`, whose header says how tiles lie. Quantises nothing.

use half::bf16;

use super::{Shape, TILE, Weights};
use crate::cuda::constants::product_few::MXFP4;
use crate::quant::MXFP4_BLOCK;

/// Packs bf16 weights `[outputs, inputs]`.
///
/// # Panics
/// If shapes disagree.
pub fn pack_bf16(shape: Shape, w: &[bf16]) -> Vec<u8> {
    assert!(
        shape.weights == Weights::Bf16 && w.len() == shape.outputs * shape.inputs,
        "matmul: shapes disagree"
    );
    pack(shape, |image, n, k, at| {
        let unit = (k / 8) ^ (n % 8);
        image[(n * 8 + unit) * 16 + k % 8 * 2..][..2].copy_from_slice(&w[at].to_le_bytes());
    })
}

/// Packs integers `[outputs, inputs]`, each within what `shape.weights` holds.
///
/// # Panics
/// If shapes disagree.
pub fn pack_integers(shape: Shape, w: &[i8]) -> Vec<u8> {
    assert!(
        matches!(shape.weights, Weights::Int8 | Weights::Int4) && w.len() == shape.outputs * shape.inputs,
        "matmul: shapes disagree"
    );
    pack(shape, |image, n, k, at| {
        if shape.weights == Weights::Int8 {
            image[byte_place(n, k)] = w[at].cast_unsigned();
        } else {
            or_half(image, half_place(n, k), u16::from((w[at] + 8).cast_unsigned() & 15) << (nibble(k) * 4));
        }
    })
}

/// Packs E4M3 codes `[outputs, inputs]`. A NaN among them counts as 480: its group's scale must be NaN.
///
/// # Panics
/// If shapes disagree.
pub fn pack_fp8(shape: Shape, codes: &[u8]) -> Vec<u8> {
    assert!(
        shape.weights == Weights::Fp8 && codes.len() == shape.outputs * shape.inputs,
        "matmul: shapes disagree"
    );
    pack(shape, |image, n, k, at| {
        let code = u16::from(codes[at]);
        let bits = if k % 16 < 8 {
            (code & 0x80) << 8 | (code & 0x7f) << 4
        } else {
            (code & 0x80) << 4 | (code & 0x70) << 8 | (code & 0xf)
        };
        or_half(image, byte_place(n, k) & !1, bits);
    })
}

/// Packs MXFP4: E2M1 codes `[outputs, inputs / 2]`, the first of a pair in the low half, and E8M0 codes
/// `[outputs, inputs / 32]`.
///
/// # Panics
/// If shapes disagree.
pub fn pack_mxfp4(shape: Shape, codes: &[u8], exponents: &[u8]) -> Vec<u8> {
    let len = shape.outputs * shape.inputs;
    assert!(
        shape.weights == Weights::Mxfp4 && codes.len() == len / 2 && exponents.len() == len / MXFP4_BLOCK,
        "matmul: shapes disagree"
    );
    pack(shape, |image, n, k, at| {
        let code = u16::from(codes[at / 2] >> (at % 2 * 4));
        let (sign, rest) = [(12, 6), (9, 3), (11, 9), (10, 0)][nibble(k)];
        or_half(image, half_place(n, k), (code & 8) << sign | (code & 7) << rest);
        let pair = n / 16 * 8 + n % 8;
        image[MXFP4.codes + pair * 4 + n / 8 % 2 * 2 + k / MXFP4_BLOCK] = exponents[at / MXFP4_BLOCK];
    })
}

/// Which lane of a warp output `n` and input `k` of a tile belong to: lane 4 g + t has inputs 2t, 2t + 1, 2t
/// + 8, 2t + 9 of every sixteen, of output g of eight.
fn lane(n: usize, k: usize) -> usize {
    n % 8 * 4 + k % 8 / 2
}

/// Where a code of one byte lies: a lane has four of each of four steps of sixteen inputs.
fn byte_place(n: usize, k: usize) -> usize {
    ((n / 8 * 32 + lane(n, k)) * 4 + k / 16) * 4 + k % 2 * 2 + k % 16 / 8
}

/// The half word that a code of four bits is one of four in, those of two steps: a lane has two times two
/// words.
fn half_place(n: usize, k: usize) -> usize {
    ((n / 16 * 32 + lane(n, k)) * 4 + n / 8 % 2 * 2 + k / 32) * 4 + k % 2 * 2
}

/// Which of the four.
fn nibble(k: usize) -> usize {
    k / 8 % 4
}

fn or_half(image: &mut [u8], at: usize, bits: u16) {
    for (byte, bits) in image[at..].iter_mut().zip(bits.to_le_bytes()) {
        *byte |= bits;
    }
}

/// Fills every tile's image: `put(image, output in it, input in it, index in the row-major weight)`.
/// Outputs past the last stay zero bytes, which no result is stored of.
fn pack(shape: Shape, put: impl Fn(&mut [u8], usize, usize, usize)) -> Vec<u8> {
    shape.check();
    let tiles = shape.inputs / TILE;
    let mut packed = vec![0; shape.packed_bytes()];
    for (i, image) in packed.chunks_exact_mut(shape.image()).enumerate() {
        let (first_output, first_input) = (i / tiles * TILE, i % tiles * TILE);
        for n in 0..TILE.min(shape.outputs - first_output) {
            for k in 0..TILE {
                put(image, n, k, (first_output + n) * shape.inputs + first_input + k);
            }
        }
    }
    packed
}
