//! Weights in the small floats of checkpoints, FP8 and MXFP4, kept as their codes: panels of sixteen outputs,
//! one after another.

use half::bf16;

use super::{PANEL, Read};
use crate::quant::{E4M3_UNSCALE, MXFP4_BLOCK, e2m1, e4m3, e4m3_scaled, e8m0};
use crate::simd::Simd;

/// Sixteen outputs' scales for one group of inputs.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(in crate::matmul) struct Row<E>([E; PANEL]);

/// Sixteen outputs' codes of one byte.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(in crate::matmul) struct Codes([u8; PANEL]);

// === impl Fp8 ===

/// Codes `[N / 16][K][16]`, and 256 times the scales (see [`e4m3_scaled`]), `[N / 16][K / block][16]`.
#[derive(Debug, Clone)]
pub(in crate::matmul) struct Fp8 {
    codes: Vec<Codes>,
    scales: Vec<Row<f32>>,
    inputs: usize,
    block: usize,
}

impl Fp8 {
    pub(super) fn pack(
        outputs: usize,
        inputs: usize,
        block: usize,
        mut fill: impl FnMut(usize, &mut [u8], &mut [f32]),
    ) -> Self {
        assert!(block > 0, "pack_fp8: the block is 0");
        let (panels, blocks) = (outputs.div_ceil(PANEL), inputs.div_ceil(block));
        let mut codes = vec![Codes([0; PANEL]); panels * inputs];
        let mut scales = vec![Row([0.0; PANEL]); panels * blocks];
        let (mut row, mut row_scales) = (vec![0; inputs], vec![0.0; blocks]);
        for n in 0..outputs {
            fill(n, &mut row, &mut row_scales);
            // Vector code reads a NaN as a number: its block's scale carries it instead. The output is NaN
            // either way.
            for (codes, scale) in row.chunks(block).zip(&mut row_scales) {
                *scale = if codes.iter().any(|code| e4m3(*code).is_nan()) { f32::NAN } else { *scale };
            }
            for (packed, code) in codes[n / PANEL * inputs..].iter_mut().zip(&row) {
                packed.0[n % PANEL] = *code;
            }
            for (packed, scale) in scales[n / PANEL * blocks..].iter_mut().zip(&row_scales) {
                packed.0[n % PANEL] = scale * E4M3_UNSCALE;
            }
        }
        Self { codes, scales, inputs, block }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.codes.as_slice()) + size_of_val(self.scales.as_slice())
    }

    pub(super) fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        let scale = self.scales[panel * self.inputs.div_ceil(self.block) + k / self.block].0[column];
        e4m3_scaled(self.codes[panel * self.inputs + k].0[column]) * scale
    }

    pub(super) fn block(&self) -> usize {
        self.block
    }

    /// Row `n`'s codes, and scales, one for each block.
    pub(super) fn copy_row(&self, n: usize, codes: &mut [u8], scales: &mut [f32]) {
        let (panel, column, blocks) = (n / PANEL, n % PANEL, self.inputs.div_ceil(self.block));
        assert!(scales.len() == blocks, "copy_row: a scale for each block");
        for (code, packed) in codes.iter_mut().zip(&self.codes[panel * self.inputs..]) {
            *code = packed.0[column];
        }
        for (scale, packed) in scales.iter_mut().zip(&self.scales[panel * blocks..]) {
            *scale = packed.0[column] / E4M3_UNSCALE;
        }
    }
}

impl Read for Fp8 {
    const STEP: usize = 1;

    type Part<'a> = &'a [Codes];

    #[inline(always)]
    fn group(&self) -> usize {
        self.block
    }

    #[inline(always)]
    fn part(&self, panel: usize, begin: usize, len: usize) -> &[Codes] {
        &self.codes[panel * self.inputs + begin..][..len]
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, panel: usize, begin: usize) -> S::Vector {
        simd.load(&self.scales[panel * self.inputs.div_ceil(self.block) + begin / self.block].0)
    }

    #[inline(always)]
    fn prefetch<S: Simd, const R: usize, const P: usize>(_: S, _: [&[Codes]; P], _: usize) {}

