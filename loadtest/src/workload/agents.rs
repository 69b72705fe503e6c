//! Tasks of agents drawn from distributions: sessions of turns, each with the whole conversation so far, and
//! sub-agents that a turn starts and the next one waits for. Makes a trace with links; sends nothing.
//!
//! All agents of a group begin with one text: system prompt and tools. The rest is an agent's own, and a
//! sub-agent has none of its parent's history.

use std::time::Duration;

use crate::{
    random::{Purpose, Rng},
    trace::{Row, Trace, links::Link},
    workload::dist::{Seconds, Tokens},
};

/// Tokens of a block: what agents share is cut down to whole ones.
pub const BLOCK_TOKENS: u32 = 64;

/// Marks the ids of blocks that all agents of a group begin with.
const SHARED: u64 = 1 << 62;

/// What sessions of agents are like.
#[derive(Debug, Clone, Copy)]
pub struct Agents {
    /// Decides all that is drawn, with the session's number.
    pub seed: u64,
    /// Sessions; at most 2^20.
    pub sessions: u32,
    /// Turns of a session's first agent.
    pub turns: Tokens,
    /// Tokens that each turn adds, besides the answer before it.
    pub input: Tokens,
    /// Tokens of each answer.
    pub output: Tokens,
    /// From an answer's end to the next turn.
    pub think: Seconds,
    /// The share of turns after which a slow tool runs, and how long that takes in place of `think`.
    pub slow: (f64, Seconds),
    /// Tokens that all agents of a group begin with.
    pub prefix_tokens: u32,
    /// Groups of sessions, drawn evenly.
    pub groups: u32,
    /// The share of turns, but for the last, that start sub-agents.
    pub spawns: f64,
    /// How many sub-agents such a turn starts.
    pub sub_agents: Tokens,
    /// Turns of a sub-agent.
    pub sub_turns: Tokens,
}

/// Rows and links as they are made.
struct Maker<'a> {
    agents: &'a Agents,
    rng: Rng,
    session: u32,
    group: u32,
    /// Agents of the session so far.
    count: u32,
    rows: Vec<Row>,
    links: Vec<Link>,
}

// === impl Agents ===

impl Agents {
    /// The sessions, one after the other, all with the time 0.
    pub fn trace(&self) -> Trace {
        let (mut rows, mut links) = (Vec::new(), Vec::new());
        for session in 0..self.sessions {
            let mut rng = Rng::at(self.seed, Purpose::Agents, session.into());
            let group = rng.below(self.groups.max(1) as usize) as u32;
            let mut maker = Maker { agents: self, rng, session, group, count: 0, rows, links };
            maker.agent(None, &[]);
            (rows, links) = (maker.rows, maker.links);
        }
        Trace { rows, block_tokens: BLOCK_TOKENS, links: Some(links) }
    }
}

// === impl Maker ===

impl Maker<'_> {
    /// Makes an agent's turns, and the sub-agents that they start; gives the row of its last one.
    fn agent(&mut self, parent: Option<u32>, starts_after: &[u32]) -> u32 {
        let agent = self.count;
        self.count += 1;
        let turns = if parent.is_none() { self.agents.turns } else { self.agents.sub_turns };
        let turns = turns.draw(&mut self.rng);
        let (mut tokens, mut after) = (self.agents.prefix_tokens, starts_after.to_vec());
        let mut last = 0;
        for turn in 0..turns {
            tokens += self.agents.input.draw(&mut self.rng);
            let output_tokens = self.agents.output.draw(&mut self.rng);
            let wait = if turn == 0 { Duration::ZERO } else { self.wait() };
            last = self.rows.len() as u32;
            let blocks = self.blocks(agent, tokens);
            self.rows.push(Row { timestamp_ms: 0, input_tokens: tokens, output_tokens, blocks });
            let follows = std::mem::replace(&mut after, vec![last]).into();
            self.links.push(Link { session: self.session, agent, parent, turn, after: follows, wait });
            tokens += output_tokens;
            // A sub-agent starts none of its own: sessions end.
            if parent.is_none() && turn + 1 < turns && self.rng.unit() < self.agents.spawns {
                let count = self.agents.sub_agents.draw(&mut self.rng);
                let ends: Vec<_> = (0..count).map(|_| self.agent(Some(agent), &[last])).collect();
                after.extend(ends);
            }
        }
        last
    }

    fn wait(&mut self) -> Duration {
        let (share, slow) = self.agents.slow;
        let is_slow = self.rng.unit() < share;
        if is_slow { slow.draw(&mut self.rng) } else { self.agents.think.draw(&mut self.rng) }
    }

    fn blocks(&self, agent: u32, tokens: u32) -> Box<[u64]> {
        let shared = self.agents.prefix_tokens / BLOCK_TOKENS;
        let group = SHARED | u64::from(self.group) << 24;
        let own = (u64::from(self.session) + 1) << 40 | u64::from(agent) << 24;
        let id = |i: u32| u64::from(i) | if i < shared { group } else { own };
        (0..tokens.div_ceil(BLOCK_TOKENS)).map(id).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Sessions of ten turns, some of which start two sub-agents of three turns.
    pub(crate) fn some(sessions: u32, spawns: f64) -> Agents {
        Agents {
            seed: 3,
            sessions,
            turns: "10".parse().unwrap(),
            input: "600".parse().unwrap(),
            output: "60".parse().unwrap(),
            think: "exp(2s)".parse().unwrap(),
            slow: (0.0, "0s".parse().unwrap()),
            prefix_tokens: 2_000,
            groups: 1,
            spawns,
            sub_agents: "2".parse().unwrap(),
            sub_turns: "3".parse().unwrap(),
        }
    }

    #[test]
    fn a_turn_repeats_its_past_and_a_sub_agent_only_what_all_begin_with() {
        let trace = some(2, 0.5).trace();
        let links = trace.links.as_ref().unwrap();
        let common = |a: usize, b: usize| {
            let (a, b) = (&trace.rows[a].blocks, &trace.rows[b].blocks);
            a.iter().zip(b).take_while(|(a, b)| a == b).count()
        };
        let (mut later, mut sub) = (0, 0);
        for (row, link) in links.iter().enumerate() {
            let Some(&before) = link.after.first() else { continue };
            let past = &links[before as usize];
            if past.agent == link.agent {
                later += 1;
                assert_eq!(common(row, before as usize), trace.rows[before as usize].blocks.len());
            } else {
                sub += 1;
                assert_eq!((link.parent, link.turn), (Some(past.agent), 0));
                assert_eq!(common(row, before as usize), 2_000 / BLOCK_TOKENS as usize);
            }
        }
        assert!(later > 18 && sub > 4, "{later} {sub}");
    }

    #[test]
    fn the_next_turn_waits_for_all_sub_agents() {
        let trace = some(1, 1.0).trace();
        let links = trace.links.unwrap();
        assert_eq!(links.len(), 10 + 9 * 2 * 3);
        let turns: Vec<_> = links.iter().filter(|link| link.agent == 0).collect();
        assert!(turns[1..].iter().all(|link| link.after.len() == 3));
        let rows = links.iter().zip(0..);
        assert!(rows.clone().all(|(link, row)| link.after.iter().all(|&before| before < row)));
    }
}
