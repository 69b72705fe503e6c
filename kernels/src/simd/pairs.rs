//! Sixteen sums of products of bf16 pairs: what processors call a bf16 dot product. For each sum two fused
//! multiply-adds, the high halves' first, each rounded once: so AVX512_BF16 is defined (Intel's intrinsics
//! guide, `_mm512_dpbf16_ps`), and so it is computed where a processor has it not.
//!
//! The instruction takes what is below 2^-126 for 0, elsewhere it is kept; [`round`] keeps such numbers from
//! arising.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32};
#[cfg(target_arch = "x86_64")]
use std::mem::transmute;

#[cfg(target_arch = "x86_64")]
use super::Avx512;
use super::Simd;
use crate::lanes::LANES;

/// Magnitudes below this, 2^-50, become 0: products of two others, and sums of such, are multiples of 2^-114.
const MAGNITUDE_MIN: f32 = f32::from_bits((127 - 50) << 23);

/// The bf16 nearest to `value`, ties to even, in the upper half of 32 bits; 0 where it is tiny.
#[inline(always)]
pub(crate) fn round(value: f32) -> u32 {
    let bits = value.to_bits();
    // A NaN's payload could round to infinity.
    let rounded = if value.is_nan() { bits | 0x0040_0000 } else { bits + 0x7fff + (bits >> 16 & 1) };
    if value.abs() < MAGNITUDE_MIN { 0 } else { rounded & 0xffff_0000 }
}

/// A pair as the dot product takes it: `first` is added first.
#[inline(always)]
pub(crate) fn pair(first: f32, second: f32) -> u32 {
    round(first) | round(second) >> 16
}

/// The dot product, and the vectors that it adds to. Every implementation gives the same bits for pairs of
/// [`round`]ed numbers.
pub(crate) trait PairDot: Copy {
    /// The instructions on floats.
    type Floats: Simd;
    /// Sixteen pairs in registers.
    type Pairs: Copy;

    fn floats(self) -> Self::Floats;
    fn load(self, from: &[u32; LANES]) -> Self::Pairs;
    /// Adds to each sum the products of one of sixteen pairs with the pair `x`.
    fn add(self, sums: Vector<Self>, pairs: Self::Pairs, x: u32) -> Vector<Self>;
}

/// Sixteen floats of a [`PairDot`].
pub(crate) type Vector<D> = <<D as PairDot>::Floats as Simd>::Vector;

/// On any instruction set: pairs are widened to floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Widening<S>(pub(crate) S);

impl<S: Simd> PairDot for Widening<S> {
    type Floats = S;
    type Pairs = [S::Vector; 2];

    #[inline(always)]
    fn floats(self) -> S {
        self.0
    }

    #[inline(always)]
    fn load(self, from: &[u32; LANES]) -> [S::Vector; 2] {
        self.0.load_pairs(from)
    }

    #[inline(always)]
    fn add(self, sums: S::Vector, [first, second]: [S::Vector; 2], x: u32) -> S::Vector {
        let sums = self.0.mul_add(self.0.splat(f32::from_bits(x & 0xffff_0000)), first, sums);
        self.0.mul_add(self.0.splat(f32::from_bits(x << 16)), second, sums)
    }
}

/// AVX-512 with its bf16 dot product.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
impl Avx512Bf16 {
    /// # Safety
    /// As for [`Avx512::new`], and the processor must have AVX512_BF16.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { Avx512::new() })
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
impl PairDot for Avx512Bf16 {
    type Floats = Avx512;
    type Pairs = __m512i;

    #[inline(always)]
    fn floats(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn load(self, from: &[u32; LANES]) -> __m512i {
        // SAFETY: `from` has 64 bytes; the load needs no alignment.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add(self, sums: __m512, pairs: __m512i, x: u32) -> __m512 {
        // SAFETY: `self` proves the feature; the vectors of pairs differ in name alone.
        unsafe {
            let x = _mm512_set1_epi32(x.cast_signed());
            _mm512_dpbf16_ps(sums, transmute::<__m512i, __m512bh>(pairs), transmute::<__m512i, __m512bh>(x))
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounds_as_bf16_does(bits: u32) {
            let value = f32::from_bits(bits);
            let exact = if value.abs() < MAGNITUDE_MIN { 0.0 } else { bf16::from_f32(value).to_f32() };
            let rounded = f32::from_bits(round(value));
            prop_assert!(rounded.to_bits() == exact.to_bits() || rounded.is_nan() && exact.is_nan());
        }
    }

    #[test]
    fn the_first_of_a_pair_is_the_upper_half() {
        assert_eq!(pair(1.0, -2.0), 0x3f80_c000);
        assert_eq!(pair(f32::NAN, 1e-30) & 0x7fff_ffff, 0x7fc0_0000);
    }
}
