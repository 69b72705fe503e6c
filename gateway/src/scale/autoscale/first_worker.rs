//! A model whose fleet went to nothing: its requests wait for the first worker, within a bound and a
//! deadline, and are what brings it. Where a worker has just joined, they wait for its first probe, whatever
//! is configured: a pod replaced by another is no outage. With a worker there, this is one call of the
//! router.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use prometheus::IntGauge;

use super::{Autoscale, Pool};
use crate::{
    clock,
    config::Role,
    error::Error,
    limits::FIRST_PROBE_PATIENCE,
    prompt::request::RequestInfo,
    routing::{Choice, Router},
};

/// One request's place among those who wait; it leaves when this is dropped.
struct Place<'a> {
    scale: &'a Autoscale,
    pool: Arc<Pool>,
    /// Whose workers answer it.
    answers: Role,
    waiting: IntGauge,
    outcome: &'static str,
}

impl Autoscale {
    /// Chooses a worker, and waits for the first one where the model has none.
    pub async fn choose(&self, router: &Arc<Router>, request: &RequestInfo) -> Result<Choice, Error> {
        match router.choose(request, &[]).await {
            // In a box: mostly there is a worker.
            Err(Error::NoWorker | Error::ModelNotFound { .. }) => {
                Box::pin(self.choose_first(router, request)).await
            }
            done => done,
        }
    }

    async fn choose_first(&self, router: &Arc<Router>, request: &RequestInfo) -> Result<Choice, Error> {
        let asked = router.now();
        // Asked for once, whatever comes of it.
        let mut place: Option<Option<Place<'_>>> = None;
        loop {
            // Listens before it looks: a worker that comes in between is not missed.
            let changed = router.fleet_change();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            let error = match router.choose(request, &[]).await {
                Err(error @ (Error::NoWorker | Error::ModelNotFound { .. })) => error,
                done => {
                    end(place.flatten(), if done.is_ok() { "served" } else { "failed" });
                    return done;
                }
            };
            let patience = match place.get_or_insert_with(|| self.wait(router, request)) {
                Some(_) => self.config.wait,
                None if router.fleet().awaits_first_probe() => FIRST_PROBE_PATIENCE,
                None => return Err(error),
            };
            let left = (asked + patience).saturating_sub(router.now());
            if clock::timeout(left, changed).await.is_err() {
                // Who waited for no worker of the model, but for a probe's word, learns what it is.
                let error = if matches!(place, Some(Some(_))) { Error::NoWorker } else { error };
                end(place.flatten(), "timed_out");
                return Err(error);
            }
        }
    }

    /// A place, if requests wait here at all, the model is one that may get a worker, and there is room.
    fn wait(&self, router: &Router, request: &RequestInfo) -> Option<Place<'_>> {
        let pool =
            if self.config.wait.is_zero() { None } else { self.pool_of(router, request.model.as_deref()) }?;
        let room =
            self.waiting.fetch_update(Relaxed, Relaxed, |n| (n < self.config.wait_max).then_some(n + 1));
        if room.is_err() {
            self.metrics.scale.waits.with_label_values(&[pool.model.as_str(), "refused"]).inc();
            return None;
        }
        let waiting = self.metrics.scale.waiting.with_label_values(&[pool.model.as_str()]);
        waiting.inc();
        let answers = pool.answers();
        pool.of(answers).first_waiting += 1;
        self.wake.notify_one();
        Some(Place { scale: self, pool, answers, waiting, outcome: "left" })
    }
}

/// Gives the place up, and says why.
fn end(place: Option<Place<'_>>, outcome: &'static str) {
    if let Some(mut place) = place {
        place.outcome = outcome;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.waiting.dec();
        self.pool.of(self.answers).first_waiting -= 1;
        self.scale.waiting.fetch_sub(1, Relaxed);
        let label = [self.pool.model.as_str(), self.outcome];
        self.scale.metrics.scale.waits.with_label_values(&label).inc();
    }
}
