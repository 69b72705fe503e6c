//! What workers and clients saw, in the order in which it happened. Two runs of one seed write the same log.
//! Nothing is judged here.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

/// One request's number; its prompt says it, so every worker that is asked knows it.
pub(crate) type Id = u32;

/// How an answer came to its client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// 0: there was no head.
    pub(crate) status: u16,
    /// The worker whose answer began.
    pub(crate) worker: Option<String>,
    /// The text so far.
    pub(crate) text: String,
    /// How often `[DONE]` was read.
    pub(crate) dones: usize,
    /// Events that are an error, and read as JSON.
    pub(crate) errors: usize,
    /// Events that are nothing that may be there.
    pub(crate) nonsense: Vec<String>,
    /// Events behind an error or behind `[DONE]`.
    pub(crate) late: usize,
    /// Whether the body came to its end, and was not aborted.
    pub(crate) whole: bool,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// A worker begins an answer; so many tokens of it are there already.
    Begun { worker: usize, id: Id, from: u32 },
    /// It ends its answer before its time.
    Ended { worker: usize, id: Id },
    /// It will not.
    Refused { worker: usize, id: Id },
    /// It has said all of it.
    Finished { worker: usize, id: Id },
    /// It lost whom it was for, or was ended.
    Aborted { worker: usize, id: Id },
    /// A client sends its request.
    Asked { id: Id },
    /// A client is gone before its answer's end.
    Left { id: Id },
    /// A client has an answer, or knows that it gets none.
    Answered { id: Id, seen: Seen },
    /// Something is done to the cluster.
    Did(crate::schedule::Act),
}

/// The log, and what time it is: the beginning of the current step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Lines>>);

#[derive(Debug, Default)]
struct Lines {
    now: Duration,
    lines: Vec<(Duration, Event)>,
}

impl Log {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// It is this time from now on.
    pub(crate) fn at(&self, now: Duration) {
        self.lines().now = now;
    }

    /// Writes a line.
    pub(crate) fn note(&self, event: Event) {
        let mut lines = self.lines();
        let now = lines.now;
        lines.lines.push((now, event));
    }

    /// Everything so far.
    pub(crate) fn read(&self) -> Vec<(Duration, Event)> {
        self.lines().lines.clone()
    }
}
