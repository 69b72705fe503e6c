//! How a weight's group of 32 is quantised: codes and a scale in bf16. Done once, when a checkpoint is
//! loaded.

use half::bf16;

use super::GROUP;

/// From here on a scale's reciprocal is finite; weights below are zeros.
const SCALE_MIN: f32 = f32::from_bits((127 - 100) << 23);

/// Codes from -127 to 127, 128 added. The scale is the smallest bf16 that covers the largest magnitude. What
/// is not finite makes the whole group NaN.
pub(super) fn eight(values: &[f32; GROUP]) -> ([u8; GROUP], u16) {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    if values.iter().any(|value| !value.is_finite()) {
        return ([128; GROUP], bf16::NAN.to_bits());
    }
    let scale = round_up(largest / 127.0);
    if scale < SCALE_MIN {
        return ([128; GROUP], 0);
    }
    let inverse = 1.0 / scale;
    let code = |value: f32| (rounded(value * inverse).clamp(-127.0, 127.0) + 128.0) as u8;
    (values.map(code), bf16::from_f32(scale).to_bits())
}

/// Codes from -8 to 7, 8 added. Of the scales that bring the largest magnitude to one of [`FULL_SCALES`] the
/// one with the least squared error; a negative scale lets a positive extreme use the code -8.
pub(super) fn four(values: &[f32; GROUP]) -> ([u8; GROUP], u16) {
    if values.iter().any(|value| !value.is_finite()) {
        return ([8; GROUP], bf16::NAN.to_bits());
    }
    let extreme = values.iter().fold(0.0_f32, |e, value| if value.abs() > e.abs() { *value } else { e });
    let mut best = ([8; GROUP], 0);
    if (extreme / 8.0).abs() < SCALE_MIN {
        return best;
    }
    let mut least = f32::INFINITY;
    for full_scale in FULL_SCALES {
        let scale = bf16::from_f32(extreme / full_scale);
        let inverse = 1.0 / scale.to_f32();
        let codes = values.map(|value| rounded(value * inverse).clamp(-8.0, 7.0));
        let errors = values.iter().zip(&codes).map(|(value, code)| value - code * scale.to_f32());
        let error = errors.map(|error| error * error).sum::<f32>();
        if error < least {
            least = error;
            best = (codes.map(|code| (code + 8.0) as u8), scale.to_bits());
        }
    }
    best
}

/// What the largest magnitude may become; -8 is the end of the range, below it the largest is clipped a
/// little in favour of the others.
const FULL_SCALES: [f32; 5] = [-8.0, -7.5, -8.5, 7.0, 7.5];

/// Rounds magnitudes up to 2^22 to even: what is added and taken away leaves no room for a fraction. Unlike
/// the library's function it needs no call on old processors.
fn rounded(value: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    (value + ROUND) - ROUND
}

/// The smallest bf16 not below `value`, which is positive.
fn round_up(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + 0xffff) & 0xffff_0000)
}
