//! Streams that outlive their worker. What was asked and what the client has of the answer are kept while it streams;
//! when the worker breaks off, another one is asked for the rest, and the client sees one stream:
//!
//! - before the first event, the request is sent again as it was, to any worker;
//! - after it, to a `keyway-worker` of the same numerics id, with the ids so far and the seed (the worker extension,
//!   `keyway_wire::extension`): the rest is, token by token, what it would have been.
//!
//! Who cannot go on is counted with the [`Obstacle`], and its stream ends honestly (`relay.rs`). Choosing a worker is not
//! done here, nor is the body relayed.

mod again;
mod ask;
mod chunk;
mod memory;
mod story;

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method};
use keyway_core::{RetryBudget, index::WorkerId};
use keyway_wire::{extension::RequestExtension, headers::NUMERICS_ID};
use parking_lot::Mutex;

pub use self::again::Begun;
use self::{
    again::Search,
    ask::{Ask, extended},
    memory::{Memory, Reservation},
    story::Story,
};
use crate::{
    asked::Asked, autoscale::Demand, fleet::Worker, limits::RESUME_BODY_BYTES_MAX, metrics::Metrics,
    routing::Router, upstream::Upstream,
};

/// Why a stream does not go on elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The configuration says so.
    Off,
    /// Another path than the two generating ones.
    Path,
    /// The worker is no `keyway-worker`.
    Engine,
    /// A function that must be called.
    Tools,
    /// A form for the answer.
    Form,
    /// More than one answer.
    Choices,
    /// The prompt is to be in the answer.
    Echo,
    /// The client uses the worker extension itself.
    OwnExtension,
    /// The request, or a chunk, cannot be read.
    Unreadable,
    /// The request is large, or too much is kept for others.
    Memory,
    /// No worker of the same numerics is ready.
    NoWorker,
    /// The retry budget is spent.
    Budget,
    /// It was tried often enough.
    Attempts,
}

impl Obstacle {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Off,
        Self::Path,
        Self::Engine,
        Self::Tools,
        Self::Form,
        Self::Choices,
        Self::Echo,
        Self::OwnExtension,
        Self::Unreadable,
        Self::Memory,
        Self::NoWorker,
        Self::Budget,
        Self::Attempts,
    ];

    /// For logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Path => "path",
            Self::Engine => "engine",
            Self::Tools => "tools",
            Self::Form => "form",
            Self::Choices => "choices",
            Self::Echo => "echo",
            Self::OwnExtension => "own_extension",
            Self::Unreadable => "unreadable",
            Self::Memory => "memory",
            Self::NoWorker => "no_worker",
            Self::Budget => "budget",
            Self::Attempts => "attempts",
        }
    }
}

/// Resumes streams.
#[derive(Debug)]
pub struct Resumer {
    router: Arc<Router>,
    upstream: Upstream,
    budget: Arc<Mutex<RetryBudget>>,
    metrics: Arc<Metrics>,
    memory: Arc<Memory>,
    on: bool,
}

/// What a request is sent with, so that its answer can be resumed.
#[derive(Debug)]
pub struct Sent {
    /// The body.
    pub body: Bytes,
    /// It without the extension.
    plain: Bytes,
    /// The seed that the extension bears, where the body bears the extension.
    exact: Result<Option<u64>, Obstacle>,
}

/// What is kept of a stream while it streams.
#[derive(Debug)]
pub struct Lifeline {
    resumer: Arc<Resumer>,
    asked: Arc<Asked>,
    tried: Vec<WorkerId>,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    /// The request, until the first event.
    Request { obstacle: Obstacle, _room: Reservation },
    /// The request, and what the client has of the answer.
    Story { plain: Bytes, seed: Option<u64>, numerics: Arc<str>, story: Story },
}

/// What became of some events.
#[derive(Debug)]
pub struct Passed {
    /// What goes on to the client.
    pub bytes: Bytes,
    /// The worker said that it cannot go on.
    pub broke: bool,
    /// Nothing is kept any more, because of this.
    pub over: Option<Obstacle>,
}

