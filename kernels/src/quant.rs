//! What the codes of quantised checkpoints mean, element by element and row by row. Keeping them packed and
//! multiplying with them is `matmul`'s business; quantising, to whole numbers, is
//! `matmul/integers/quantise.rs`'.
//!
//! * FP8 E4M3FN (arXiv 2209.05433; the OCP 8-bit floating point specification): sign, 4 exponent bits (bias
//!   7), 3 mantissa bits; no infinity, NaN where all but the sign is set. A row has one f32 scale per block
//!   of inputs; DeepSeek-V3's `weight_scale_inv` has one for 128 rows by 128 inputs.
//! * MXFP4 (OCP Microscaling Formats specification 1.0): elements E2M1 (sign, 2 exponent bits with bias 1, 1
//!   mantissa bit), two in a byte, the first in the low half; 32 of them share a scale E8M0, `2^(code -
//!   127)`, 255 being NaN.

/// Elements that share a scale in MXFP4.
pub const MXFP4_BLOCK: usize = 32;

/// The values of E2M1's codes.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of an E2M1 code, the low four bits of `code`.
pub fn e2m1(code: u8) -> f32 {
    E2M1[usize::from(code & 15)]
}

/// The value of an E8M0 code: a power of two, or NaN.
pub fn e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is below the normal numbers.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// The value of an E4M3FN code.
pub fn e4m3(code: u8) -> f32 {
    if code & 0x7f == 0x7f { f32::NAN } else { e4m3_scaled(code) * E4M3_UNSCALE }
}

/// [`e4m3`] over 256 (and 480 / 256 instead of NaN): what an f16 with these bits is worth, which is how
/// vector code decodes it.
#[inline(always)]
pub(crate) fn e4m3_scaled(code: u8) -> f32 {
    // The exponent moves from bias 7 to f32's 127, a factor of 2^-120; exact for subnormal codes, too.
    let magnitude = f32::from_bits(u32::from(code & 0x7f) << 20) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | u32::from(code & 0x80) << 24)
}

/// What the values of [`e4m3_scaled`] are multiplied by to be those of [`e4m3`].
pub(crate) const E4M3_UNSCALE: f32 = 256.0;

/// Decodes one MXFP4 row: `codes` `[out.len() / 2]`, `scales` `[out.len() / 32]`. Exact in f32 and in bf16,
/// except where it overflows to infinity.
///
/// # Panics
/// If shapes disagree.
pub fn decode_mxfp4(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    assert!(
        out.len() == 2 * codes.len() && out.len() == MXFP4_BLOCK * scales.len(),
        "decode_mxfp4: shapes disagree"
    );
    let blocks = out.chunks_exact_mut(MXFP4_BLOCK).zip(codes.chunks_exact(MXFP4_BLOCK / 2));
    for ((out, codes), scale) in blocks.zip(scales) {
        let scale = e8m0(*scale);
        for (pair, code) in out.chunks_exact_mut(2).zip(codes) {
            pair[0] = e2m1(*code) * scale;
            pair[1] = e2m1(code >> 4) * scale;
        }
    }
}

/// Decodes one FP8 row: `scales` has one value for each `block` of `codes`, the last maybe cut short. Each
/// product is rounded to f32.
///
/// # Panics
/// If shapes disagree.
pub fn decode_fp8(codes: &[u8], scales: &[f32], block: usize, out: &mut [f32]) {
    assert!(
        out.len() == codes.len() && scales.len() == codes.len().div_ceil(block),
        "decode_fp8: shapes disagree"
    );
    for ((out, codes), scale) in out.chunks_mut(block).zip(codes.chunks(block)).zip(scales) {
        for (out, code) in out.iter_mut().zip(codes) {
            *out = e4m3(*code) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sign, exponent and mantissa of a small float with subnormals, in float64.
    fn small_float(code: u8, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let exponent = i32::from(code >> mantissa_bits & ((1 << exponent_bits) - 1));
        let negative = code >> (mantissa_bits + exponent_bits) & 1 == 1;
        let magnitude = if exponent == 0 {
            mantissa * f64::from(1 - bias).exp2()
        } else {
            (1.0 + mantissa) * f64::from(exponent - bias).exp2()
        };
        if negative { -magnitude } else { magnitude }
    }

    #[test]
    fn every_code_has_its_value() {
        for code in 0..=255 {
            let exact = small_float(code, 4, 3, 7);
            if code & 0x7f == 0x7f {
                assert!(e4m3(code).is_nan());
            } else {
                assert_eq!(f64::from(e4m3(code)).to_bits(), exact.to_bits(), "{code}");
            }
            assert_eq!(f64::from(e4m3_scaled(code) * 256.0).to_bits(), exact.to_bits(), "{code}");
            let power = f64::from(i32::from(code) - 127).exp2();
            assert!(code == 255 || f64::from(e8m0(code)) == power);
        }
        assert!(e8m0(255).is_nan());
        for code in 0..16 {
            assert_eq!(f64::from(e2m1(code)).to_bits(), small_float(code, 2, 1, 1).to_bits());
        }
        assert_eq!((e4m3(0x7e), e4m3(0x01), e4m3(0x80).to_bits()), (448.0, 0.001_953_125, 1 << 31));
    }

    #[test]
    fn rows_are_decoded_in_order() {
        let codes: Vec<u8> = (0..32).map(|i| (i % 16) | ((15 - i % 16) << 4)).collect();
        let mut out = [f32::NAN; 64];
        decode_mxfp4(&codes, &[127, 130], &mut out);
        assert_eq!(out[..4], [0.0, -6.0, 0.5, -4.0]);
        assert_eq!(out[32..36], [0.0, -48.0, 4.0, -32.0]);
        let mut out = [f32::NAN; 5];
        decode_fp8(&[0x38, 0x40, 0xb8, 0x38, 0x7e], &[1.0, 0.5, -2.0], 2, &mut out);
        assert_eq!(out, [1.0, 2.0, -0.5, 0.5, -896.0]);
    }

    #[test]
    fn mxfp4_is_exact_in_bf16() {
        for scale in 0..=252 {
            for code in 0..16 {
                let value = e2m1(code) * e8m0(scale);
                assert_eq!(half::bf16::from_f32(value).to_f32().to_bits(), value.to_bits());
                assert_eq!(
                    f64::from(value),
                    f64::from(e2m1(code)) * f64::from(i32::from(scale) - 127).exp2()
                );
            }
        }
    }
}
