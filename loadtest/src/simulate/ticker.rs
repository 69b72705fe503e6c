//! A line on stderr every few seconds of a long simulation. Looks at the clock once in a while; decides
//! nothing.

use std::{
    io::{IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

/// Time between two lines.
const EVERY: Duration = Duration::from_secs(5);
/// Requests between two looks at the clock.
const LOOK_EVERY: u64 = 1 << 10;

/// Says how far one replay is.
#[derive(Debug)]
pub(super) struct Ticker {
    what: String,
    total: u64,
    done: u64,
    started: Instant,
    told: Instant,
    redraws: bool,
}

impl Ticker {
    /// For a replay of `total` requests.
    pub(super) fn new(what: String, total: u64) -> Self {
        let now = Instant::now();
        Self { what, total, done: 0, started: now, told: now, redraws: std::io::stderr().is_terminal() }
    }

    /// One request more has arrived.
    pub(super) fn tick(&mut self) {
        self.done += 1;
        if !self.done.is_multiple_of(LOOK_EVERY) || self.told.elapsed() < EVERY {
            return;
        }
        self.told = Instant::now();
        let line = line(&self.what, self.done, self.total, self.started.elapsed());
        // A closed stderr must not end the simulation.
        let _ = if self.redraws {
            write!(std::io::stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(std::io::stderr(), "{line}")
        };
    }
}

impl Drop for Ticker {
    /// Clears a redrawn line.
    fn drop(&mut self) {
        if self.redraws && self.told > self.started {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let left = elapsed.as_secs_f64() * (total - done.min(total)) as f64 / done.max(1) as f64;
    let (elapsed, percent) = (elapsed.as_secs_f64(), 100.0 * done as f64 / total.max(1) as f64);
    format!("{what}: {done} of {total} requests ({percent:.0} %), {elapsed:.0} s, about {left:.0} s left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line() {
        let text = line("prefix on 64 workers", 2048, 8192, Duration::from_secs(10));
        assert_eq!(text, "prefix on 64 workers: 2048 of 8192 requests (25 %), 10 s, about 30 s left");
    }
}
