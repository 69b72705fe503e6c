//! Sixteen floats (or integers) in vector registers, for the few inner loops whose sums must stay there
//! (matrix tiles, attention). Everything else is plain loops over `Lanes` that the compiler vectorises by
//! itself.
//!
//! A value of a [`Simd`] type is the proof that the processor has the instructions: [`crate::isa::Isa::run`]
//! makes it.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod pairs;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) use pairs::Avx512Bf16;
#[cfg(test)]
pub(crate) use pairs::round;
pub(crate) use pairs::{PairDot, Widening, pair};
pub(crate) use portable::Portable;

use crate::lanes::LANES;

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
    /// FP8 codes as [`crate::quant::e4m3_scaled`].
    fn load_e4m3_scaled(self, from: &[u8; LANES]) -> Self::Vector;
    /// E2M1 codes in the low halves of bytes.
    fn load_e2m1_low(self, from: &[u8; LANES]) -> Self::Vector;
    /// E2M1 codes in the high halves of bytes.
    fn load_e2m1_high(self, from: &[u8; LANES]) -> Self::Vector;
    /// Loads sixty-four bytes as they are: sixteen fours, as [`Simd::dot`] takes them.
    fn load_bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes;
    /// The low and the high halves of 64 bytes, each as 64 bytes.
    fn load_halves(self, from: &[u8; 4 * LANES]) -> [Self::Bytes; 2];
    fn splat_int(self, value: i32) -> Self::Ints;
    /// Adds to each of sixteen integers the product of its four unsigned bytes with the four signed bytes of
    /// `by`, of which none is -128.
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
