//! Functions of one number that every instruction set computes alike. The standard library's `exp` and `sin`
//! differ between platforms and do not vectorise; these are short polynomials in fused multiply-adds.

/// Adding this rounds a float below 2^22 to an integer and leaves that integer in the low mantissa bits.
const ROUND_F32: f32 = 12_582_912.0;
/// The same for f64, below 2^51.
const ROUND_F64: f64 = 6_755_399_441_055_744.0;

/// `e^x` with a relative error below 1.5e-7 for `-87 <= x <= 88`; below, 0; above, `e^88`. NaN stays NaN.
///
/// `x = n ln2 + r` with `|r| <= ln2 / 2`; `e^r` is its Taylor series to the seventh power (remainder 5e-9),
/// `2^n` is put into the exponent bits.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = std::f32::consts::LN_2;
    const LN2_LO: f32 = (std::f64::consts::LN_2 - LN2_HI as f64) as f32;
    let vanishes = x < -87.0;
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_F32);
    let n = shifted - ROUND_F32;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, factor);
    }
    // The shift drops everything but n's low bits; 127 is the exponent's bias.
    let result = p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if vanishes { 0.0 } else { result }
}

/// `x / (1 + e^-x)`, also called SiLU or swish (arXiv 1702.03118).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `(sin x, cos x)` with an absolute error below 1e-11, for `|x| <= 2^24`.
///
/// `x = n pi/2 + r` with `|r| <= pi/4`; Taylor series of `r`, then the quadrant `n mod 4` swaps and negates.
#[inline(always)]
pub fn sin_cos(x: f64) -> (f64, f64) {
    const HALF_PI_HI: f64 = std::f64::consts::FRAC_PI_2;
    const HALF_PI_LO: f64 = 6.123_233_995_736_766e-17;
    let shifted = x.mul_add(std::f64::consts::FRAC_2_PI, ROUND_F64);
    let n = shifted - ROUND_F64;
    let r = n.mul_add(-HALF_PI_LO, n.mul_add(-HALF_PI_HI, x));
    let r2 = r * r;
    let mut sin = 1.0 / 6_227_020_800.0;
    for factor in [-1.0 / 39_916_800.0, 1.0 / 362_880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0] {
        sin = r2.mul_add(sin, factor);
    }
    let sin = (r2 * r).mul_add(sin, r);
    let mut cos = 1.0 / 479_001_600.0;
    for factor in [-1.0 / 3_628_800.0, 1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0] {
        cos = r2.mul_add(cos, factor);
    }
    let quadrant = shifted.to_bits();
    let (s, c) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let negated = |x: f64, bit: u64| f64::from_bits(x.to_bits() ^ ((bit & 2) << 62));
    (negated(s, quadrant), negated(c, quadrant.wrapping_add(1)))
}

/// Index of the largest value, the lowest one among equals; 0 for an empty row. NaN never wins.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] || (row[best].is_nan() && !value.is_nan()) {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_its_bound_on_a_dense_sweep() {
        let worst = (-870_000..=880_000)
            .map(|i| {
                let x = i as f32 * 1e-4;
                let exact = f64::from(x).exp();
                ((f64::from(exp(x)) - exact) / exact).abs()
            })
            .fold(0.0, f64::max);
        assert!(worst < 1.5e-7, "{worst:e}");
    }

    #[test]
    fn exp_at_its_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!((exp(f32::NEG_INFINITY), exp(-87.1), exp(f32::MIN)), (0.0, 0.0, 0.0));
        assert_eq!(exp(f32::INFINITY), exp(88.0));
        assert!(exp(-87.0).is_normal() && exp(88.0).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn silu_at_its_edges() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(200.0), 200.0);
        assert!(silu(-200.0).abs() < 1e-35);
    }

    #[test]
    fn sin_cos_is_within_its_bound_in_every_quadrant() {
        for i in 0..400_000_i32 {
            let x = f64::from(i - 200_000) * 83.886_07;
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 1e-11 && (cos - x.cos()).abs() < 1e-11, "{x}");
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }

    #[test]
    fn argmax_takes_the_first_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NAN, -1.0, f32::NAN]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
        assert_eq!(argmax(&[]), 0);
    }
}
