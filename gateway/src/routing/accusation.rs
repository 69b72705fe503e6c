//! What is held against a worker that did not serve a request, until it is known whose fault that was. It
//! outlives the ticket: it counts as no load and holds no placement.

use std::sync::Arc;

use keyway_core::{breaker::Verdict, refusals::Mark};

use super::{Router, Ticket};
use crate::{
    fleet::{Worker, ejection::BreakerPermit},
    routing::refusal::Charge,
};

/// A charge against a worker. Dropped it is dismissed, but for what stands by itself ("not now", a broken
/// connection).
#[derive(Debug)]
#[must_use = "dropped, it is dismissed"]
pub struct Accusation {
    router: Arc<Router>,
    worker: Arc<Worker>,
    charge: Charge,
    path: String,
    mark: Mark,
    trip: BreakerPermit,
    settled: bool,
}

impl Accusation {
    pub(super) fn new(ticket: &mut Ticket, charge: Charge, path: &str) -> Self {
        let (router, worker) = (Arc::clone(&ticket.router), Arc::clone(&ticket.worker));
        let after = if let Charge::Busy { retry_after } = charge { retry_after } else { None };
        let mark = worker.standing.refused(ticket.kind, (ticket.sent, router.now()), after);
        router.metrics.fleet.refusals.with_label_values(&[worker.name.as_str(), charge.as_str()]).inc();
        let mut trip = ticket.trip.pass_on();
        if charge == Charge::Lost {
            trip.judge(Verdict::Bad, router.now());
        }
        Self { router, worker, charge, path: path.to_owned(), mark, trip, settled: charge.is_plain() }
    }

    /// Another worker has served the same request.
    pub fn upheld(mut self) {
        match self.charge {
            Charge::Busy { .. } | Charge::Lost => {}
            Charge::Failed => self.trip.judge(Verdict::Bad, self.router.now()),
            Charge::Rejected(_) | Charge::ErrorEvent => {
                if self.worker.standing.convict(self.mark) {
                    self.warn();
                }
            }
        }
        self.settled = true;
    }

    /// No other worker has shown whose fault it was: a failure counts, a refusal only for its pause.
    pub fn undecided(mut self) {
        if self.charge == Charge::Failed {
            self.trip.judge(Verdict::Bad, self.router.now());
        }
        self.settled = true;
    }

    fn warn(&self) {
        let status = if let Charge::Rejected(status) = self.charge { Some(status.as_u16()) } else { None };
        tracing::warn!(
            worker = %self.worker.name,
            status,
            path = self.path,
            check = self.charge.check(),
            "a worker refuses what others serve, and is asked by single requests until it serves one"
        );
    }
}

impl Drop for Accusation {
    fn drop(&mut self) {
        if !self.settled {
            self.worker.standing.dismiss(self.mark, self.router.now());
        }
    }
}

#[cfg(test)]
mod tests;
