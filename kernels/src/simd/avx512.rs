//! [`Simd`] in 512-bit registers.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_and_si256, _mm256_cvtepi8_epi16,
    _mm256_loadu_si256, _mm256_set1_epi16, _mm256_slli_epi16, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutexvar_ps,
    _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
    _mm512_srli_epi16, _mm512_srli_epi32, _mm512_storeu_ps,
};

use super::Simd;
use crate::lanes::LANES;
use crate::quant::E2M1;

/// Sixteen floats in one AVX-512 register; a value proves that the processor has the instructions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

#[allow(unsafe_code)]
impl Avx512 {
    /// # Safety
    /// The processor must have AVX-512 F, BW, DQ, VL and VNNI.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

#[allow(unsafe_code)]
impl Simd for Avx512 {
    type Vector = __m512;
    type Ints = __m512i;
    type Bytes = __m512i;

    const WIDE: bool = true;

    #[inline(always)]
    fn zero(self) -> __m512 {
        // SAFETY: `self` proves the feature, here and in every method below.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: as in `zero`.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: `from` has sixteen floats; the load needs no alignment.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> __m512 {
        // SAFETY: `from` has 32 bytes; the load needs no alignment.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    fn load_pairs(self, from: &[u32; LANES]) -> [__m512; 2] {
        // SAFETY: `from` has 64 bytes; the load needs no alignment.
        unsafe {
            let bits = _mm512_loadu_si512(from.as_ptr().cast());
            [
                _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x1_0000))),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)),
            ]
        }
    }

    #[inline(always)]
    fn load_e4m3_scaled(self, from: &[u8; LANES]) -> __m512 {
        // SAFETY: `from` has 16 bytes; the load needs no alignment.
        unsafe {
            // As for AVX2.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(!0x4000)))
        }
    }

    #[inline(always)]
    fn load_e2m1_low(self, from: &[u8; LANES]) -> __m512 {
        // SAFETY: `from` has 16 bytes and the table sixteen floats; only the low four bits choose.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            _mm512_permutexvar_ps(codes, _mm512_loadu_ps(E2M1.as_ptr()))
        }
    }

    #[inline(always)]
    fn load_e2m1_high(self, from: &[u8; LANES]) -> __m512 {
        // SAFETY: as in `load_e2m1_low`.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), _mm512_loadu_ps(E2M1.as_ptr()))
        }
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 4 * LANES]) -> __m512i {
        // SAFETY: `from` has 64 bytes; the load needs no alignment.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_halves(self, from: &[u8; 4 * LANES]) -> [__m512i; 2] {
        let bytes = self.load_bytes(from);
        // SAFETY: as in `zero`.
        unsafe {
            let low = _mm512_set1_epi8(15);
            [_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low)]
        }
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> __m512i {
        // SAFETY: as in `zero`.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, bytes: __m512i, by: i32) -> __m512i {
        // SAFETY: as in `zero`.
        unsafe { _mm512_dpbusd_epi32(sums, bytes, _mm512_set1_epi32(by)) }
    }

    #[inline(always)]
    fn to_floats(self, ints: __m512i) -> __m512 {
        // SAFETY: as in `zero`.
        unsafe { _mm512_cvtepi32_ps(ints) }
    }

    #[inline(always)]
    fn prefetch<T>(self, near: *const T, bytes: usize) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(near.wrapping_byte_add(bytes).cast()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512, to: &mut [f32; LANES]) {
        // SAFETY: as in `load`.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `zero`.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as in `zero`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
}
