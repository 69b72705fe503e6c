//! Keyway's own format for agents at work: JSON lines, a session a line, which say what each turn adds and
//! not what each prompt is. Compiled here into rows, links and ids of blocks. `docs/traces.md` describes it.

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    path::Path,
    time::Duration,
};

use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Row, Trace, TraceError,
    sessions::{Agent, SessionTurns, together},
};
use crate::{limits, random::splitmix};

/// Tokens of one block id.
const BLOCK_TOKENS: u32 = 64;

/// Milliseconds that a generated token takes where a trace is replayed at fixed times: 50 tokens a second.
const TOKEN_MS: u64 = 20;

/// The longest time that is believed: 30 years.
const TIME_MS_MAX: u64 = 1_000_000_000_000;

/// What is wrong with a session of agents.
#[derive(Debug, thiserror::Error)]
pub enum AgentsError {
    /// It is no JSON, lacks a field or has one too many.
    #[error("not a session of agents: {0}")]
    Json(#[from] serde_json::Error),
    /// It does nothing.
    #[error("agent {0} has no turns: give each at least one")]
    NoTurns(u32),
    /// A turn says nothing, or is answered by nothing.
    #[error("turn {turn} of agent {agent}: `{field}` is 0: it must be at least 1")]
    Nothing {
        /// Number of the agent in its session, from 0.
        agent: u32,
        /// Number of the turn in its agent, from 1.
        turn: usize,
        /// The field of the turn.
        field: &'static str,
    },
    /// A time is longer than any recording.
    #[error("`{field}` of agent {agent} is more than {TIME_MS_MAX} ms")]
    TooLate {
        /// Number of the agent in its session, from 0.
        agent: u32,
        /// The field of the agent or its turn.
        field: &'static str,
    },
    /// Its prompt is longer than any model's.
    #[error("turn {turn} of agent {agent}: its prompt has more than {most} tokens", most = limits::LENGTH_TOKENS_MAX)]
    TooLong {
        /// Number of the agent in its session, from 0.
        agent: u32,
        /// Number of the turn in its agent, from 1.
        turn: usize,
    },
}

/// A session, or a sub-agent in it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Work {
    /// For people alone.
    #[serde(default, alias = "agent", rename = "session")]
    _name: Option<String>,
    #[serde(default)]
    begins_ms: u64,
    #[serde(default)]
    starts_with: Vec<(String, u32)>,
    turns: Vec<WorkTurn>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkTurn {
    adds: u32,
    generates: u32,
    #[serde(default)]
    tools_ms: u64,
    #[serde(default)]
    agents: Vec<Work>,
    #[serde(default)]
    forgets: bool,
}

/// Whether `path` is a file that begins as one of sessions of agents does.
pub(crate) fn is_agents(path: &Path) -> bool {
    let text = super::beginning(path);
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim_start();
    first.starts_with('{') && first.contains("\"turns\"") && !first.contains("\"hash_ids\"")
}

/// Reads the sessions of `path`.
pub(crate) fn load(path: &Path) -> Result<Trace, TraceError> {
    let io = |source| TraceError::Io { path: path.into(), source };
    let mut sessions = Vec::new();
    for (line, text) in BufReader::new(File::open(path).map_err(io)?).lines().enumerate() {
        let text = text.map_err(io)?;
        if text.trim().is_empty() {
            continue;
        }
        let turns = session(sessions.len() as u64, &text);
        sessions.push(turns.map_err(|source| TraceError::Session {
            path: path.into(),
            line: line + 1,
            source: source.into(),
        })?);
    }
    let (rows, links) = together(sessions);
    if rows.is_empty() {
        return Err(TraceError::Empty(path.into()));
    }
    Ok(Trace { rows, block_tokens: BLOCK_TOKENS, links: Some(links) })
}

fn session(number: u64, text: &str) -> Result<SessionTurns, AgentsError> {
    let work: Work = serde_json::from_str(text)?;
    let mut compiler = Compiler { session: number, turns: SessionTurns::default(), agents: 1 };
    compiler.add(&work, Agent::FIRST, None)?;
    Ok(compiler.turns)
}

/// A turn whose answer others may go on from, and when it ends if its tokens come evenly.
#[derive(Debug, Clone, Copy)]
struct Answered {
    turn: u32,
    at_ms: u64,
}

impl WorkTurn {
    fn check(&self, agent: u32, turn: usize) -> Result<(), AgentsError> {
        for (field, tokens) in [("adds", self.adds), ("generates", self.generates)] {
            if tokens == 0 {
                return Err(AgentsError::Nothing { agent, turn, field });
            }
        }
        if self.tools_ms > TIME_MS_MAX {
            return Err(AgentsError::TooLate { agent, field: "tools_ms" });
        }
        Ok(())
    }
}

/// Makes turns of one session's line.
struct Compiler {
    session: u64,
    turns: SessionTurns,
    /// Agents found so far.
    agents: u32,
}

impl Compiler {
    /// Adds the turns of `agent`, which `start` has started. Gives those that it ends with: its last one, and
    /// those of the sub-agents that this one started.
    fn add(
        &mut self,
        work: &Work,
        agent: Agent,
        start: Option<Answered>,
    ) -> Result<Vec<Answered>, AgentsError> {
        if work.turns.is_empty() {
            return Err(AgentsError::NoTurns(agent.number));
        }
        if work.begins_ms > TIME_MS_MAX {
            return Err(AgentsError::TooLate { agent: agent.number, field: "begins_ms" });
        }
        let mut prompt = Prompt::starting_with(&work.starts_with);
        // A session begins with its first turn.
        let begins_ms = if start.is_none() { work.begins_ms } else { 0 };
        let mut wait_ms = work.begins_ms - begins_ms;
        let mut before: Vec<_> = start.into_iter().collect();
        for (turn, said) in work.turns.iter().enumerate() {
            let agent_number = agent.number;
            let (number, turn) = (turn as u64, turn + 1);
            said.check(agent_number, turn)?;
            if said.forgets {
                prompt = Prompt::starting_with(&work.starts_with);
            }
            let label = |answer: u64| {
                [agent_number.into(), number, answer]
                    .iter()
                    .fold(self.session, |hash, part| splitmix(hash) ^ part)
            };
            prompt.add(label(0), said.adds);
            if prompt.tokens > u64::from(limits::LENGTH_TOKENS_MAX) {
                return Err(AgentsError::TooLong { agent: agent_number, turn });
            }
            let at_ms = before
                .iter()
                .map(|answered| answered.at_ms)
                .max()
                .unwrap_or(begins_ms)
                .saturating_add(wait_ms);
            let row = Row {
                timestamp_ms: at_ms,
                input_tokens: prompt.tokens as u32,
                output_tokens: said.generates,
                blocks: prompt.ids.as_slice().into(),
            };
            prompt.add(label(1), said.generates);
            let after = before.iter().map(|answered| answered.turn).collect();
            let number = self.turns.push(agent, row, after, Duration::from_millis(wait_ms));
            let ended =
                Answered { turn: number, at_ms: at_ms.saturating_add(u64::from(said.generates) * TOKEN_MS) };
            before = vec![ended];
            for sub_agent in &said.agents {
                let number = self.agents;
                self.agents += 1;
                let sub = Agent { number, parent: Some(agent_number) };
                before.extend(self.add(sub_agent, sub, Some(ended))?);
            }
            wait_ms = said.tools_ms;
        }
        Ok(before)
    }
}

/// A prompt as it grows. Only whole blocks have ids, as in an engine's cache.
#[derive(Debug, Clone)]
struct Prompt {
    ids: Vec<u64>,
    tokens: u64,
    /// Hash of all of it so far.
    hash: u64,
}

impl Prompt {
    /// The parts that prompts share by name.
    fn starting_with(parts: &[(String, u32)]) -> Self {
        let mut prompt = Self { ids: Vec::new(), tokens: 0, hash: 0 };
        for (name, tokens) in parts {
            prompt.add(xxh3_64(name.as_bytes()), *tokens);
        }
        prompt
    }

