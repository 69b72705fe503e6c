//! How a weight lies in memory: panels of sixteen outputs, in one of four number types, and how the inner loop
//! reads them. No arithmetic but the exact meaning of a code.

use half::bf16;

use crate::lanes::LANES;
use crate::quant::{E4M3_UNSCALE, MXFP4_BLOCK, e2m1, e4m3, e4m3_scaled, e8m0};
use crate::simd::Simd;

/// Outputs per panel.
pub(super) const PANEL: usize = LANES;

/// How [`PackedMatrix::pack`] keeps a weight in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Four bytes.
    F32,
    /// Two bytes, the upper half of an f32.
    Bf16,
}

/// A weight `[N, K]`, packed.
#[derive(Debug, Clone)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    panels: Panels,
}

#[derive(Debug, Clone)]
pub(super) enum Panels {
    F32(Plain<f32>),
    Bf16(Plain<u16>),
    Fp8(Fp8),
    Mxfp4(Mxfp4),
}

/// Sixteen outputs' values for one input (or their scales for one group of inputs).
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Row<E>([E; PANEL]);

/// Sixteen outputs' codes of one byte.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(super) struct Codes([u8; PANEL]);

/// What the inner loop needs of a weight: for one panel, input after input, sixteen f32.
pub(super) trait Read: Sync {
    /// How many inputs lie in one place of memory; it divides every group.
    const STEP: usize;

    /// A panel's memory of one group.
    type Part<'a>: Copy;

    /// How many inputs share a scale.
    fn group(&self) -> usize;

    /// The memory of the inputs `begin..begin + len`, a group, in a panel.
    fn part(&self, panel: usize, begin: usize, len: usize) -> Self::Part<'_>;

    /// The scales of that group.
    fn scale<S: Simd>(&self, simd: S, panel: usize, begin: usize) -> S::Vector;

    /// The weights of input `k + step` of a part of `len` inputs; `k` is a multiple of `STEP`, above `step`.
    fn load<S: Simd>(
        simd: S,
        part: Self::Part<'_>,
        len: usize,
        k: usize,
        step: usize,
        scale: S::Vector,
    ) -> S::Vector;
}

// === impl PackedMatrix ===

impl PackedMatrix {
    /// Packs a weight of `outputs` rows and `inputs` columns; `fill(n, row)` writes row `n` into `row`
    /// `[inputs]`. With [`WeightType::Bf16`] values are rounded to bf16.
    pub fn pack(
        outputs: usize,
        inputs: usize,
        kept_as: WeightType,
        fill: impl FnMut(usize, &mut [f32]),
    ) -> Self {
        let panels = match kept_as {
            WeightType::F32 => Panels::F32(Plain::pack(outputs, inputs, fill)),
            WeightType::Bf16 => Panels::Bf16(Plain::pack(outputs, inputs, fill)),
        };
        Self { outputs, inputs, panels }
    }

    /// Packs a weight in FP8 E4M3FN with a scale per `block` inputs of a row (below 2^120), and keeps it so;
    /// `fill(n, codes, scales)` writes row `n`'s codes `[inputs]` and scales `[inputs / block, rounded up]`. Where
    /// one scale serves several rows, each is given it. Products have the bits of those with the f32 that
    /// [`crate::quant::decode_fp8`] gives.
    ///
    /// # Panics
    /// If `block` is 0.
    pub fn pack_fp8(
        outputs: usize,
        inputs: usize,
        block: usize,
        fill: impl FnMut(usize, &mut [u8], &mut [f32]),
    ) -> Self {
        Self { outputs, inputs, panels: Panels::Fp8(Fp8::pack(outputs, inputs, block, fill)) }
    }

    /// Packs a weight in MXFP4 and keeps it so; `fill(n, codes, scales)` writes row `n`'s codes `[inputs / 2]`,
    /// the first of a pair in the low half, and scales `[inputs / 32]`. Products have the bits of those with the
    /// f32 that [`crate::quant::decode_mxfp4`] gives.
    ///
    /// # Panics
    /// If `inputs` is not a multiple of [`MXFP4_BLOCK`].
    pub fn pack_mxfp4(outputs: usize, inputs: usize, fill: impl FnMut(usize, &mut [u8], &mut [u8])) -> Self {
        Self { outputs, inputs, panels: Panels::Mxfp4(Mxfp4::pack(outputs, inputs, fill)) }
    }

