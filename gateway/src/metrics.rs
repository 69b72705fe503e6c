//! Every series of the gateway, declared once. Labels are closed sets or names from the fleet, so a client
//! cannot make series; what lies outside is `other`. Each gateway instance has its own registry.

mod caches;
mod fleet;
mod forget;
mod lifecycle;
mod mishaps;
mod model_names;
mod obstacle;
mod oidc;
mod peers;
mod per_model;
mod per_worker;
mod prefill_legs;
mod pulls;
mod reference;
mod resume;
mod scale;
mod store;
mod stored_state;
mod tenants;
mod traces;
mod usage;

use std::{cell::RefCell, sync::Arc};

use prometheus::{
    CounterVec, Encoder, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder, core::Collector,
};

pub use self::{
    caches::{CacheMetrics, DriftMetrics},
    fleet::FleetMetrics,
    lifecycle::{CertificateMetrics, LifecycleMetrics, Validity},
    mishaps::{Mishap, MishapKind, Mishaps},
    model_names::ModelNameMetrics,
    obstacle::Obstacle,
    oidc::OidcMetrics,
    peers::{PeerState, PeerStates, PlacementMetrics},
    per_model::{COMPLETE, ModelSeries, ModelTotals},
    per_worker::{Prediction, WorkerSeries},
    prefill_legs::PrefillLegMetrics,
    pulls::PullMetrics,
    reference::Family,
    resume::ResumeMetrics,
    scale::ScaleMetrics,
    store::StoreMetrics,
    stored_state::StoredStateMetrics,
    tenants::TenantMetrics,
    traces::TraceMetrics,
    usage::UsageMetrics,
};
use self::{
    forget::OfWorkers,
    per_model::{Families, PerModel},
};

/// Seconds, from a cached short prompt to a cold 1M-token one.
pub(crate) const TTFT_BUCKETS: [f64; 16] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0];
/// Seconds of routing work, from an empty index to a very long prompt.
const ROUTING_BUCKETS: [f64; 8] = [0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.001, 0.01, 0.1];

/// Handles of all series.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    of_workers: Vec<Box<dyn OfWorkers>>,
    families: Vec<Family>,
    per_model: PerModel,
    /// `keyway_requests_in_flight{worker}`: an in-flight gauge, 0 when nothing is in flight.
    pub worker_in_flight: IntGaugeVec,
    /// `keyway_in_flight`: an in-flight gauge over all requests, 0 when nothing is in flight.
    pub in_flight: IntGauge,
    /// `keyway_arriving`: requests whose bodies are on their way, which are not in flight yet.
    pub arriving: IntGauge,
    /// `keyway_body_memory_bytes`: of request bodies.
    pub body_memory: IntGauge,
    /// `keyway_waiting_prefill_tokens{worker}`: an in-flight gauge, 0 when nothing is in flight.
    pub waiting_prefill_tokens: IntGaugeVec,
    /// `keyway_connections`: open client connections.
    pub connections: IntGauge,
    /// `keyway_picks_total{worker,reason}`: choices of a worker, by why it was chosen.
    pub picks: IntCounterVec,
    /// `keyway_retries_total{reason}`: attempts on another worker, by why the one before failed.
    pub retries: IntCounterVec,
    /// `keyway_retries_refused_total`: the budget was spent.
    pub retries_refused: IntCounter,
    /// `keyway_connection_races_total{worker}`: kept connections that ended under a request.
    pub races: IntCounterVec,
    /// What tenants ask for and use.
    pub tenants: TenantMetrics,
    /// `keyway_worker_ejections_total{worker}`: times that failures took it out, or kept it out after a
    /// trial.
    pub ejections: IntCounterVec,
    /// `keyway_worker_ready{worker}`: 1 where it takes requests, else 0; set before each scrape.
    pub worker_ready: IntGaugeVec,
    /// `keyway_routing_seconds`: reading and hashing.
    pub routing: Histogram,
    /// `keyway_requests_waiting`: an in-flight gauge, 0 when nothing is in flight.
    pub holding: IntGauge,
    /// `keyway_request_wait_seconds`: before a worker could begin.
    pub hold: Histogram,
    /// `keyway_sessions_active`: sessions that have a turn under way or whose next one is expected; set
    /// before each scrape.
    pub sessions: IntGauge,
    /// `keyway_session_pause_seconds`: how long turns waited because their session was paused.
    pub session_pause: Histogram,
    /// `keyway_index_bytes`: memory that the prefix index holds; set before each scrape.
    pub index_bytes: IntGauge,
    /// `keyway_index_blocks`: residencies, so a block at two workers counts twice; set before each scrape.
    pub index_blocks: IntGauge,
    /// Who belongs to the fleet.
    pub fleet: FleetMetrics,
    /// Reloads, shortages, panics, lost log lines and certificates of the process.
    pub lifecycle: LifecycleMetrics,
    /// What is believed of workers' caches, and how true it is.
    pub caches: CacheMetrics,
    /// How many workers there should be.
    pub scale: ScaleMetrics,
    /// Requests that go to another model than the one that they name.
    pub model_names: ModelNameMetrics,
    /// Prompts that one worker computes for another.
    pub prefill_legs: PrefillLegMetrics,
    /// What workers fetch from each other's caches.
    pub pulls: PullMetrics,
    /// Addresses of other gateways, by whether they tell what they have at each worker.
    pub peers: PeerStates,
    /// What gateways tell each other of their placements.
    pub placements: PlacementMetrics,
    /// Requests that did not end well.
    pub mishaps: Mishaps,
    /// What becomes of traces.
    pub traces: TraceMetrics,
    /// Streams that broke off.
    pub resume: ResumeMetrics,
    /// Ids of what workers store for clients, and requests that name such ids.
    pub stored_state: StoredStateMetrics,
    /// What is kept of who has used how much.
    pub usage: UsageMetrics,
    /// Tokens that an issuer signs, in place of keys.
    pub oidc: OidcMetrics,
    /// The store by which gateways keep tenants' limits together.
    pub store: StoreMetrics,
}