    /// Adds the first `tokens` of the text `label`.
    fn add(&mut self, label: u64, tokens: u32) {
        let mut from = 0;
        while from < tokens {
            let filled = (self.tokens % u64::from(BLOCK_TOKENS)) as u32;
            let taken = (BLOCK_TOKENS - filled).min(tokens - from);
            for part in [label, u64::from(from), u64::from(taken)] {
                self.hash = splitmix(self.hash ^ splitmix(part));
            }
            (from, self.tokens) = (from + taken, self.tokens + u64::from(taken));
            if filled + taken == BLOCK_TOKENS {
                // Below the marks of the other kinds of ids.
                self.ids.push(self.hash >> 4);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;
    use crate::trace::sessions::tests::assert_links_hold;

    fn load(text: &str) -> Result<Trace, TraceError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Trace::load(file.path())
    }

    const SESSION: &str = r#"{"session": "a", "begins_ms": 100, "starts_with": [["system", 128]], "turns": [
        {"adds": 64, "generates": 64, "tools_ms": 2000, "agents": [
            {"begins_ms": 30, "starts_with": [["system", 128], ["search", 64]], "turns": [
                {"adds": 10, "generates": 5, "tools_ms": 7}, {"adds": 10, "generates": 5}]},
            {"agent": "quick", "turns": [{"adds": 1, "generates": 1}]}]},
        {"adds": 100, "generates": 50, "tools_ms": 9},
        {"adds": 64, "generates": 1, "forgets": true}]}"#;

    fn one_line() -> String {
        SESSION.replace('\n', " ")
    }

