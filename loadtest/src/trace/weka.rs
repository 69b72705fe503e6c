//! WEKA's traces of agents at work: one JSON object a session, in one file or a folder of them, with the
//! requests of sub-agents nested. Flattened here into rows. github.com/callanjfox/kv-cache-tester,
//! `docs/trace_replay_tester.md`.
//!
//! A session's times count from its own start, and nothing says when it began: the sessions begin evenly over
//! the mean session's length, after which as many end as begin. Ids are a session's own unless
//! `hash_id_scope` is `global`.
//!
//! Requests of one list follow each other. A sub-agent starts after the answer in front of it; the list's
//! next request that was sent after its end waits for it. What passed between is told by `think_time`, else
//! by the gap to the answer's end (`api_time`), else by the gap to its start.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;

use super::{
    Row, Trace, TraceError,
    agents::AgentsError,
    checked,
    sessions::{Agent, SessionTurns, together},
};
use crate::{limits, random::splitmix};

/// Tokens of a block where the session does not say.
const BLOCK_TOKENS: u32 = 64;

/// The latest time that is believed, in seconds: 30 years.
const SECONDS_MAX: f64 = 1e9;

/// What is wrong with a file of sessions.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// It is no JSON, or lacks a field of a session.
    #[error("not a session of WEKA's: {0}")]
    Json(#[from] serde_json::Error),
    /// The sessions of one trace have blocks of several sizes.
    #[error("its sessions differ in block_size: keep those of one size")]
    BlockSizes,
    /// It is not one of Keyway's own format.
    #[error(transparent)]
    Agents(#[from] AgentsError),
    /// The file is larger than what is read.
    #[error("larger than {most} bytes: cut it", most = limits::TEXT_FILE_BYTES_MAX)]
    TooLarge,
}

#[derive(Deserialize)]
struct Session {
    #[serde(default = "default_block")]
    block_size: u32,
    #[serde(default)]
    hash_id_scope: String,
    requests: Vec<Entry>,
}

/// A request, or a sub-agent with requests of its own.
#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    t: f64,
    #[serde(rename = "in")]
    input: Option<u32>,
    #[serde(default)]
    out: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
    /// Seconds from sending to the answer's end.
    api_time: Option<f64>,
    /// Seconds from the answer in front to this request.
    think_time: Option<f64>,
    /// Of a sub-agent: from its start to its end.
    duration_ms: Option<f64>,
    #[serde(default)]
    requests: Vec<Entry>,
}

fn default_block() -> u32 {
    BLOCK_TOKENS
}

/// Whether `path` is a folder, or a file that begins as a session does.
pub(crate) fn is_weka(path: &Path) -> bool {
    let is_session = |text: &str| {
        let text = text.trim_start();
        let first = &text[..text.find("\"hash_ids\"").unwrap_or(text.len())];
        text.starts_with('{') && first.contains("\"requests\"")
    };
    path.is_dir() || is_session(&super::beginning(path))
}

/// Reads the sessions of `path`.
pub(crate) fn load(path: &Path) -> Result<Trace, TraceError> {
    let sessions = files(path)?.iter().map(|file| read(file)).collect::<Result<Vec<_>, _>>()?;
    let sessions: Vec<Session> = sessions.into_iter().flatten().collect();
    let Some(block_tokens) = sessions.first().map(|session| session.block_size).filter(|&size| size > 0)
    else {
        return Err(TraceError::Empty(path.into()));
    };
    if sessions.iter().any(|session| session.block_size != block_tokens) {
        return Err(TraceError::Session { path: path.into(), line: 1, source: SessionError::BlockSizes });
    }
    let mut turns: Vec<SessionTurns> =
        sessions.iter().enumerate().map(|(i, session)| flat(i, session)).collect();
    let count = turns.len() as u64;
    let mean_ms = turns.iter().map(SessionTurns::last_ms).sum::<u64>() / count;
    for (i, turns) in turns.iter_mut().enumerate() {
        turns.delay(mean_ms * i as u64 / count);
    }
    let (rows, links) = together(turns);
    if rows.is_empty() {
        return Err(TraceError::Empty(path.into()));
    }
    let rows = rows.into_iter().map(|row| checked(row, block_tokens, 0)).collect::<Result<_, _>>();
    let rows = rows.map_err(|source| TraceError::Line { path: path.into(), line: 1, source })?;
    Ok(Trace { rows, block_tokens, links: Some(links) })
}

