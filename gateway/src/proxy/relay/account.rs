//! What is counted of an answer as it passes, and what is told of it when it is over: to the series, the
//! record, the worker's breaker and the router.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use keyway_core::{breaker::Verdict, pick::Pick};
use keyway_wire::openai::Usage;

use super::meter::Meter;
use crate::{
    api::AtFault,
    clock::Instant,
    limits::ALIVE_NOTE_INTERVAL,
    metrics::ModelSeries,
    prompt::request::RequestInfo,
    proxy::poison::Suspect,
    routing::{Accusation, Ticket, refusal::Charge},
    sse,
    telemetry::record::Record,
    usage::{UsageTap, cached, hide::UsageFilter},
};

/// What is known of a request when its answer begins.
#[derive(Debug)]
pub struct RelayedRequest {
    /// Its weight on the worker.
    pub ticket: Box<Ticket>,
    /// What routing read of it.
    pub info: Arc<RequestInfo>,
    /// Why it went there.
    pub pick: Pick,
    /// Where the first token's time, the usage and the outcome of the answer are noted.
    pub record: Arc<Record>,
    /// The series of its model.
    pub series: Arc<ModelSeries>,
    /// What becomes of the usage in a stream.
    pub usage: UsageFilter,
    /// Where what was asked has broken workers before.
    pub suspect: Option<Suspect>,
}

/// What is counted of an answer as it passes.
#[derive(Debug)]
pub(super) struct Account {
    /// When the worker that answers now has last sent anything.
    pub(super) last_piece: Option<Instant>,
    /// When the last generated content went to the client.
    last_token: Option<Instant>,
    /// Whether content of the worker that answers now has gone to the client.
    began: bool,
    /// When it is next noted that the worker says something: it may have been silent since its head.
    alive_due: Instant,
    /// Held against workers whose streams began with an error, until another one has generated content or
    /// failed too.
    accusations: Vec<(Accusation, AtFault)>,
    status: StatusCode,
    tap: UsageTap,
    /// Where it is charged for, until that is done.
    meter: Option<Box<Meter>>,
    pub(super) told: RelayedRequest,
}

impl Account {
    pub(super) fn new(
        status: StatusCode,
        (tap, meter): (UsageTap, Option<Box<Meter>>),
        told: RelayedRequest,
        began: Instant,
    ) -> Self {
        let accusations = Vec::new();
        Self {
            last_piece: None,
            last_token: None,
            began: false,
            alive_due: began + ALIVE_NOTE_INTERVAL,
            accusations,
            status,
            tap,
            meter,
            told,
        }
    }

    /// Another worker's stream takes the place of the broken one.
    pub(super) fn goes_on(&mut self, pick: Pick, ticket: Box<Ticket>, now: Instant) {
        (self.told.pick, self.told.ticket) = (pick, ticket);
        (self.began, self.last_piece, self.alive_due) = (false, None, now + ALIVE_NOTE_INTERVAL);
    }

    /// The worker says something, whatever it is.
    pub(super) fn hears(&mut self, now: Instant) {
        self.last_piece = Some(now);
        if now > self.alive_due {
            self.alive_due = now + ALIVE_NOTE_INTERVAL;
            self.told.ticket.still_answering(self.at(now));
        }
    }

    /// Counts a piece of an unstreamed answer.
    pub(super) fn saw_part(&mut self, bytes: &Bytes, now: Instant) {
        self.tap.see(bytes, false);
        if let Some(meter) = &mut self.meter {
            meter.saw_part(bytes);
        }
        if self.status.is_success() && !std::mem::replace(&mut self.began, true) {
            // Its tokens are computed before its first byte is sent, unless it is none.
            if begins_as_error(bytes) {
                self.accusation().undecided();
            } else {
                self.first_token(now);
            }
        }
    }

    /// Counts whole events; returns what the client is to see of them. `generated`: whether there is content
    /// among them; `mentions_usage`: whether they name a usage, or may.
    pub(super) fn saw(
        &mut self,
        bytes: Bytes,
        (generated, mentions_usage): (bool, bool),
        now: Instant,
    ) -> Bytes {
        self.tap.see(&bytes, mentions_usage);
        if let Some(meter) = &mut self.meter {
            meter.saw(&bytes);
        }
        let mut bytes = self.told.usage.pass(bytes, mentions_usage);
        if let Some(cached_tokens) = self.told.ticket.handed().filter(|_| mentions_usage) {
            bytes = cached::in_events(bytes, cached_tokens);
        }
        // A refusal that comes as events is no token: nothing says that the prompt was computed.
        if generated && self.status.is_success() && !bytes.is_empty() && !is_comment(&bytes) {
            self.saw_token(now);
        }
        bytes
    }

    fn saw_token(&mut self, now: Instant) {
        let first_of_worker = !std::mem::replace(&mut self.began, true);
        if first_of_worker {
            self.accusations.drain(..).for_each(|(accusation, _)| accusation.upheld());
        }
        if let Some(last) = self.last_token.replace(now) {
            self.told.series.itl().observe((now - last).as_secs_f64());
            if first_of_worker {
                // How long it took says nothing of its speed: it had part of the answer to compute too.
                self.first_token(now);
            }
            return;
        }
        let ttft = now - self.told.record.started();
        self.told.series.ttft().observe(ttft.as_secs_f64());
        self.told.record.first_token(ttft);
        self.told.ticket.stream_began(self.at(now));
    }

