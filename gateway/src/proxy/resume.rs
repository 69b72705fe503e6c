//! Streams that outlive their worker. What was asked and what the client has of the answer are kept while it
//! streams; when the worker breaks off, another one is asked for the rest, and the client sees one stream:
//!
//! - before its first content, the request is sent again as it was, to any worker;
//! - after it, to a `keyway-worker` of the same numerics id, with the ids so far and the seed (the worker
//!   extension, `keyway_wire::extension`): the rest is, token by token, what it would have been;
//! - after it, of another engine's stream, where the configuration allows it, to any worker with the text so
//!   far: the rest follows from that, not from the same tokens.
//!
//! Who cannot go on is counted with the [`Obstacle`], and its stream ends honestly (`relay.rs`). Choosing a
//! worker is not done here, nor is the body relayed.

mod again;
pub(in crate::proxy) mod ask;
mod chunk;
mod memory;
mod restart;
mod text;
mod tokens;

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method};
use keyway_core::index::WorkerId;
use keyway_wire::{extension::RequestExtension, headers::NUMERICS_ID};

pub use self::again::Begun;
use self::{
    again::Search,
    ask::{Ask, continues_as_text, extended},
    memory::Memory,
    restart::Restart,
    text::TextHistory,
    tokens::TokenHistory,
};
use crate::{
    api::Api,
    config::ResumeConfig,
    fleet::Worker,
    limits::RESUME_BODY_BYTES_MAX,
    metrics::{Metrics, Obstacle},
    proxy::{asked::Asked, own_fault::RequestFailure, poison::Suspect, retry_limits::RetryLimits},
    routing::{Router, Ticket},
    upstream::Upstream,
};

/// Keeps what is needed to resume streams, and finds workers that go on with broken ones.
#[derive(Debug)]
pub struct Resumer {
    router: Arc<Router>,
    upstream: Upstream,
    retries: RetryLimits,
    metrics: Arc<Metrics>,
    memory: Arc<Memory>,
    on: bool,
    by_text: bool,
}

/// What a request is sent with, so that its answer can be resumed.
#[derive(Debug)]
pub struct Sent {
    /// The body that the worker is sent, with the extension where that is of use.
    pub body: Bytes,
    /// It without the extension.
    plain: Bytes,
    /// The seed that the extension bears, where the body bears the extension.
    exact: Result<Option<u64>, Obstacle>,
}

/// What is kept of a stream while it streams.
#[derive(Debug)]
pub struct ResumeState {
    resumer: Arc<Resumer>,
    asked: Arc<Asked>,
    tried: Vec<WorkerId>,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    /// The request, until the first content.
    Request(Restart),
    /// The request, and what the client has of the answer.
    Tokens { plain: Bytes, seed: Option<u64>, numerics: Arc<str>, history: TokenHistory },
    /// The request, and the answer's text.
    Text(TextHistory),
}

/// What became of some events.
#[derive(Debug)]
pub struct PassedOn {
    /// What goes on to the client.
    pub bytes: Bytes,
    /// Nothing is kept any more, because of this.
    pub over: Option<Obstacle>,
}

/// The search for another worker.
pub struct Again(Pin<Box<dyn Future<Output = Result<Begun, Obstacle>> + Send>>);

impl Resumer {
    /// One that resumes as it is configured.
    pub fn new(
        router: Arc<Router>,
        upstream: Upstream,
        retries: RetryLimits,
        metrics: Arc<Metrics>,
        config: ResumeConfig,
    ) -> Self {
        let ResumeConfig { memory_bytes, continue_text } = config;
        let memory = Arc::new(Memory::new(memory_bytes, metrics.resume.bytes.clone()));
        let on = memory_bytes > 0;
        let by_text = on && continue_text;
        Self { router, upstream, retries, metrics, memory, on, by_text }
    }

    /// Whether a worker's streams are continued by their text: then it is good to know how many tokens that
    /// is.
    pub fn counts_tokens(&self, worker: &Worker) -> bool {
        self.by_text && worker.numerics_id().is_none()
    }

    /// What to send to a worker: the request, which may ask for more than its client does (`plain`), as it is
    /// or with the extension, where that can be of use.
    pub fn sent(&self, asked: &Asked, plain: Bytes, worker: &Worker, seed: u64) -> Sent {
        let ask = match (self.on && asked.info.stream, worker.numerics_id()) {
            (false, _) => Err(Obstacle::Off),
            (true, None) => Err(Obstacle::Engine),
            (true, Some(_)) => Ask::of(&asked.parts, &asked.body),
        };
        match ask {
            Ok(Ask { has_seed }) => {
                let seed = (!has_seed).then_some(seed);
                let extension = RequestExtension { seed, ..RequestExtension::default() };
                Sent { body: extended(&plain, &extension), plain, exact: Ok(seed) }
            }
            Err(obstacle) => Sent { body: plain.clone(), plain, exact: Err(obstacle) },
        }
    }

