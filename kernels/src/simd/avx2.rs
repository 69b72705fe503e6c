//! [`Simd`] in pairs of 256-bit registers.

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32,
    _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cvtepi8_epi16,
    _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps,
    _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_permutevar8x32_ps, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi16, _mm256_slli_epi32,
    _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_xor_ps,
};

use super::Simd;
use crate::lanes::LANES;
use crate::quant::E2M1;

/// AVX2 and FMA: two registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

#[allow(unsafe_code)]
impl Avx2 {
    /// # Safety
    /// The processor must have AVX2, FMA and F16C.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }

    /// Sixteen bytes as 32-bit integers.
    #[allow(clippy::unused_self)] // the proof that the processor has the instructions
    #[inline(always)]
    fn widen(self, from: &[u8; LANES]) -> [__m256i; 2] {
        let from = from.as_ptr();
        // SAFETY: both halves lie in `from`'s sixteen bytes; the loads need no alignment.
        unsafe {
            [
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8).cast())),
            ]
        }
    }

    /// [`Simd::dot`] of eight integers. The instruction adds pairs of products in 16 bits, which hold those
    /// of seven bits each: the eighth goes by itself.
    #[allow(clippy::unused_self)] // as for `widen`
    #[inline(always)]
    fn dot_half(self, sums: __m256i, bytes: __m256i, by: i32) -> __m256i {
        // SAFETY: `self` proves the feature.
        unsafe {
            let (by, ones) = (_mm256_set1_epi32(by), _mm256_set1_epi16(1));
            let low = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
            let high = _mm256_andnot_si256(_mm256_set1_epi8(0x7f), bytes);
            let low = _mm256_madd_epi16(_mm256_maddubs_epi16(low, by), ones);
            let high = _mm256_madd_epi16(_mm256_maddubs_epi16(high, by), ones);
            _mm256_add_epi32(_mm256_add_epi32(sums, low), high)
        }
    }

    /// The E2M1 codes in the low four bits: the low three choose a magnitude, the fourth is the sign.
    #[allow(clippy::unused_self)] // as for `widen`
    #[inline(always)]
    fn e2m1(self, codes: __m256i) -> __m256 {
        // SAFETY: `self` proves the feature; the first half of the table has eight floats.
        unsafe {
            let magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1.as_ptr()), codes);
            let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), _mm256_set1_epi32(i32::MIN));
            _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign))
        }
    }
}

#[allow(unsafe_code)]
impl Simd for Avx2 {
    type Vector = [__m256; 2];
    type Ints = [__m256i; 2];
    type Bytes = [__m256i; 2];

    const WIDE: bool = false;

    #[inline(always)]
    fn zero(self) -> [__m256; 2] {
        // SAFETY: `self` proves the feature, here and in every method below.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; 2] {
        // SAFETY: as in `zero`.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [__m256; 2] {
        let from = from.as_ptr();
        // SAFETY: both halves lie in `from`'s sixteen floats; the loads need no alignment.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> [__m256; 2] {
        let from = from.as_ptr();
        // SAFETY: as in `load`, with halves of 16 bytes.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    fn load_pairs(self, from: &[u32; LANES]) -> [[__m256; 2]; 2] {
        let from = from.as_ptr();
        // SAFETY: both halves lie in `from`'s 64 bytes; the loads need no alignment.
        unsafe {
            let bits = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())];
            let upper = _mm256_set1_epi32(-0x1_0000);
            [
                bits.map(|bits| _mm256_castsi256_ps(_mm256_and_si256(bits, upper))),
                bits.map(|bits| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))),
            ]
        }
    }

    #[inline(always)]
    fn load_e4m3_scaled(self, from: &[u8; LANES]) -> [__m256; 2] {
        // SAFETY: `from` has 16 bytes; the load needs no alignment.
        unsafe {
            // Sign-extended and shifted, a code is an f16 but for one copy of the sign in the exponent.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            let half = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(!0x4000));
            let high = _mm256_extracti128_si256::<1>(half);
            [_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    fn load_e2m1_low(self, from: &[u8; LANES]) -> [__m256; 2] {
        self.widen(from).map(|codes| self.e2m1(codes))
    }

    #[inline(always)]
    fn load_e2m1_high(self, from: &[u8; LANES]) -> [__m256; 2] {
        let [low, high] = self.widen(from);
        // SAFETY: as in `zero`.
        let [low, high] = unsafe { [_mm256_srli_epi32::<4>(low), _mm256_srli_epi32::<4>(high)] };
        [self.e2m1(low), self.e2m1(high)]
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 4 * LANES]) -> [__m256i; 2] {
        let from = from.as_ptr();
        // SAFETY: both halves lie in `from`'s 64 bytes; the loads need no alignment.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }

    #[inline(always)]
    fn load_halves(self, from: &[u8; 4 * LANES]) -> [[__m256i; 2]; 2] {
        let bytes = self.load_bytes(from);
        // SAFETY: as in `zero`.
        unsafe {
            let low = _mm256_set1_epi8(15);
            let high = bytes.map(|bytes| _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low));
            [bytes.map(|bytes| _mm256_and_si256(bytes, low)), high]
        }
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> [__m256i; 2] {
        // SAFETY: as in `zero`.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    fn dot(self, sums: [__m256i; 2], bytes: [__m256i; 2], by: i32) -> [__m256i; 2] {
        [self.dot_half(sums[0], bytes[0], by), self.dot_half(sums[1], bytes[1], by)]
    }

    #[inline(always)]
    fn to_floats(self, ints: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: as in `zero`.
        unsafe { [_mm256_cvtepi32_ps(ints[0]), _mm256_cvtepi32_ps(ints[1])] }
    }

    #[inline(always)]
    fn prefetch<T>(self, near: *const T, bytes: usize) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(near.wrapping_byte_add(bytes).cast()) }
    }

    #[inline(always)]
    fn store(self, vector: [__m256; 2], to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: as in `load`.
        unsafe {
            _mm256_storeu_ps(to, vector[0]);
            _mm256_storeu_ps(to.add(8), vector[1]);
        }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as in `zero`.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as in `zero`.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
}