    #[inline(always)]
    fn load<S: Simd>(simd: S, part: &[Codes], len: usize, k: usize, _: usize, scale: S::Vector) -> S::Vector {
        simd.mul(simd.load_e4m3_scaled(&part[..len][k].0), scale)
    }
}

// === impl Mxfp4 ===

/// Codes of two inputs in a byte, the first in the low half, `[N / 16][K / 2][16]`; scales as bf16, which
/// holds each exactly, `[N / 16][K / 32][16]`.
#[derive(Debug, Clone)]
pub(in crate::matmul) struct Mxfp4 {
    codes: Vec<Codes>,
    scales: Vec<Row<u16>>,
    inputs: usize,
}

impl Mxfp4 {
    pub(super) fn pack(
        outputs: usize,
        inputs: usize,
        mut fill: impl FnMut(usize, &mut [u8], &mut [u8]),
    ) -> Self {
        assert!(inputs.is_multiple_of(MXFP4_BLOCK), "pack_mxfp4: the last block is not whole");
        let (panels, pairs, blocks) = (outputs.div_ceil(PANEL), inputs / 2, inputs / MXFP4_BLOCK);
        let mut codes = vec![Codes([0; PANEL]); panels * pairs];
        let mut scales = vec![Row([0; PANEL]); panels * blocks];
        let (mut row, mut row_scales) = (vec![0; pairs], vec![0; blocks]);
        for n in 0..outputs {
            fill(n, &mut row, &mut row_scales);
            for (packed, code) in codes[n / PANEL * pairs..].iter_mut().zip(&row) {
                packed.0[n % PANEL] = *code;
            }
            for (packed, scale) in scales[n / PANEL * blocks..].iter_mut().zip(&row_scales) {
                packed.0[n % PANEL] = bf16::from_f32(e8m0(*scale)).to_bits();
            }
        }
        Self { codes, scales, inputs }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.codes.as_slice()) + size_of_val(self.scales.as_slice())
    }

    pub(super) fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        let scale = self.scales[(panel * self.inputs + k) / MXFP4_BLOCK].0[column];
        let code = self.codes[panel * (self.inputs / 2) + k / 2].0[column] >> (k % 2 * 4);
        e2m1(code) * bf16::from_bits(scale).to_f32()
    }

    /// Row `n`'s codes, two in a byte, and exponents, one for each block.
    pub(super) fn copy_row(&self, n: usize, codes: &mut [u8], exponents: &mut [u8]) {
        let (panel, column, blocks) = (n / PANEL, n % PANEL, self.inputs / MXFP4_BLOCK);
        assert!(exponents.len() == blocks, "copy_row: an exponent for each block");
        for (code, packed) in codes.iter_mut().zip(&self.codes[panel * (self.inputs / 2)..]) {
            *code = packed.0[column];
        }
        for (exponent, packed) in exponents.iter_mut().zip(&self.scales[panel * blocks..]) {
            // A bf16's exponent is E8M0's code, of subnormal 2^-127 and of NaN too.
            *exponent = (packed.0[column] >> 7) as u8;
        }
    }
}

impl Read for Mxfp4 {
    const STEP: usize = 2;

    type Part<'a> = &'a [Codes];

    #[inline(always)]
    fn group(&self) -> usize {
        MXFP4_BLOCK
    }

    #[inline(always)]
    fn part(&self, panel: usize, begin: usize, len: usize) -> &[Codes] {
        &self.codes[panel * (self.inputs / 2) + begin / 2..][..len / 2]
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, panel: usize, begin: usize) -> S::Vector {
        simd.load_bf16(&self.scales[(panel * self.inputs + begin) / MXFP4_BLOCK].0)
    }

    #[inline(always)]
    fn prefetch<S: Simd, const R: usize, const P: usize>(_: S, _: [&[Codes]; P], _: usize) {}

    #[inline(always)]
    fn load<S: Simd>(
        simd: S,
        part: &[Codes],
        len: usize,
        k: usize,
        step: usize,
        scale: S::Vector,
    ) -> S::Vector {
        let codes = &part[..len / 2][k / 2].0;
        simd.mul(if step == 0 { simd.load_e2m1_low(codes) } else { simd.load_e2m1_high(codes) }, scale)
    }
}
