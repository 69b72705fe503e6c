//! The log on stderr, as [`Lines`]: a pipe that no process reads or a disk that hangs holds up no request,
//! and lost lines are counted.

mod requests;

use std::{
    io::{self, IsTerminal},
    sync::LazyLock,
    time::Duration,
};

use keyway_lines::{Fate, Lines};
use prometheus::IntCounter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing_subscriber::{
    EnvFilter,
    fmt::format::{self, JsonFields},
};

use self::requests::RequestLines;
use crate::limits::LOG_QUEUE_BYTES;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people to read, in colour on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// How long the end of the process waits for the last lines.
const LAST_LINES_PATIENCE: Duration = Duration::from_secs(1);

/// The process's, whichever gateway it happened to.
static LOST: LazyLock<Option<IntCounter>> = LazyLock::new(|| {
    IntCounter::new(
        "keyway_log_lines_lost_total",
        "Lines of the log that were not written: it was read too slowly, or could not be written to.",
    )
    .ok()
});

/// The count of lost lines, to be shown.
pub fn counter() -> prometheus::Result<IntCounter> {
    LOST.clone().ok_or_else(|| prometheus::Error::Msg("lost lines cannot be counted".to_owned()))
}

/// Logs from now on; once what is returned is dropped, the last lines have been written, if that took no more
/// than a second.
pub fn to_stderr(format: LogFormat) -> Log {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colour = io::stderr().is_terminal();
    let lines = Lines::to("log", io::stderr(), LOG_QUEUE_BYTES, |fate, lines| {
        if let (Fate::Dropped | Fate::Failed(_), Some(lost)) = (fate, &*LOST) {
            lost.inc_by(lines);
        }
    });
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(lines.clone()).with_ansi(colour);
    match format {
        LogFormat::Text => log.event_format(RequestLines { json: false, others: format::format() }).init(),
        LogFormat::Json => {
            let lines = RequestLines { json: true, others: format::format().json() };
            log.fmt_fields(JsonFields::new()).event_format(lines).init();
        }
    }
    Log(lines)
}

/// The log, until its end.
#[derive(Debug)]
pub struct Log(Lines);

impl Drop for Log {
    fn drop(&mut self) {
        // If they cannot be written, there is nowhere to say so.
        self.0.flush(LAST_LINES_PATIENCE);
    }
}
