//! Sixteen floats (or integers) in vector registers, for the few inner loops whose sums must stay there (matrix
//! tiles, attention). Everything else is plain loops over `Lanes` that the compiler vectorises by itself.
//!
//! A value of a [`Simd`] type is the proof that the processor has the instructions: [`crate::isa::Isa::run`]
//! makes it.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512i, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch,
    _mm256_add_epi32, _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cvtepi8_epi16, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps,
    _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_permutevar8x32_ps, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi16, _mm256_slli_epi32,
    _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_xor_ps, _mm512_and_si512,
    _mm512_castsi512_ps, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps,
    _mm512_permutexvar_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_slli_epi32, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_storeu_ps,
};

mod pairs;

#[cfg(target_arch = "x86_64")]
pub(crate) use pairs::Avx512Bf16;
#[cfg(test)]
pub(crate) use pairs::round;
pub(crate) use pairs::{PairDot, Widening, pair};

use crate::lanes::LANES;
use crate::quant::{E2M1, e4m3_scaled};

/// Instructions on sixteen floats. Every implementation gives the same bits.
pub(crate) trait Simd: Copy {
    /// Sixteen floats in registers.
    type Vector: Copy;
    /// Sixteen 32-bit integers in registers.
    type Ints: Copy;
    /// Sixty-four bytes in registers.
    type Bytes: Copy;

    /// Whether 32 such vectors fit the register file: it decides tile sizes, never bits.
    const WIDE: bool;

    fn zero(self) -> Self::Vector;
    fn splat(self, value: f32) -> Self::Vector;
    fn load(self, from: &[f32; LANES]) -> Self::Vector;
    /// Widens bf16 bits, exactly.
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Vector;
    /// The upper halves of 32 bits as bf16, and the lower ones.
    fn load_pairs(self, from: &[u32; LANES]) -> [Self::Vector; 2];
    /// FP8 codes as [`e4m3_scaled`].
    fn load_e4m3_scaled(self, from: &[u8; LANES]) -> Self::Vector;
    /// E2M1 codes in the low halves of bytes.
    fn load_e2m1_low(self, from: &[u8; LANES]) -> Self::Vector;
    /// E2M1 codes in the high halves of bytes.
    fn load_e2m1_high(self, from: &[u8; LANES]) -> Self::Vector;
    /// Sixty-four bytes.
    fn load_bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes;
    /// The low and the high halves of 64 bytes, each as 64 bytes.
    fn load_halves(self, from: &[u8; 4 * LANES]) -> [Self::Bytes; 2];
    fn splat_int(self, value: i32) -> Self::Ints;
    /// Adds to each of sixteen integers the product of its four unsigned bytes with the four signed bytes of `by`,
    /// of which none is -128.
    fn dot(self, sums: Self::Ints, bytes: Self::Bytes, by: i32) -> Self::Ints;
    /// Integers of at most 24 bits.
    fn to_floats(self, ints: Self::Ints) -> Self::Vector;
    /// Asks memory for what lies `bytes` behind `near`; any address is allowed.
    fn prefetch<T>(self, near: *const T, bytes: usize);
    fn store(self, vector: Self::Vector, to: &mut [f32; LANES]);
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, each lane rounded once.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
}

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

/// AVX2 and FMA: two registers.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
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

    /// [`Simd::dot`] of eight integers. The instruction adds pairs of products in 16 bits, which hold those of seven
    /// bits each: the eighth goes by itself.
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

#[cfg(target_arch = "x86_64")]
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

/// AVX-512: one register.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
impl Avx512 {
    /// # Safety
    /// The processor must have AVX-512 F, BW, DQ, VL and VNNI.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

#[cfg(target_arch = "x86_64")]
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
