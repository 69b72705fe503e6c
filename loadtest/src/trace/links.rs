//! Which turn of an agent follows which: a turn begins when the answers that it goes on from have come and
//! its tools are done, however long these answers took. Reads nothing.

use std::time::Duration;

/// How one row of a trace hangs together with others of its session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Number of the session: a person's task, with all agents that work on it.
    pub session: u32,
    /// Number of the agent in its session; 0 is the one that the person speaks to.
    pub agent: u32,
    /// Number of the agent that started this one, in the same session.
    pub parent: Option<u32>,
    /// Number of the turn in its agent, from 0.
    pub turn: u32,
    /// The rows whose answers must have ended, all of them earlier in the trace: the agent's turn before, and
    /// the last turns of sub-agents that it waited for. None for a session's first turn.
    pub after: Box<[u32]>,
    /// From the last of these answers' ends to this turn, in which tools run; from the session's begin for a
    /// first turn.
    pub wait: Duration,
}
