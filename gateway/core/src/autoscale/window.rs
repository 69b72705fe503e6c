//! What happened lately: tokens per second, and a quantile of single times, each over a window of fixed length. A window
//! forgets exactly, so a step of the load is seen whole after one length of it, and a great one after a third.

use std::{collections::VecDeque, time::Duration};

/// Parts of a window in which tokens are counted.
const SLOTS: usize = 30;
/// Parts of a window that alone say how much comes when they say so much more than all of it that chance is no reason.
const LATEST_SLOTS: usize = 10;
/// How much more that is: with the least requests below, 3.4 standard deviations of a Poisson process.
const STEP: f64 = 1.75;
/// Requests in the latest part below which it says nothing.
const STEP_REQUESTS: u64 = 20;
/// Single values kept: of more that come in one window the oldest leave first.
const MAX_VALUES: usize = 1_024;
/// Values below which a quantile says nothing.
const MIN_VALUES: usize = 10;

/// Tokens and requests per second, over a window.
#[derive(Debug, Clone)]
pub struct TokenRate {
    slot: Duration,
    /// Tokens and requests of each slot that is not over yet, newest last.
    slots: VecDeque<(u64, f64, u64)>,
    began: Option<Duration>,
}

impl TokenRate {
    /// Over windows of this length.
    pub fn new(window: Duration) -> Self {
        Self {
            slot: (window / SLOTS as u32).max(Duration::from_millis(1)),
            slots: VecDeque::new(),
            began: None,
        }
    }

    /// A request with this many tokens came.
    pub fn add(&mut self, now: Duration, tokens: f64) {
        self.forget(now);
        self.began.get_or_insert(now);
        let number = self.number(now);
        match self.slots.back_mut() {
            Some(last) if last.0 >= number => {
                last.1 += tokens;
                last.2 += 1;
            }
            _ => self.slots.push_back((number, tokens, 1)),
        }
    }

    /// Tokens per second. Before a whole window was seen, of the time since the first request, but at least of a fifth of
    /// a window: a first request is no rate.
    pub fn per_second(&mut self, now: Duration) -> f64 {
        self.forget(now);
        let window = self.slot * SLOTS as u32;
        let seen = self.began.map_or(window, |began| now.saturating_sub(began).clamp(window / 5, window));
        let whole = self.slots.iter().map(|slot| slot.1).sum::<f64>() / seen.as_secs_f64();
        let latest = self.number(now).saturating_sub(LATEST_SLOTS as u64 - 1);
        let since = self.slots.iter().filter(|slot| slot.0 >= latest);
        let (tokens, requests) = since.fold((0.0, 0), |sum, slot| (sum.0 + slot.1, sum.1 + slot.2));
        let lately = tokens / (window / SLOTS as u32 * LATEST_SLOTS as u32).as_secs_f64();
        if requests >= STEP_REQUESTS && lately > STEP * whole { lately } else { whole }
    }

    /// Requests per second, of the same time.
    pub fn requests_per_second(&mut self, now: Duration) -> f64 {
        let (tokens, mean) = (self.per_second(now), self.mean(now));
        if mean > 0.0 { tokens / mean } else { 0.0 }
    }

    /// Tokens of one request; 0 without any.
    pub fn mean(&mut self, now: Duration) -> f64 {
        self.forget(now);
        let requests: u64 = self.slots.iter().map(|slot| slot.2).sum();
        self.slots.iter().map(|slot| slot.1).sum::<f64>() / (requests.max(1) as f64)
    }

    fn number(&self, now: Duration) -> u64 {
        (now.as_nanos() / self.slot.as_nanos()) as u64
    }

    fn forget(&mut self, now: Duration) {
        let oldest = self.number(now).saturating_sub(SLOTS as u64 - 1);
        while self.slots.front().is_some_and(|slot| slot.0 < oldest) {
            self.slots.pop_front();
        }
    }
}

