//! The frequencies of a rotary embedding, and how models stretch them for contexts longer than they were
//! first trained on. No angles, no positions.

use std::f64::consts::TAU;

/// How the base frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// They are used as they are.
    None,
    /// All divided by `factor`.
    Linear {
        /// What every frequency is divided by, from the checkpoint's configuration.
        factor: f64,
    },
    /// Llama 3's: long wavelengths divided by `factor`, short ones kept, a linear blend between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length of the first training, in positions.
        original_max_position: f64,
    },
    /// YaRN (arXiv 2309.00071): as Llama 3's, but the blend is linear in the pair's index, and cosines and
    /// sines are scaled.
    Yarn {
        /// Divisor of the frequencies that turn seldom.
        factor: f64,
        /// Pairs that turn more often than this within the first training's context are kept.
        beta_fast: f64,
        /// Pairs that turn less often than this are divided.
        beta_slow: f64,
        /// Context length of the first training, in positions.
        original_max_position: f64,
        /// Whether the two bounds of the blend are rounded outwards to whole pairs (all models but gpt-oss).
        truncate: bool,
        /// What cosines and sines are multiplied by; [`RopeScaling::yarn_attention_factor`] where a model
        /// does not say.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// YaRN's attention factor as transformers derives it: `m(mscale) / m(mscale_all_dim)` where a model
    /// names both (DeepSeek), else `m(1)`; `m(s) = 0.1 s ln(factor) + 1`, and 1 where nothing is stretched.
    pub fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
        let m = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        match (mscale, mscale_all_dim) {
            (Some(scale), Some(all_dim)) if scale != 0.0 && all_dim != 0.0 => m(scale) / m(all_dim),
            _ => m(1.0),
        }
    }

    /// What cosines and sines are multiplied by.
    pub(super) fn attention_factor(&self) -> f64 {
        match *self {
            Self::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// Radians per position of pair `pair` of `dim / 2`.
    pub(super) fn frequency(&self, pair: usize, dim: usize, theta: f64) -> f64 {
        let base = theta.powf(-((2 * pair) as f64) / dim as f64);
        // The share of the base frequency that is kept; the rest is divided by the factor.
        let blend = |keep: f64, factor: f64| keep * base + (1.0 - keep) * base / factor;
        match *self {
            Self::None => base,
            Self::Linear { factor } => base / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let turns = original_max_position * base / TAU;
                let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                blend(keep.clamp(0.0, 1.0), factor)
            }
            Self::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } => {
                // The (fractional) pair that turns `turns` times within the first training's context.
                let pair_of = |turns: f64| {
                    dim as f64 * (original_max_position / (turns * TAU)).ln() / (2.0 * theta.ln())
                };
                let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                let high = if low == high { high + 0.001 } else { high };
                blend(1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0), factor)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192.0,
        };
        // With a head of two there is one pair, of frequency 1: the wavelength is chosen through the context.
        let scaled = |turns: f64| match scaling {
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => {
                let original_max_position = turns * TAU;
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position }
                    .frequency(0, 2, 10_000.0)
            }
            _ => f64::NAN,
        };
        assert_eq!((scaled(4.1), scaled(0.9)), (1.0, 1.0 / 8.0));
        assert!((scaled(2.5) - (0.5 + 0.5 / 8.0)).abs() < 1e-12);
        assert_eq!(RopeScaling::Linear { factor: 4.0 }.frequency(0, 2, 10_000.0), 0.25);
    }

    /// Reference: `_compute_yarn_parameters` of transformers 5.23 for the published settings of gpt-oss
    /// (theta 150000, factor 32, 4096 positions, untruncated) and DeepSeek-V3 (theta 10000, factor 40, 4096
    /// positions, mscale = mscale_all_dim = 1), heads of 64.
    #[test]
    fn yarn_gives_the_frequencies_of_transformers() {
        let yarn = |factor: f64, truncate, attention_factor| RopeScaling::Yarn {
            factor,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096.0,
            truncate,
            attention_factor,
        };
        let gpt_oss = yarn(32.0, false, RopeScaling::yarn_attention_factor(32.0, None, None));
        let deepseek = yarn(40.0, true, RopeScaling::yarn_attention_factor(40.0, Some(1.0), Some(1.0)));
        let expected = [
            (0, 1.0, 1.0),
            (8, 0.050_813_272_595, 0.100_000_001_49),
            (9, 0.031_705_696_136, 0.074_989_415_705),
            (12, 0.006_794_959_306_7, 0.026_879_360_899),
            (15, 0.001_052_602_194_25, 0.008_334_509_097),
            (17, 0.000_129_318_694_235, 0.003_561_997_320_5),
            (18, 3.830_881_178_1e-5, 0.002_249_365_206_8),
            (23, 5.950_239_483_4e-6, 3.333_803_397e-5),
            (31, 3.023_511_396_8e-7, 3.333_803_533_7e-6),
        ];
        for (pair, of_gpt_oss, of_deepseek) in expected {
            for (scaling, theta, exact) in
                [(gpt_oss, 150_000.0, of_gpt_oss), (deepseek, 10_000.0, of_deepseek)]
            {
                let frequency = scaling.frequency(pair, 64, theta);
                // The reference computes in f32.
                assert!((frequency / exact - 1.0).abs() < 1e-6, "{pair}: {frequency} {exact}");
            }
        }
        assert!((gpt_oss.attention_factor() - 1.346_573_590_279_972_7).abs() < 1e-15);
        assert_eq!((deepseek.attention_factor(), RopeScaling::None.attention_factor()), (1.0, 1.0));
        let older = RopeScaling::yarn_attention_factor(40.0, Some(0.707), Some(1.0));
        assert!((older - 0.921_042_355_316_339_9).abs() < 1e-15);
    }
}
