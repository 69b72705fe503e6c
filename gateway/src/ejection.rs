//! The breakers of a fleet's workers, and how many of them may be open at once. When one opens and closes is
//! [`keyway_core::breaker`]'s business; here each answer's end is reported to it, or that nobody can say.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use keyway_core::breaker::{Breaker, Verdict, may_eject};
use parking_lot::Mutex;
use prometheus::IntCounterVec;

use crate::clock::Clock;

/// What the workers' gates share.
#[derive(Debug)]
pub struct Ejections {
    clock: Clock,
    /// Workers that belong to the fleet.
    workers: AtomicUsize,
    /// Workers that are out.
    out: Mutex<usize>,
    counted: Option<IntCounterVec>,
}

/// One worker's gate.
#[derive(Debug)]
pub struct Gate {
    worker: String,
    breaker: Mutex<Breaker>,
    /// Whether the breaker is open, to know without its lock that it is not.
    open: AtomicBool,
    fleet: Arc<Ejections>,
}

/// One request's way through a gate. Dropped without a verdict it says nothing of the worker.
#[derive(Debug)]
pub struct Trip {
    gate: Arc<Gate>,
    trial: bool,
    judged: bool,
}

impl Ejections {
    /// For a fleet without workers; what is ejected is counted by worker.
    pub fn new(clock: Clock, counted: Option<IntCounterVec>) -> Arc<Self> {
        Arc::new(Self { clock, workers: AtomicUsize::new(0), out: Mutex::default(), counted })
    }

    /// The gate of a worker that joins.
    pub fn gate(self: &Arc<Self>, worker: String) -> Arc<Gate> {
        self.workers.fetch_add(1, Ordering::Relaxed);
        Arc::new(Gate {
            worker,
            breaker: Mutex::default(),
            open: AtomicBool::new(false),
            fleet: Arc::clone(self),
        })
    }
}

impl Gate {
    /// Whether a request may go through now.
    pub fn admits(&self) -> bool {
        !self.open.load(Ordering::Acquire) || self.breaker.lock().admits(self.fleet.clock.now())
    }

    /// A request goes through.
    pub fn begin(self: &Arc<Self>) -> Trip {
        let open = self.open.load(Ordering::Acquire);
        let trial = open && self.breaker.lock().begin(self.fleet.clock.now());
        Trip { gate: Arc::clone(self), trial, judged: false }
    }

    fn end(&self, verdict: Verdict, trial: bool) {
        let now = self.fleet.clock.now();
        if verdict == Verdict::Good && !trial {
            self.breaker.lock().end(verdict, trial, false, now);
            return;
        }
        // Whoever ejects or takes back does so one after the other, so that never too many are out.
        let mut out = self.fleet.out.lock();
        let mut breaker = self.breaker.lock();
        let was_open = breaker.is_open();
        let opened =
            breaker.end(verdict, trial, may_eject(*out, self.fleet.workers.load(Ordering::Relaxed)), now);
        self.open.store(breaker.is_open(), Ordering::Release);
        match (was_open, breaker.is_open()) {
            (false, true) => *out += 1,
            (true, false) => *out = out.saturating_sub(1),
            _ => {}
        }
        if opened {
            tracing::warn!(worker = %self.worker, again = was_open, "ejected for its failures; one request will try it");
            if let Some(counted) = &self.fleet.counted {
                counted.with_label_values(&[self.worker.as_str()]).inc();
            }
        } else if was_open && !breaker.is_open() {
            tracing::info!(worker = %self.worker, "back after a good answer");
        }
    }
}

impl Trip {
    /// Says how the answer ended. The first verdict counts.
    pub fn judge(&mut self, verdict: Verdict) {
        if !std::mem::replace(&mut self.judged, true) {
            self.gate.end(verdict, self.trial);
        }
    }
}

impl Drop for Gate {
    // Its worker has left the fleet, and nobody has a trip through it any more.
    fn drop(&mut self) {
        self.fleet.workers.fetch_sub(1, Ordering::Relaxed);
        if *self.open.get_mut() {
            let mut out = self.fleet.out.lock();
            *out = out.saturating_sub(1);
        }
    }
}

impl Drop for Trip {
    fn drop(&mut self) {
        if self.trial && !self.judged {
            self.gate.breaker.lock().abandon(true, self.gate.fleet.clock.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use keyway_core::breaker::{CONSECUTIVE_FAILURES, FIRST_PAUSE};

    use super::*;

    fn fail(gate: &Arc<Gate>) {
        for _ in 0..CONSECUTIVE_FAILURES {
            gate.begin().judge(Verdict::Bad);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn of_ten_workers_that_all_fail_five_stay_and_each_comes_back_by_a_trial() {
        let fleet = Ejections::new(Clock::start(), None);
        let gates: Vec<_> = (0..10).map(|i| fleet.gate(i.to_string())).collect();
        gates.iter().for_each(fail);
        assert_eq!(gates.iter().filter(|gate| gate.admits()).count(), 5);
        tokio::time::advance(FIRST_PAUSE).await;
        for gate in &gates[..5] {
            assert!(gate.admits());
            let mut trial = gate.begin();
            assert!(!gate.admits(), "one at a time");
            drop(gate.begin());
            assert!(!gate.admits(), "another one that ends says nothing");
            trial.judge(Verdict::Good);
            assert!(gate.admits());
        }
        // Their places are free for others.
        gates[5..].iter().for_each(fail);
        assert_eq!(gates.iter().filter(|gate| gate.admits()).count(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_whose_client_leaves_makes_room_for_the_next() {
        let fleet = Ejections::new(Clock::start(), None);
        let gate = fleet.gate("a".into());
        let _another = fleet.gate("b".into());
        fail(&gate);
        assert!(!gate.admits());
        tokio::time::advance(FIRST_PAUSE + Duration::from_millis(1)).await;
        drop(gate.begin());
        assert!(gate.admits());
    }
}
