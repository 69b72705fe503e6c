//! What the turns of a run go on from: in conversations the one before, in a trace what its links say. Says
//! neither when a session begins nor when an answer ends.

use std::{ops::Range, time::Duration};

use crate::{
    trace::links::Link,
    workload::conversation::{self, Conversations},
};

/// The turns of all sessions and what follows what. A conversation is a session of one agent.
#[derive(Debug)]
pub enum Flow {
    /// Each turn follows the one before it. Request numbers are those of [`conversation::row`].
    Conversations(Conversations),
    /// As a trace says. Request numbers are its rows.
    Trace(TurnGraph),
}

/// Where a turn belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnPlace {
    /// Number of the session.
    pub session: usize,
    /// Number of the agent in it; 0 is the one that the person speaks to.
    pub agent: u32,
    /// Who started the agent.
    pub parent: Option<u32>,
    /// Number of the turn in its agent, from 0.
    pub turn: u32,
    /// Turns of the whole session.
    pub turns: u32,
    /// From the last of the answers that the turn goes on from to the turn: tools run, or a person thinks.
    pub wait: Duration,
}

/// The links of a trace, read from each turn to those that go on from it.
#[derive(Debug)]
pub struct TurnGraph {
    /// The first turns of the sessions that are replayed, in order of time.
    firsts: Vec<usize>,
    nodes: Vec<Node>,
    /// Rows that go on from others, those of each other row together.
    followers: Vec<u32>,
    /// Turns of each session of the trace.
    sizes: Vec<u32>,
}

#[derive(Debug)]
struct Node {
    session: u32,
    agent: u32,
    parent: Option<u32>,
    turn: u32,
    wait: Duration,
    /// Answers that the turn goes on from.
    after: u32,
    /// Where its own followers begin.
    followers: u32,
}

// === impl Flow ===

impl Flow {
    /// How many sessions there are at most.
    pub fn sessions(&self) -> usize {
        match self {
            Self::Conversations(_) => usize::MAX,
            Self::Trace(graph) => graph.firsts.len(),
        }
    }

    /// The first turn of the session that begins as number `nth`, from 0.
    pub fn first(&self, nth: usize) -> usize {
        match self {
            Self::Conversations(_) => conversation::row(nth, 0),
            Self::Trace(graph) => graph.firsts[nth],
        }
    }

    /// The session of a turn.
    pub fn session(&self, row: usize) -> usize {
        match self {
            Self::Conversations(_) => conversation::split(row).0,
            Self::Trace(graph) => graph.nodes[row].session as usize,
        }
    }

    /// Where a turn belongs.
    pub fn place(&self, row: usize) -> TurnPlace {
        match self {
            Self::Conversations(conversations) => {
                let (session, turn) = conversation::split(row);
                let turns = conversations.turns(session) as u32;
                TurnPlace { session, agent: 0, parent: None, turn: turn as u32, turns, wait: self.wait(row) }
            }
            Self::Trace(graph) => {
                let &Node { session, agent, parent, turn, wait, after, .. } = &graph.nodes[row];
                let turns = graph.sizes[session as usize];
                let wait = if after == 0 { Duration::ZERO } else { wait };
                TurnPlace { session: session as usize, agent, parent, turn, turns, wait }
            }
        }
    }

    /// The turns that go on from a turn's answer.
    pub fn followers(&self, row: usize) -> Vec<usize> {
        match self {
            Self::Conversations(conversations) => {
                let (session, turn) = conversation::split(row);
                if turn + 1 < conversations.turns(session) { vec![row + 1] } else { Vec::new() }
            }
            Self::Trace(graph) => graph.followers(row).iter().map(|&row| row as usize).collect(),
        }
    }

    /// How many answers a turn goes on from; 0 for a session's first.
    pub fn answers_before(&self, row: usize) -> u32 {
        match self {
            Self::Conversations(_) => u32::from(conversation::split(row).1 > 0),
            Self::Trace(graph) => graph.nodes[row].after,
        }
    }

    /// From the last of these answers to the turn.
    pub fn wait(&self, row: usize) -> Duration {
        match self {
            Self::Conversations(_) if conversation::split(row).1 == 0 => Duration::ZERO,
            Self::Conversations(conversations) => conversations.think(row - 1),
            Self::Trace(graph) => graph.nodes[row].wait,
        }
    }

    /// Whether the agent of a turn takes another one behind it.
    pub fn goes_on(&self, row: usize) -> bool {
        match self {
            Self::Conversations(_) => !self.followers(row).is_empty(),
            Self::Trace(graph) => {
                let agent = graph.nodes[row].agent;
                graph.followers(row).iter().any(|&next| graph.nodes[next as usize].agent == agent)
            }
        }
    }

