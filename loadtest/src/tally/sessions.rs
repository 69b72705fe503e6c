//! Adds up whole sessions: how many were begun and ended, how long a person waited for all of one, and what
//! its later turns waited for and found in caches. Keeps what is under way, and judges nothing.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::TokenSums;
use crate::{
    client::record::Record,
    schedule::flow::TurnPlace,
    stats::{Samples, Summary},
};

/// The turns at which a row of figures begins: each row is of twice as many as the one before.
pub const DEPTHS: [u32; 8] = [1, 2, 3, 5, 9, 17, 33, 65];

/// What the sessions of a run came to. Warm-ups are in no figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionsReport {
    /// Sessions of which a turn was sent.
    pub begun: u64,
    /// Those of which every turn was answered well.
    pub ended: u64,
    /// Those that a failed turn ended.
    pub failed: u64,
    /// Those that the run's end cut off.
    pub unfinished: u64,
    /// Turns that were sent.
    pub turns: u64,
    /// Turns that were not sent because one before them had failed.
    pub turns_not_sent: u64,
    /// Job completion time of sessions that ended: from when the first turn was due to the last answer's end.
    pub completion: Option<Summary>,
    /// Time in tools of sessions that ended: what all their turns waited behind answers.
    pub tools: Option<Summary>,
    /// Figures of good answers by the number of the turn in its agent.
    pub by_turn: Vec<TurnsReport>,
}

/// Figures of the turns with certain numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnsReport {
    /// Number of the first such turn, from 1.
    pub from: u32,
    /// Time to the first token from when turns were due.
    pub ttft: Option<Summary>,
    /// Prompt tokens by `usage`.
    pub prompt_tokens: u64,
    /// Those from caches; `None` if the server reports none.
    pub cached_tokens: Option<u64>,
    /// Prompt tokens that the same prompts were made to have.
    pub prompt_tokens_wanted: u64,
    /// Those that one unbounded cache could have held.
    pub possible_tokens: u64,
}

/// Sums over the sessions of a run.
#[derive(Debug, Default)]
pub struct SessionTally {
    /// Sessions that have begun and are not over, by their numbers.
    open: HashMap<usize, Progress>,
    begun: u64,
    ended: u64,
    failed: u64,
    turns: u64,
    /// See [`SessionsReport::completion`].
    pub completion: Samples,
    /// See [`SessionsReport::tools`].
    pub tools: Samples,
    /// By the number of the turn, as [`DEPTHS`] has it.
    pub by_turn: [TurnTally; DEPTHS.len()],
}

/// Sums over the turns with certain numbers.
#[derive(Debug, Default)]
pub struct TurnTally {
    /// Time to the first token.
    pub ttft: Samples,
    tokens: TokenSums,
}

/// How far a session is.
#[derive(Debug)]
struct Progress {
    begun_ns: u64,
    ended_ns: u64,
    /// Turns that have ended, and those that there are.
    turns: (u32, u32),
    tools_ns: u64,
    failed: bool,
    warmup: bool,
}

// === impl TurnsReport ===

impl TurnsReport {
    /// The numbers of the turns, such as `3-4`.
    pub fn numbers(&self) -> String {
        match DEPTHS.iter().find(|&&next| next > self.from) {
            Some(next) if next - self.from > 1 => format!("{}-{}", self.from, next - 1),
            Some(_) => self.from.to_string(),
            None => format!("{}-", self.from),
        }
    }

    /// Share of prompt tokens that came from caches.
    pub fn cached(&self) -> Option<f64> {
        let cached = self.cached_tokens?;
        (self.prompt_tokens > 0).then(|| cached as f64 / self.prompt_tokens as f64)
    }

    /// The share with one unbounded cache.
    pub fn possible(&self) -> Option<f64> {
        let wanted = self.prompt_tokens_wanted;
        (wanted > 0).then(|| self.possible_tokens as f64 / wanted as f64)
    }
}

// === impl SessionTally ===

impl SessionTally {
    /// Adds a turn that has ended in any way. A session whose first turn warms up is in no figure.
    pub fn add(&mut self, record: &Record, place: &TurnPlace) {
        let open = self.open.entry(place.session).or_insert_with(|| {
            self.begun += u64::from(!record.warmup);
            Progress {
                begun_ns: record.intended_ns,
                ended_ns: 0,
                turns: (0, place.turns),
                tools_ns: 0,
                failed: false,
                warmup: record.warmup,
            }
        });
        open.ended_ns = open.ended_ns.max(record.exchange.end_ns);
        open.turns.0 += 1;
        let wait_ns = u64::try_from(place.wait.as_nanos()).unwrap_or(u64::MAX);
        open.tools_ns = open.tools_ns.saturating_add(wait_ns);
        open.failed |= !record.is_ok();
        if !open.warmup {
            self.turns += 1;
            if record.is_ok() {
                self.by_turn[depth(place.turn)].add(record);
            }
        }
        if open.turns.0 < open.turns.1 {
            return;
        }
        match self.open.remove(&place.session) {
            Some(whole) if whole.failed && !whole.warmup => self.failed += 1,
            Some(whole) if !whole.warmup => {
                self.ended += 1;
                self.completion.add_ns(whole.ended_ns.saturating_sub(whole.begun_ns));
                self.tools.add_ns(whole.tools_ns);
            }
            _ => {}
        }
    }

