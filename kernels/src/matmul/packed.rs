//! How a weight lies in memory: panels of sixteen outputs in one of several number types, and how the inner
//! loop reads those that are multiplied as f32. No arithmetic but the exact meaning of a code. bf16 and whole
//! numbers, which are multiplied as such, are the business of `pairs.rs` and `integers.rs`.

mod narrow;
mod plain;

use super::integers::{IntBits, Integers, Quad4, Quad8};
use super::pairs::Pairs;
use crate::lanes::LANES;
use crate::simd::Simd;
use narrow::{Fp8, Mxfp4};
use plain::Plain;

/// Outputs per panel, one for each lane of a vector.
pub(super) const PANEL: usize = LANES;

/// How [`PackedMatrix::pack`] keeps a weight in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Four bytes a weight: nothing is rounded.
    F32,
    /// Two bytes, the upper half of an f32; products round their input likewise: see `pairs.rs`.
    Bf16,
}

/// What a weight's codes are where it is kept as a checkpoint's small floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SmallFloats {
    /// E4M3 with a scale per so many inputs of a row.
    Fp8 {
        /// How many inputs of a row share a scale.
        block: usize,
    },
    /// MXFP4: E2M1 codes of 4 bits, with an E8M0 scale for every 32 inputs of a row.
    Mxfp4,
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
    F32(Plain),
    Bf16(Pairs),
    Fp8(Fp8),
    Mxfp4(Mxfp4),
    Int8(Integers<Quad8>),
    Int4(Integers<Quad4>),
}

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

    /// Asks memory for what `R` rows will read some inputs after input `k` of these neighbours.
    fn prefetch<S: Simd, const R: usize, const P: usize>(simd: S, parts: [Self::Part<'_>; P], k: usize);

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
            WeightType::Bf16 => Panels::Bf16(Pairs::pack(outputs, inputs, fill)),
        };
        Self { outputs, inputs, panels }
    }

    /// Packs a weight in FP8 E4M3FN with a scale per `block` inputs of a row (below 2^120), and keeps it so;
    /// `fill(n, codes, scales)` writes row `n`'s codes `[inputs]` and scales `[inputs / block, rounded up]`.
    /// Where one scale serves several rows, each is given it. Products have the bits of those with the f32
    /// that [`crate::quant::decode_fp8`] gives.
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

    /// Packs a weight in MXFP4 and keeps it so; `fill(n, codes, scales)` writes row `n`'s codes `[inputs /
    /// 2]`, the first of a pair in the low half, and scales `[inputs / 32]`. Products have the bits of those
    /// with the f32 that [`crate::quant::decode_mxfp4`] gives.
    ///
    /// # Panics
    /// If `inputs` is not a multiple of [`crate::quant::MXFP4_BLOCK`].
    pub fn pack_mxfp4(outputs: usize, inputs: usize, fill: impl FnMut(usize, &mut [u8], &mut [u8])) -> Self {
        Self { outputs, inputs, panels: Panels::Mxfp4(Mxfp4::pack(outputs, inputs, fill)) }
    }

    /// Quantises a weight to whole numbers with a scale per 32 inputs of a row; `fill` as for
    /// [`PackedMatrix::pack`]. Products quantise their input likewise: see `integers.rs`.
    pub fn pack_int(
        outputs: usize,
        inputs: usize,
        bits: IntBits,
        fill: impl FnMut(usize, &mut [f32]),
    ) -> Self {
        let panels = match bits {
            IntBits::Eight => Panels::Int8(Integers::pack(outputs, inputs, fill)),
            IntBits::Four => Panels::Int4(Integers::pack(outputs, inputs, fill)),
        };
        Self { outputs, inputs, panels }
    }

    /// N: how many outputs the weight has, without the padding of its panels.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// K: over how many inputs each output is summed.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub(super) fn panels(&self) -> &Panels {
        &self.panels
    }

    /// Bytes in memory, padding included.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(plain) => plain.bytes(),
            Panels::Bf16(pairs) => pairs.bytes(),
            Panels::Fp8(fp8) => fp8.bytes(),
            Panels::Mxfp4(mx) => mx.bytes(),
            Panels::Int8(integers) => integers.bytes(),
            Panels::Int4(integers) => integers.bytes(),
        }
    }

    /// Whether it is kept as small floats, and which.
    pub fn small_floats(&self) -> Option<SmallFloats> {
        match &self.panels {
            Panels::Fp8(fp8) => Some(SmallFloats::Fp8 { block: fp8.block() }),
            Panels::Mxfp4(_) => Some(SmallFloats::Mxfp4),
            _ => None,
        }
    }

    /// Copies row `n` of a weight in FP8: what [`PackedMatrix::pack_fp8`] was given, but that the scale of a
    /// block with a NaN among its codes is NaN.
    ///
    /// # Panics
    /// If it is kept otherwise, or shapes disagree.
    pub fn copy_fp8_row(&self, n: usize, codes: &mut [u8], scales: &mut [f32]) {
        assert!(n < self.outputs && codes.len() == self.inputs, "copy_fp8_row: out of range");
        assert!(matches!(self.panels, Panels::Fp8(_)), "copy_fp8_row: not in FP8");
        if let Panels::Fp8(fp8) = &self.panels {
            fp8.copy_row(n, codes, scales);
        }
    }

    /// Copies row `n` of a weight in MXFP4: what [`PackedMatrix::pack_mxfp4`] was given.
    ///
    /// # Panics
    /// If it is kept otherwise, or shapes disagree.
    pub fn copy_mxfp4_row(&self, n: usize, codes: &mut [u8], exponents: &mut [u8]) {
        assert!(n < self.outputs && codes.len() * 2 == self.inputs, "copy_mxfp4_row: out of range");
        assert!(matches!(self.panels, Panels::Mxfp4(_)), "copy_mxfp4_row: not in MXFP4");
        if let Panels::Mxfp4(mx) = &self.panels {
            mx.copy_row(n, codes, exponents);
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
                Panels::F32(plain) => plain.element(panel, column, k),
                Panels::Bf16(pairs) => pairs.element(panel, column, k),
                Panels::Fp8(fp8) => fp8.element(panel, column, k),
                Panels::Mxfp4(mx) => mx.element(panel, column, k),
                Panels::Int8(integers) => integers.element(panel, column, k),
                Panels::Int4(integers) => integers.element(panel, column, k),
            };
        }
    }
}