#[derive(Default)]
struct Declare {
    registry: Registry,
    of_workers: RefCell<Vec<Box<dyn OfWorkers>>>,
    families: RefCell<Vec<Family>>,
}

impl Declare {
    fn register<C: Collector + Clone + 'static>(
        &self,
        kind: &'static str,
        made: prometheus::Result<C>,
    ) -> prometheus::Result<C> {
        let collector = made?;
        self.families.borrow_mut().extend(collector.desc().into_iter().map(|desc| Family::new(desc, kind)));
        self.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn family<C>(
        &self,
        kind: &'static str,
        made: prometheus::Result<C>,
        labels: &[&str],
    ) -> prometheus::Result<C>
    where
        C: Collector + OfWorkers + Clone + 'static,
    {
        let family = self.register(kind, made)?;
        if labels.contains(&"worker") {
            self.of_workers.borrow_mut().push(Box::new(family.clone()));
        }
        Ok(family)
    }

    fn counter(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        self.family("counter", IntCounterVec::new(Opts::new(name, help), labels), labels)
    }

    fn real_counter(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<CounterVec> {
        self.family("counter", CounterVec::new(Opts::new(name, help), labels), labels)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.register("gauge", IntGauge::new(name, help))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
        self.family("gauge", IntGaugeVec::new(Opts::new(name, help), labels), labels)
    }

    fn real_gauges(&self, name: &str, help: &str) -> prometheus::Result<GaugeVec> {
        self.real_gauges_of(name, help, &["worker"])
    }

    fn real_gauges_of(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        self.family("gauge", GaugeVec::new(Opts::new(name, help), labels), labels)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        self.register(
            "histogram",
            Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())),
        )
    }

    fn histograms(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<HistogramVec> {
        self.register(
            "histogram",
            HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), &["model"]),
        )
    }
}

