//! Which turn comes when, where a trace tells what follows what: once the answers that it goes on from have
//! ended and its wait has passed. Sends nothing, and knows no worker.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use crate::{engine_model::Nanos, schedule::Due, trace::links::Link};

/// Which rows follow which, of the rows that are replayed.
#[derive(Debug)]
pub(super) struct TurnGraph {
    sessions: Vec<SessionRows>,
    /// Of each row its session, and which it is there; `None`: it is not replayed.
    places: Vec<Option<(u32, u32)>>,
    /// Of each row those that wait for its answer.
    followers: Vec<Vec<u32>>,
    /// Of each row how many answers it waits for, and how long it waits then.
    waits: Vec<(u32, Nanos)>,
}

#[derive(Debug)]
struct SessionRows {
    /// Rows with the time after the session's begin at which they were recorded.
    rows: Vec<(u32, Nanos)>,
    begins: Nanos,
}

/// How sessions begin.
#[derive(Debug, Clone, Copy)]
pub(super) struct Begins {
    /// Sessions that go on at once, the next of which begins where one ends; `None`: at their recorded times.
    pub(super) at_once: Option<usize>,
    /// How often all are replayed, one copy after the other.
    pub(super) copies: u64,
    /// Time from one copy to the next, where times are the recorded ones.
    pub(super) copy_ns: u64,
}

/// A turn that comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Coming {
    pub(super) at: Nanos,
    /// Those that come at once keep the order in which they were found.
    number: u64,
    pub(super) copy: u64,
    pub(super) row: u32,
}

/// What became of an answer's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SessionEnd {
    /// When the session began.
    pub(super) began: Nanos,
    /// Whether another one has begun in its place.
    pub(super) is_replaced: bool,
}

/// The turns of a run.
#[derive(Debug)]
pub(super) struct Turns<'a> {
    graph: &'a TurnGraph,
    begins: Begins,
    coming: BinaryHeap<Reverse<Coming>>,
    number: u64,
    /// Sessions under way, by copy and number.
    live: HashMap<(u64, u32), Live>,
    /// Sessions that have begun.
    begun: u64,
}

#[derive(Debug)]
struct Live {
    began: Nanos,
    /// Of each row how many answers it waits for, and when the last of those ended that have.
    open: Vec<(u32, Nanos)>,
    /// Answers that have not ended.
    left: usize,
}

// === impl TurnGraph ===

impl TurnGraph {
    /// Of the rows in `schedule`; waits pass `speed` times as fast.
    pub(super) fn new(links: &[Link], schedule: &[Due], speed: f64) -> Self {
        let mut numbers = HashMap::new();
        let (mut sessions, mut places) = (Vec::<SessionRows>::new(), vec![None; links.len()]);
        for due in schedule {
            let known = sessions.len() as u32;
            let number = *numbers.entry(links[due.row].session).or_insert(known);
            if number == known {
                sessions.push(SessionRows { rows: Vec::new(), begins: due.intended_ns });
            }
            let session = &mut sessions[number as usize];
            places[due.row] = Some((number, session.rows.len() as u32));
            session.rows.push((due.row as u32, due.intended_ns - session.begins));
        }
        let mut followers = vec![Vec::new(); links.len()];
        let mut waits = vec![(0, 0); links.len()];
        for due in schedule {
            let link = &links[due.row];
            // What lies outside of the slice has been answered before.
            let before = link.after.iter().filter(|&&row| places[row as usize].is_some());
            for &row in before {
                followers[row as usize].push(due.row as u32);
                waits[due.row].0 += 1;
            }
            waits[due.row].1 = (link.wait.as_secs_f64() * 1e9 / speed) as Nanos;
        }
        Self { sessions, places, followers, waits }
    }

    /// The row of the same agent that goes on from this one's answer.
    pub(super) fn next_turn(&self, links: &[Link], row: usize) -> Option<usize> {
        let of = |link: &Link| (link.session, link.agent, link.turn);
        let (session, agent, turn) = of(&links[row]);
        let followers = self.followers[row].iter().map(|&follower| follower as usize);
        followers.into_iter().find(|&follower| of(&links[follower]) == (session, agent, turn + 1))
    }

    /// Sessions of one copy.
    pub(super) fn sessions(&self) -> usize {
        self.sessions.len()
    }
}

// === impl Turns ===

impl<'a> Turns<'a> {
    /// The first sessions begin.
    pub(super) fn new(graph: &'a TurnGraph, begins: Begins) -> Self {
        let (coming, live) = (BinaryHeap::new(), HashMap::new());
        let mut turns = Self { graph, begins, coming, number: 0, live, begun: 0 };
        let all = turns.all();
        for _ in 0..begins.at_once.map_or(all, |at_once| all.min(at_once as u64)) {
            turns.begin_next(0);
        }
        turns
    }

    /// Sessions of all copies.
    fn all(&self) -> u64 {
        self.graph.sessions.len() as u64 * self.begins.copies
    }

