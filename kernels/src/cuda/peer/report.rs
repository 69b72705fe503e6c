//! What ranks tell their host: whose fault ended the group, how many rows each expert was sent, where the
//! time of rounds went. A few words on the device, to be fetched behind a step; reading them waits for
//! nothing.

use std::time::Duration;

use super::Layout;
use crate::cuda::constants::peer::{
    CAUSE_BIT, DEADLINE, FAULT_AT, PHASE_BIT, PROTOCOL, SPENT_AT, STATE_WORDS,
};
use crate::fabric::{Cause, FabricError, Phase};
use crate::moe::parallel::Times;

/// The words of a rank's report, as they were fetched.
#[derive(Debug, Clone)]
pub struct Report {
    state: Vec<u32>,
    /// `[ranks, held]`: rows of this rank's tokens that each expert there got since the group began.
    loads: Vec<u32>,
}

impl Report {
    /// That of the `number`th of `count` ranks of one device, whose words all these are.
    ///
    /// # Panics
    /// If there are not as many words as [`super::Peers::report`] names.
    pub fn of(words: &[u32], layout: &Layout, count: usize, number: usize) -> Self {
        let loads = layout.ranks * layout.held;
        assert_eq!(words.len(), count * (STATE_WORDS + loads), "peers: a report of another length");
        let (states, all_loads) = words.split_at(count * STATE_WORDS);
        Self {
            state: states[number * STATE_WORDS..][..STATE_WORDS].to_vec(),
            loads: all_loads[number * loads..][..loads].to_vec(),
        }
    }

    /// The error that ended the group, if one did, and the number of its round.
    pub fn fault(&self, deadline: Duration) -> Option<(FabricError, u32)> {
        let (fault, round) = (self.state[FAULT_AT], self.state[FAULT_AT + 1]);
        if fault == 0 {
            return None;
        }
        let combines = fault >> PHASE_BIT & 1;
        let cause = match fault >> CAUSE_BIT & 0xff {
            DEADLINE => Cause::Deadline(deadline),
            PROTOCOL => Cause::Protocol("a message that makes no sense"),
            _ => Cause::Protocol("tokens out of turn, too many, or for an expert that nobody holds"),
        };
        let error = FabricError {
            rank: (fault & 0xff) as usize,
            exchange: u64::from(round) * 2 - u64::from(1 - combines),
            phase: if combines == 1 { Phase::Combine } else { Phase::Dispatch },
            layer: None,
            cause,
        };
        Some((error, round))
    }

    /// Rows of this rank's tokens since the group began that each rank's experts were sent, `[ranks, held]`.
    pub fn rows(&self) -> Vec<u32> {
        self.loads.clone()
    }

    /// The same since `before`.
    pub fn rows_since(&self, before: &Self) -> Vec<u32> {
        self.loads.iter().zip(&before.loads).map(|(now, before)| now.wrapping_sub(*before)).collect()
    }

    /// Where the time of all rounds since `before` went, on the device, waiting included: at most 4.29 s
    /// each, after which they begin again with 0.
    pub fn times_since(&self, before: &Self) -> Times {
        let spent = |part: usize| {
            let at = SPENT_AT + part;
            Duration::from_nanos(self.state[at].wrapping_sub(before.state[at]).into())
        };
        Times { dispatch: spent(0), compute: spent(1), combine: spent(2) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { ranks: 2, held: 3, tokens: 4, top: 2, width: 8 };

    fn report(fault: u32, spent: u32, load: u32) -> Report {
        let mut words = vec![0; 2 * (STATE_WORDS + 6)];
        words[STATE_WORDS + FAULT_AT..][..2].copy_from_slice(&[fault, 7]);
        words[STATE_WORDS + SPENT_AT..][..3].copy_from_slice(&[spent, 2, 3]);
        words[2 * STATE_WORDS + 6..][..6].copy_from_slice(&[load, 1, 2, 3, 4, 5]);
        Report::of(&words, &LAYOUT, 2, 1)
    }

    #[test]
    fn counts_go_on_past_the_end_of_their_words() {
        let (before, now) = (report(0, u32::MAX - 9, u32::MAX), report(0, 20, 4));
        assert_eq!(now.rows_since(&before), [5, 0, 0, 0, 0, 0]);
        assert_eq!(now.times_since(&before).dispatch, Duration::from_nanos(30));
        assert_eq!(now.times_since(&before).combine, Duration::ZERO);
    }

    #[test]
    fn a_fault_names_rank_exchange_and_round() {
        let deadline = Duration::from_secs(3);
        assert_eq!(report(0, 0, 0).fault(deadline), None);
        let (error, round) = report(1 << 16 | 1 << 8 | 5, 0, 0).fault(deadline).unwrap();
        assert_eq!((error.rank, error.exchange, error.phase, round), (5, 14, Phase::Combine, 7));
        assert_eq!(error.cause, Cause::Deadline(deadline));
    }
}