impl Metrics {
    /// Declares every series in a registry of its own.
    #[allow(clippy::too_many_lines, reason = "a table: a line or two for each series")]
    pub fn new() -> prometheus::Result<Self> {
        let d = Declare::default();
        let build = d.gauges("keyway_build_info", "Always 1; the version is in the label.", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            worker_in_flight: d.gauges(
                "keyway_requests_in_flight",
                "Requests at a worker, answers included.",
                &["worker"],
            )?,
            in_flight: d.gauge(
                "keyway_in_flight",
                "Requests that have come whole and whose answers have not ended.",
            )?,
            arriving: d.gauge("keyway_arriving", "Requests whose bodies are on their way.")?,
            body_memory: d.gauge(
                "keyway_body_memory_bytes",
                "Bytes of request bodies that are held; bodies of up to 32 KiB are not counted.",
            )?,
            waiting_prefill_tokens: d.gauges(
                "keyway_waiting_prefill_tokens",
                "Estimated uncached prompt tokens sent to a worker whose first token is still awaited.",
                &["worker"],
            )?,
            connections: d.gauge("keyway_connections", "Open client connections.")?,
            picks: d.counter("keyway_picks_total", "Routing decisions.", &["worker", "reason"])?,
            retries: d.counter("keyway_retries_total", "Attempts on another worker.", &["reason"])?,
            retries_refused: d.register(
                "counter",
                IntCounter::new(
                    "keyway_retries_refused_total",
                    "Attempts on another worker that the retry budget did not allow.",
                ),
            )?,
            races: d.counter(
                "keyway_connection_races_total",
                "Kept connections that a worker closed as a request went out, which then went over another one.",
                &["worker"],
            )?,
            tenants: TenantMetrics::declare(&d)?,
            ejections: d.counter(
                "keyway_worker_ejections_total",
                "Times that a worker was taken out for its failures, or stayed out after a trial.",
                &["worker"],
            )?,
            worker_ready: d.gauges(
                "keyway_worker_ready",
                "1 where the worker takes requests.",
                &["worker"],
            )?,
            routing: d.histogram(
                "keyway_routing_seconds",
                "Time to read and hash a request.",
                &ROUTING_BUCKETS,
            )?,
            holding: d.gauge("keyway_requests_waiting", "Requests that wait for a worker that can begin.")?,
            sessions: d.gauge(
                "keyway_sessions_active",
                "Sessions that have a turn under way, or whose next turn is expected.",
            )?,
            session_pause: d.histogram(
                "keyway_session_pause_seconds",
                "Time that turns waited because all sessions together need more KV cache than the workers have.",
                &TTFT_BUCKETS,
            )?,
            hold: d.histogram(
                "keyway_request_wait_seconds",
                "How long requests waited for a worker that could begin.",
                &TTFT_BUCKETS,
            )?,
            index_bytes: d.gauge("keyway_index_bytes", "Memory held by the prefix index.")?,
            index_blocks: d.gauge("keyway_index_blocks", "Block residencies in the prefix index.")?,
            fleet: FleetMetrics::declare(&d)?,
            lifecycle: LifecycleMetrics::declare(&d)?,
            caches: CacheMetrics::declare(&d)?,
            scale: ScaleMetrics::declare(&d)?,
            model_names: ModelNameMetrics::declare(&d)?,
            prefill_legs: PrefillLegMetrics::declare(&d)?,
            pulls: PullMetrics::declare(&d)?,
            peers: PeerStates::declare(&d)?,
            placements: PlacementMetrics::declare(&d)?,
            mishaps: Mishaps::default(),
            traces: TraceMetrics::declare(&d)?,
            resume: ResumeMetrics::declare(&d)?,
            stored_state: StoredStateMetrics::declare(&d)?,
            usage: UsageMetrics::declare(&d)?,
            oidc: OidcMetrics::declare(&d)?,
            store: StoreMetrics::declare(&d)?,
            per_model: PerModel::new(Families::declare(&d)?),
            of_workers: d.of_workers.into_inner(),
            families: d.families.into_inner(),
            registry: d.registry,
        })
    }

    /// Admits a model of the fleet as a label value, up to a bound.
    pub fn admit_model(&self, model: &str) {
        self.per_model.admit(model);
    }

    /// Removes every series of a worker that is gone.
    pub fn forget_worker(&self, worker: &str) {
        self.of_workers.iter().for_each(|family| family.forget(worker));
    }

    /// The series for a model that a client named: its own if the fleet has it.
    pub fn model(&self, model: Option<&str>) -> Arc<ModelSeries> {
        self.per_model.get(model)
    }

    /// What has been counted of each model so far.
    pub fn model_totals(&self) -> Vec<ModelTotals> {
        self.per_model.totals()
    }

    /// Looks up the series of a worker. Its gauges appear, at 0 where no request has moved them.
    pub fn worker(&self, worker: &str) -> WorkerSeries {
        WorkerSeries::new(self, worker)
    }

    /// Every family, in the order declared.
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// The exposition in Prometheus' text format.
    pub fn render(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let mut families = self.registry.gather();
        families
            .iter_mut()
            .filter(|family| scale::is_by_role(family.name()))
            .for_each(scale::without_no_role);
        if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
            tracing::error!(%error, "metrics could not be encoded");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_cannot_make_series() {
        let metrics = Metrics::new().unwrap();
        metrics.admit_model("m");
        for i in 0..10_000 {
            let name = format!("made-up-{i}");
            metrics.model(Some(&name)).ended("complete");
        }
        metrics.model(Some("m")).ended("complete");
        let text = String::from_utf8(metrics.render()).unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with("keyway_requests_total")).count(), 2);
    }

    #[test]
    fn nothing_of_a_worker_stays_when_it_is_gone() {
        let metrics = Metrics::new().unwrap();
        for worker in ["a:1", "a:10"] {
            metrics.picks.with_label_values(&[worker, "prefix"]).inc();
            metrics.picks.with_label_values(&[worker, "least_loaded"]).inc();
            metrics.worker_in_flight.with_label_values(&[worker]).inc();
            metrics.caches.kv_lag.with_label_values(&[worker]).set(0.5);
        }
        metrics.forget_worker("a:1");
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(!text.contains("\"a:1\"") && text.matches("\"a:10\"").count() == 4, "{text}");
    }

    #[test]
    fn two_gateways_do_not_share_counts() {
        let (a, b) = (Metrics::new().unwrap(), Metrics::new().unwrap());
        a.in_flight.set(3);
        assert_eq!(b.in_flight.get(), 0);
    }
}
