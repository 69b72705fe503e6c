//! What is kept of one request: its times, its token counts, how it ended. No statistics.

use keyway_wire::openai::Usage;
use serde::Serialize;

use crate::oracle::Reusable;

/// Classes of failure. A stream is good only if it ended with `[DONE]` and carried no error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureClass {
    /// No connection.
    Connect,
    /// An HTTP status other than 200.
    Status(u16),
    /// An error event inside the stream.
    ErrorEvent,
    /// The connection or the stream ended before `[DONE]`.
    Cut,
    /// Nothing final within `--timeout`.
    Timeout,
    /// Bytes that are no stream of OpenAI events.
    Protocol,
}

impl std::fmt::Display for FailureClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect => f.write_str("connect"),
            Self::Status(code) => write!(f, "status_{code}"),
            Self::ErrorEvent => f.write_str("error_event"),
            Self::Cut => f.write_str("cut"),
            Self::Timeout => f.write_str("timeout"),
            Self::Protocol => f.write_str("protocol"),
        }
    }
}

impl Serialize for FailureClass {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How one request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{class}: {message}")]
pub struct Failure {
    /// What to count it as.
    pub class: FailureClass,
    /// The cause in words; the server's own where it gave some.
    pub message: String,
}

/// How one request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// With `[DONE]`.
    Ok,
    /// Badly.
    Failed(Failure),
    /// By us: the run was interrupted.
    Cancelled,
}

/// One exchange. Times are nanoseconds after the run's zero.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// When it was handed to the connection pool.
    pub sent_ns: u64,
    /// When the answer's head was here.
    pub head_ns: Option<u64>,
    /// When the first event with text was here, or, for an answer without text, the one with the finish reason.
    pub first_ns: Option<u64>,
    /// When the last event with text was here.
    pub last_ns: Option<u64>,
    /// When it ended, well or badly.
    pub end_ns: u64,
    /// Events with text.
    pub text_events: u64,
    /// Times between events with text, in microseconds.
    pub gaps_us: Vec<u32>,
    /// The server's own counts.
    pub usage: Option<Usage>,
    /// Who answered, where a gateway says so.
    pub worker: Option<String>,
    /// How it ended.
    pub outcome: Outcome,
}

/// One request of the run.
#[derive(Debug, Clone)]
pub struct Record {
    /// Index of the trace's row.
    pub row: usize,
    /// When it was due.
    pub intended_ns: u64,
    /// Tokens the prompt was made to have, chat template included.
    pub wanted_prompt_tokens: u64,
    /// What caches could have held of it.
    pub reusable: Reusable,
    /// What happened.
    pub exchange: Exchange,
}

/// A line of `requests.jsonl`. Times in milliseconds after the run's zero, lengths in tokens.
#[derive(Debug, Serialize)]
pub struct RecordLine<'a> {
    row: usize,
    intended_ms: f64,
    sent_ms: f64,
    head_ms: Option<f64>,
    first_ms: Option<f64>,
    end_ms: f64,
    outcome: String,
    worker: Option<&'a str>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    possible_tokens: u64,
    pooled_lru_tokens: Option<u64>,
}

impl Record {
    /// Whether the stream ended well.
    pub fn is_ok(&self) -> bool {
        self.exchange.outcome == Outcome::Ok
    }

    /// The record as a line of `requests.jsonl`.
    pub fn line(&self) -> RecordLine<'_> {
        let ms = |ns: u64| ns as f64 / 1e6;
        let exchange = &self.exchange;
        let usage = exchange.usage.as_ref();
        RecordLine {
            row: self.row,
            intended_ms: ms(self.intended_ns),
            sent_ms: ms(exchange.sent_ns),
            head_ms: exchange.head_ns.map(ms),
            first_ms: exchange.first_ns.map(ms),
            end_ms: ms(exchange.end_ns),
            outcome: match &exchange.outcome {
                Outcome::Ok => "ok".into(),
                Outcome::Failed(failure) => failure.class.to_string(),
                Outcome::Cancelled => "cancelled".into(),
            },
            worker: exchange.worker.as_deref(),
            prompt_tokens: usage.map(|u| u.prompt_tokens),
            cached_tokens: usage.and_then(Usage::cached_tokens),
            completion_tokens: usage.map(|u| u.completion_tokens),
            possible_tokens: self.reusable.unbounded,
            pooled_lru_tokens: self.reusable.pooled,
        }
    }
}