    /// Turns of the first `sessions` sessions.
    pub fn turns_of(&self, sessions: usize) -> u64 {
        match self {
            Self::Conversations(conversations) => {
                (0..sessions).map(|session| conversations.turns(session) as u64).sum()
            }
            Self::Trace(graph) => {
                let size = |&row: &usize| u64::from(graph.sizes[graph.nodes[row].session as usize]);
                graph.firsts.iter().take(sessions).map(size).sum()
            }
        }
    }
}

// === impl TurnGraph ===

impl TurnGraph {
    /// The sessions that begin in `rows`, whole. `speed`: seconds of the trace's time in one second.
    pub fn new(links: &[Link], rows: Range<usize>, speed: f64) -> Self {
        let sessions = links.iter().map(|link| link.session as usize + 1).max().unwrap_or(0);
        let (mut sizes, mut counts) = (vec![0; sessions], vec![0; links.len() + 1]);
        for link in links {
            sizes[link.session as usize] += 1;
            link.after.iter().for_each(|&before| counts[before as usize] += 1);
        }
        let mut begin = 0;
        for count in &mut counts {
            (*count, begin) = (begin, begin + *count);
        }
        let mut followers = vec![0; begin as usize];
        let mut ends = counts.clone();
        for (link, row) in links.iter().zip(0..) {
            for &before in &link.after {
                let end = &mut ends[before as usize];
                followers[*end as usize] = row;
                *end += 1;
            }
        }
        let node = |(link, &followers): (&Link, &u32)| Node {
            session: link.session,
            agent: link.agent,
            parent: link.parent,
            turn: link.turn,
            wait: Duration::try_from_secs_f64(link.wait.as_secs_f64() / speed).unwrap_or(Duration::MAX),
            after: link.after.len() as u32,
            followers,
        };
        let firsts = rows.filter(|&row| links[row].after.is_empty()).collect();
        Self { firsts, nodes: links.iter().zip(&counts).map(node).collect(), followers, sizes }
    }

    /// The rows of the sessions' first turns, in order of time.
    pub fn firsts(&self) -> &[usize] {
        &self.firsts
    }

    fn followers(&self, row: usize) -> &[u32] {
        let begin = self.nodes[row].followers as usize;
        let end = self.nodes.get(row + 1).map_or(self.followers.len(), |next| next.followers as usize);
        &self.followers[begin..end]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two sessions. In the first an agent starts two others with its first turn and waits for both.
    pub(crate) fn links() -> Vec<Link> {
        let link = |session, agent, turn, after: &[u32], wait_ms| Link {
            session,
            agent,
            parent: (agent > 0).then_some(0),
            turn,
            after: after.into(),
            wait: Duration::from_millis(wait_ms),
        };
        vec![
            link(0, 0, 0, &[], 500),
            link(0, 1, 0, &[0], 10),
            link(1, 0, 0, &[], 0),
            link(0, 2, 0, &[0], 20),
            link(0, 1, 1, &[1], 30),
            link(1, 0, 1, &[2], 40),
            link(0, 0, 1, &[0, 3, 4], 100),
        ]
    }

    #[test]
    fn a_trace_s_links_are_read_from_each_turn_to_its_followers() {
        let flow = Flow::Trace(TurnGraph::new(&links(), 0..7, 10.0));
        let followers: Vec<_> = (0..7).map(|row| flow.followers(row)).collect();
        assert_eq!(followers, [vec![1, 3, 6], vec![4], vec![5], vec![6], vec![6], vec![], vec![]]);
        let goes_on: Vec<_> = (0..7).map(|row| flow.goes_on(row)).collect();
        assert_eq!(goes_on, [true, true, true, false, false, false, false]);
        let wait = Duration::from_millis(10);
        assert_eq!(flow.place(6), TurnPlace { session: 0, agent: 0, parent: None, turn: 1, turns: 5, wait });
        assert_eq!((flow.place(0).wait, flow.place(3).parent), (Duration::ZERO, Some(0)));
        assert_eq!((flow.first(1), flow.turns_of(1), flow.turns_of(2)), (2, 5, 7));
        let late = Flow::Trace(TurnGraph::new(&links(), 1..4, 1.0));
        assert_eq!((late.sessions(), late.first(0), late.turns_of(1)), (1, 2, 2));
        let slow = Flow::Trace(TurnGraph::new(&links(), 0..7, f64::MIN_POSITIVE));
        assert_eq!(slow.wait(6), Duration::MAX);
    }
}
