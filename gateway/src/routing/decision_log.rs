//! A sampled log of choices, one JSON object a line, to look at or replay later: the request's prefix by its
//! hashes, and for each worker what it held and how busy it was. Never text; and a choice never waits for the
//! file: what the writer cannot keep up with is dropped. Lines count as written once they are in the file.

use std::{fs::OpenOptions, io, path::Path, sync::Arc, time::Duration};

use keyway_core::pick::{Candidate, Pick};
use keyway_lines::{Fate, Lines};
use keyway_wire::block_hash::BlockHash;
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use serde::Serialize;
use tokio::task::spawn_blocking;

use crate::{
    clock::{self, Instant},
    fleet::Worker,
    limits::DECISION_LOG_QUEUE_BYTES,
    routing::{Setting, View},
};

/// How often it is said at most that lines cannot be written.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);
/// How long the end of the process waits for the last lines: a disk that hangs must not hold it up.
const LAST_LINES_PATIENCE: Duration = Duration::from_secs(1);

/// Where choices are logged.
#[derive(Debug)]
pub struct DecisionLog {
    lines: Lines,
    share: f64,
}

#[derive(Serialize)]
struct Line<'a> {
    unix_seconds: f64,
    model: Option<&'a str>,
    keyed_by: &'static str,
    prompt_tokens: u64,
    blocks: usize,
    /// Names of the first block and of the whole prefix, in hexadecimal; equal ones are equal prefixes.
    first_block: Option<String>,
    last_block: Option<String>,
    worker: &'a str,
    reason: &'static str,
    matched_tokens: u64,
    workers: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    worker: &'a str,
    matched_blocks: u32,
    requests_in_flight: u64,
    waiting_prefill_tokens: u64,
    weight: f64,
}

impl<'a> Row<'a> {
    fn of((worker, candidate): (&'a Arc<Worker>, &'a Candidate)) -> Self {
        Self {
            worker: &worker.name,
            matched_blocks: candidate.matched_blocks,
            requests_in_flight: candidate.load.requests,
            waiting_prefill_tokens: candidate.load.waiting_prefill_tokens,
            weight: candidate.weight,
        }
    }
}

impl DecisionLog {
    /// Appends to `path`, of each choice with probability `share`. `counted` counts lines by what became of
    /// them.
    pub fn open(path: &Path, share: f64, counted: IntCounterVec) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|error| {
            io::Error::new(error.kind(), format!("decision log {}: {error}", path.display()))
        })?;
        let complained = Mutex::new(None);
        let tell = move |fate: Fate<'_>, lines| {
            let outcome = match fate {
                Fate::Written => "written",
                Fate::Dropped => "dropped",
                Fate::Failed(error) => {
                    complain(&mut complained.lock(), error);
                    "failed"
                }
            };
            counted.with_label_values(&[outcome]).inc_by(lines);
        };
        Ok(Self { lines: Lines::to("decision-log", file, DECISION_LOG_QUEUE_BYTES, tell), share })
    }

    /// Logs a choice, if it is one of those to be logged. `weighed`: the workers it was made from.
    pub fn choice<'a>(
        &self,
        model: Option<&'a str>,
        setting: &Setting,
        view: &View,
        weighed: impl Iterator<Item = (&'a Arc<Worker>, &'a Candidate)>,
        pick: &Pick,
        worker: &'a str,
    ) {
        if fastrand::f64() >= self.share {
            return;
        }
        let hex = |hash: &BlockHash| format!("{:016x}", hash.0);
        let line = Line {
            unix_seconds: clock::unix_seconds(),
            model,
            keyed_by: if setting.by_tokens { "tokens" } else { "text" },
            prompt_tokens: setting.prompt_tokens,
            blocks: view.blocks(),
            first_block: view.chain.first().map(hex),
            last_block: view.chain.last().map(hex),
            worker,
            reason: pick.reason.as_str(),
            matched_tokens: pick.matched_tokens,
            workers: weighed.map(Row::of).collect(),
        };
        let mut bytes = serde_json::to_vec(&line).unwrap_or_default();
        bytes.push(b'\n');
        self.lines.send(&bytes);
    }

    /// Completes when what was logged is in the file, or cannot be in time: for the end of the process.
    pub async fn flush(&self) {
        let lines = self.lines.clone();
        let written = spawn_blocking(move || lines.flush(LAST_LINES_PATIENCE)).await;
        if !written.unwrap_or(false) {
            tracing::warn!("the last lines of the decision log are not written: its file is too slow");
        }
    }
}

fn complain(complained: &mut Option<Instant>, error: &io::Error) {
    let now = Instant::now();
    if complained.is_none_or(|then| now - then >= COMPLAINT_INTERVAL) {
        *complained = Some(now);
        tracing::error!(%error, "the decision log cannot be written: its lines are lost until it can");
    }
}
