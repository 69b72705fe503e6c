//! A sampled log of choices, one JSON object a line, to look at or replay later: the request's prefix by its hashes, and
//! for each worker what it held and how busy it was. Never text; and a choice never waits for the file: what the writer
//! cannot keep up with is dropped and counted.

use std::{
    fs::OpenOptions,
    io::{self, BufWriter, Write},
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use keyway_core::pick::{Candidate, Pick};
use keyway_wire::block_hash::BlockHash;
use prometheus::IntCounterVec;
use serde::Serialize;
use tokio::sync::oneshot;

use crate::{
    clock,
    fleet::Worker,
    limits::DECISION_LOG_LINES,
    routing::{Setting, View},
};

/// How long a line may wait in memory.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);
/// How long the end of the process waits for the last lines: a disk that hangs must not hold it up.
const LAST_LINES_PATIENCE: Duration = Duration::from_secs(1);
/// Until a full queue is looked at again.
const QUEUE_PAUSE: Duration = Duration::from_millis(10);

/// Where choices are logged.
#[derive(Debug)]
pub struct DecisionLog {
    lines: SyncSender<ToWrite>,
    share: f64,
    counted: IntCounterVec,
}

/// What the writer is sent.
enum ToWrite {
    Line(Vec<u8>),
    /// Dropped once all that was sent before it is in the file.
    Flush(oneshot::Sender<()>),
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
    /// Appends to `path`, of each choice with probability `share`. `counted` counts lines by what became of them.
    pub fn open(path: &Path, share: f64, counted: IntCounterVec) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|error| {
            io::Error::new(error.kind(), format!("decision log {}: {error}", path.display()))
        })?;
        let (lines, waiting) = sync_channel(DECISION_LOG_LINES);
        let writer = move || write_all(BufWriter::new(file), &waiting);
        thread::Builder::new().name("decision-log".to_owned()).spawn(writer)?;
        Ok(Self { lines, share, counted })
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
            blocks: view.chain.len(),
            first_block: view.chain.first().map(hex),
            last_block: view.chain.last().map(hex),
            worker,
            reason: pick.reason.as_str(),
            matched_tokens: pick.matched_tokens,
            workers: weighed.map(Row::of).collect(),
        };
        let mut bytes = serde_json::to_vec(&line).unwrap_or_default();
        bytes.push(b'\n');
        let outcome = if self.lines.try_send(ToWrite::Line(bytes)).is_ok() { "written" } else { "dropped" };
        self.counted.with_label_values(&[outcome]).inc();
    }

    /// Completes when what was logged is in the file, or cannot be in time: for the end of the process.
    pub async fn flush(&self) {
        if clock::timeout(LAST_LINES_PATIENCE, self.written()).await.is_err() {
            tracing::warn!("the last lines of the decision log are not written: its file is too slow");
        }
    }

    async fn written(&self) {
        let (flush, flushed) = oneshot::channel();
        let mut flush = ToWrite::Flush(flush);
        while let Err(TrySendError::Full(again)) = self.lines.try_send(flush) {
            flush = again;
            clock::sleep(QUEUE_PAUSE).await;
        }
        // Dropped without a word.
        let _ = flushed.await;
    }
}

/// Writes until the log is gone. An error is said once; the lines after it are lost.
fn write_all(mut file: impl Write, waiting: &Receiver<ToWrite>) {
    let mut failed = false;
    loop {
        let result = match waiting.recv_timeout(FLUSH_INTERVAL) {
            Ok(ToWrite::Line(line)) => file.write_all(&line),
            Ok(ToWrite::Flush(_written)) => file.flush(),
            Err(RecvTimeoutError::Timeout) => file.flush(),
            Err(RecvTimeoutError::Disconnected) => {
                let _ = file.flush(); // nobody is left to tell
                return;
            }
        };
        if let (Err(error), false) = (result, failed) {
            failed = true;
            tracing::error!(%error, "the decision log cannot be written");
        }
    }
}
