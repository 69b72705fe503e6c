//! Samples of times and their summary: mean, percentiles, maximum. Exact to the microsecond; bounded by the
//! number of distinct microseconds, not by the number of samples.

pub mod hdr;
pub mod samples;
pub mod series;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use self::hdr::HdrError;

/// Values that must lie above a percentile for it to be compared: with fewer, it says little more than the
/// largest.
const TAIL_MIN: f64 = 5.0;

/// Times below this are counted in a list, 32 KiB of it at most.
const SHORT_US: u64 = 4096;

/// A counted set of times.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    /// How often each number of microseconds below [`SHORT_US`] occurred, up to the largest that did: servers
    /// that answer so fast do so often.
    short: Vec<u64>,
    /// Microseconds from there on, and how often they occurred.
    long: BTreeMap<u64, u64>,
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

impl Summary {
    /// The figures of the samples of several, which are `all` together within 0.05 %: numbers, means and
    /// largest are exact. `None` without samples.
    pub fn of_several(parts: &[Self], all: &Samples) -> Option<Self> {
        let n: u64 = parts.iter().map(|part| part.n).sum();
        let share = |part: &Self| part.n as f64 / n as f64;
        let mean: f64 = parts.iter().map(|part| part.mean * share(part)).sum();
        let squares = |part: &Self| (part.std.powi(2) + (part.mean - mean).powi(2)) * share(part);
        Some(Self {
            n,
            mean,
            std: parts.iter().map(squares).sum::<f64>().sqrt(),
            max: parts.iter().map(|part| part.max).fold(0.0, f64::max),
            ..all.summary()?
        })
    }
}

impl Samples {
    /// Adds a time given in nanoseconds, rounded to the microsecond.
    pub fn add_ns(&mut self, ns: u64) {
        self.add_us((ns + 500) / 1000);
    }

    /// Adds a time given in microseconds.
    pub fn add_us(&mut self, us: u64) {
        self.add_equal_us(us, 1);
    }

    /// Adds `count` equal times.
    pub fn add_equal_us(&mut self, us: u64, count: u64) {
        self.count(us, count);
        self.n += count;
        self.sum_us += u128::from(us) * u128::from(count);
        self.sum_us2 += (us as f64).powi(2) * count as f64;
    }

    fn count(&mut self, us: u64, count: u64) {
        if us >= SHORT_US {
            *self.long.entry(us).or_insert(0) += count;
            return;
        }
        let place = us as usize;
        if place >= self.short.len() {
            self.short.resize((place + 1).next_power_of_two(), 0);
        }
        self.short[place] += count;
    }

    /// Microseconds and how often they occurred, the smallest first.
    fn counted(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> {
        let short = self.short.iter().enumerate().map(|(us, &count)| (us as u64, count));
        let long = self.long.iter().map(|(&us, &count)| (us, count));
        short.filter(|&(_, count)| count > 0).chain(long)
    }

    /// The figures; `None` without samples.
    pub fn summary(&self) -> Option<Summary> {
        let (max_us, _) = self.counted().next_back()?;
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
        hdr::encode(self.counted())
    }

    /// What [`Samples::hdr`] wrote, each within 0.05 %.
    ///
    /// # Errors
    /// A text that is no HdrHistogram.
    pub fn of_hdr(text: &str) -> Result<Self, HdrError> {
        let mut samples = Self::default();
        for (us, count) in hdr::decode(text)? {
            samples.add_equal_us(us, count);
        }
        Ok(samples)
    }

    /// Adds all samples of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (us, count) in other.counted() {
            self.count(us, count);
        }
        self.n += other.n;
        self.sum_us += other.sum_us;
        self.sum_us2 += other.sum_us2;
    }

    fn percentile_us(&self, percent: f64) -> u64 {
        // Less than a millionth of a sample is the arithmetic's own error.
        let rank = (self.n as f64 * percent / 100.0 - 1e-6).ceil().max(1.0) as u64;
        let mut below = 0;
        for (us, count) in self.counted() {
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
        fn several_have_the_figures_of_all_their_samples(parts in prop::collection::vec(prop::collection::vec(0u64..9_000_000, 1..60), 1..5)) {
            let (mut exact, mut coarse, mut summaries) = (Samples::default(), Samples::default(), Vec::new());
            for part in &parts {
                let mut samples = Samples::default();
                for &us in part {
                    samples.add_us(us);
                }
                exact.merge(&samples);
                coarse.merge(&Samples::of_hdr(&samples.hdr()).unwrap());
                summaries.push(samples.summary().unwrap());
            }
            let (got, want) = (Summary::of_several(&summaries, &coarse).unwrap(), exact.summary().unwrap());
            prop_assert_eq!((got.n, got.max), (want.n, want.max));
            let near = |got: f64, want: f64, share: f64| (got - want).abs() <= want * share + 2e-3;
            prop_assert!(near(got.mean, want.mean, 1e-9) && near(got.std, want.std, 1e-6), "{got:?} {want:?}");
            for (got, want) in [(got.p50, want.p50), (got.p90, want.p90), (got.p99, want.p99)] {
                prop_assert!(near(got, want, 5e-4), "{got} {want}");
            }
        }

        #[test]
        fn figures_equal_those_of_the_sorted_samples(
            mut us in prop::collection::vec(prop_oneof![0u64..2000, SHORT_US - 5..SHORT_US + 5, 0u64..90_000], 1..300),
        ) {
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