    #[test]
    fn a_session_becomes_prompts_links_and_blocks() {
        let trace = load(&one_line()).unwrap();
        let links = trace.links.unwrap();
        assert_links_hold(&trace.rows, &links);
        let parents: Vec<_> = links.iter().map(|link| link.parent).collect();
        assert_eq!(parents, [None, Some(0), Some(0), Some(0), None, None]);
        let shown: Vec<_> =
            links.iter().map(|link| (link.agent, link.turn, &*link.after, link.wait.as_millis())).collect();
        let want: [(u32, u32, &[u32], u128); 6] = [
            (0, 0, &[], 0),
            (2, 0, &[0], 0),
            (1, 0, &[0], 30),
            (1, 1, &[2], 7),
            (0, 1, &[0, 3, 1], 2000),
            (0, 2, &[4], 9),
        ];
        assert_eq!(shown, want);
        assert_eq!(trace.rows[0].timestamp_ms, 100);
        let lengths: Vec<_> = trace.rows.iter().map(|row| (row.input_tokens, row.blocks.len())).collect();
        assert_eq!(lengths, [(192, 3), (1, 0), (202, 3), (217, 3), (356, 5), (192, 3)]);
        let blocks: Vec<_> = trace.rows.iter().map(|row| &row.blocks).collect();
        assert_eq!(blocks[0][..2], blocks[2][..2], "the shared part");
        assert_ne!(blocks[0][2], blocks[2][2], "the parts behind it");
        assert_eq!(blocks[0][..], blocks[4][..3], "the next turn goes on from the first");
        assert_eq!(blocks[2], blocks[3], "the same agent");
        assert_eq!((&blocks[5][..2], blocks[5][2] == blocks[0][2]), (&blocks[0][..2], false), "forgotten");
    }

    #[test]
    fn sessions_share_named_parts_alone() {
        let trace = load(&format!("{0}\n\n{0}\n", one_line())).unwrap();
        let links = trace.links.as_ref().unwrap();
        let first: Vec<_> =
            (0..12).filter(|&i| links[i].after.is_empty()).map(|i| &trace.rows[i].blocks).collect();
        assert_eq!(first.len(), 2);
        assert_eq!((&first[0][..2], first[0][2] == first[1][2]), (&first[1][..2], false));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let good = one_line();
        for (bad, want) in [
            (r#"{"turns": []}"#.to_owned(), "line 2: agent 0 has no turns"),
            (
                r#"{"turns": [{"adds": 1}]}"#.into(),
                "line 2: not a session of agents: missing field `generates`",
            ),
            (r#"{"turns": [], "begin_ms": 3}"#.into(), "unknown field `begin_ms`"),
            (good.replace("\"adds\": 100", "\"adds\": 0"), "line 2: turn 2 of agent 0: `adds` is 0"),
            (good.replace("\"generates\": 5,", "\"generates\": 0,"), "turn 1 of agent 1: `generates` is 0"),
            (
                good.replace("\"begins_ms\": 30", "\"begins_ms\": 1000000000001"),
                "`begins_ms` of agent 1 is more",
            ),
            (
                good.replace("\"tools_ms\": 9", "\"tools_ms\": 18446744073709551615"),
                "`tools_ms` of agent 0 is",
            ),
            (good.replace("\"adds\": 1,", "\"adds\": 4000000000,"), "turn 1 of agent 2: its prompt has more"),
            ("nonsense".into(), "line 2: not a session"),
        ] {
            let error = load(&format!("{good}\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }

    /// A session's line, of at most two levels of sub-agents.
    fn line() -> impl Strategy<Value = String> {
        let turn = (1u32..200, 1u32..99, 0u64..5000, any::<bool>());
        let turns = |agents: BoxedStrategy<String>| {
            let turn = (turn.clone(), prop::collection::vec(agents, 0..3)).prop_map(
                |((adds, generates, tools_ms, forgets), agents)| {
                    let agents = agents.join(",");
                    format!(
                        r#"{{"adds":{adds},"generates":{generates},"tools_ms":{tools_ms},"forgets":{forgets},"agents":[{agents}]}}"#
                    )
                },
            );
            (0u64..9000, 0u32..300, prop::collection::vec(turn, 1..4)).prop_map(
                |(begins_ms, shared, turns)| {
                    let turns = turns.join(",");
                    format!(r#"{{"begins_ms":{begins_ms},"starts_with":[["s",{shared}]],"turns":[{turns}]}}"#)
                },
            )
        };
        let none = prop::collection::vec(turn.clone(), 1..3).prop_map(|turns| {
            let turns: Vec<_> =
                turns.iter().map(|(a, g, ..)| format!(r#"{{"adds":{a},"generates":{g}}}"#)).collect();
            format!(r#"{{"turns":[{}]}}"#, turns.join(","))
        });
        turns(turns(none.boxed()).boxed())
    }

    proptest! {
        #[test]
        fn links_and_prompts_hold_whatever_sessions_say(lines in prop::collection::vec(line(), 1..4)) {
            let trace = load(&lines.join("\n")).unwrap();
            let links = trace.links.unwrap();
            assert_links_hold(&trace.rows, &links);
            for row in &trace.rows {
                prop_assert_eq!(row.blocks.len() as u32, row.input_tokens / BLOCK_TOKENS);
            }
        }

        #[test]
        fn no_text_makes_it_panic(text: String, cut in 0usize..400) {
            let _ = session(0, &text);
            let line = one_line();
            prop_assert!(session(0, line.get(..cut).unwrap_or("")).is_err());
        }
    }
}
