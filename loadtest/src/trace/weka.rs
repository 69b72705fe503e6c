//! WEKA's traces of agents at work: one JSON object a session, in one file or a folder of them, with the
//! requests of sub-agents nested. Flattened here into rows. github.com/callanjfox/kv-cache-tester,
//! `docs/trace_replay_tester.md`.
//!
//! A session's times count from its own start, and nothing says when it began: the sessions begin evenly over
//! the mean session's length, after which as many end as begin. Ids are a session's own unless
//! `hash_id_scope` is `global`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{Row, Trace, TraceError, checked};
use crate::{limits, random::splitmix};

/// Tokens of a block where the session does not say.
const BLOCK_TOKENS: u32 = 64;

/// What is wrong with sessions of WEKA's.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// It is no JSON, or lacks a field of a session.
    #[error("not a session of WEKA's: {0}")]
    Json(#[from] serde_json::Error),
    /// The sessions of one trace have blocks of several sizes.
    #[error("its sessions differ in block_size: keep those of one size")]
    BlockSizes,
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
    #[serde(default)]
    requests: Vec<Entry>,
}

fn default_block() -> u32 {
    BLOCK_TOKENS
}

/// Whether `path` is a folder, or a file that begins as a session does.
pub(crate) fn is_weka(path: &Path) -> bool {
    let head = || -> std::io::Result<Vec<u8>> {
        use std::io::Read as _;
        let mut head = Vec::new();
        fs::File::open(path)?.take(4096).read_to_end(&mut head)?;
        Ok(head)
    };
    let is_session = |head: &[u8]| {
        let chunk = head.utf8_chunks().next();
        let text = chunk.as_ref().map_or("", std::str::Utf8Chunk::valid).trim_start();
        let first = &text[..text.find("\"hash_ids\"").unwrap_or(text.len())];
        text.starts_with('{') && first.contains("\"requests\"")
    };
    path.is_dir() || head().is_ok_and(|head| is_session(&head))
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
    let mut rows: Vec<Vec<Row>> =
        sessions.iter().enumerate().map(|(i, session)| flatten(i, session)).collect();
    let lengths_ms = rows.iter().map(|rows| rows.iter().map(|row| row.timestamp_ms).max().unwrap_or(0));
    let mean_ms = lengths_ms.sum::<u64>() / rows.len() as u64;
    let count = rows.len() as u64;
    for (i, rows) in rows.iter_mut().enumerate() {
        for row in rows {
            row.timestamp_ms += mean_ms * i as u64 / count;
        }
    }
    let mut rows: Vec<Row> = rows.into_iter().flatten().collect();
    rows.sort_by_key(|row| row.timestamp_ms);
    if rows.is_empty() {
        return Err(TraceError::Empty(path.into()));
    }
    let rows = rows.into_iter().map(|row| checked(row, block_tokens, 0)).collect::<Result<_, _>>();
    let rows = rows.map_err(|source| TraceError::Line { path: path.into(), line: 1, source })?;
    Ok(Trace { rows, block_tokens })
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
fn flatten(number: usize, session: &Session) -> Vec<Row> {
    let own = |id: u64| match session.hash_id_scope.as_str() {
        // Below the marks of the other kinds of ids.
        "global" => id & (u64::MAX >> 4),
        _ => splitmix(splitmix(number as u64) ^ id) >> 4,
    };
    let mut rows = Vec::new();
    add(&session.requests, 0.0, &own, &mut rows);
    rows
}

fn add(entries: &[Entry], since_s: f64, own: &impl Fn(u64) -> u64, rows: &mut Vec<Row>) {
    for entry in entries {
        let at_s = since_s + entry.t.max(0.0);
        if let Some(input_tokens) = entry.input {
            rows.push(Row {
                timestamp_ms: (at_s * 1e3).round() as u64,
                input_tokens,
                output_tokens: entry.out,
                blocks: entry.hash_ids.iter().map(|&id| own(id)).collect(),
            });
        }
        // Some write a sub-agent's times from its own start, some from the session's.
        let is_relative = entry.requests.first().is_some_and(|first| first.t < entry.t);
        add(&entry.requests, if is_relative { at_s } else { since_s }, own, rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
