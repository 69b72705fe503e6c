//! What engines' KV goes over: each sends one transfer after the other, and receives so.

use keyway_core::Transfer;

use super::Nanos;

/// Until when each engine's link is taken, in both directions.
#[derive(Debug)]
pub struct Links {
    sends_until: Vec<Nanos>,
    receives_until: Vec<Nanos>,
}

impl Links {
    /// Those of so many engines, all free.
    pub fn new(engines: usize) -> Self {
        Self { sends_until: vec![0; engines], receives_until: vec![0; engines] }
    }

    /// Takes both ends for so many tokens from `at` on, behind what they have to do; when the tokens are
    /// there.
    pub fn take(&mut self, at: Nanos, (from, to): (usize, usize), tokens: u64, transfer: Transfer) -> Nanos {
        let starts = at.max(self.sends_until[from]).max(self.receives_until[to]);
        let ends = starts + nanos(tokens as f64 * transfer.ms_per_token);
        (self.sends_until[from], self.receives_until[to]) = (ends, ends);
        ends + nanos(transfer.handover_ms)
    }
}

fn nanos(ms: f64) -> Nanos {
    (ms * 1e6).round() as Nanos
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRANSFER: Transfer = Transfer { handover_ms: 5.0, ms_per_token: 0.5 };

    #[test]
    fn an_end_that_is_taken_is_waited_for_and_another_is_not() {
        let mut links = Links::new(4);
        let mut ends_ms = |at_ms: u64, ends: (usize, usize), tokens: u64| {
            links.take(at_ms * 1_000_000, ends, tokens, TRANSFER) / 1_000_000
        };
        assert_eq!(ends_ms(100, (0, 1), 20), 115);
        assert_eq!(ends_ms(100, (0, 2), 20), 125, "it sends one after the other");
        assert_eq!(ends_ms(100, (3, 1), 20), 125, "it receives so");
        assert_eq!(ends_ms(100, (2, 3), 0), 105, "each way is apart");
        assert_eq!(ends_ms(500, (0, 1), 2), 506);
    }
}