    /// The prompt is computed.
    pub(super) fn first_token(&mut self, now: Instant) {
        self.told.ticket.first_token(self.at(now));
    }

    fn at(&self, now: Instant) -> Duration {
        self.told.ticket.router().at(now)
    }

    fn accusation(&mut self) -> Accusation {
        self.told.ticket.accuse(Charge::ErrorEvent, self.told.record.path())
    }

    /// Whether the client has content of the answer.
    pub(super) fn has_content(&self) -> bool {
        self.last_token.is_some()
    }

    /// The worker says that its stream failed. `is_tried_again`: another one is asked, whose answer says
    /// whose fault it was.
    pub(super) fn failed_in_band(&mut self, fault: AtFault, is_tried_again: bool) {
        if !self.began {
            let accusation = self.accusation();
            self.accusations.push((accusation, fault));
        } else if is_tried_again {
            self.told.ticket.judge(Verdict::Bad);
        }
    }

    /// No other worker answers. Where several have failed at the request, none is held to be at fault; where
    /// one alone was asked, what blames the request is taken at its word. Returns whether several blame it.
    pub(super) fn nobody_goes_on(&mut self) -> bool {
        let several = self.accusations.len() > 1;
        let all_blame_it = self.accusations.iter().all(|(_, fault)| *fault == AtFault::Request);
        for (accusation, fault) in self.accusations.drain(..) {
            if several || fault == AtFault::Request {
                drop(accusation);
            } else {
                accusation.undecided();
            }
        }
        several && all_blame_it
    }

    /// Whether what has come of an unstreamed JSON answer is one value; `None` where that is not known.
    pub(super) fn is_whole_json(&self) -> Option<bool> {
        self.tap.is_whole_json()
    }

    /// The answer is complete. `failed_in_band`: it says itself that it failed; `done`: a stream's last word
    /// was passed on.
    pub(super) fn complete(&mut self, (failed_in_band, done): (bool, bool), now: Instant) {
        let failed_in_band = failed_in_band || (self.status.is_success() && self.tap.is_error());
        let outcome = match (self.status.is_success(), failed_in_band) {
            (true, false) => "complete",
            (true, true) => "worker_error_event",
            (false, _) => "worker_status",
        };
        let now = self.at(now);
        if let Some(verdict) = verdict(self.status, failed_in_band) {
            self.told.ticket.judge_at(verdict, now);
        }
        self.told.record.outcome(outcome);
        if outcome == "complete"
            && let Some(suspect) = &self.told.suspect
        {
            suspect.answered(now);
        }
        if outcome == "complete" && done {
            self.told.usage.ended();
        }
        if let Some(meter) = self.meter.take() {
            meter.complete(&self.tap, self.told.ticket.handed(), failed_in_band);
        }
        if let Some(usage) = self.tap.finish()
            && self.told.record.computes()
        {
            self.count(usage, now);
        }
    }

    /// The answer ends as a failure.
    pub(super) fn failed(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.failed();
        }
    }

    fn count(&mut self, usage: Usage, now: Duration) {
        self.told.ticket.answered(usage.completion_tokens);
        let usage = self.told.ticket.handed().map_or(usage.clone(), |cached| usage.with_cached(cached));
        let reported = usage.cached_tokens().unwrap_or(0);
        self.told.series.tokens(
            usage.prompt_tokens,
            usage.completion_tokens,
            self.told.pick.matched_tokens,
            reported,
        );
        let router = self.told.ticket.router();
        let miss = router.learn(&self.told.info, &self.told.pick, &usage, (&self.told.ticket, now));
        self.told.record.usage(usage, miss);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Some(meter) = self.meter.take() {
            meter.broke_off(&self.tap);
        }
    }
}

/// Whether an unstreamed answer is an error, as engines write it: by its first field.
fn begins_as_error(body: &[u8]) -> bool {
    let inside = body.trim_ascii_start().strip_prefix(b"{").unwrap_or_default().trim_ascii_start();
    inside.starts_with(b"\"error\"") || inside.starts_with(b"\"object\":\"error\"")
}

/// Whether there is nothing but comments in some events.
fn is_comment(events: &[u8]) -> bool {
    events.starts_with(b":") && sse::events(events).all(|event| event.data.is_none())
}

/// What a whole answer says of the worker. "Not now" (429, 503) is neither good nor bad; nor is what may be
/// the request's fault: a refusal (4xx), an error inside a stream. A failure that was looked into has its
/// verdict by now, and keeps it.
fn verdict(status: StatusCode, failed_in_band: bool) -> Option<Verdict> {
    match status.as_u16() {
        400..500 | 503 | 529 => None,
        500.. => Some(Verdict::Bad),
        _ if failed_in_band => None,
        _ => Some(Verdict::Good),
    }
}
