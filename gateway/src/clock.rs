//! The seam for time: everything in the gateway that reads or waits for time does it here, so that tests run
//! in tokio's paused time and a simulator can take over.
#![allow(clippy::disallowed_methods, reason = "the one place that reads clocks")]

#[cfg(not(feature = "simulation"))]
use std::time::{SystemTime, UNIX_EPOCH};
use std::{pin::Pin, time::Duration};

use parking_lot::Mutex;
pub use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout, timeout_at};

/// Seconds since 1970, to compare with what others say.
pub fn unix_seconds() -> f64 {
    since_1970().as_secs_f64()
}

/// Nanoseconds since 1970, as traces count time.
pub fn unix_nanos() -> u64 {
    since_1970().as_nanos() as u64
}

#[cfg(not(feature = "simulation"))]
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// What the simulated world takes it for.
#[cfg(feature = "simulation")]
fn since_1970() -> Duration {
    turmoil::since_epoch().unwrap_or_default()
}

/// Time since the gateway started, as the routing core takes it.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that counts from now on; its copies tell the same time.
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.at(Instant::now())
    }

    /// Time from the start until `then`.
    pub fn at(&self, then: Instant) -> Duration {
        then - self.start
    }
}

/// A timer that the requests of one connection take one after the other: to list one with the runtime and to
/// take it out again costs more than to let it go off in vain now and then.
#[derive(Debug, Default)]
pub struct KeptTimer(Mutex<Option<Pin<Box<Sleep>>>>);

impl KeptTimer {
    /// What the last request has left, if it goes off by then; else a new one.
    pub fn take(&self, by: Instant) -> Pin<Box<Sleep>> {
        let left = self.0.lock().take();
        left.filter(|left| left.deadline() <= by).unwrap_or_else(|| Box::pin(sleep_until(by)))
    }

    /// Leaves it to the next request.
    pub fn leave(&self, timer: Pin<Box<Sleep>>) {
        *self.0.lock() = Some(timer);
    }
}
