//! What the operations' tests share: adversarial inputs, and the two comparisons (with the oracle, between
//! instruction sets).

use std::num::NonZeroUsize;

use crate::compute::Compute;
use crate::isa::Isa;

/// `n` reproducible values: mostly of order one, with exact zeros, tiny values and outliers of order 100
/// among them, so that nothing averages out and a softmax is not flat.
pub(crate) fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = ((state >> 40) as f32 / (1 << 23) as f32) - 1.0;
            match state % 101 {
                0 => 0.0,
                1 => unit * 1e-20,
                2 => unit * 100.0,
                _ => unit,
            }
        })
        .collect()
}

/// Asserts `|actual - exact| <= tolerance * scale` element by element; `scale` bounds the size of the terms
/// summed.
pub(crate) fn assert_close(actual: &[f32], exact: &[f64], scale: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), exact.len());
    for (i, (a, e)) in actual.iter().zip(exact).enumerate() {
        let error = (f64::from(*a) - e).abs();
        assert!(
            error <= tolerance * scale[i],
            "element {i}: {a} against {e}, error {error:e}, scale {}",
            scale[i]
        );
    }
}

/// Runs `op` on every instruction set with 1, 2 and 3 threads that share work of any size, asserts that all
/// results agree in every bit, and returns the result.
pub(crate) fn everywhere(op: impl Fn(&Compute) -> Vec<f32>) -> Vec<f32> {
    let mut first: Option<Vec<f32>> = None;
    for threads in [1, 2, 3] {
        let compute = self::threads(threads);
        for isa in Isa::available() {
            let result = op(&compute.clone().with_isa(isa));
            let agrees = first.as_ref().is_none_or(|first| same_bits(&result, first));
            assert!(agrees, "{} with {threads} threads differs from what came before", isa.name());
            first.get_or_insert(result);
        }
    }
    first.unwrap()
}

/// `n` threads that share work of any size.
pub(crate) fn threads(n: usize) -> Compute {
    Compute::new(NonZeroUsize::new(n).unwrap()).sharing_everything()
}

/// Equality of bits, which tells `-0.0` from `0.0` and equates a NaN with itself.
pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
