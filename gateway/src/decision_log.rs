//! A sampled log of choices, one JSON object a line, to look at or replay later: the request's prefix by its hashes, and
//! for each worker what it held and how busy it was. Never text; and a choice never waits for the file: what the writer
//! cannot keep up with is dropped. Lines count as written once they are in the file.

use std::{
    fs::OpenOptions,
    io::{self, Write},
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
    clock::{self, Instant},
    fleet::Worker,
    limits::DECISION_LOG_LINES,
    routing::{Setting, View},
};

/// Lines are written together, up to about so many bytes.
const TOGETHER_BYTES: usize = 64 << 10;
/// How often it is said at most that lines cannot be written.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);
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
        let mut writer = Writer::new(file, counted.clone());
        thread::Builder::new().name("decision-log".to_owned()).spawn(move || writer.run(&waiting))?;
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
        if self.lines.try_send(ToWrite::Line(bytes)).is_err() {
            self.counted.with_label_values(&["dropped"]).inc();
        }
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

/// Writes the lines, and tells what becomes of them.
struct Writer<F> {
    file: F,
    counted: IntCounterVec,
    /// Whole lines that are not in the file yet.
    together: Vec<u8>,
    /// The file ends within a line, as there was no room for the rest.
    torn: bool,
    complained: Option<Instant>,
}

impl<F: Write> Writer<F> {
    fn new(file: F, counted: IntCounterVec) -> Self {
        Self { file, counted, together: Vec::new(), torn: false, complained: None }
    }

    /// Until the log is gone.
    fn run(&mut self, waiting: &Receiver<ToWrite>) {
        loop {
            match waiting.recv_timeout(FLUSH_INTERVAL) {
                Ok(ToWrite::Line(line)) => {
                    self.together.extend(line);
                    if self.together.len() >= TOGETHER_BYTES {
                        self.write();
                    }
                }
                Ok(ToWrite::Flush(_written)) => self.write(),
                Err(RecvTimeoutError::Timeout) => self.write(),
                Err(RecvTimeoutError::Disconnected) => return self.write(),
            }
        }
    }

    /// Writes what has come together. What there is no room for is lost: there would be more and more of it.
    fn write(&mut self) {
        let (written, error) = write_up_to(&mut self.file, self.torn, &self.together);
        let (whole, rest) = self.together.split_at(written);
        let lines = |bytes: &[u8]| memchr::memchr_iter(b'\n', bytes).count() as u64;
        self.torn = if written == 0 { self.torn } else { !whole.ends_with(b"\n") };
        for (outcome, count) in [("written", lines(whole)), ("failed", lines(rest))] {
            if count > 0 {
                self.counted.with_label_values(&[outcome]).inc_by(count);
            }
        }
        self.together.clear();
        let Some(error) = error else { return };
        let now = Instant::now();
        if self.complained.is_none_or(|then| now - then >= COMPLAINT_INTERVAL) {
            self.complained = Some(now);
            tracing::error!(%error, "the decision log cannot be written: its lines are lost until it can");
        }
    }
}

/// Writes as much as there is room for, behind the end of a torn line; how many of the bytes that is.
fn write_up_to(file: &mut impl Write, torn: bool, bytes: &[u8]) -> (usize, Option<io::Error>) {
    let mut written = 0;
    if torn
        && !bytes.is_empty()
        && let Err(error) = file.write_all(b"\n")
    {
        return (0, Some(error));
    }
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Some(io::ErrorKind::WriteZero.into())),
            Ok(more) => written += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Some(error)),
        }
    }
    (written, file.flush().err())
}

#[cfg(test)]
mod tests {
    use prometheus::Opts;
    use proptest::prelude::*;

    use super::*;

    /// A disk with room for so many bytes.
    struct Disk {
        room: usize,
        held: Vec<u8>,
    }

    impl Write for &mut Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room).min(7);
            if taken == 0 && !bytes.is_empty() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.held.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    proptest! {
        /// A disk that is full now and then: each line is counted once, as what became of it, and whole lines are read again.
        #[test]
        fn what_is_counted_as_written_is_in_the_file(steps in prop::collection::vec((1_usize..4, 0_usize..40), 1..30)) {
            let counted = IntCounterVec::new(Opts::new("lines", "lines"), &["outcome"]).unwrap();
            let count = |outcome| counted.with_label_values(&[outcome]).get();
            let mut disk = Disk { room: 0, held: Vec::new() };
            let mut writer = Writer::new(&mut disk, counted.clone());
            let mut sent = 0;
            for (lines, room) in steps {
                for _ in 0..lines {
                    writer.together.extend(format!("{{\"n\":{sent}}}\n").bytes());
                    sent += 1;
                }
                writer.file.room = room;
                writer.write();
            }
            prop_assert_eq!(count("written") + count("failed"), sent);
            let text = String::from_utf8(disk.held).unwrap();
            let whole = text.split_inclusive('\n').filter(|line| line.starts_with('{') && line.ends_with("}\n"));
            // One that lacked only its end has that by the next one.
            let torn = whole.count() as u64 - count("written");
            prop_assert!(torn <= count("failed"), "{}", text);
        }
    }
}
