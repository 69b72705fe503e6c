//! Whether a worker may be chosen: a state machine fed with what was seen of it, at times given as the
//! `Duration` since the gateway started. It sends no probe and keeps no clock; it says when the next probe is
//! due.
//!
//! Busy is not dead: a failed probe takes down only a worker that has not answered anything for a while. And
//! a client's mistake is an answer: the caller reports a 4xx as a success. But a port that refuses is proof,
//! however busy the worker was: no process listens there. So the ports of workers that are up are looked at
//! more often than they are asked.

use std::time::Duration;

/// Time between probes of a worker that is up.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Time to the first probe of a worker that is not up; each failed one doubles it.
pub const FIRST_BACKOFF: Duration = Duration::from_millis(250);
/// Greatest time between probes of a worker that is not up: how late its return is noticed at most. It is
/// asked no more rarely than one that is up; where no process is reached, which costs a packet, each
/// [`LOOK_INTERVAL`].
pub const MAX_BACKOFF: Duration = PROBE_INTERVAL;
/// Failed probes in a row that take a silent worker down.
pub const FAILED_PROBES: u32 = 3;
/// Time between two looks at the port of a worker that is up. With the second look a closed port is known in
/// 1.75 s.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(1_500);
/// Time to a second look at a port that refused: a listener that is replaced is away for less.
pub const SECOND_LOOK: Duration = Duration::from_millis(250);
/// Looks in a row that must be refused to take a worker down.
pub const REFUSED_LOOKS: u32 = 2;
/// How recent an answer must be for the worker to count as alive whatever its probes say.
pub const ALIVE_WINDOW: Duration = Duration::from_secs(15);

/// Where a worker stands.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Known, but not yet seen alive.
    Joining,
    /// Seen alive, and neither paused nor asleep: it may be chosen for new requests.
    Ready,
    /// Reachable, but who lists it says that it is not ready, or its engine sleeps; it keeps what it has and
    /// may be chosen again.
    Paused,
    /// Not reachable; probed until it is.
    Down,
    /// Finishes what it has and gets nothing new.
    Draining,
}

impl State {
    /// Its name in metrics and on the admin pages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Paused => "paused",
            Self::Down => "down",
            Self::Draining => "draining",
        }
    }
}

/// What a look at a worker's port found.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// It takes connections: refused looks before this one count no more.
    Open,
    /// It refuses them: no process listens.
    Refused,
    /// Nothing that can be held against the worker: no answer in time, or trouble of the gateway's own.
    Unknown,
}

/// One worker's state and what decides its next one.
#[derive(Clone, Debug)]
pub struct Health {
    state: State,
    /// Probes failed in a row.
    failed_probes: u32,
    /// When it last answered anything: a request or a probe.
    last_success: Option<Duration>,
    /// Since when it is ready, or was when it last was.
    up_since: Duration,
    /// Down because a connection failed: only a new connection, a probe's, proves the contrary.
    refused: bool,
    /// Its list says that it is not ready: beside `state`, which goes on meanwhile.
    paused: bool,
    /// Its engine says that it sleeps.
    asleep: bool,
    next_probe_at: Duration,
    next_look_at: Duration,
    /// Looks at its port that were refused in a row.
    refused_looks: u32,
    /// Since when nothing more is to be expected of it, streams that it has begun included.
    dead_since: Option<Duration>,
}

impl Health {
    /// A worker that was just heard of; its first probe is due at once.
    pub fn new(now: Duration) -> Self {
        Self {
            state: State::Joining,
            failed_probes: 0,
            last_success: None,
            up_since: now,
            refused: false,
            paused: false,
            asleep: false,
            next_probe_at: now,
            next_look_at: now + LOOK_INTERVAL,
            refused_looks: 0,
            dead_since: None,
        }
    }

    /// A probe ended. One that went well brings the worker up; [`FAILED_PROBES`] in a row that failed take a
    /// silent one down.
    pub fn on_probe(&mut self, ok: bool, now: Duration) {
        if self.state == State::Draining {
            return;
        }
        if ok {
            return self.up(now);
        }
        self.failed_probes = self.failed_probes.saturating_add(1);
        if self.state == State::Ready && self.failed_probes >= FAILED_PROBES && !self.recently_alive(now) {
            self.state = State::Down;
            self.failed_probes = 0;
            self.dead_since.get_or_insert(now);
        }
        self.next_probe_at = now + self.probe_delay();
    }

    /// Its probe reached no process: its port refuses, or there is no way to it.
    pub fn on_unreached_probe(&mut self, now: Duration) {
        self.on_probe(false, now);
        if self.state != State::Draining {
            self.next_probe_at = self.next_probe_at.min(now + LOOK_INTERVAL);
        }
    }

    /// Its probe could not be sent, for reasons that are not the worker's: it is sent soon.
    pub fn on_probe_not_sent(&mut self, now: Duration) {
        if self.state != State::Draining {
            self.next_probe_at = now + LOOK_INTERVAL;
        }
    }