    /// What to keep of a stream whose head has come.
    pub fn lifeline(
        self: &Arc<Self>,
        asked: &Arc<Asked>,
        worker: &Worker,
        sent: &Sent,
        head: &HeaderMap,
    ) -> Result<Box<ResumeState>, Obstacle> {
        if !self.on {
            return Err(Obstacle::Off);
        }
        if !asked.info.stream || asked.parts.method != Method::POST || !asked.may_repeat() {
            return Err(Obstacle::Path);
        }
        let by_text = match sent.exact {
            Err(Obstacle::Engine) if self.by_text => continues_as_text(&asked.parts, &asked.body),
            _ => Err(Obstacle::Engine),
        };
        // One body, or also the one that asks for more.
        let apart = (sent.exact.is_ok() || by_text.is_ok()) && sent.plain.as_ptr() != asked.body.as_ptr();
        let came = asked.came.as_ref().map_or(0, Bytes::len);
        let bytes = came + asked.body.len() + if apart { sent.plain.len() } else { 0 };
        let room = if bytes <= RESUME_BODY_BYTES_MAX { self.memory.reserve(bytes) } else { None };
        let room = room.ok_or(Obstacle::Memory)?;
        let numerics = head.get(NUMERICS_ID).and_then(|id| id.to_str().ok());
        let api = Api::of(asked.parts.uri.path());
        let kept = match (sent.exact, numerics) {
            (Ok(seed), Some(numerics)) => {
                let (plain, history) = (sent.plain.clone(), TokenHistory::new(room));
                Kept::Tokens { plain, seed, numerics: numerics.into(), history }
            }
            (Ok(_), None) => Kept::Request(Restart::new(api, Obstacle::Engine, room)),
            (Err(Obstacle::Engine), _) => match by_text {
                Ok(()) => Kept::Text(TextHistory::new(sent.plain.clone(), api == Api::Chat, room)),
                Err(obstacle) => Kept::Request(Restart::new(api, obstacle, room)),
            },
            (Err(obstacle), _) => Kept::Request(Restart::new(api, obstacle, room)),
        };
        let tried = vec![worker.id];
        Ok(Box::new(ResumeState { resumer: Arc::clone(self), asked: Arc::clone(asked), tried, kept }))
    }

    /// Counts a stream that does not go on.
    pub fn not_resumed(&self, obstacle: Obstacle) {
        self.metrics.resume.not_resumed.with_label_values(&[obstacle.as_str()]).inc();
    }
}

impl ResumeState {
    /// Takes whole events on their way to the client. `binds`: there is more among them than an answer's
    /// opening.
    pub fn pass(&mut self, events: Bytes, binds: bool) -> PassedOn {
        match &mut self.kept {
            Kept::Request(restart) => restart.tell(events, binds),
            Kept::Tokens { history, .. } => PassedOn { bytes: history.tell(&events), over: None },
            Kept::Text(history) => PassedOn { bytes: history.tell(&events), over: None },
        }
    }

    /// Whether the stream must say `[DONE]` to be whole.
    pub fn must_be_done(&self) -> bool {
        matches!(self.kept, Kept::Tokens { .. } | Kept::Text(_))
    }

    /// Whether requests like this were blamed in band by several workers lately: it is not tried elsewhere
    /// then.
    pub fn is_own_fault(&self) -> bool {
        let Resumer { retries, router, .. } = &*self.resumer;
        retries.own_faults.knows(&self.asked, RequestFailure::InBand, router.now())
    }

    /// Remembers that several workers blamed this request, so that its like is not tried elsewhere.
    pub fn note_own_fault(&self) {
        let Resumer { retries, router, .. } = &*self.resumer;
        retries.own_faults.note(&self.asked, RequestFailure::InBand, router.now());
    }

    /// The worker broke before anything of the answer came.
    pub fn broke_unbegun(&self, worker: WorkerId) -> Option<Suspect> {
        self.resumer.retries.poisons.broke(&self.asked, worker, self.resumer.router.now())
    }

    /// Asks another worker for the rest; then the request's part in its model's demand goes from the ticket
    /// to the search. `in_doubt`: the request itself may be at fault.
    pub fn again(&self, ticket: &mut Ticket, in_doubt: bool) -> Result<Again, Obstacle> {
        let (resumer, asked) = (Arc::clone(&self.resumer), Arc::clone(&self.asked));
        if !resumer.router.has_another(&asked.info, &self.tried) {
            return Err(Obstacle::NoWorker);
        }
        if !self.asked.broken.may_break_another() {
            return Err(Obstacle::Attempts);
        }
        let (body, numerics) = match &self.kept {
            Kept::Request(restart) => restart.may_begin().map(|()| (asked.body.clone(), None))?,
            Kept::Text(history) => (history.rest()?, None),
            Kept::Tokens { plain, seed, numerics, history } => {
                (extended(plain, &history.rest(*seed)?), Some(Arc::clone(numerics)))
            }
        };
        let demand = ticket.give_back();
        let tried = self.tried.clone();
        let search = Search { resumer, asked, body, numerics, tried, demand, in_doubt, suspect: None };
        Ok(Again(Box::pin(search.run())))
    }

    /// Another worker's stream begins.
    pub fn begun(&mut self, begun: &Begun) {
        self.tried.clone_from(&begun.tried);
        let how = match &mut self.kept {
            Kept::Request(restart) => {
                restart.renewed();
                "restart"
            }
            Kept::Tokens { history, .. } if history.has_begun() => {
                history.goes_on();
                "exact"
            }
            Kept::Text(history) if history.has_begun() => {
                history.goes_on();
                "text"
            }
            _ => "restart",
        };
        self.resumer.metrics.resume.resumed.with_label_values(&[how]).inc();
        let worker = &begun.ticket.worker().name;
        tracing::info!(id = self.asked.record.id(), %worker, how, "another worker goes on with a stream");
    }
}

impl Future for Again {
    type Output = Result<Begun, Obstacle>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for Again {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Again")
    }
}