    /// When the next turn comes, as far as is known.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        self.coming.peek().map(|Reverse(coming)| coming.at)
    }

    /// The next turn.
    pub(super) fn pop(&mut self) -> Option<Coming> {
        self.coming.pop().map(|Reverse(coming)| coming)
    }

    /// Whether no turn will come, and no answer is under way.
    pub(super) fn is_over(&self) -> bool {
        self.live.is_empty()
    }

    /// An answer has ended; what follows comes. `Some`: it was its session's last.
    pub(super) fn ended(&mut self, at: Nanos, copy: u64, row: u32) -> Option<SessionEnd> {
        let (session, _) = self.graph.places[row as usize]?;
        let live = self.live.get_mut(&(copy, session))?;
        live.left -= 1;
        let mut due = Vec::new();
        for &follower in &self.graph.followers[row as usize] {
            let Some((_, place)) = self.graph.places[follower as usize] else { continue };
            let (open, last) = &mut live.open[place as usize];
            (*open, *last) = (*open - 1, at.max(*last));
            if *open == 0 {
                due.push((*last + self.graph.waits[follower as usize].1, follower));
            }
        }
        let (began, is_over) = (live.began, live.left == 0);
        for (at, row) in due {
            self.push(at, copy, row);
        }
        if !is_over {
            return None;
        }
        self.live.remove(&(copy, session));
        let is_replaced = self.begins.at_once.is_some() && self.begun < self.all();
        if is_replaced {
            self.begin_next(at);
        }
        Some(SessionEnd { began, is_replaced })
    }

    fn begin_next(&mut self, now: Nanos) {
        let count = self.graph.sessions.len() as u64;
        let (copy, session) = (self.begun / count, (self.begun % count) as u32);
        self.begun += 1;
        let SessionRows { rows, begins } = &self.graph.sessions[session as usize];
        let began = match self.begins.at_once {
            Some(_) => now,
            None => begins + copy * self.begins.copy_ns,
        };
        let open = rows.iter().map(|(row, _)| (self.graph.waits[*row as usize].0, 0)).collect();
        self.live.insert((copy, session), Live { began, open, left: rows.len() });
        for &(row, after) in rows {
            if self.graph.waits[row as usize].0 == 0 {
                self.push(began + after, copy, row);
            }
        }
    }

    fn push(&mut self, at: Nanos, copy: u64, row: u32) {
        let number = self.number;
        self.number += 1;
        self.coming.push(Reverse(Coming { at, number, copy, row }));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::workload::agents;

    fn graph(sessions: u32, spawns: f64, speed: f64) -> (Vec<Link>, TurnGraph) {
        let links = agents::tests::some(sessions, spawns).trace().links.unwrap();
        let schedule: Vec<_> = (0..links.len()).map(|row| Due { intended_ns: 0, row }).collect();
        let graph = TurnGraph::new(&links, &schedule, speed);
        (links, graph)
    }

    proptest! {
        /// However long answers take: each turn comes once, its wait after the last answer that it goes on
        /// from, and never more sessions go on than may.
        #[test]
        fn a_turn_comes_its_wait_after_what_it_follows(
            took in prop::collection::vec(1_u64..5_000_000_000, 1..40),
            at_once in 1_usize..6,
            copies in 1_u64..3,
        ) {
            let (links, graph) = graph(4, 0.3, 2.0);
            let mut turns = Turns::new(&graph, Begins { at_once: Some(at_once), copies, copy_ns: 0 });
            let mut ends = HashMap::new();
            let mut under_way = BinaryHeap::<Reverse<(Nanos, u64, u32)>>::new();
            let (mut came, mut over) = (0, 0);
            loop {
                let end = under_way.peek().map(|&Reverse((at, ..))| at);
                if let Some(at) = end.filter(|at| turns.next_at().is_none_or(|next| *at <= next)) {
                    let Some(Reverse((_, copy, row))) = under_way.pop() else { break };
                    ends.insert((copy, row), at);
                    over += u64::from(turns.ended(at, copy, row).is_some());
                    continue;
                }
                let Some(Coming { at, copy, row, .. }) = turns.pop() else { break };
                let link = &links[row as usize];
                let last = link.after.iter().map(|before| ends[&(copy, *before)]).max();
                if let Some(last) = last {
                    prop_assert!(at.abs_diff(last + link.wait.as_nanos() as u64 / 2) <= 1);
                }
                prop_assert!(turns.live.len() <= at_once);
                under_way.push(Reverse((at + took[came % took.len()], copy, row)));
                came += 1;
            }
            prop_assert!(turns.is_over());
            prop_assert_eq!((came as u64, over), (links.len() as u64 * copies, 4 * copies));
        }
    }

    #[test]
    fn without_a_number_at_once_sessions_begin_when_they_did() {
        let (links, _) = graph(2, 0.0, 1.0);
        let at = |row: usize| u64::from(links[row].session) * 7_000 + row as u64;
        let schedule: Vec<_> = (0..links.len()).map(|row| Due { intended_ns: at(row), row }).collect();
        let graph = TurnGraph::new(&links, &schedule, 1.0);
        let mut turns = Turns::new(&graph, Begins { at_once: None, copies: 2, copy_ns: 50_000 });
        let came: Vec<_> = std::iter::from_fn(|| turns.pop()).map(|turn| (turn.at, turn.copy)).collect();
        assert_eq!(came, [(0, 0), (7_010, 0), (50_000, 1), (57_010, 1)]);
    }

    #[test]
    fn a_turn_whose_past_lies_before_the_slice_comes_when_it_did() {
        let (links, _) = graph(1, 0.0, 1.0);
        let schedule: Vec<_> = (4..10).map(|row| Due { intended_ns: 10 * row as u64, row }).collect();
        let graph = TurnGraph::new(&links, &schedule, 1.0);
        let mut turns = Turns::new(&graph, Begins { at_once: Some(1), copies: 1, copy_ns: 0 });
        let first = turns.pop().unwrap();
        assert_eq!((first.at, first.row, turns.pop()), (0, 4, None));
    }
}
