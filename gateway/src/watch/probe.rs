//! Asks each worker, at the times its health state machine names, whether it is up, which models it serves,
//! and how large its cache is; and says what is wrong with one that cannot be used. What the answers mean for
//! it is `keyway_core::health`'s business.

mod ask;
mod complaints;
mod faults;
mod look;
mod models;
mod parts;

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use keyway_core::health::State;
use tokio::sync::watch;

pub(crate) use self::ask::get;
pub use self::complaints::Complaints;
use self::{
    ask::Found,
    look::{Looking, keep_looking},
};
use crate::{
    clock,
    fleet::{
        Cause, Fault, Worker,
        scrape::{self, Sleep},
    },
    limits::{MAX_SCRAPE_BYTES, SCRAPE_MAX_AGE},
    metrics::Metrics,
    routing::Router,
    upstream::Upstream,
};

/// Failed probes after which what is wrong is told: of a worker that is not up, so that one that starts
/// beside the gateway is no news; and of one that is, as it may be busy.
const TOLD_AFTER: (u64, u64) = (2, 3);

/// One worker, as it is watched.
#[derive(Debug)]
pub struct Watch {
    /// The worker that is probed, until it has drained.
    pub worker: Arc<Worker>,
    /// What is told that it has changed.
    pub router: Arc<Router>,
    /// Sends the probes, as it sends requests.
    pub upstream: Upstream,
    /// Where failed probes are counted, and the validity of the worker's client certificate is shown.
    pub metrics: Arc<Metrics>,
    /// Where the log has room for it.
    pub complaints: Arc<Complaints>,
    /// As the log has it.
    pub was_up: AtomicBool,
    /// Where it is told how many data-parallel engines are behind the worker's address; 0: not known.
    pub engines: watch::Sender<u32>,
}

impl Watch {
    /// Probes it for ever, and looks at its port meanwhile: a probe that hangs does not keep the gateway from
    /// seeing that it is closed.
    pub async fn run(self) {
        tokio::join!(keep_looking(&self), self.keep_asking());
    }

    async fn keep_asking(&self) {
        let Self { worker, router, .. } = self;
        let (mut scraped_at, mut looking) = (None, Looking::default());
        loop {
            // A worker that has just failed is due earlier than it was: look again when it does.
            let due = worker.with_health(|health| health.next_probe_at()).saturating_sub(router.now());
            if !due.is_zero() {
                let _ = clock::timeout(due, worker.failed()).await;
                self.note_change(false);
                continue;
            }
            worker.origin().sweep();
            if let Some(tls) = &worker.config().tls {
                self.metrics.lifecycle.certificates.client(&worker.name, tls.validity());
            }
            let first = worker.with_health(|health| health.awaits_first_probe());
            let found = self.probe(&mut looking).await;
            if self.take(found) {
                self.scrape_cache(&mut scraped_at).await;
            }
            self.note_change(first);
        }
    }

    /// Of one that is not up its port is looked at first: only a new connection proves that it is back.
    async fn probe(&self, looking: &mut Looking) -> Found {
        if self.worker.state() != State::Ready
            && let Err(fault) = looking.look(&self.worker).await
        {
            return fault.into();
        }
        ask::probe(&self.worker, &self.upstream, &self.metrics, self.router.now()).await
    }

    /// Takes what a probe found. Returns whether the worker is up.
    fn take(&self, found: Found) -> bool {
        let now = self.router.now();
        match found {
            Found::Up(fault) => {
                self.worker.with_health(|health| health.on_probe(true, now));
                match fault {
                    // What it answered is not by chance.
                    Some(fault) => self.fault(fault, 1),
                    None => self.no_fault(),
                }
                return true;
            }
            Found::Down(fault) => {
                self.worker.with_health(|health| match fault.cause {
                    Cause::Refused | Cause::Unreachable => health.on_unreached_probe(now),
                    _ => health.on_probe(false, now),
                });
                let up = self.worker.with_health(|health| health.routable());
                self.fault(fault, if up { TOLD_AFTER.1 } else { TOLD_AFTER.0 });
            }
            Found::NotAsked(fault) => {
                self.worker.with_health(|health| health.on_probe_not_sent(now));
                self.fault(fault, TOLD_AFTER.0);
            }
        }
        false
    }

