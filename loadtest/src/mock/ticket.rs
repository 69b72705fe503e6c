//! What the engine and an answer share of one request: how many tokens are there, and how it ended. The
//! engine's thread writes, the answer's task reads; neither waits for the other, and a slow reader costs no
//! memory.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    task::{Context, Poll},
};

use futures_util::task::AtomicWaker;

/// The state of one request, which the engine's thread and the answer's task share.
#[derive(Debug, Default)]
pub(super) struct Ticket {
    /// Tokens that came out so far.
    ready: AtomicU32,
    cached_tokens: AtomicU32,
    broken: AtomicBool,
    waker: AtomicWaker,
}

/// What an answer can go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// This many tokens are there in all, more than the reader has seen.
    Tokens(u32),
    /// The worker is gone.
    Broken,
}

impl Ticket {
    /// More tokens came out: `ready` in all.
    pub(super) fn advance(&self, ready: u32, cached_tokens: u32) {
        self.cached_tokens.store(cached_tokens, Ordering::Relaxed);
        self.ready.store(ready, Ordering::Release);
        self.waker.wake();
    }

    /// No more will come.
    pub(super) fn break_off(&self) {
        self.broken.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Prompt tokens that were cached; known with the first token.
    pub(super) fn cached_tokens(&self) -> u32 {
        self.cached_tokens.load(Ordering::Relaxed)
    }

    /// Whether there is more than `seen` tokens, or never will be.
    pub(super) fn poll(&self, seen: u32, context: &Context<'_>) -> Poll<Progress> {
        self.look(seen).map_or_else(
            || {
                self.waker.register(context.waker());
                // It may have come between the look and the registration.
                self.look(seen).map_or(Poll::Pending, Poll::Ready)
            },
            Poll::Ready,
        )
    }

    fn look(&self, seen: u32) -> Option<Progress> {
        let ready = self.ready.load(Ordering::Acquire);
        if ready > seen {
            Some(Progress::Tokens(ready))
        } else {
            self.broken.load(Ordering::Acquire).then_some(Progress::Broken)
        }
    }
}