    /// A look at its port ended. Returns whether that took it down.
    pub fn on_look(&mut self, look: Look, now: Duration) -> bool {
        self.next_look_at = now + if look == Look::Refused { SECOND_LOOK } else { LOOK_INTERVAL };
        match look {
            Look::Unknown => return false,
            Look::Open => {
                self.refused_looks = 0;
                if self.state != State::Down {
                    self.dead_since = None;
                }
                return false;
            }
            Look::Refused => self.refused_looks = self.refused_looks.saturating_add(1),
        }
        if self.refused_looks < REFUSED_LOOKS {
            return false;
        }
        // It was so at the first of them.
        self.next_look_at = now + LOOK_INTERVAL;
        self.dead_since.get_or_insert(now.saturating_sub(SECOND_LOOK));
        let was_up = self.state == State::Ready;
        self.on_connect_failure(now);
        was_up
    }

    /// A connection to it could not be made: it is down at once. Many at a time count as one.
    pub fn on_connect_failure(&mut self, now: Duration) {
        self.dead_since.get_or_insert(now);
        match self.state {
            State::Joining | State::Ready => {
                self.state = State::Down;
                self.failed_probes = 0;
                self.next_probe_at = now + FIRST_BACKOFF;
                self.refused = true;
            }
            State::Down => self.refused = true,
            State::Paused | State::Draining => {}
        }
    }

    /// It answered a request or streamed a token. A refusal of what the client sent (4xx) is an answer.
    ///
    /// It may still be streaming while it refuses new connections (an engine that is shutting down does), so
    /// this does not bring back a worker that did.
    pub fn on_success(&mut self, now: Duration) {
        match self.state {
            State::Joining => self.up(now),
            State::Down if !self.refused => self.up(now),
            State::Ready => {
                self.last_success = Some(now);
                self.failed_probes = 0;
            }
            State::Down | State::Paused | State::Draining => {}
        }
    }

    /// The list that it is from says that it is not ready, or is again: then a probe of one that is down is
    /// due at once. Returns whether that is news.
    pub fn pause(&mut self, paused: bool, now: Duration) -> bool {
        let news = std::mem::replace(&mut self.paused, paused) != paused;
        if news && !paused && self.state == State::Down {
            self.next_probe_at = now;
        }
        news
    }

    /// Its engine sleeps, or is awake. Returns whether that is news.
    pub fn sleep(&mut self, asleep: bool) -> bool {
        std::mem::replace(&mut self.asleep, asleep) != asleep
    }

    /// It gets nothing new from now on, for good: a worker that returns is a new one.
    pub fn drain(&mut self, _now: Duration) {
        self.state = State::Draining;
        self.next_probe_at = Duration::MAX;
    }

    /// Its state; a ready worker that is paused or asleep is [`State::Paused`].
    pub fn state(&self) -> State {
        let held = self.paused || self.asleep;
        if self.state == State::Ready && held { State::Paused } else { self.state }
    }

    /// When the next probe is due; `Duration::MAX`: never.
    pub fn next_probe_at(&self) -> Duration {
        self.next_probe_at
    }

    /// When the next look at its port is due.
    pub fn next_look_at(&self) -> Duration {
        self.next_look_at
    }

    /// Whether its port is looked at now; if not, its probes find out more. Streams of one that drains still
    /// come from it.
    pub fn wants_look(&self) -> bool {
        matches!(self.state, State::Ready | State::Draining)
    }

    /// Nothing is looked at now: the time of the next look, as ever.
    pub fn no_look(&mut self, now: Duration) {
        self.next_look_at = now + LOOK_INTERVAL;
    }

    /// Whether only a new connection proves that it is back.
    pub fn refused(&self) -> bool {
        self.refused
    }

    /// Since when nothing more is to be expected of it: its port refuses, or it has let its probes fail for
    /// long. What it streams meanwhile is no sign to the contrary, as who shuts down refuses while it still
    /// streams; what it does not stream is lost.
    pub fn seems_dead_since(&self) -> Option<Duration> {
        self.dead_since
    }

    /// Whether nothing at all is known of it yet: its first probe is on its way.
    pub fn awaits_first_probe(&self) -> bool {
        self.state == State::Joining && self.failed_probes == 0
    }

    /// Whether it may be chosen.
    pub fn routable(&self) -> bool {
        self.state() == State::Ready
    }

    /// How long it has been ready since it last came up.
    pub fn up_for(&self, now: Duration) -> Duration {
        now.saturating_sub(self.up_since)
    }

    fn up(&mut self, now: Duration) {
        // Of one that was up, a kept connection may have told; that its port is closed, looks tell.
        if self.state != State::Ready {
            self.up_since = now;
            // Another process is awake until it says otherwise.
            self.asleep = false;
            self.refused_looks = 0;
            self.dead_since = None;
        }
        self.state = State::Ready;
        self.failed_probes = 0;
        self.last_success = Some(now);
        self.refused = false;
        self.next_probe_at = now + PROBE_INTERVAL;
    }

    fn recently_alive(&self, now: Duration) -> bool {
        self.last_success.is_some_and(|then| now.saturating_sub(then) < ALIVE_WINDOW)
    }

    fn probe_delay(&self) -> Duration {
        if self.state == State::Ready {
            return PROBE_INTERVAL;
        }
        let doublings = self.failed_probes.min(16);
        (FIRST_BACKOFF * (1 << doublings)).min(MAX_BACKOFF)
    }
}

#[cfg(test)]
mod tests;