    /// Counts a fault, keeps it to be shown, and tells it when so many probes have found one, and then ever
    /// more rarely.
    fn fault(&self, fault: Fault, told_after: u64) {
        let (worker, now) = (&self.worker, self.router.now());
        if worker.state() == State::Draining {
            return;
        }
        let cause = fault.cause;
        self.metrics.fleet.probe_failures.with_label_values(&[worker.name.as_str(), cause.as_str()]).inc();
        let mut trouble = worker.trouble.lock();
        trouble.found(fault, now);
        let present = trouble.to_tell(told_after, now).cloned();
        if let Some(present) = present.filter(|_| self.complaints.may_tell(worker.id, cause, now)) {
            trouble.told(now);
            drop(trouble);
            let (fault, times, state) = (&present.fault, present.times, worker.condition());
            let for_s = now.saturating_sub(present.since).as_secs();
            tracing::warn!(
                worker = %worker.name, state, cause = cause.as_str(), url = fault.url, times, for_s,
                "worker {}: {fault}", if worker.routable() { "has a fault" } else { "cannot be used" }
            );
        }
        if let Some((workers, causes)) = self.complaints.summary(now) {
            tracing::warn!(
                workers,
                causes,
                "more workers have faults; /workers of the admin listener has them all"
            );
        }
    }

    fn no_fault(&self) {
        self.complaints.over(self.worker.id);
        let Some((past, true)) = self.worker.trouble.lock().over() else { return };
        let for_s = self.router.now().saturating_sub(past.since).as_secs();
        tracing::info!(worker = %self.worker.name, cause = past.fault.cause.as_str(), for_s, "worker's fault is over");
    }

    /// Says when it has come up or gone down, also when a request has noticed. `anyhow`: who waits is told in
    /// any case.
    fn note_change(&self, anyhow: bool) {
        let (worker, state) = (&self.worker, self.worker.state());
        let up = matches!(state, State::Ready | State::Paused);
        let changed = state != State::Draining && self.was_up.swap(up, Relaxed) != up;
        if changed {
            let models = worker.models().into_iter().map(|m| m.id).collect::<Vec<_>>().join(", ");
            tracing::info!(worker = %worker.name, ready = up, models, "worker changed state");
        }
        if changed || anyhow {
            self.router.fleet_changed();
        }
    }

    /// Its engine sleeps or wakes: nothing is wrong with it.
    fn sleeps(&self, sleep: Sleep) {
        let Self { worker, router, .. } = self;
        if !worker.with_health(|health| health.sleep(sleep != Sleep::Awake)) {
            return;
        }
        tracing::info!(worker = %worker.name, awake = sleep == Sleep::Awake, "worker's engine sleeps or wakes");
        if sleep == Sleep::Asleep {
            router.cache_is_lost(worker);
        }
        router.fleet_changed();
    }

    /// Asks for the size of its cache. Not part of its health: an engine without metrics serves as well.
    async fn scrape_cache(&self, scraped_at: &mut Option<Duration>) {
        let Self { worker, router, upstream, .. } = self;
        let page = get(worker, upstream, "/metrics", MAX_SCRAPE_BYTES).await;
        let page = page.map(|page| String::from_utf8_lossy(&page).into_owned());
        if let Some(page) = &page {
            let engines = scrape::ranks(page).len() as u32;
            self.engines.send_if_modified(|known| engines > 0 && mem::replace(known, engines) != engines);
        }
        let rank_on = |rank| page.as_deref().map_or(rank, |page| scrape::rank_on(page, rank));
        let rank = worker.rank().map(rank_on);
        if let Some(hits) = page.as_deref().and_then(|page| scrape::cache_hits(page, rank)) {
            router.cache_hits_are(worker, hits);
        }
        if let Some(sleep) = page.as_deref().and_then(|page| scrape::sleep(page, rank)) {
            self.sleeps(sleep);
        }
        let config = page.map(|page| scrape::cache_config(&page, rank));
        if let Some(config) = config.filter(|config| config.tokens().is_some()) {
            *scraped_at = Some(router.now());
            router.cache_is(worker, config);
        } else if scraped_at.take_if(|at| router.now() > *at + SCRAPE_MAX_AGE).is_some() {
            router.cache_is(worker, scrape::CacheConfig::default());
        }
    }
}

/// Asks a worker once which models it serves, and notes them.
///
/// # Errors
/// What is wrong with it, if anything is.
pub async fn once(worker: &Worker, upstream: &Upstream, metrics: &Metrics) -> Result<(), Fault> {
    Looking::default().look(worker).await?;
    match ask::probe(worker, upstream, metrics, Duration::ZERO).await {
        Found::Up(None) => Ok(()),
        Found::Up(Some(fault)) | Found::Down(fault) | Found::NotAsked(fault) => Err(fault),
    }
}

/// Waits until a worker is ready, at most `patience`.
pub async fn first_ready(router: &Router, patience: Duration) -> bool {
    let deadline = router.now() + patience;
    while router.now() < deadline {
        if router.fleet().all().iter().any(|worker| worker.routable()) {
            return true;
        }
        clock::sleep(Duration::from_millis(20)).await;
    }
    false
}
