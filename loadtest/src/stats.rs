//! Samples of times and their summary: mean, percentiles, maximum. Exact to the microsecond; bounded by the
//! number of distinct microseconds, not by the number of samples.

pub mod hdr;
pub mod samples;
pub mod series;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Values that must lie above a percentile for it to be compared: with fewer, it says little more than the
/// largest.
const TAIL_MIN: f64 = 5.0;

/// A counted set of times.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    /// Microseconds and how often they occurred.
    counts: BTreeMap<u64, u64>,
    n: u64,
    sum_us: u128,
    /// Sum of the squares, for the standard deviation.
    sum_us2: f64,
}

/// The figures of one metric, in milliseconds. Percentiles are by nearest rank: the smallest sample that at
/// least p per cent of all do not exceed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many samples the figures are of.
    pub n: u64,
    /// Arithmetic mean of all samples.
    pub mean: f64,
    /// Standard deviation, with n as the divisor; 0 where an older report lacks it.
    #[serde(default)]
    pub std: f64,
    /// Median: no more than half of the samples are larger.
    pub p50: f64,
    /// 90th percentile: no more than a tenth of the samples are larger.
    pub p90: f64,
    /// 95th percentile: no more than a twentieth are larger; 0 where an older report lacks it.
    #[serde(default)]
    pub p95: f64,
    /// 99th percentile: no more than a hundredth of the samples are larger.
    pub p99: f64,
    /// Largest sample, to the microsecond.
    pub max: f64,
}

/// How many values it takes to compare the percentile `percent`, below 100.
pub fn values_min(percent: f64) -> usize {
    (TAIL_MIN * 100.0 / (100.0 - percent)).ceil() as usize
}

impl Samples {
    /// Adds a time given in nanoseconds, rounded to the microsecond.
    pub fn add_ns(&mut self, ns: u64) {
        self.add_us((ns + 500) / 1000);
    }

    /// Adds a time given in microseconds.
    pub fn add_us(&mut self, us: u64) {
        *self.counts.entry(us).or_insert(0) += 1;
        self.n += 1;
        self.sum_us += u128::from(us);
        self.sum_us2 += (us as f64).powi(2);
    }

    /// The figures; `None` without samples.
    pub fn summary(&self) -> Option<Summary> {
        let (&max_us, _) = self.counts.last_key_value()?;
        let mean = self.sum_us as f64 / self.n as f64;
        let percentile = |percent| self.percentile_ms(percent);
        Some(Summary {
            n: self.n,
            mean: mean / 1e3,
            std: (self.sum_us2 / self.n as f64 - mean * mean).max(0.0).sqrt() / 1e3,
            p50: percentile(50.0),
            p90: percentile(90.0),
            p95: percentile(95.0),
            p99: percentile(99.0),
            max: max_us as f64 / 1e3,
        })
    }

    /// How many samples there are.
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The smallest sample that at least `percent` of 100 do not exceed, in milliseconds; 0 without samples.
    pub fn percentile_ms(&self, percent: f64) -> f64 {
        self.percentile_us(percent) as f64 / 1e3
    }

    /// All of them as an HdrHistogram of microseconds (V2, compressed, base64).
    pub fn hdr(&self) -> String {
        hdr::encode(self.counts.iter().map(|(&us, &count)| (us, count)))
    }

    /// Adds all samples of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (&us, &count) in &other.counts {
            *self.counts.entry(us).or_insert(0) += count;
        }
        self.n += other.n;
        self.sum_us += other.sum_us;
        self.sum_us2 += other.sum_us2;
    }

    fn percentile_us(&self, percent: f64) -> u64 {
        // Less than a millionth of a sample is the arithmetic's own error.
        let rank = (self.n as f64 * percent / 100.0 - 1e-6).ceil().max(1.0) as u64;
        let mut below = 0;
        for (&us, &count) in &self.counts {
            below += count;
            if below >= rank {
                return us;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_samples_no_figures() {
        assert_eq!(Samples::default().summary(), None);
    }

    #[test]
    fn nanoseconds_are_rounded() {
        let mut samples = Samples::default();
        samples.add_ns(1499);
        samples.add_ns(1500);
        assert_eq!(samples.summary().unwrap().mean, 0.0015);
    }

    proptest! {
        #[test]
        fn figures_equal_those_of_the_sorted_samples(mut us in prop::collection::vec(0u64..2000, 1..300)) {
            let mut samples = Samples::default();
            for &us in &us {
                samples.add_us(us);
            }
            us.sort_unstable();
            let rank = |percent: usize| us[(percent * us.len()).div_ceil(100) - 1] as f64 / 1e3;
            let got = samples.summary().unwrap();
            prop_assert_eq!((got.p50, got.p90, got.p99), (rank(50), rank(90), rank(99)));
            prop_assert_eq!((got.n, got.max), (us.len() as u64, us[us.len() - 1] as f64 / 1e3));
            prop_assert!((got.mean - us.iter().sum::<u64>() as f64 / us.len() as f64 / 1e3).abs() < 1e-9);
        }
    }
}