    /// N.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// K.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub(super) fn panels(&self) -> &Panels {
        &self.panels
    }

    /// Bytes in memory, padding included.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(plain) => size_of_val(plain.rows.as_slice()),
            Panels::Bf16(plain) => size_of_val(plain.rows.as_slice()),
            Panels::Fp8(fp8) => size_of_val(fp8.codes.as_slice()) + size_of_val(fp8.scales.as_slice()),
            Panels::Mxfp4(mx) => size_of_val(mx.codes.as_slice()) + size_of_val(mx.scales.as_slice()),
        }
    }

    /// Copies row `n` into `out` `[K]`: the embedding of token `n`.
    ///
    /// # Panics
    /// If `n` is not below N or `out` is not K long.
    pub fn copy_row(&self, n: usize, out: &mut [f32]) {
        assert!(n < self.outputs && out.len() == self.inputs, "copy_row: out of range");
        let (panel, column) = (n / PANEL, n % PANEL);
        for (k, out) in out.iter_mut().enumerate() {
            *out = match &self.panels {
                Panels::F32(plain) => plain.rows[panel * self.inputs + k].0[column],
                Panels::Bf16(plain) => plain.rows[panel * self.inputs + k].0[column].widen(),
                Panels::Fp8(fp8) => fp8.element(panel, column, k),
                Panels::Mxfp4(mx) => mx.element(panel, column, k),
            };
        }
    }
}

// === impl Plain ===

/// Every element by itself: `[N / 16][K][16]`.
#[derive(Debug, Clone)]
pub(super) struct Plain<E> {
    rows: Vec<Row<E>>,
    inputs: usize,
}

pub(super) trait Element: Copy + Default + Sync + 'static {
    fn load<S: Simd>(simd: S, from: &[Self; PANEL]) -> S::Vector;
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f32; PANEL]) -> S::Vector {
        simd.load(from)
    }

    fn widen(self) -> f32 {
        self
    }

    fn narrow(value: f32) -> Self {
        value
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16; PANEL]) -> S::Vector {
        simd.load_bf16(from)
    }

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }

    fn narrow(value: f32) -> Self {
        bf16::from_f32(value).to_bits()
    }
}

impl<E: Element> Plain<E> {
    fn pack(outputs: usize, inputs: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Self {
        let mut rows = vec![Row([E::default(); PANEL]); outputs.div_ceil(PANEL) * inputs];
        let mut row = vec![0.0; inputs];
        for n in 0..outputs {
            fill(n, &mut row);
            let panel = &mut rows[n / PANEL * inputs..][..inputs];
            for (packed, value) in panel.iter_mut().zip(&row) {
                packed.0[n % PANEL] = E::narrow(*value);
            }
        }
        Self { rows, inputs }
    }
}

impl<E: Element> Read for Plain<E> {
    const STEP: usize = 1;

    type Part<'a> = &'a [Row<E>];

    #[inline(always)]
    fn group(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn part(&self, panel: usize, begin: usize, len: usize) -> &[Row<E>] {
        &self.rows[panel * self.inputs + begin..][..len]
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _: usize, _: usize) -> S::Vector {
        simd.zero()
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, part: &[Row<E>], len: usize, k: usize, _: usize, _: S::Vector) -> S::Vector {
        E::load(simd, &part[..len][k].0)
    }
}

// === impl Fp8 ===

/// Codes `[N / 16][K][16]`, and 256 times the scales (see [`e4m3_scaled`]), `[N / 16][K / block][16]`.
#[derive(Debug, Clone)]
pub(super) struct Fp8 {
    codes: Vec<Codes>,
    scales: Vec<Row<f32>>,
    inputs: usize,
    block: usize,
}

impl Fp8 {
    fn pack(
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

    fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        let scale = self.scales[panel * self.inputs.div_ceil(self.block) + k / self.block].0[column];
        e4m3_scaled(self.codes[panel * self.inputs + k].0[column]) * scale
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
    fn load<S: Simd>(simd: S, part: &[Codes], len: usize, k: usize, _: usize, scale: S::Vector) -> S::Vector {
        simd.mul(simd.load_e4m3_scaled(&part[..len][k].0), scale)
    }
}

// === impl Mxfp4 ===

/// Codes of two inputs in a byte, the first in the low half, `[N / 16][K / 2][16]`; scales as bf16, which holds
/// each exactly, `[N / 16][K / 32][16]`.
#[derive(Debug, Clone)]
pub(super) struct Mxfp4 {
    codes: Vec<Codes>,
    scales: Vec<Row<u16>>,
    inputs: usize,
}

impl Mxfp4 {
    fn pack(outputs: usize, inputs: usize, mut fill: impl FnMut(usize, &mut [u8], &mut [u8])) -> Self {
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
                packed.0[n % PANEL] = u16::narrow(e8m0(*scale));
            }
        }
        Self { codes, scales, inputs }
    }

    fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        let scale = self.scales[(panel * self.inputs + k) / MXFP4_BLOCK].0[column];
        let code = self.codes[panel * (self.inputs / 2) + k / 2].0[column] >> (k % 2 * 4);
        e2m1(code) * scale.widen()
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
