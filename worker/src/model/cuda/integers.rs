//! Quantises weights as the CUDA kernels want them: a scale per output and 128 inputs, symmetric. The CPU's
//! groups are of 32 inputs (`kernels/src/matmul/integers.rs`).

use keyway_kernels::cuda::matmul::Weights;

/// Of these shares of the largest scale, four bits take the one with the least squared error: a few outliers
/// cut off leave the rest finer.
const INT4_SHARES: [f32; 5] = [1.0, 0.94, 0.88, 0.82, 0.76];

/// Writes the codes of a group's `values`; a value is about its code times the scale returned.
pub(super) fn quantise(values: &[f32], weights: Weights, codes: &mut [i8]) -> f32 {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    if largest == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    if weights == Weights::Int8 {
        let scale = largest / 127.0;
        encode(values, scale, 127.0, codes);
        return scale;
    }
    let scale = |share: f32| largest / 7.0 * share;
    let error = |scale: f32| -> f32 {
        values.iter().map(|value| (value - (value / scale).round().clamp(-7.0, 7.0) * scale).powi(2)).sum()
    };
    let best = INT4_SHARES.into_iter().map(scale).min_by(|a, b| error(*a).total_cmp(&error(*b)));
    let scale = best.unwrap_or(largest / 7.0);
    encode(values, scale, 7.0, codes);
    scale
}

fn encode(values: &[f32], scale: f32, most: f32, codes: &mut [i8]) {
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (value / scale).round().clamp(-most, most) as i8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 128 values of both signs, the largest 3.
    fn values() -> Vec<f32> {
        (0..128).map(|i| (i * 37 % 128) as f32 / 127.0 * 6.0 - 3.0).collect()
    }

    #[test]
    fn a_code_is_off_by_half_a_step_at_most_but_where_outliers_are_cut() {
        for (weights, steps) in [(Weights::Int8, 127.0), (Weights::Int4, 7.0)] {
            let mut codes = [0; 128];
            let scale = quantise(&values(), weights, &mut codes);
            for (value, code) in values().iter().zip(codes) {
                let error = (value - f32::from(code) * scale).abs();
                let cut = (value.abs() - steps * scale).max(0.0);
                assert!(error <= scale * 0.501 + cut, "{value} became {code} of {scale}");
            }
        }
    }

    #[test]
    fn four_bits_cut_an_outlier_off_where_that_is_better_and_zeros_stay() {
        let mut values = vec![0.52; 128];
        values[0] = 4.0;
        let mut codes = [1; 128];
        assert!(quantise(&values, Weights::Int4, &mut codes) < 4.0 / 7.0);
        assert_eq!((quantise(&[0.0; 128], Weights::Int8, &mut codes), codes), (0.0, [0; 128]));
    }
}
