//! The log of the process `keyway-worker` on stderr, as [`Lines`]: a pipe without a reader or a disk that
//! hangs stops no engine and holds up no request, and lost lines are counted.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal as _};
use std::panic::PanicHookInfo;
use std::sync::LazyLock;

use clap::ValueEnum;
use keyway_lines::{Fate, Lines};
use prometheus::IntCounter;
use tracing_subscriber::EnvFilter;

use crate::limits::{LAST_LINES_MAX, LOG_QUEUE_BYTES};

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The process's, whichever worker it happened to.
static LOST: LazyLock<Option<IntCounter>> = LazyLock::new(|| {
    IntCounter::new(
        "keyway_worker_log_lines_lost_total",
        "Lines of the log that were not written: it was read too slowly, or could not be written to.",
    )
    .ok()
});

/// The count of lost lines, to be shown; `None` cannot be, as its name is one.
pub(crate) fn lost() -> Option<&'static IntCounter> {
    LOST.as_ref()
}

/// Logs from now on, panics too. Once what is returned is dropped, the last lines have been written, if that
/// took no more than a second.
pub fn to_stderr(format: LogFormat) -> Log {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = Lines::to("log", io::stderr(), LOG_QUEUE_BYTES, |fate, lines| {
        if let (Fate::Dropped | Fate::Failed(_), Some(lost)) = (fate, lost()) {
            lost.inc_by(lines);
        }
    });
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(lines.clone())
        .with_ansi(io::stderr().is_terminal())
        .with_target(false);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    std::panic::set_hook(Box::new(note));
    Log(lines)
}

/// Says on stderr why the process ends, and waits no more than a second for the reader.
pub fn last_words(words: &str) {
    // Without a thread for it there is no way to say it.
    let lines = Lines::to("last words", io::stderr(), words.len(), |_, _| {});
    lines.send(words.as_bytes());
    lines.flush(LAST_LINES_MAX);
}

/// Logs a panic instead of writing it in place, where a pipe without a reader would keep its thread from
/// ending.
fn note(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(ToString::to_string);
    // What is made up as it panics may hold what clients sent.
    let text = panic.payload().downcast_ref::<&'static str>().copied().unwrap_or("(not shown)");
    // Only where the environment asks for it (`RUST_BACKTRACE`).
    let trace = Some(Backtrace::capture()).filter(|trace| trace.status() == BacktraceStatus::Captured);
    tracing::error!(place, text, trace = trace.map(|trace| trace.to_string()), "a panic, which is a bug");
}

/// The log, until its end.
#[derive(Debug)]
pub struct Log(Lines);

impl Drop for Log {
    fn drop(&mut self) {
        // If they cannot be written, there is nowhere to say so.
        self.0.flush(LAST_LINES_MAX);
    }
}
