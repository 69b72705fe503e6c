//! [`Simd`] as plain loops over arrays: on every processor, and what the others must agree with.

use super::Simd;
use crate::lanes::LANES;
use crate::quant::{E2M1, e4m3_scaled};

/// What the target guarantees. Vectorised on aarch64; on x86-64 each `mul_add` is a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    type Vector = [f32; LANES];
    type Ints = [i32; LANES];
    type Bytes = [u8; 4 * LANES];

    const WIDE: bool = false;

    #[inline(always)]
    fn zero(self) -> [f32; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [f32; LANES] {
        *from
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> [f32; LANES] {
        from.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_pairs(self, from: &[u32; LANES]) -> [[f32; LANES]; 2] {
        [from.map(|bits| f32::from_bits(bits & 0xffff_0000)), from.map(|bits| f32::from_bits(bits << 16))]
    }

    #[inline(always)]
    fn load_e4m3_scaled(self, from: &[u8; LANES]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            out[lane] = e4m3_scaled(from[lane]);
        }
        out
    }

    #[inline(always)]
    fn load_e2m1_low(self, from: &[u8; LANES]) -> [f32; LANES] {
        from.map(|code| E2M1[usize::from(code & 15)])
    }

    #[inline(always)]
    fn load_e2m1_high(self, from: &[u8; LANES]) -> [f32; LANES] {
        from.map(|code| E2M1[usize::from(code >> 4)])
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 4 * LANES]) -> [u8; 4 * LANES] {
        *from
    }

    #[inline(always)]
    fn load_halves(self, from: &[u8; 4 * LANES]) -> [[u8; 4 * LANES]; 2] {
        [from.map(|byte| byte & 15), from.map(|byte| byte >> 4)]
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> [i32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    fn dot(self, mut sums: [i32; LANES], bytes: [u8; 4 * LANES], by: i32) -> [i32; LANES] {
        let by = by.to_le_bytes().map(|byte| i32::from(byte as i8));
        for lane in 0..LANES {
            for i in 0..4 {
                sums[lane] += i32::from(bytes[4 * lane + i]) * by[i];
            }
        }
        sums
    }

    #[inline(always)]
    fn to_floats(self, ints: [i32; LANES]) -> [f32; LANES] {
        ints.map(|int| int as f32)
    }

    #[inline(always)]
    fn prefetch<T>(self, _: *const T, _: usize) {}

    #[inline(always)]
    fn store(self, vector: [f32; LANES], to: &mut [f32; LANES]) {
        *to = vector;
    }

    #[inline(always)]
    fn mul(self, mut a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        for lane in 0..LANES {
            a[lane] *= b[lane];
        }
        a
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], mut c: [f32; LANES]) -> [f32; LANES] {
        for lane in 0..LANES {
            c[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        c
    }
}