/// Single values of a window.
#[derive(Debug, Clone)]
pub struct Recent {
    window: Duration,
    values: VecDeque<(Duration, f64)>,
}

impl Recent {
    /// Over windows of this length.
    pub fn new(window: Duration) -> Self {
        Self { window, values: VecDeque::new() }
    }

    /// Notes one.
    pub fn add(&mut self, now: Duration, value: f64) {
        self.forget(now);
        if self.values.len() == MAX_VALUES {
            self.values.pop_front();
        }
        self.values.push_back((now, value));
    }

    /// The value that `share` of them do not exceed; `None` where there are too few.
    pub fn quantile(&mut self, now: Duration, share: f64) -> Option<f64> {
        self.forget(now);
        if self.values.len() < MIN_VALUES {
            return None;
        }
        let mut sorted: Vec<f64> = self.values.iter().map(|value| value.1).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let place = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len());
        Some(sorted[place - 1])
    }

    fn forget(&mut self, now: Duration) {
        while self.values.front().is_some_and(|value| now.saturating_sub(value.0) > self.window) {
            self.values.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_step_is_seen_whole_after_one_window_and_forgotten_after_another() {
        let mut rate = TokenRate::new(s(30.0));
        for i in 0..600 {
            rate.add(s(f64::from(i) * 0.1), 50.0);
        }
        assert!((rate.per_second(s(59.99)) - 500.0).abs() < 20.0, "{}", rate.per_second(s(59.99)));
        for i in 0..300 {
            rate.add(s(60.0 + f64::from(i) * 0.1), 300.0);
        }
        assert!((rate.per_second(s(89.99)) - 3_000.0).abs() < 110.0);
        assert_eq!(rate.mean(s(89.99)), 300.0);
        assert_eq!((rate.per_second(s(121.0)), rate.mean(s(121.0))), (0.0, 0.0));
    }

    #[test]
    fn a_great_step_is_seen_after_a_third_of_a_window_and_chance_is_not_taken_for_one() {
        let after = |step: f64, seconds: f64| {
            let mut rate = TokenRate::new(s(30.0));
            let (mut now, mut random) = (0.0, 0x9E37_79B9_7F4A_7C15_u64);
            let mut most: f64 = 0.0;
            while now < 600.0 + seconds {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let per_s = if now < 600.0 { 2.5 } else { 2.5 * step };
                now -= ((random >> 11) as f64 / (1_u64 << 53) as f64).max(1e-12).ln() / per_s;
                rate.add(s(now), 100.0);
                if (60.0..600.0).contains(&now) {
                    most = most.max(rate.per_second(s(now)) / 250.0);
                }
            }
            (most, rate.per_second(s(600.0 + seconds)) / 250.0)
        };
        let (by_chance, stepped) = after(6.0, 10.5);
        assert!(by_chance < 1.6, "{by_chance}");
        assert!((5.0..7.0).contains(&stepped), "{stepped}");
        let (_, small) = after(1.3, 10.5);
        assert!(small < 1.5, "{small}");
    }

    #[test]
    fn one_request_is_no_rate() {
        let mut rate = TokenRate::new(s(30.0));
        rate.add(s(100.0), 600.0);
        assert_eq!(rate.per_second(s(100.0)), 100.0);
        assert_eq!(rate.per_second(s(112.0)), 50.0);
    }

    #[test]
    fn quantiles_are_of_the_window_and_of_enough() {
        let mut recent = Recent::new(s(10.0));
        for i in 1..=9 {
            recent.add(s(1.0), f64::from(i));
        }
        assert_eq!(recent.quantile(s(1.0), 0.9), None);
        recent.add(s(2.0), 10.0);
        assert_eq!(recent.quantile(s(2.0), 0.9), Some(9.0));
        assert_eq!(recent.quantile(s(11.5), 0.9), None);
        for i in 0..5_000 {
            recent.add(s(12.0), f64::from(i));
        }
        assert_eq!(recent.values.len(), MAX_VALUES);
    }
}
