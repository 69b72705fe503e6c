//! The breakers of a fleet's workers, and how many of them may be open at once. When one opens and closes is
//! [`keyway_core::breaker`]'s business; here each answer's end is reported to it, or that it says nothing of
//! the worker.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use keyway_core::breaker::{Breaker, Verdict, may_eject};
use parking_lot::Mutex;
use prometheus::IntCounterVec;

use crate::clock::Clock;

/// What the workers' gates share.
#[derive(Debug)]
pub struct Ejections {
    clock: Clock,
    /// The workers that belong to the fleet. A gate that ejects its worker or takes it back holds it, so that
    /// never too many are out.
    members: Mutex<HashMap<u64, Member>>,
    numbers: AtomicU64,
    counted: Option<IntCounterVec>,
}

/// What is known of a worker for the sake of the others of its models.
#[derive(Debug, Default)]
struct Member {
    /// Not known until it has said so: then it may serve any.
    models: Vec<String>,
    out: bool,
}

/// What lets requests through to one worker: its breaker, which opens only if enough others are left.
#[derive(Debug)]
pub struct Gate {
    worker: String,
    number: u64,
    breaker: Mutex<Breaker>,
    /// Whether the breaker is open, to know without its lock that it is not.
    open: AtomicBool,
    fleet: Arc<Ejections>,
}

/// One request's way through a gate. Dropped without a verdict it says nothing of the worker.
#[derive(Debug)]
pub struct BreakerPermit {
    gate: Arc<Gate>,
    trial: bool,
    judged: bool,
}

impl Ejections {
    /// For a fleet without workers; what is ejected is counted by worker.
    pub fn new(clock: Clock, counted: Option<IntCounterVec>) -> Arc<Self> {
        Arc::new(Self { clock, members: Mutex::default(), numbers: AtomicU64::new(0), counted })
    }

    /// The gate of a worker that joins.
    pub fn gate(self: &Arc<Self>, worker: String) -> Arc<Gate> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.members.lock().insert(number, Member::default());
        Arc::new(Gate {
            worker,
            number,
            breaker: Mutex::default(),
            open: AtomicBool::new(false),
            fleet: Arc::clone(self),
        })
    }
}

/// Whether a worker may be ejected: each of its models keeps enough workers, and so does the fleet where its
/// models are not known.
fn may_go(members: &HashMap<u64, Member>, number: u64) -> bool {
    let share = |model: Option<&String>| {
        let of_it = members.values().filter(|member| {
            member.models.is_empty() || model.is_none_or(|model| member.models.contains(model))
        });
        let (out, all) = of_it.fold((0, 0), |(out, all), member| (out + usize::from(member.out), all + 1));
        may_eject(out, all)
    };
    let models = members.get(&number).map_or(&[][..], |member| &member.models);
    if models.is_empty() { share(None) } else { models.iter().all(|model| share(Some(model))) }
}

impl Gate {
    /// The worker serves these models from now on.
    pub fn serves(&self, models: Vec<String>) {
        if let Some(member) = self.fleet.members.lock().get_mut(&self.number) {
            member.models = models;
        }
    }

    /// Whether a request may go through now.
    pub fn admits(&self) -> bool {
        !self.open.load(Ordering::Acquire) || self.breaker.lock().admits(self.fleet.clock.now())
    }

    /// A request goes through.
    pub fn begin(self: &Arc<Self>) -> BreakerPermit {
        let open = self.open.load(Ordering::Acquire);
        let trial = open && self.breaker.lock().begin(self.fleet.clock.now());
        BreakerPermit { gate: Arc::clone(self), trial, judged: false }
    }

