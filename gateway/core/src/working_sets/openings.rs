//! What sessions share with others: the tokens that their first turn found cached, such as a system text and
//! tools that all have. What a later turn finds is its own past too, so it does not tell.

use std::mem;

use crate::spread_map::SpreadMap;

/// First turns that are remembered at least; twice as many at most.
const OPENINGS: usize = 32_768;
/// How fast the mean follows what is seen: one part in so many.
const MEAN_WINDOW: f64 = 64.0;

/// The first turns of conversations that are sessions only once they go on, and what first turns share.
#[derive(Debug, Default)]
pub(super) struct Openings {
    recent: SpreadMap<u64, f32>,
    older: SpreadMap<u64, f32>,
    mean: f64,
    seen: f64,
}

impl Openings {
    /// A session began, and found so many tokens.
    pub(super) fn shared(&mut self, tokens: f64) {
        self.seen = (self.seen + 1.0).min(MEAN_WINDOW);
        self.mean += (tokens - self.mean) / self.seen;
    }

    /// A conversation began that is no session yet.
    pub(super) fn remember(&mut self, conversation: u64, tokens: f64) {
        if self.recent.len() >= OPENINGS {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(conversation, tokens as f32);
    }

    /// Tokens that a session shares whose first turn may have been seen: else as many as others do.
    pub(super) fn of(&self, conversation: u64) -> f64 {
        let known = self.recent.get(&conversation).or_else(|| self.older.get(&conversation));
        known.map_or(self.mean, |tokens| f64::from(*tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_seen_to_begin_shares_as_much_as_others() {
        let mut openings = Openings::default();
        assert_eq!(openings.of(1), 0.0);
        openings.remember(1, 0.0);
        openings.shared(100.0);
        openings.shared(200.0);
        assert_eq!((openings.of(1), openings.of(2)), (0.0, 150.0));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut openings = Openings::default();
        for conversation in 0..=(2 * OPENINGS as u64) {
            openings.remember(conversation, 7.0);
        }
        assert_eq!((openings.of(0), openings.of(OPENINGS as u64)), (0.0, 7.0));
        assert!(openings.recent.len() + openings.older.len() <= 2 * OPENINGS);
    }
}
