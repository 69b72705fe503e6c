//! Sessions of turns that follow each other's answers: when one begins, and which turn is due once an answer
//! has ended. Takes times as arguments.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
};

use crate::schedule::{Due, flow::Flow};

/// See [`super::Pacer::Sessions`]. Request numbers are those of the flow.
#[derive(Debug)]
pub struct Sessions {
    pub(super) flow: Flow,
    starts: Starts,
    /// Sessions to hold in all, unless `until_ns` comes first.
    count: usize,
    /// Those begun so far.
    begun: usize,
    /// Later turns: when they are due, and their rows.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    until_ns: u64,
    pub(super) under_way: usize,
    /// Sessions that have begun and are not over, by their numbers.
    open: HashMap<usize, Open>,
}

/// When the first turns of sessions are due.
#[derive(Debug)]
pub enum Starts {
    /// At these times, in nanoseconds after the run's zero, the earliest first.
    At(VecDeque<u64>),
    /// When one of the slots is free; it was freed at these times.
    Free(BinaryHeap<Reverse<u64>>),
}

/// A session under way.
#[derive(Debug, Default)]
struct Open {
    /// Turns that are due or under way.
    turns: usize,
    /// A turn failed: what follows is not sent.
    failed: bool,
    /// A turn was due too late to be sent: the session keeps its slot to the end.
    cut: bool,
    /// Turns that wait for more answers: how many, and when the latest so far ended.
    waiting: HashMap<usize, (u32, u64)>,
}

// === impl Sessions ===

impl Sessions {
    pub(super) fn new(flow: Flow, starts: Starts, count: usize, until_ns: u64) -> Self {
        let count = count.min(flow.sessions());
        let (due, open) = (BinaryHeap::new(), HashMap::new());
        Self { flow, starts, count, begun: 0, due, until_ns, under_way: 0, open }
    }

    /// What is due next, and whether it begins a session.
    pub(super) fn peek(&self) -> Option<(Due, bool)> {
        let start = match &self.starts {
            Starts::At(times) => times.front().copied(),
            Starts::Free(slots) => slots.peek().map(|&Reverse(at)| at),
        };
        let start = start.filter(|&at| self.begun < self.count && at < self.until_ns);
        let start = start.map(|intended_ns| Due { intended_ns, row: self.flow.first(self.begun) });
        let turn = self.due.peek().map(|&Reverse((intended_ns, row))| Due { intended_ns, row });
        match (start, turn) {
            (Some(start), Some(turn)) if turn.intended_ns <= start.intended_ns => Some((turn, false)),
            (Some(start), _) => Some((start, true)),
            (None, turn) => turn.map(|turn| (turn, false)),
        }
    }

    pub(super) fn take(&mut self) {
        match self.peek() {
            Some((first, true)) => {
                self.begun += 1;
                match &mut self.starts {
                    Starts::At(times) => drop(times.pop_front()),
                    Starts::Free(slots) => drop(slots.pop()),
                }
                let open = Open { turns: 1, ..Open::default() };
                self.open.insert(self.flow.session(first.row), open);
            }
            _ => drop(self.due.pop()),
        }
        self.under_way += 1;
    }

