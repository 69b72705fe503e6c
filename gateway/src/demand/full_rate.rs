//! What full workers compute, measured as what comes out of a fleet that always has work waiting: with the
//! pauses between two prompts, and beside the answers that full workers are at. A speed fitted from single
//! answers has neither. How long it is believed is not decided here.

use std::time::Duration;

/// Measures over one window after another.
#[derive(Debug)]
pub(super) struct FullRate {
    window: Duration,
    /// Prompt tokens computed so far.
    computed: f64,
    /// The window that runs.
    from: Option<From>,
}

#[derive(Debug, Clone, Copy)]
struct From {
    at: Duration,
    computed: f64,
    ready: usize,
    /// Whether the fleet is the same as in the window before: who has just come is cold.
    counts: bool,
}

impl FullRate {
    /// Of a fleet of which nothing was seen.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, computed: 0.0, from: None }
    }

    /// So many prompt tokens were computed.
    pub(super) fn computed(&mut self, tokens: u64) {
        self.computed += tokens as f64;
    }

    /// Looks at a moment; `full`: work waits, and all of it is this gateway's. Tokens a second of each of so
    /// many workers that are `ready`, at the end of a window through which that was so.
    pub(super) fn look(&mut self, now: Duration, full: bool, ready: usize) -> Option<f64> {
        if !full || ready == 0 {
            self.from = None;
            return None;
        }
        let begin = |counts| From { at: now, computed: self.computed, ready, counts };
        let Some(from) = self.from.filter(|from| from.ready == ready) else {
            self.from = Some(begin(false));
            return None;
        };
        let elapsed = now.saturating_sub(from.at);
        if elapsed < self.window {
            return None;
        }
        self.from = Some(begin(true));
        let rate = (self.computed - from.computed) / elapsed.as_secs_f64() / ready as f64;
        Some(rate).filter(|rate| from.counts && *rate > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_of_whole_windows_in_which_the_same_workers_were_full() {
        let mut rate = FullRate::new(Duration::from_secs(30));
        let mut seen = Vec::new();
        for t in 0..600 {
            let now = Duration::from_secs(t);
            // Ten prompts of 300 tokens a second by two; from 200 s on three; between 400 s and 410 s nothing
            // waits.
            let ready = if t < 200 { 2 } else { 3 };
            (0..5 * ready).for_each(|_| rate.computed(300));
            let full = !(400..410).contains(&t);
            seen.extend(rate.look(now, full, ready).map(|rate| (t, rate)));
        }
        assert!(seen.iter().all(|(_, rate)| (rate - 1_500.0).abs() < 60.0), "{seen:?}");
        let at = |from: u64, to: u64| seen.iter().filter(|(t, _)| (from..to).contains(t)).count();
        assert_eq!((at(0, 60), at(60, 200), at(200, 260), at(260, 400), at(400, 470)), (0, 5, 0, 5, 0));
        assert_eq!(rate.look(Duration::from_secs(700), true, 0), None);
    }
}