fn files(path: &Path) -> Result<Vec<PathBuf>, TraceError> {
    if !path.is_dir() {
        return Ok(vec![path.into()]);
    }
    let io = |source| TraceError::Io { path: path.into(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.extension().is_some_and(|kind| kind == "json" || kind == "jsonl") {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<Session>, TraceError> {
    let text = fs::read_to_string(path).map_err(|source| TraceError::Io { path: path.into(), source })?;
    let broken = |line, source| TraceError::Session { path: path.into(), line, source };
    if text.len() > limits::TEXT_FILE_BYTES_MAX {
        return Err(broken(1, SessionError::TooLarge));
    }
    let sessions = serde_json::Deserializer::from_str(&text).into_iter();
    sessions.map(|session| session.map_err(|error| broken(error.line(), error.into()))).collect()
}

/// The requests of a session and of its sub-agents.
fn flat(number: usize, session: &Session) -> SessionTurns {
    let own = |id: u64| match session.hash_id_scope.as_str() {
        // Below the marks of the other kinds of ids.
        "global" => id & (u64::MAX >> 4),
        _ => splitmix(splitmix(number as u64) ^ id) >> 4,
    };
    let mut walk = Walk { turns: SessionTurns::default(), agents: 1, own: &own };
    walk.add(&session.requests, 0, Agent::FIRST, None);
    walk.turns
}

/// A turn whose answer others may go on from, and when it ended in the recording.
#[derive(Debug, Clone, Copy)]
struct Ended {
    turn: u32,
    at_ms: u64,
}

/// A walk through a session's lists.
struct Walk<'a> {
    turns: SessionTurns,
    /// Agents found so far.
    agents: u32,
    own: &'a dyn Fn(u64) -> u64,
}

impl Walk<'_> {
    /// Adds the list of `agent`, whose times count from `since_ms` and which `start` has started. Gives the
    /// turns that it ended with: its last one, and those of sub-agents that it did not wait for.
    fn add(&mut self, entries: &[Entry], since_ms: u64, agent: Agent, start: Option<Ended>) -> Vec<Ended> {
        let (mut last, mut running) = (None, Vec::<Ended>::new());
        for entry in entries {
            let at_ms = since_ms + milliseconds(entry.t);
            if let Some(input_tokens) = entry.input {
                let (joined, left) = running.into_iter().partition(|ended| ended.at_ms <= at_ms);
                running = left;
                last = Some(self.turn(entry, (at_ms, input_tokens), agent, before(last.or(start), joined)));
            }
            // Some write a sub-agent's times from its own start, some from the session's.
            let is_relative = entry.requests.first().is_some_and(|first| first.t < entry.t);
            if !entry.requests.is_empty() {
                let sub_agent = Agent { number: self.agents, parent: Some(agent.number) };
                self.agents += 1;
                let since_ms = if is_relative { at_ms } else { since_ms };
                let mut ended = self.add(&entry.requests, since_ms, sub_agent, last.or(start));
                if let (Some(ms), Some(last)) = (entry.duration_ms, ended.last_mut()) {
                    last.at_ms = last.at_ms.max(at_ms + milliseconds(ms / 1e3));
                }
                running.append(&mut ended);
            }
        }
        running.extend(last);
        running
    }

    fn turn(
        &mut self,
        entry: &Entry,
        (at_ms, input_tokens): (u64, u32),
        agent: Agent,
        before: Vec<Ended>,
    ) -> Ended {
        let row = Row {
            timestamp_ms: at_ms,
            input_tokens,
            output_tokens: entry.out,
            blocks: entry.hash_ids.iter().map(|&id| (self.own)(id)).collect(),
        };
        let ended_ms = before.iter().map(|ended| ended.at_ms).max().unwrap_or(0);
        let wait_ms = match entry.think_time {
            Some(seconds) if before.len() == 1 => milliseconds(seconds),
            _ => at_ms.saturating_sub(ended_ms),
        };
        let after = before.iter().map(|ended| ended.turn).collect();
        let turn = self.turns.push(agent, row, after, Duration::from_millis(wait_ms));
        Ended { turn, at_ms: at_ms + milliseconds(entry.api_time.unwrap_or(0.0)) }
    }
}

/// What a turn goes on from: the answer in front of it, and the sub-agents that it waits for.
fn before(answer: Option<Ended>, joined: Vec<Ended>) -> Vec<Ended> {
    answer.into_iter().chain(joined).collect()
}

fn milliseconds(seconds: f64) -> u64 {
    (seconds.clamp(0.0, SECONDS_MAX) * 1e3).round() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::sessions::tests::assert_links_hold;

    const SESSION: &str = r#"{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "s", "in": 128, "out": 9, "hash_ids": [1, 2]},
        {"t": 2.0, "type": "subagent", "requests": [{"t": 0.5, "in": 64, "out": 1, "hash_ids": [7]}]},
        {"t": 4.0, "type": "n", "in": 200, "out": 5, "hash_ids": [1, 2, 3]}]}"#;

    #[test]
    fn sessions_are_flattened_and_share_no_ids() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.json"), SESSION).unwrap();
        fs::write(dir.path().join("b.json"), SESSION).unwrap();
        let trace = Trace::load(dir.path()).unwrap();
        let shown: Vec<_> = trace.rows.iter().map(|row| (row.timestamp_ms, row.input_tokens)).collect();
        // The second begins half of the mean length later.
        assert_eq!(shown, [(0, 128), (2000, 128), (2500, 64), (4000, 200), (4500, 64), (6000, 200)]);
        assert_eq!(trace.block_tokens, 64);
        assert_eq!(trace.rows[0].blocks[..], trace.rows[3].blocks[..2]);
        assert_ne!(trace.rows[0].blocks, trace.rows[1].blocks);
    }

    /// Each turn's agent, turn, what it goes on from, and its wait in milliseconds.
    fn links(requests: &str) -> Vec<(u32, u32, Vec<u32>, u128)> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        fs::write(&file, format!(r#"{{"block_size": 64, "hash_ids": [], "requests": [{requests}]}}"#))
            .unwrap();
        let trace = load(&file).unwrap();
        let links = trace.links.unwrap();
        assert_links_hold(&trace.rows, &links);
        links.iter().map(|link| (link.agent, link.turn, link.after.to_vec(), link.wait.as_millis())).collect()
    }

    #[test]
    fn a_request_goes_on_from_the_one_before_it_and_from_sub_agents_that_had_ended() {
        let plain = r#"{"t": 0.5, "in": 9}, {"t": 2, "in": 9}, {"t": 7, "in": 9, "think_time": 1}"#;
        assert_eq!(links(plain), [(0, 0, vec![], 500), (0, 1, vec![0], 1500), (0, 2, vec![1], 1000)]);
        let told =
            r#"{"t": 0, "in": 9, "api_time": 1.5}, {"t": 2, "in": 9, "api_time": 9}, {"t": 7, "in": 9}"#;
        assert_eq!(links(told), [(0, 0, vec![], 0), (0, 1, vec![0], 500), (0, 2, vec![1], 0)]);
        // The first sub-agent ended before the second request, the second's own sub-agent after it.
        let agents = r#"{"t": 0, "in": 9, "api_time": 1},
            {"t": 1, "requests": [{"t": 2, "in": 9, "api_time": 1}, {"t": 4, "in": 9, "api_time": 1}]},
            {"t": 1, "duration_ms": 7000, "requests": [{"t": 3, "in": 9}]},
            {"t": 7, "in": 9, "api_time": 1, "think_time": 1},
            {"t": 9, "in": 9}"#;
        let want = [
            (0, 0, vec![], 0),
            (1, 0, vec![0], 1000),
            (2, 0, vec![0], 2000),
            (1, 1, vec![1], 1000),
            (0, 1, vec![0, 3], 2000),
            (0, 2, vec![4, 2], 1000),
        ];
        assert_eq!(links(agents), want);
    }

    #[test]
    fn lists_that_begin_with_a_sub_agent_or_go_back_in_time_have_links_too() {
        let odd = r#"{"t": 3, "requests": [{"t": 0, "requests": [{"t": 0, "in": 9}]}, {"t": 1, "in": 9}]},
            {"t": 1, "in": 9}, {"t": 0, "in": 9}, {"t": 1e300, "in": 9}, {"t": 5, "requests": [{"t": -4, "in": 9}]}"#;
        assert_eq!(links(odd).len(), 6);
    }

    proptest! {
        #[test]
        fn links_hold_whatever_a_session_says(
            entries in prop::collection::vec((0u32..9, 0u32..4, prop::option::of(0u32..4), 0usize..4), 1..20),
        ) {
            // An entry takes in as many of those behind it as it has sub-agents' requests.
            let mut text = Vec::<String>::new();
            for (t, api, think, taken) in entries.into_iter().rev() {
                let inner = text.split_off(text.len().saturating_sub(taken));
                let think = think.map_or_else(String::new, |s| format!(r#", "think_time": {s}"#));
                text.push(if inner.is_empty() {
                    format!(r#"{{"t": {t}, "in": 9, "api_time": {api}{think}}}"#)
                } else {
                    format!(r#"{{"t": {t}, "requests": [{}]}}"#, inner.join(","))
                });
            }
            links(&text.join(","));
        }
    }

    #[test]
    fn global_ids_are_shared_and_mistakes_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("trace.jsonl");
        let global = SESSION.replace("local", "global").replace('\n', "");
        fs::write(&file, format!("{global}\n{global}\n")).unwrap();
        let trace = Trace::load(&file).unwrap();
        assert_eq!((trace.rows.len(), &trace.rows[0].blocks), (6, &trace.rows[1].blocks));
        fs::write(&file, global.replace("\"in\": 200", "\"in\": 20")).unwrap();
        assert!(Trace::load(&file).unwrap_err().to_string().contains("at most one for each 64"));
        fs::write(&file, "{\"requests\": 3}").unwrap();
        assert!(Trace::load(&file).unwrap_err().to_string().contains("not a session"));
    }
}
