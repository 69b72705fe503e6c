//! How fast a worker computes prompts, fitted from its answers: the running median of tokens per second,
//! where the tokens are those that waited there when a request came and its own, and the seconds are those to
//! its first token. And what follows for the choice: workers' speeds relative to each other, which scale the
//! cost.
//!
//! A median, because single answers are off by orders of magnitude (a stalled batch, a prefix that was cached
//! after all), and in logarithms, because half and double the speed are errors of one size.

use smallvec::SmallVec;

/// Tokens below which the time to the first token says more of everything else than of prefill.
const MIN_TOKENS: u64 = 128;
/// Answers before the median counts.
const MIN_ANSWERS: u32 = 16;
/// Steps of the estimate, as a natural logarithm: from 65 % at first down to 3 % a step.
const STEPS: (f64, f64) = (0.5, 0.03);
/// What is left of a step after each answer.
const STEP_DECAY: f64 = 0.9;
/// Speeds up to this share above the median, or as far below, count as equal: queues and what was cached
/// after all blur a fit, and a worker that is wrongly taken for faster draws the prefixes of others (with
/// 0.25 one of four equal workers got 1.9 times the mean load of a replayed trace, with 1 none more than 1.1
/// times).
const EQUAL_SHARE: f64 = 1.0;
/// A worker counts as at most this many times as fast, or as slow, as the median one.
const MAX_RATIO: f64 = 4.0;

/// Before any answer: tokens per second of an eight-billion-parameter model on a large GPU.
const PRIOR_TOKENS_PER_S: f64 = 8_000.0;

/// How fast one worker computes prompts: the running median of tokens per second over its answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillRate {
    /// Natural logarithm of tokens per second, and these.
    log: f64,
    per_second: f64,
    step: f64,
    answers: u32,
}

impl Default for PrefillRate {
    fn default() -> Self {
        Self { log: 0.0, per_second: 1.0, step: STEPS.0, answers: 0 }
    }
}

impl PrefillRate {
    /// The first token came `seconds` after a request that found, with its own, `tokens` to compute.
    pub fn observe(&mut self, tokens: u64, seconds: f64) {
        if tokens < MIN_TOKENS || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let seen = (tokens as f64 / seconds).ln();
        if self.answers == 0 {
            self.log = seen;
        } else {
            // Up and down by equal steps: it rests where as many answers lie above as below.
            let error = seen - self.log;
            self.log += self.step.min(error.abs()).copysign(error);
            self.step = (self.step * STEP_DECAY).max(STEPS.1);
        }
        self.per_second = self.log.exp();
        self.answers = self.answers.saturating_add(1);
    }

    /// Tokens per second, once enough answers have told.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.answers >= MIN_ANSWERS).then_some(self.per_second)
    }
}

/// What the workers' rates say together, in tokens per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    of_all: f64,
    to_compare: Option<f64>,
}

impl Rates {
    /// Of all workers, and of those that are compared with each other.
    pub fn of(all: impl Iterator<Item = Option<f64>>, compared: impl Iterator<Item = Option<f64>>) -> Self {
        Self { of_all: median(all).unwrap_or(PRIOR_TOKENS_PER_S), to_compare: median(compared) }
    }

    /// How fast a worker with this rate is relative to the median of those known; 1 where that is unknown or
    /// about equal.
    pub fn relative_speed(&self, rate: Option<f64>) -> f64 {
        let known = rate.zip(self.to_compare);
        let ratio = known.map_or(1.0, |(rate, median)| (rate / median).clamp(1.0 / MAX_RATIO, MAX_RATIO));
        if (1.0 / (1.0 + EQUAL_SHARE)..=1.0 + EQUAL_SHARE).contains(&ratio) { 1.0 } else { ratio }
    }

    /// Prompt tokens per millisecond of a worker with this relative speed: the median of those known, or a
    /// large GPU's where none is, times that.
    pub fn tokens_per_ms(&self, speed: f64) -> f64 {
        self.of_all / 1e3 * speed
    }
}

/// The upper median of those known.
fn median(rates: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let mut known: SmallVec<[f64; 8]> = rates.flatten().collect();
    let middle = known.len() / 2;
    (!known.is_empty()).then(|| *known.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers at `rate` tokens per second, every fifth of them off by a factor of a hundred.
    fn fitted(rate: f64, answers: u64) -> PrefillRate {
        let mut fit = PrefillRate::default();
        for i in 0..answers {
            let tokens = 200 + 37 * i % 5000;
            let factor = match i % 10 {
                3 => 100.0,
                8 => 0.01,
                _ => 1.0,
            };
            fit.observe(tokens, factor * tokens as f64 / rate);
        }
        fit
    }

    #[test]
    fn the_median_is_found_whatever_single_answers_say() {
        for rate in [50.0, 4_000.0, 100_000.0] {
            let found = fitted(rate, 200).tokens_per_second().unwrap();
            assert!((0.8..1.25).contains(&(found / rate)), "{found} for {rate}");
        }
    }

    #[test]
    fn a_change_is_followed() {
        let mut fit = fitted(1_000.0, 100);
        for _ in 0..100 {
            fit.observe(1_000, 0.25);
        }
        assert!((0.8..1.25).contains(&(fit.tokens_per_second().unwrap() / 4_000.0)));
    }

    #[test]
    fn few_or_short_prompts_tell_nothing() {
        assert_eq!(fitted(100.0, u64::from(MIN_ANSWERS) - 1).tokens_per_second(), None);
        let mut fit = PrefillRate::default();
        for _ in 0..100 {
            fit.observe(10, 1.0);
            fit.observe(1_000, 0.0);
            fit.observe(1_000, f64::NAN);
        }
        assert_eq!(fit, PrefillRate::default());
    }

    #[test]
    fn speeds_are_relative_to_the_median_and_bounded() {
        let of = |rates: &[Option<f64>]| Rates::of(rates.iter().copied(), rates.iter().copied());
        let relative_speeds = |rates: &[Option<f64>]| {
            rates.iter().map(|rate| of(rates).relative_speed(*rate)).collect::<Vec<_>>()
        };
        let speeds = relative_speeds(&[Some(600.0), Some(1100.0), Some(3300.0), None, Some(10.0)]);
        // The median is 1100.
        assert_eq!(speeds, [1.0, 1.0, 3.0, 1.0, 0.25]);
        assert_eq!(relative_speeds(&[None, None]), [1.0, 1.0]);
        assert_eq!(relative_speeds(&[Some(5.0)]), [1.0]);
        assert_eq!([1.0, 2.0].map(|speed| of(&[Some(5000.0), None]).tokens_per_ms(speed)), [5.0, 10.0]);
        assert_eq!(of(&[None]).tokens_per_ms(0.5), 4.0);
        let compared = Rates::of([Some(5000.0), Some(9000.0)].into_iter(), [Some(1000.0)].into_iter());
        assert_eq!((compared.relative_speed(Some(4000.0)), compared.tokens_per_ms(1.0)), (4.0, 9.0));
    }
}
