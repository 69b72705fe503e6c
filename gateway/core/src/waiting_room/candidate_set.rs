//! The candidates of one release, written down once for all quotes of it, with those that are open at hand.
//! Who begins changes one line of it. Matches and costs are the pick's.

use std::cell::{Cell, OnceCell};

use smallvec::SmallVec;

use super::Ahead;
use crate::candidate::Candidate;
use crate::index::WorkerId;
use crate::load::LoadSnapshot;
use crate::spread_map::SpreadMap;

/// The workers that the same requests may be sent to, at one moment.
#[derive(Clone, Debug)]
pub struct CandidateSet {
    candidates: Vec<Candidate>,
    horizon_ms: f64,
    /// The places of those with a backlog of at most the horizon.
    open: SmallVec<[u32; 8]>,
    /// The least backlog of the others.
    least_closed_ms: f64,
    /// The reserve with which no worker was open, and the least backlog then: within a release neither it nor
    /// what waits falls.
    shut: Cell<Option<(f64, f64)>>,
    /// The place of each worker; made when a request that waits first asks, which with an empty room is
    /// never.
    place_of: OnceCell<SpreadMap<WorkerId, u32>>,
}

impl CandidateSet {
    /// These; a worker with a backlog of at most `horizon_ms` is open.
    pub fn new(candidates: Vec<Candidate>, horizon_ms: f64) -> Self {
        let (mut open, mut least_closed_ms) = (SmallVec::with_capacity(candidates.len()), f64::INFINITY);
        for (place, Candidate { load, .. }) in (0..).zip(&candidates) {
            if load.pace.backlog_ms <= horizon_ms {
                open.push(place);
            } else {
                least_closed_ms = load.pace.backlog_ms.min(least_closed_ms);
            }
        }
        let (shut, place_of) = (Cell::new(None), OnceCell::new());
        Self { candidates, horizon_ms, open, least_closed_ms, shut, place_of }
    }

    /// All of them, whether open or not, in the order that [`CandidateSet::new`] was given.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// What one is doing has changed: it was sent more.
    pub fn update(&mut self, index: usize, load: LoadSnapshot) {
        self.candidates[index].load = load;
        self.shut.set(None);
        let listed = self.open.iter().position(|place| *place as usize == index);
        if load.pace.backlog_ms <= self.horizon_ms {
            if listed.is_none() {
                self.open.push(index as u32);
            }
        } else {
            listed.map(|at| self.open.swap_remove(at));
            self.least_closed_ms = self.least_closed_ms.min(load.pace.backlog_ms);
        }
    }

    /// For [`super::WorkerChooser::least_excess_ms`]: constant time where no worker is open. What waits for a
    /// worker that is not open is left out, which makes it at most too small. Without candidates no request
    /// needs to wait for them.
    pub fn least_excess_ms(&self, ahead: &Ahead) -> f64 {
        if self.candidates.is_empty() {
            return f64::NEG_INFINITY;
        }
        let horizon_ms = self.horizon_ms - ahead.reserve_ms();
        if let Some((reserve_ms, least_ms)) = self.shut.get()
            && ahead.reserve_ms() >= reserve_ms
        {
            return least_ms - horizon_ms;
        }
        let mut least_ms = self.least_closed_ms;
        for place in &self.open {
            let Candidate { worker, load, .. } = &self.candidates[*place as usize];
            least_ms = least_ms.min(load.pace.backlog_ms + ahead.of(*worker));
            if least_ms <= horizon_ms {
                return least_ms - horizon_ms;
            }
        }
        if least_ms.is_finite() {
            self.shut.set(Some((ahead.reserve_ms(), least_ms)));
        }
        least_ms - horizon_ms
    }

    /// For [`super::WorkerChooser::is_open`]; `false` for a worker that is not among the candidates.
    pub fn is_open(&self, worker: WorkerId, ahead: &Ahead) -> bool {
        let places = self.place_of.get_or_init(|| {
            (0..).zip(&self.candidates).map(|(place, candidate)| (candidate.worker, place)).collect()
        });
        places.get(&worker).is_some_and(|place| {
            let backlog_ms = self.candidates[*place as usize].load.pace.backlog_ms;
            let horizon_ms = self.horizon_ms - ahead.reserve_ms();
            backlog_ms <= self.horizon_ms && backlog_ms + ahead.of(worker) <= horizon_ms
        })
    }
}
