//! Which instruction sets this machine has, and the call of an operation's body compiled for one of them.
//!
//! A body is written once; `Isa::run` instantiates it per instruction set. Since bodies use only correctly
//! rounded operations (`+ - * /`, `mul_add`, comparisons, integer arithmetic) in an order that the source
//! fixes, every instantiation gives the same bits.

#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512, Avx512Bf16};
use crate::simd::{PairDot, Portable, Simd, Widening};

/// A computation to instantiate per instruction set. Implement `run` with `#[inline(always)]`, and give
/// everything hot that it calls the same attribute: only inlined code is compiled with the wider vectors.
/// Closures have no such attribute; keep vector instructions out of them.
pub(crate) trait Body {
    /// What the computation returns, equal for all instruction sets; `()` where it writes to slices.
    type Out;

    /// Computes, with `simd`'s instructions.
    fn run<S: Simd>(self, simd: S) -> Self::Out;
}

/// A [`Body`] whose hot loop is a dot product of bf16 pairs, which some processors have an instruction for.
pub(crate) trait PairBody {
    /// What the computation returns, equal whether or not the processor has the instruction.
    type Out;

    /// Computes, with `dot`'s instructions.
    fn run<D: PairDot>(self, dot: D) -> Self::Out;
}

/// A body where pairs are widened.
struct Widened<B>(B);

impl<B: PairBody> Body for Widened<B> {
    type Out = B::Out;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> B::Out {
        self.0.run(Widening(simd))
    }
}

/// An instruction set this machine was found to have; there is no other way to get one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// What the target guarantees: NEON on aarch64; SSE2 with `fma` from libm (slow, same bits) on x86-64.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same, but for dot products of bf16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

impl Isa {
    /// The widest instruction set of this machine.
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self(Kind::Baseline))
    }

    /// Every instruction set of this machine that has its own instantiation, narrowest first.
    pub fn available() -> Vec<Self> {
        let baseline = vec![Self(Kind::Baseline)];
        #[cfg(target_arch = "x86_64")]
        let baseline = Self::add_x86_64(baseline);
        baseline
    }

    #[cfg(target_arch = "x86_64")]
    fn add_x86_64(mut found: Vec<Self>) -> Vec<Self> {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        if avx2 {
            found.push(Self(Kind::Avx2));
        }
        if avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
        {
            found.push(Self(Kind::Avx512));
            if is_x86_feature_detected!("avx512bf16") {
                found.push(Self(Kind::Avx512Bf16));
            }
        }
        found
    }

    /// For logs: `avx512_bf16`, `avx512`, `avx2`, `neon` or `scalar`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Baseline if cfg!(target_arch = "aarch64") => "neon",
            Kind::Baseline => "scalar",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// Runs `body` compiled for this instruction set.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn run<B: Body>(self, body: B) -> B::Out {
        match self.0 {
            Kind::Baseline => body.run(Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` makes this value only where the processor has these features.
            Kind::Avx2 => unsafe { avx2(body) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 | Kind::Avx512Bf16 => unsafe { avx512(body) },
        }
    }

    /// [`Self::run`] for dot products of bf16 pairs.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn run_pairs<B: PairBody>(self, body: B) -> B::Out {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Kind::Avx512Bf16 => unsafe { avx512_bf16(body) },
            _ => self.run(Widened(body)),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn avx2<B: Body>(body: B) -> B::Out {
    // SAFETY: this function is compiled for, hence called only with, these features.
    body.run(unsafe { Avx2::new() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(unsafe_code)]
fn avx512<B: Body>(body: B) -> B::Out {
    // SAFETY: as in `avx2`.
    body.run(unsafe { Avx512::new() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
#[allow(unsafe_code)]
fn avx512_bf16<B: PairBody>(body: B) -> B::Out {
    // SAFETY: as in `avx2`.
    body.run(unsafe { Avx512Bf16::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_set_is_detected() {
        assert_eq!(Some(&Isa::detect()), Isa::available().last());
        assert!(["avx512_bf16", "avx512", "avx2", "neon", "scalar"].contains(&Isa::detect().name()));
    }
}
