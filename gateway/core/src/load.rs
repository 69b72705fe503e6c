//! What one worker has been sent and has not finished. Counters only: who holds them for how long is decided by
//! the owner of the response body, which calls `start`, `first_token` and `end` exactly once each.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Shared counters of one worker.
#[derive(Debug, Default)]
pub struct Load {
    requests: AtomicU64,
    waiting_prefill_tokens: AtomicU64,
}

/// The counters at one moment.
#[derive(Copy, Clone, Default, Debug, PartialEq, Eq)]
pub struct LoadSnapshot {
    /// Requests sent whose response body still lives.
    pub requests: u64,
    /// Uncached prompt tokens of those among them that have not produced a first token.
    pub waiting_prefill_tokens: u64,
}

impl Load {
    /// A request with this much prefill of its own was sent.
    pub fn start(&self, uncached_tokens: u64) {
        self.requests.fetch_add(1, Relaxed);
        self.waiting_prefill_tokens.fetch_add(uncached_tokens, Relaxed);
    }

    /// Its first token came, or it ended without one: its prefill no longer waits. Takes the value given to
    /// [`Load::start`].
    pub fn first_token(&self, uncached_tokens: u64) {
        subtract(&self.waiting_prefill_tokens, uncached_tokens);
    }

    /// Its response body is gone.
    pub fn end(&self) {
        subtract(&self.requests, 1);
    }

    /// The counters now. The two are read one after the other, so they may differ by a request in between.
    pub fn snapshot(&self) -> LoadSnapshot {
        LoadSnapshot {
            requests: self.requests.load(Relaxed),
            waiting_prefill_tokens: self.waiting_prefill_tokens.load(Relaxed),
        }
    }
}

/// Stops at zero: a call too many must not make a worker look infinitely loaded for ever.
fn subtract(counter: &AtomicU64, amount: u64) {
    let before = counter.fetch_update(Relaxed, Relaxed, |value| Some(value.saturating_sub(amount)));
    debug_assert!(before.is_ok_and(|value| value >= amount), "ended more than was started");
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn waiting_ends_with_the_first_token_and_the_request_with_its_body() {
        let load = Load::default();
        load.start(100);
        load.start(50);
        assert_eq!(load.snapshot(), LoadSnapshot { requests: 2, waiting_prefill_tokens: 150 });
        load.first_token(100);
        assert_eq!(load.snapshot(), LoadSnapshot { requests: 2, waiting_prefill_tokens: 50 });
        load.end();
        load.first_token(50);
        load.end();
        assert_eq!(load.snapshot(), LoadSnapshot::default());
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
        let load = Load::default();
        thread::scope(|scope| {
            for tokens in 1..=4 {
                let load = &load;
                scope.spawn(move || {
                    for _ in 0..1000 {
                        load.start(tokens);
                        load.first_token(tokens);
                        load.end();
                    }
                });
            }
        });
        assert_eq!(load.snapshot(), LoadSnapshot::default());
    }
}