    /// The figures; `None` of a run without sessions.
    pub fn report(&self) -> Option<SessionsReport> {
        let open = || self.open.values().filter(|open| !open.warmup);
        let broken = || open().filter(|open| open.failed);
        let failed = broken().count() as u64;
        (self.begun > 0).then(|| SessionsReport {
            begun: self.begun,
            ended: self.ended,
            failed: self.failed + failed,
            unfinished: open().count() as u64 - failed,
            turns: self.turns,
            turns_not_sent: broken().map(|open| u64::from(open.turns.1 - open.turns.0)).sum(),
            completion: self.completion.summary(),
            tools: self.tools.summary(),
            by_turn: DEPTHS
                .iter()
                .zip(&self.by_turn)
                .filter_map(|(&from, turns)| turns.report(from))
                .collect(),
        })
    }
}

/// The row of figures of a turn, by its number from 0.
fn depth(turn: u32) -> usize {
    DEPTHS.partition_point(|&from| from <= turn + 1) - 1
}

// === impl TurnTally ===

impl TurnTally {
    fn add(&mut self, record: &Record) {
        if let Some(ns) = record.ttft_ns() {
            self.ttft.add_ns(ns);
        }
        self.tokens.add(record);
    }

    fn report(&self, from: u32) -> Option<TurnsReport> {
        let tokens = &self.tokens;
        (!self.ttft.is_empty()).then(|| TurnsReport {
            from,
            ttft: self.ttft.summary(),
            prompt_tokens: tokens.prompt,
            cached_tokens: (tokens.with_cached > 0).then_some(tokens.cached),
            prompt_tokens_wanted: tokens.wanted_prompt,
            possible_tokens: tokens.possible,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        client::record::{Failure, FailureClass, Outcome, tests::good},
        oracle::Reusable,
    };

    fn place(session: usize, turn: u32, turns: u32, wait_ms: u64) -> TurnPlace {
        let wait = Duration::from_millis(wait_ms);
        TurnPlace { session, agent: 0, parent: None, turn, turns, wait }
    }

    fn failed(mut record: Record) -> Record {
        let message = String::new();
        record.exchange.outcome = Outcome::Failed(Failure { class: FailureClass::Cut, message });
        record
    }

    #[test]
    fn a_session_is_complete_with_its_last_answer() {
        let mut tally = SessionTally::default();
        assert_eq!(tally.report(), None);
        tally.add(&good(10, 10, 20, 50), &place(0, 0, 3, 0));
        tally.add(&good(150, 151, 160, 400), &place(0, 0, 3, 100));
        tally.add(&good(100, 100, 110, 200), &place(0, 1, 3, 50));
        // Of three turns the second fails; of the last session one is still to come.
        tally.add(&good(0, 0, 5, 9), &place(1, 0, 3, 0));
        tally.add(&failed(good(20, 20, 25, 30)), &place(1, 1, 3, 11));
        tally.add(&good(0, 0, 5, 9), &place(2, 0, 2, 0));
        tally.add(&failed(good(0, 0, 5, 9)), &place(3, 0, 1, 0));
        for (session, warmup) in [(4, true), (4, false), (5, true)] {
            let record = Record { warmup, ..good(0, 0, 5, 9) };
            tally.add(&record, &place(session, u32::from(!warmup), 2, 0));
        }
        let report = tally.report().unwrap();
        assert_eq!((report.begun, report.ended, report.failed, report.unfinished), (4, 1, 2, 1));
        assert_eq!((report.turns, report.turns_not_sent), (7, 1));
        assert_eq!((report.completion.unwrap().max, report.tools.unwrap().max), (390.0, 150.0));
    }

    #[test]
    fn turns_are_told_apart_by_their_number() {
        let depths: Vec<_> = [0, 1, 2, 3, 4, 7, 8, 15, 16, 63, 64, 1023].map(depth).into();
        assert_eq!(depths, [0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 7]);
        let mut tally = SessionTally::default();
        for turn in [0, 2, 3, 64] {
            let reusable = Reusable { unbounded: 10 * u64::from(turn.min(3)), pooled: None };
            let record = Record { reusable, ..good(0, 0, 10 + u64::from(turn), 99) };
            tally.add(&record, &place(0, turn, 9, 0));
        }
        let by_turn = tally.report().unwrap().by_turn;
        let shown: Vec<_> =
            by_turn.iter().map(|row| (row.numbers(), row.ttft.unwrap().n, row.possible())).collect();
        let want = [("1", 1, 0.0), ("3-4", 2, 50.0 / 80.0), ("65-", 1, 30.0 / 40.0)];
        assert_eq!(shown, want.map(|(numbers, n, share)| (numbers.to_owned(), n, Some(share))));
        assert_eq!(by_turn[0].cached(), None, "this server reports none");
    }
}