    fn end(&self, verdict: Verdict, trial: bool, now: Duration) {
        if verdict == Verdict::Good && !trial {
            self.breaker.lock().end(verdict, trial, false, now);
            return;
        }
        let mut members = self.fleet.members.lock();
        let mut breaker = self.breaker.lock();
        let was_open = breaker.is_open();
        let opened = breaker.end(verdict, trial, may_go(&members, self.number), now);
        self.open.store(breaker.is_open(), Ordering::Release);
        if let Some(member) = members.get_mut(&self.number) {
            member.out = breaker.is_open();
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

impl BreakerPermit {
    /// What is left of the way, for who may say later how it ended; nothing is left here.
    #[must_use]
    pub fn pass_on(&mut self) -> Self {
        let judged = std::mem::replace(&mut self.judged, true);
        Self { gate: Arc::clone(&self.gate), trial: self.trial, judged }
    }

    /// Says how the answer ended, at a time of the fleet's clock. The first verdict counts.
    pub fn judge(&mut self, verdict: Verdict, now: Duration) {
        if !std::mem::replace(&mut self.judged, true) {
            self.gate.end(verdict, self.trial, now);
        }
    }
}

impl Drop for Gate {
    // Its worker has left the fleet, and no request has a permit of it any more.
    fn drop(&mut self) {
        self.fleet.members.lock().remove(&self.number);
    }
}

impl Drop for BreakerPermit {
    fn drop(&mut self) {
        if self.trial && !self.judged {
            self.gate.breaker.lock().abandon(true, self.gate.fleet.clock.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use keyway_core::breaker::{CONSECUTIVE_FAILURES, FIRST_PAUSE};

    use super::*;

    fn fail(gate: &Arc<Gate>) {
        for _ in 0..CONSECUTIVE_FAILURES {
            gate.begin().judge(Verdict::Bad, gate.fleet.clock.now());
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
            trial.judge(Verdict::Good, fleet.clock.now());
            assert!(gate.admits());
        }
        // Their places are free for others.
        gates[5..].iter().for_each(fail);
        assert_eq!(gates.iter().filter(|gate| gate.admits()).count(), 5);
    }

    /// Requests on their way to each of ten workers, by when they end.
    struct Traffic {
        gates: Vec<Arc<Gate>>,
        trips: Vec<(Duration, usize, BreakerPermit)>,
        random: fastrand::Rng,
    }

    impl Traffic {
        /// One request to a worker that admits one, in turn.
        fn send(&mut self, now: Duration) {
            let admitting: Vec<usize> = (0..10).filter(|&i| self.gates[i].admits()).collect();
            let to = self.random.choice(admitting).expect("half of the fleet stays");
            let ends = now + Duration::from_millis(self.random.u64(1..2_000));
            self.trips.push((ends, to, self.gates[to].begin()));
        }

        /// What has ended by now; all but the last worker fail, and some clients leave.
        fn end(&mut self, now: Duration) {
            let (ended, going): (Vec<_>, Vec<_>) = self.trips.drain(..).partition(|trip| trip.0 <= now);
            self.trips = going;
            for (_, at, mut trip) in ended {
                match self.random.u8(..10) {
                    0 => {}
                    _ if at == 9 => trip.judge(Verdict::Good, now),
                    _ => trip.judge(Verdict::Bad, now),
                }
            }
        }

        fn trials(&self, at: usize) -> usize {
            self.trips.iter().filter(|(_, of, trip)| *of == at && trip.trial).count()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn of_ten_workers_nine_of_which_fail_at_most_half_are_out_and_each_is_tried_by_one_at_a_time() {
        let clock = Clock::start();
        let fleet = Ejections::new(clock, None);
        let gates: Vec<_> = (0..10).map(|i| fleet.gate(i.to_string())).collect();
        let mut traffic = Traffic { gates, trips: Vec::new(), random: fastrand::Rng::with_seed(7) };
        let (mut most, mut trials) = (0, 0);
        for _ in 0..40_000 {
            traffic.send(clock.now());
            tokio::time::advance(Duration::from_millis(20)).await;
            traffic.end(clock.now());
            let out = |member: &&Member| member.out;
            most = most.max(fleet.members.lock().values().filter(out).count());
            assert!(most <= 5, "half of them stay");
            for at in 0..10 {
                assert!(traffic.trials(at) <= 1, "one at a time");
                trials += traffic.trials(at);
            }
            assert!(!fleet.members.lock()[&9].out, "the good one stays in");
        }
        assert!(most == 5 && trials > 0, "{most} out, {trials}");
    }

    #[tokio::test(start_paused = true)]
    async fn no_model_loses_more_than_half_of_its_own_workers() {
        let fleet = Ejections::new(Clock::start(), None);
        let gates: Vec<_> = (0..8).map(|i| fleet.gate(i.to_string())).collect();
        // Two workers have the small model, of which one serves the large one too.
        for (i, gate) in gates.iter().enumerate() {
            let models = [(i != 0).then_some("large"), (i < 2).then_some("small")];
            gate.serves(models.into_iter().flatten().map(str::to_owned).collect());
        }
        gates[..2].iter().for_each(fail);
        assert!(!gates[0].admits() && gates[1].admits(), "the small model keeps one");
        gates[2..].iter().for_each(fail);
        let large = gates[1..].iter().filter(|gate| gate.admits()).count();
        assert_eq!(large, 4, "of seven, three may go");
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
