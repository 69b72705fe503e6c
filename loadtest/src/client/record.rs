//! What is kept of one request: its times, its token counts, how it ended. No statistics.

use keyway_wire::openai::Usage;
use serde::Serialize;

use crate::{oracle::Reusable, schedule::flow::TurnPlace};

/// Classes of failure. A stream is good only if it said why generating ended, came to its last event, and
/// carried no error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureClass {
    /// No connection to the server could be made, so nothing was sent.
    Connect,
    /// An HTTP status other than 200.
    Status(u16),
    /// An error event inside the stream.
    ErrorEvent,
    /// An error in one piece, under the status of a good answer.
    ErrorBody,
    /// A finish reason that says that generating was broken off.
    Aborted,
    /// The stream came to its last event without a finish reason.
    Unfinished,
    /// The connection or the stream ended before its last event.
    Cut,
    /// Nothing final within `--timeout`.
    Timeout,
    /// Bytes that are no stream of events of a known API.
    Protocol,
    /// Not sent: `--max-concurrency` requests were under way and `--overload` is `drop`.
    Dropped,
}

impl std::fmt::Display for FailureClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect => f.write_str("connect"),
            Self::Status(code) => write!(f, "status_{code}"),
            Self::ErrorEvent => f.write_str("error_event"),
            Self::ErrorBody => f.write_str("error_body"),
            Self::Aborted => f.write_str("aborted"),
            Self::Unfinished => f.write_str("unfinished"),
            Self::Cut => f.write_str("cut"),
            Self::Timeout => f.write_str("timeout"),
            Self::Protocol => f.write_str("protocol"),
            Self::Dropped => f.write_str("dropped"),
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
    /// The stream said why generating ended, came to its last event and carried no error.
    Ok,
    /// No good stream came, or the request was dropped unsent; the failure says why.
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
    /// When the first event with generated content was here, or, for an answer without any, the one with the
    /// finish reason.
    pub first_ns: Option<u64>,
    /// When the last event with generated content was here.
    pub last_ns: Option<u64>,
    /// When it ended, well or badly.
    pub end_ns: u64,
    /// Events with generated content.
    pub text_events: u64,
    /// Times between events with generated content, in microseconds.
    pub gaps_us: Vec<u32>,
    /// The server's own counts.
    pub usage: Option<Usage>,
    /// Who answered, where a gateway says so.
    pub worker: Option<String>,
    /// The answer, if a conversation goes on from it.
    pub text: String,
    /// How it ended; [`Outcome::Cancelled`] until it has.
    pub outcome: Outcome,
}

/// One request of the run.
#[derive(Debug, Clone)]
pub struct Record {
    /// The request's number in its workload; of a trace, its row.
    pub row: usize,
    /// When it was due.
    pub intended_ns: u64,
    /// How long it waited for one of `--max-concurrency` places, in nanoseconds.
    pub queued_ns: u64,
    /// Sent to warm up: in no figure.
    pub warmup: bool,
    /// Where it belongs, if it is a turn of a session.
    pub place: Option<TurnPlace>,
    /// Tokens the prompt was made to have, chat template included.
    pub wanted_prompt_tokens: u64,
    /// What caches could have held of it.
    pub reusable: Reusable,
    /// Times of sending and of the answer, the server's counts, and how it ended.
    pub exchange: Exchange,
}

/// A line of `requests.jsonl`. Times in milliseconds after the run's zero, lengths in tokens.
#[derive(Debug, Serialize)]
pub struct RecordLine<'a> {
    row: usize,
    intended_ms: f64,
    queued_ms: f64,
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
    warmup: bool,
    session: Option<usize>,
    agent: Option<u32>,
    turn: Option<u32>,
}

impl Record {
    /// Time to the first token as a person would have seen it, in nanoseconds; of a good answer.
    pub fn ttft_ns(&self) -> Option<u64> {
        Some(self.exchange.first_ns?.saturating_sub(self.intended_ns))
    }

    /// Time to the end as a person would have seen it, in nanoseconds.
    pub fn e2e_ns(&self) -> u64 {
        self.exchange.end_ns.saturating_sub(self.intended_ns)
    }

    /// Time from the first to the second event with text, in nanoseconds.
    pub fn ttst_ns(&self) -> Option<u64> {
        self.exchange.gaps_us.first().map(|&us| u64::from(us) * 1000)
    }

    /// Mean time of a generated token after the first, in nanoseconds, by the server's own count.
    pub fn tpot_ns(&self) -> Option<u64> {
        let tokens = self.exchange.usage.as_ref()?.completion_tokens;
        let (first_ns, last_ns) = (self.exchange.first_ns?, self.exchange.last_ns?);
        (tokens >= 2).then(|| last_ns.saturating_sub(first_ns) / (tokens - 1))
    }

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
            queued_ms: ms(self.queued_ns),
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
            warmup: self.warmup,
            session: self.place.map(|place| place.session),
            agent: self.place.map(|place| place.agent),
            turn: self.place.map(|place| place.turn),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A good answer of three tokens 5 ms apart; times in milliseconds.
    pub(crate) fn good(due: u64, sent: u64, first: u64, end: u64) -> Record {
        let ns = |ms: u64| ms * 1_000_000;
        let usage = Usage { prompt_tokens: 40, completion_tokens: 3, total_tokens: 43, ..Usage::default() };
        Record {
            row: 0,
            intended_ns: ns(due),
            queued_ns: 0,
            warmup: false,
            place: None,
            wanted_prompt_tokens: 40,
            reusable: Reusable::default(),
            exchange: Exchange {
                sent_ns: ns(sent),
                head_ns: Some(ns(sent)),
                first_ns: Some(ns(first)),
                last_ns: Some(ns(first) + ns(10)),
                end_ns: ns(end),
                text_events: 3,
                gaps_us: vec![5000, 5000],
                usage: Some(usage),
                worker: None,
                text: String::new(),
                outcome: Outcome::Ok,
            },
        }
    }
}
