//! What an answer is charged, to a tenant that has a limit of tokens and in the ledger: its usage, or what
//! has passed of it, whatever way it ends.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;

use crate::{
    access::tenants::{Used, Visit},
    api::Api,
    ledger::Tokens,
    limits::BYTES_PER_TOKEN,
    prompt::work::Work,
    telemetry::record::{Record, tokens_of},
    usage::{UsageTap, passed::StreamCount},
};

/// Counts one answer. Those that are charged nowhere have none.
#[derive(Debug)]
pub(super) struct Meter {
    record: Arc<Record>,
    /// Whose limit it is charged to as it passes, if it is.
    visit: Option<Arc<Visit>>,
    answer: Metered,
    passed: StreamCount,
    /// Bytes of an answer that is no stream.
    bytes: u64,
    failed: bool,
}

/// What an answer is charged by, besides what passes of it.
#[derive(Debug)]
pub(super) struct Metered {
    /// Whose events it has, if it is a stream.
    pub(super) api: Api,
    /// What the request makes its worker compute.
    pub(super) work: Work,
    /// The client's `background`: the worker computes it to its end, even if the client leaves.
    pub(super) background: bool,
    /// The worker's status.
    pub(super) status: StatusCode,
    /// Whether its body is text, so that its bytes say how many tokens it has.
    pub(super) is_text: bool,
}

impl Meter {
    pub(super) fn new(record: Arc<Record>, answer: Metered) -> Self {
        let visit = record.visit().filter(|visit| visit.is_metered());
        Self { record, visit, answer, passed: StreamCount::default(), bytes: 0, failed: false }
    }

    /// Events go to the client.
    pub(super) fn saw(&mut self, events: &[u8]) {
        self.passed.see(self.answer.api, events);
        if let Some(visit) = &self.visit {
            visit.passes(self.passed.tokens());
        }
    }

    /// A part of an answer that is no stream does.
    pub(super) fn saw_part(&mut self, bytes: &Bytes) {
        self.bytes += bytes.len() as u64;
    }

    /// The answer has failed.
    pub(super) fn failed(&mut self) {
        self.failed = true;
    }

    /// The answer has come to its end; `failed`: by its own word it is none. `handed`: tokens of its prompt
    /// that another worker had cached.
    pub(super) fn complete(mut self, tap: &UsageTap, handed: Option<u64>, failed: bool) {
        self.failed |= failed;
        let tokens = tap.usage().map_or_else(Tokens::default, |usage| tokens_of(&usage));
        let used = match tokens.total() {
            0 => self.unsaid(tap, true),
            _ => Used::Tokens(Tokens { cached: handed.unwrap_or(tokens.cached), ..tokens }),
        };
        self.record.settle(used);
    }

    /// The answer has ended before its end: its worker broke, or its client left.
    pub(super) fn broke_off(self, tap: &UsageTap) {
        // What came of its usage: engines and Anthropic's API say at the beginning what the prompt took.
        let said = tap.usage().filter(|usage| usage.prompt_tokens > 0);
        let used = match (self.unsaid(tap, false), said) {
            (Used::Passed(answer), Some(usage)) => {
                let tokens = tokens_of(&usage);
                Used::Begun(Tokens { generated: answer.max(tokens.generated), ..tokens })
            }
            (used, _) => used,
        };
        self.record.settle(used);
    }

    fn unsaid(&self, tap: &UsageTap, whole: bool) -> Used {
        let answer = self.passed.tokens().max(self.unstreamed(tap, whole));
        match answer {
            _ if !self.answer.status.is_success() => Used::Nothing,
            0 if self.failed || self.answer.work == Work::Counts => Used::Nothing,
            // It has begun, and what comes of it will be asked for some other way.
            _ if self.answer.background && !self.failed => Used::Most,
            0 if self.answer.work == Work::Generates && whole && self.bytes > 0 => Used::Most,
            answer => Used::Passed(answer),
        }
    }

    /// Tokens of an answer that is no stream.
    fn unstreamed(&self, tap: &UsageTap, whole: bool) -> u64 {
        match tap {
            UsageTap::Body(..) if whole => tap.tokens(),
            // Numbers, mostly.
            _ if self.answer.work == Work::Pools => 0,
            _ if self.answer.is_text => self.bytes.div_ceil(BYTES_PER_TOKEN),
            _ => 0,
        }
    }
}

/// Whether a kind of content is sounds, pictures or the like.
pub(super) fn is_media(kind: &[u8]) -> bool {
    ["audio/", "image/", "video/", "application/octet-stream"]
        .iter()
        .any(|media| kind.starts_with(media.as_bytes()))
}