/// The search for another worker.
pub struct Again(Pin<Box<dyn Future<Output = Result<Begun, Obstacle>> + Send>>);

impl Resumer {
    /// One that resumes, or none that does: with at most `memory_bytes` kept, 0 for not at all.
    pub fn new(
        router: Arc<Router>,
        upstream: Upstream,
        budget: Arc<Mutex<RetryBudget>>,
        metrics: Arc<Metrics>,
        memory_bytes: usize,
    ) -> Self {
        let memory = Arc::new(Memory::new(memory_bytes, metrics.resume.bytes.clone()));
        Self { router, upstream, budget, metrics, memory, on: memory_bytes > 0 }
    }

    /// What to send to a worker: the request, which may ask for more than its client does (`plain`), as it is or with the
    /// extension, where that can be of use.
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
    ) -> Result<Box<Lifeline>, Obstacle> {
        if !self.on {
            return Err(Obstacle::Off);
        }
        if !asked.info.stream || asked.parts.method != Method::POST || !asked.may_repeat() {
            return Err(Obstacle::Path);
        }
        // One body, or also the one that asks for more.
        let apart = sent.exact.is_ok() && sent.plain.as_ptr() != asked.body.as_ptr();
        let bytes = asked.body.len() + if apart { sent.plain.len() } else { 0 };
        let room = if bytes <= RESUME_BODY_BYTES_MAX { self.memory.reserve(bytes) } else { None };
        let room = room.ok_or(Obstacle::Memory)?;
        let numerics = head.get(NUMERICS_ID).and_then(|id| id.to_str().ok());
        let kept = match (sent.exact, numerics) {
            (Ok(seed), Some(numerics)) => {
                let (plain, story) = (sent.plain.clone(), Story::new(room));
                Kept::Story { plain, seed, numerics: numerics.into(), story }
            }
            (Ok(_), None) => Kept::Request { obstacle: Obstacle::Engine, _room: room },
            (Err(obstacle), _) => Kept::Request { obstacle, _room: room },
        };
        let tried = vec![worker.id];
        Ok(Box::new(Lifeline { resumer: Arc::clone(self), asked: Arc::clone(asked), tried, kept }))
    }

    /// Counts a stream that does not go on.
    pub fn not_resumed(&self, obstacle: Obstacle) {
        self.metrics.resume.not_resumed.with_label_values(&[obstacle.as_str()]).inc();
    }
}

impl Lifeline {
    /// Takes whole events on their way to the client.
    pub fn pass(&mut self, events: Bytes) -> Passed {
        match &mut self.kept {
            Kept::Request { obstacle, .. } => Passed { bytes: events, broke: false, over: Some(*obstacle) },
            Kept::Story { story, .. } => {
                let told = story.tell(&events);
                Passed { bytes: told.bytes, broke: told.broke, over: None }
            }
        }
    }

    /// Whether the stream must say `[DONE]` to be whole.
    pub fn must_be_done(&self) -> bool {
        matches!(self.kept, Kept::Story { .. })
    }

    /// Asks another worker for the rest.
    pub fn again(&self, demand: Option<Demand>) -> Result<Again, Obstacle> {
        let (resumer, asked) = (Arc::clone(&self.resumer), Arc::clone(&self.asked));
        let (body, numerics) = match &self.kept {
            Kept::Request { .. } => (asked.body.clone(), None),
            Kept::Story { plain, seed, numerics, story } => {
                (extended(plain, &story.rest(*seed)?), Some(Arc::clone(numerics)))
            }
        };
        let search = Search { resumer, asked, body, numerics, tried: self.tried.clone(), demand };
        Ok(Again(Box::pin(search.run())))
    }

    /// Another worker's stream begins.
    pub fn begun(&mut self, begun: &Begun) {
        self.tried.clone_from(&begun.tried);
        let how = match &mut self.kept {
            Kept::Story { story, .. } if story.has_begun() => {
                story.goes_on();
                "exact"
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
