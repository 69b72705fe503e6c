//! What happened lately: tokens per second, and a quantile of single times, each over a window of fixed
//! length.
//!
//! A rate is the mean of ten windows, in which chance is small, but what shorter times say where they differ
//! from it by more than chance explains: then at least so much comes, or at most, by one standard deviation.
//! So a great step of the load is seen after a sixth of a window and a small one after some windows, and a
//! steady load does not look like either.
//!
//! Ten, as a fleet is held for the greatest rate of the last minutes: of 15 requests a second that is one in
//! fourteen too many with means of four windows, half of that with means of ten.

use std::{collections::VecDeque, time::Duration};

/// Parts of a window in which tokens are counted.
const SLOTS: usize = 30;
/// Windows that a rate is the mean of.
const WINDOWS: usize = 10;
/// Windows without a request after which none is expected: a fleet that may go to nothing does not wait for
/// all ten.
const SILENT_WINDOWS: usize = 4;
/// Parts that may say something else, from the longest on.
const SHORTER: [usize; 5] = [120, 60, 30, 10, 5];
/// How many standard deviations that must be. Looked at once a second, 4 are exceeded by chance once in nine
/// hours for each of them.
const BEYOND_CHANCE: f64 = 4.0;
/// Single values kept: of more that come in one window the oldest leave first.
const MAX_VALUES: usize = 1_024;
/// Values below which a quantile says nothing.
pub(super) const MIN_VALUES: usize = 10;

/// Tokens and requests per second, over a window.
#[derive(Debug, Clone)]
pub struct TokenRate {
    slot: Duration,
    /// Slots that are not over yet, newest last.
    slots: VecDeque<Slot>,
    began: Option<Duration>,
}

/// What came in one part of a window.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    number: u64,
    tokens: f64,
    /// Sum of the squares, which says how much one request weighs.
    squares: f64,
    requests: u64,
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
        if self.slots.back().is_none_or(|last| last.number < number) {
            self.slots.push_back(Slot { number, ..Slot::default() });
        }
        if let Some(last) = self.slots.back_mut() {
            last.tokens += tokens;
            last.squares += tokens * tokens;
            last.requests += 1;
        }
    }

    /// Tokens per second. Before all windows were seen, of the time since the first request, but at least of
    /// a fifth of a window: a first request is no rate.
    pub fn per_second(&mut self, now: Duration) -> f64 {
        self.forget(now);
        if self.since(now, SLOTS * SILENT_WINDOWS).0 <= 0.0 {
            return 0.0;
        }
        let window = self.slot * SLOTS as u32;
        let whole_s = self
            .began
            .map_or(window, |began| now.saturating_sub(began).clamp(window / 5, window * WINDOWS as u32));
        let (tokens, squares) = self.since(now, SLOTS * WINDOWS);
        let mut rate = tokens / whole_s.as_secs_f64();
        // As many tokens as one independent arrival weighs: prompts of different lengths are fewer than they
        // look.
        let weight = if tokens > 0.0 { squares / tokens } else { 1.0 };
        for slots in SHORTER {
            // The slot that is not over counts as far as it has come.
            let first = self.number(now).saturating_sub(slots as u64 - 1);
            let begin = Duration::from_nanos(first * self.slot.as_nanos() as u64);
            let seconds = now.saturating_sub(begin).as_secs_f64();
            if seconds >= whole_s.as_secs_f64() {
                continue;
            }
            let (came, expected) = (self.since(now, slots).0 / weight, rate * seconds / weight);
            // Such roots of Poisson counts differ by chance alike, however many there are (F. J. Anscombe,
            // 1948).
            let beyond = 2.0 * ((came + 0.375).sqrt() - (expected + 0.375).sqrt());
            if beyond > BEYOND_CHANCE {
                rate = rate.max((came - came.sqrt()) * weight / seconds);
            } else if beyond < -BEYOND_CHANCE {
                rate = rate.min((came + (came + 1.0).sqrt()) * weight / seconds);
            }
        }
        rate
    }

    /// Tokens of the latest slots, and the sum of their squares.
    fn since(&self, now: Duration, slots: usize) -> (f64, f64) {
        let first = self.number(now).saturating_sub(slots as u64 - 1);
        let latest = self.slots.iter().rev().take_while(|slot| slot.number >= first);
        latest.fold((0.0, 0.0), |sum, slot| (sum.0 + slot.tokens, sum.1 + slot.squares))
    }

    /// Requests per second, of the same time.
    pub fn requests_per_second(&mut self, now: Duration) -> f64 {
        let (tokens, mean) = (self.per_second(now), self.mean(now));
        if mean > 0.0 { tokens / mean } else { 0.0 }
    }

    /// Tokens of one request; 0 without any.
    pub fn mean(&mut self, now: Duration) -> f64 {
        self.forget(now);
        let requests: u64 = self.slots.iter().map(|slot| slot.requests).sum();
        self.since(now, SLOTS * WINDOWS).0 / (requests.max(1) as f64)
    }

    fn number(&self, now: Duration) -> u64 {
        (now.as_nanos() / self.slot.as_nanos()) as u64
    }

    fn forget(&mut self, now: Duration) {
        let oldest = self.number(now).saturating_sub((SLOTS * WINDOWS) as u64 - 1);
        while self.slots.front().is_some_and(|slot| slot.number < oldest) {
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

    /// Notes a value seen at `now`. The oldest goes for it once `MAX_VALUES` are held.
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
        Some(upper_value(self.values.iter().map(|value| value.1).collect(), share))
    }

    fn forget(&mut self, now: Duration) {
        while self.values.front().is_some_and(|value| now.saturating_sub(value.0) > self.window) {
            self.values.pop_front();
        }
    }
}