    /// Takes in that a turn has ended; gives the turns that were due and now are not.
    pub(super) fn ended(&mut self, row: usize, at_ns: u64, well: bool) -> Vec<usize> {
        self.under_way -= 1;
        let session = self.flow.session(row);
        let Some(open) = self.open.get_mut(&session) else { return Vec::new() };
        open.turns -= 1;
        open.failed |= !well;
        let mut dropped = Vec::new();
        if open.failed {
            let flow = &self.flow;
            self.due.retain(|&Reverse((_, row))| {
                let is_kept = flow.session(row) != session;
                dropped.extend((!is_kept).then_some(row));
                is_kept
            });
            open.turns -= dropped.len();
        } else {
            for next in self.flow.followers(row) {
                let before = self.flow.answers_before(next);
                let (missing, latest_ns) = open.waiting.entry(next).or_insert((before, 0));
                (*missing, *latest_ns) = (*missing - 1, at_ns.max(*latest_ns));
                if *missing > 0 {
                    continue;
                }
                let wait_ns = u64::try_from(self.flow.wait(next).as_nanos()).unwrap_or(u64::MAX);
                let due_ns = latest_ns.saturating_add(wait_ns);
                open.waiting.remove(&next);
                if due_ns < self.until_ns {
                    open.turns += 1;
                    self.due.push(Reverse((due_ns, next)));
                } else {
                    open.cut = true;
                }
            }
        }
        if open.turns == 0 {
            let cut = open.cut;
            self.open.remove(&session);
            if let (Starts::Free(slots), false) = (&mut self.starts, cut) {
                slots.push(Reverse(at_ns));
            }
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{
        flow::{TurnGraph, tests::links},
        pacer::{Pacer, tests::simulate},
    };

    fn graph() -> Flow {
        Flow::Trace(TurnGraph::new(&links(), 0..7, 1.0))
    }

    fn pacer(starts: Starts, until_ns: u64) -> Pacer {
        Pacer::sessions(graph(), starts, usize::MAX, until_ns)
    }

    const MS: u64 = 1_000_000;

    /// The rows in the order of sending, with the milliseconds at which they are due.
    fn sent(pacer: Pacer, took: impl Fn(usize) -> u64, fails: &[usize]) -> Vec<(usize, u64)> {
        simulate(pacer, |row| took(row) * MS, fails).into_iter().map(|sent| (sent.0, sent.1 / MS)).collect()
    }

    #[test]
    fn a_turn_waits_for_the_last_of_the_answers_that_it_goes_on_from() {
        let starts = || Starts::At([0, 5 * MS].into());
        let want = [(0, 0), (2, 5), (5, 55), (1, 110), (3, 120), (4, 150), (6, 260)];
        let took = |row| if row == 0 { 100 } else { 10 };
        assert_eq!(sent(pacer(starts(), u64::MAX), took, &[]), want);
        // The other sub-agent is the slower one now, and the answers are later: so is what follows them.
        let took = |row| if row == 3 { 500 } else { 10 };
        let want = [(0, 0), (2, 5), (1, 20), (3, 30), (5, 55), (4, 60), (6, 630)];
        assert_eq!(sent(pacer(starts(), u64::MAX), took, &[]), want);
    }

    #[test]
    fn a_session_begins_when_the_last_turn_of_another_has_ended() {
        let one = Starts::Free([Reverse(0)].into());
        let sent = sent(pacer(one, u64::MAX), |_| 10, &[]);
        assert_eq!(sent, [(0, 0), (1, 20), (3, 30), (4, 60), (6, 170), (2, 180), (5, 230)]);
    }

    #[test]
    fn a_failed_turn_ends_its_session_once_what_is_under_way_has_ended() {
        let one = || Starts::Free([Reverse(0)].into());
        // Row 3 is under way when row 1 fails; row 4 is never due.
        let took = |row| if row == 3 { 300 } else { 15 };
        assert_eq!(sent(pacer(one(), u64::MAX), took, &[1]), [(0, 0), (1, 25), (3, 35), (2, 335), (5, 390)]);
        // Row 3 is due and not sent yet when row 1 fails.
        assert_eq!(sent(pacer(one(), u64::MAX), |_| 5, &[1]), [(0, 0), (1, 15), (2, 20), (5, 65)]);
    }

    #[test]
    fn what_is_due_too_late_is_not_sent_and_its_session_keeps_its_slot() {
        let one = Starts::Free([Reverse(0)].into());
        assert_eq!(sent(pacer(one, 150 * MS), |_| 10, &[]), [(0, 0), (1, 20), (3, 30), (4, 60)]);
        let at = Starts::At([0, 5 * MS, 149 * MS].into());
        let sent = sent(pacer(at, 50 * MS), |_| 10, &[]);
        assert_eq!(sent, [(0, 0), (2, 5), (1, 20), (3, 30)]);
    }
}
