//! The candidates of one release, written down once for all quotes of it, with those that are open at hand. Who begins
//! changes one line of it. Matches and costs are the pick's.

use std::cell::Cell;

use super::Ahead;
use crate::candidate::Candidate;
use crate::index::WorkerId;
use crate::load::LoadSnapshot;
use crate::spread_map::SpreadMap;

/// The workers that the same requests may be sent to, at one moment.
#[derive(Clone, Debug)]
pub struct Sheet {
    candidates: Vec<Candidate>,
    horizon_ms: f64,
    /// Backlogs that are at most the horizon.
    open: SpreadMap<WorkerId, f64>,
    /// The least backlog of the others.
    least_closed_ms: f64,
    /// The reserve with which nobody was open, and the least backlog then: within a release neither it nor what waits falls.
    shut: Cell<Option<(f64, f64)>>,
}

impl Sheet {
    /// A sheet of these; a worker with a backlog of at most `horizon_ms` is open.
    pub fn new(candidates: Vec<Candidate>, horizon_ms: f64) -> Self {
        let mut sheet = Self {
            candidates,
            horizon_ms,
            open: SpreadMap::default(),
            least_closed_ms: f64::INFINITY,
            shut: Cell::new(None),
        };
        for Candidate { worker, load, .. } in &sheet.candidates {
            if load.pace.backlog_ms <= horizon_ms {
                sheet.open.insert(*worker, load.pace.backlog_ms);
            } else {
                sheet.least_closed_ms = sheet.least_closed_ms.min(load.pace.backlog_ms);
            }
        }
        sheet
    }

    /// All of them.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// What one is doing has changed: it was sent more.
    pub fn update(&mut self, index: usize, load: LoadSnapshot) {
        let Candidate { worker, load: known, .. } = &mut self.candidates[index];
        *known = load;
        self.shut.set(None);
        if load.pace.backlog_ms <= self.horizon_ms {
            self.open.insert(*worker, load.pace.backlog_ms);
        } else {
            self.open.remove(worker);
            self.least_closed_ms = self.least_closed_ms.min(load.pace.backlog_ms);
        }
    }

    /// For [`super::Desk::least_excess_ms`]: constant time where nobody is open. What waits for a worker that is not open is
    /// left out, which makes it at most too small. Without candidates nobody needs to wait for them.
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
        for (worker, backlog_ms) in &self.open {
            least_ms = least_ms.min(backlog_ms + ahead.of(*worker));
            if least_ms <= horizon_ms {
                return least_ms - horizon_ms;
            }
        }
        if least_ms.is_finite() {
            self.shut.set(Some((ahead.reserve_ms(), least_ms)));
        }
        least_ms - horizon_ms
    }

    /// For [`super::Desk::is_open`].
    pub fn is_open(&self, worker: WorkerId, ahead: &Ahead) -> bool {
        let horizon_ms = self.horizon_ms - ahead.reserve_ms();
        self.open.get(&worker).is_some_and(|backlog_ms| backlog_ms + ahead.of(worker) <= horizon_ms)
    }
}