/// The least of these, of which there is one, that `share` of them do not exceed.
pub(super) fn upper_value(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let place = ((values.len() as f64 * share).ceil() as usize).clamp(1, values.len());
    values[place - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Poisson arrivals of 100 tokens: the greatest and the least rate seen while `per_s` is steady, and the
    /// rate `seconds` after it has become `step` times as much, each as a share of what truly comes.
    fn after(per_s: f64, step: f64, seconds: f64) -> (f64, f64, f64) {
        let mut rate = TokenRate::new(s(30.0));
        let (mut now, mut random) = (0.0, 0x9E37_79B9_7F4A_7C15_u64);
        let (mut most, mut least): (f64, f64) = (0.0, 9.0);
        while now < 1_800.0 + seconds {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let per_s = if now < 1_800.0 { per_s } else { per_s * step };
            now -= ((random >> 11) as f64 / (1_u64 << 53) as f64).max(1e-12).ln() / per_s;
            rate.add(s(now), 100.0);
            if (300.0..1_800.0).contains(&now) {
                let seen = rate.per_second(s(now)) / (100.0 * per_s);
                (most, least) = (most.max(seen), least.min(seen));
            }
        }
        (most, least, rate.per_second(s(1_800.0 + seconds)) / (100.0 * per_s * step))
    }

    #[test]
    fn a_great_step_is_seen_after_seconds_and_chance_is_not_taken_for_one() {
        for per_s in [2.5, 15.0] {
            let (most, least, stepped) = after(per_s, 6.0, 5.5);
            assert!(most < 1.3 && least > 0.7, "{per_s}: {least} to {most}");
            assert!((0.6..1.1).contains(&stepped), "{per_s}: {stepped}");
            assert!(
                (0.85..1.1).contains(&after(per_s, 6.0, 20.0).2),
                "{per_s}: {}",
                after(per_s, 6.0, 20.0).2
            );
        }
        // Half as much again is seen whole after the ten windows at the latest, and where much comes long
        // before.
        assert!((0.9..1.15).contains(&after(2.5, 1.5, 301.0).2), "{}", after(2.5, 1.5, 301.0).2);
        assert!((0.9..1.1).contains(&after(40.0, 1.5, 32.0).2), "{}", after(40.0, 1.5, 32.0).2);
    }

    #[test]
    fn a_steady_load_stays_within_half_a_worker_of_a_dozen() {
        let (most, least, _) = after(15.0, 1.0, 1.0);
        assert!(most < 1.045 && least > 0.955, "{least} to {most}");
    }

    #[test]
    fn less_is_seen_too_and_all_is_forgotten_in_time() {
        assert!(after(15.0, 1.0 / 6.0, 31.0).2 < 1.5, "{}", after(15.0, 1.0 / 6.0, 31.0).2);
        let mut rate = TokenRate::new(s(30.0));
        for i in 0..6_000 {
            rate.add(s(f64::from(i) * 0.1), 50.0);
        }
        assert!((rate.per_second(s(599.99)) - 500.0).abs() < 20.0, "{}", rate.per_second(s(599.99)));
        assert_eq!(rate.mean(s(599.99)), 50.0);
        assert_eq!((rate.per_second(s(721.0)), rate.mean(s(721.0))), (0.0, 50.0));
        assert_eq!((rate.per_second(s(901.0)), rate.mean(s(901.0))), (0.0, 0.0));
    }

    #[test]
    fn a_few_long_prompts_are_no_step() {
        // One request a second; now and then one of fifty times as many tokens.
        let mut rate = TokenRate::new(s(30.0));
        for i in 0..600_u32 {
            let tokens = if i % 40 == 39 { 5_000.0 } else { 100.0 };
            rate.add(s(f64::from(i)), tokens);
            if i > 240 {
                let seen = rate.per_second(s(f64::from(i)));
                assert!((120.0..350.0).contains(&seen), "{i}: {seen}, where 222 come");
            }
        }
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
