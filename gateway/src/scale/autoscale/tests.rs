//! A request counts as what it is at each moment, and as nothing when it is gone.

use keyway_core::pick::Policy;
use keyway_wire::block_hash::HashKey;

use super::*;
use crate::{
    clock::Clock,
    config::{ScaleFile, WorkerConfig},
    fleet::{Fleet, Model, ejection::Ejections},
    limits::FIRST_PROBE_PATIENCE,
    prompt::request::{self, KeyerConfig, RequestInfo},
};

mod roles;

fn setup(toml: &str) -> (Arc<Autoscale>, Arc<Router>) {
    setup_with(&["http://127.0.0.1:1"], toml)
}

fn setup_with(workers: &[&str], toml: &str) -> (Arc<Autoscale>, Arc<Router>) {
    let config = ScaleConfig::try_from(&toml::from_str::<ScaleFile>(toml).unwrap()).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let workers: Vec<WorkerConfig> = workers.iter().map(|worker| worker.parse().unwrap()).collect();
    let fleet = Arc::new(Fleet::new(&workers, Duration::ZERO, &Ejections::new(Clock::start(), None)));
    // It was asked, and did not answer: nobody waits for its first probe.
    fleet.all()[0].with_health(|health| health.on_probe(false, Duration::ZERO));
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: std::num::NonZeroUsize::new(64).unwrap() };
    let router = Router::new(fleet, Arc::clone(&metrics), Clock::start(), Policy::Prefix, keyer, 1 << 20);
    (Autoscale::new(config, metrics), Arc::new(router))
}

fn ready(router: &Router, models: &[&str]) {
    ready_at(router, 0, models);
}

fn ready_at(router: &Router, at: usize, models: &[&str]) {
    make_ready(&router.fleet().all()[at], models, router.now());
}

fn make_ready(worker: &Worker, models: &[&str], now: Duration) {
    let model = |id: &&str| Model {
        id: (*id).to_owned(),
        parent: None,
        json: serde_json::value::RawValue::NULL.to_owned(),
        context: None,
        numerics_id: None,
        kv_source_port: None,
    };
    worker.set_models(models.iter().map(model).collect());
    worker.with_health(|health| health.on_probe(true, now));
}

fn request(model: &str) -> RequestInfo {
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: std::num::NonZeroUsize::new(64).unwrap() };
    // 400 bytes of prompt and some for its frame: about a hundred tokens.
    let body = format!(r#"{{"model":"{model}","prompt":"{}"}}"#, "word ".repeat(80));
    request::read(body.as_bytes(), keyer)
}

fn state(scale: &Autoscale, model: &str) -> (u64, u64, bool, f64, f64) {
    let pool = Arc::clone(&scale.pools.read()[model]);
    let state = pool.state.lock();
    (state.waiting, state.running, state.unsent_tokens > 0.0, state.sent_tokens, state.held_tokens)
}

#[tokio::test]
async fn a_request_counts_as_what_it_is_and_is_gone_when_dropped() {
    let (scale, router) = setup("");
    ready(&router, &["base", "adapter"]);
    let mut demand = scale.enter(&router, &request("adapter"), router.now());
    assert_eq!(state(&scale, "base"), (1, 0, true, 0.0, 0.0));
    demand.sent(60, Role::Both);
    assert_eq!(state(&scale, "base"), (1, 0, false, 60.0, 0.0));
    demand.sent(40, Role::Both);
    assert_eq!(state(&scale, "base"), (1, 0, false, 40.0, 0.0));
    demand.first_token(Duration::from_secs(1));
    demand.first_token(Duration::from_secs(2));
    assert_eq!(state(&scale, "base"), (0, 1, false, 0.0, 40.0));
    demand.ended(Duration::from_secs(4));
    assert_eq!(scale.pools.read()["base"].state.lock().run_s, Some(3.0));
    drop(demand);
    assert_eq!(state(&scale, "base"), (0, 0, false, 0.0, 0.0));
    drop(scale.enter(&router, &request("base"), router.now()));
    assert_eq!(state(&scale, "base"), (0, 0, false, 0.0, 0.0));
}

#[tokio::test]
async fn clients_cannot_make_pools() {
    let (scale, router) = setup("");
    ready(&router, &["base"]);
    for i in 0..100 {
        drop(scale.enter(&router, &request(&format!("made-up-{i}")), router.now()));
    }
    scale.tick(&router);
    let models: Vec<String> = scale.rows().into_iter().map(|row| row.model).collect();
    assert_eq!(models, ["base"]);
}

#[tokio::test]
async fn whoever_waits_for_a_first_worker_is_counted_and_bounded() {
    let (scale, router) = setup("wait_seconds = 60.0\nwait_max = 1\nmin = 0\n[[model]]\nname = \"m\"");
    scale.tick(&router);
    assert_eq!(scale.rows()[0].desired, 0);
    let (waits, routes) = (Arc::clone(&scale), Arc::clone(&router));
    let asked = request("m");
    let waiting = tokio::spawn(async move {
        let demand = waits.enter(&routes, &asked, routes.now());
        waits.choose(&routes, &asked).await.map(|choice| (choice.worker.name.clone(), demand))
    });
    while scale.first_waiting() == 0 {
        tokio::task::yield_now().await;
    }
    scale.tick(&router);
    let row = &scale.rows()[0];
    assert_eq!((row.desired, row.first_waiting), (1, 1), "{row:?}");
    assert!(scale.choose(&router, &request("m")).await.is_err(), "the room is full");
    assert!(scale.choose(&router, &request("unknown")).await.is_err());
    ready(&router, &["m"]);
    router.fleet_changed();
    let served = clock::timeout(Duration::from_secs(30), waiting).await.expect("it is told of the worker");
    assert_eq!(served.unwrap().unwrap().0, "127.0.0.1:1");
    assert_eq!(scale.first_waiting(), 0);
    let text = String::from_utf8(scale.metrics.render()).unwrap();
    for line in [
        "keyway_scale_waits_total{model=\"m\",outcome=\"served\"} 1",
        "keyway_scale_waits_total{model=\"m\",outcome=\"refused\"} 1",
        "keyway_scale_waiting_requests{model=\"m\"} 0",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_first_worker_ends() {
    let (scale, router) = setup("wait_seconds = 60.0\n[[model]]\nname = \"m\"");
    let asked = router.now();
    assert!(scale.choose(&router, &request("m")).await.is_err());
    assert_eq!(router.now().saturating_sub(asked).as_secs(), 60);
    let (never, router) = setup("");
    assert!(never.choose(&router, &request("m")).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_first_probe_of_a_worker_that_joins() {
    let (scale, router) = setup("");
    let joins = router.fleet().add(&"http://127.0.0.1:2".parse().unwrap(), router.now());
    let asks = |asked: RequestInfo| {
        let (scale, router) = (Arc::clone(&scale), Arc::clone(&router));
        tokio::spawn(
            async move { scale.choose(&router, &asked).await.map(|choice| choice.worker.name.clone()) },
        )
    };
    let waiting = asks(request("m"));
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    joins.with_health(|health| health.on_probe(true, router.now()));
    router.fleet_changed();
    assert_eq!(waiting.await.unwrap().unwrap(), "127.0.0.1:2");

    // One that does not answer keeps nobody longer than its first probe, or than a second.
    joins.with_health(|health| *health = keyway_core::health::Health::new(router.now()));
    let (waiting, asked) = (asks(request("m")), router.now());
    tokio::task::yield_now().await;
    joins.with_health(|health| health.on_probe(false, router.now()));
    router.fleet_changed();
    assert!(waiting.await.unwrap().is_err());
    assert_eq!(router.now(), asked);
    joins.with_health(|health| *health = keyway_core::health::Health::new(router.now()));
    assert!(asks(request("m")).await.unwrap().is_err());
    assert_eq!(router.now().saturating_sub(asked), FIRST_PROBE_PATIENCE);
}

#[tokio::test]
async fn streams_tell_the_time_between_their_tokens() {
    let (scale, router) = setup("");
    ready(&router, &["base"]);
    let s = Duration::from_secs_f64;
    for i in 0..20 {
        let mut demand = scale.enter(&router, &request("base"), router.now());
        demand.sent(10, Role::Both);
        if i % 2 == 0 {
            demand.stream_began(s(1.0));
        }
        demand.first_token(s(1.0));
        demand.answered(11);
        demand.ended(s(if i % 2 == 0 { 1.5 } else { 1.0 }));
    }
    let pool = Arc::clone(&scale.pools.read()["base"]);
    assert_eq!(pool.state.lock().itl.quantile(s(2.0), 0.1), Some(0.05));
}

#[tokio::test(start_paused = true)]
async fn streams_that_wait_miss_the_objective_and_who_left_early_does_not() {
    let (scale, router) = setup("ttft_slo_seconds = 4.0");
    ready(&router, &["m"]);
    let mut asked = request("m");
    asked.stream = true;
    let p90 = || {
        scale.tick(&router);
        scale.pools.read()["m"].state.lock().last.and_then(|(seen, _)| seen.ttft_p90_s)
    };
    let served: Vec<_> = (0..20).map(|_| scale.enter(&router, &asked, router.now())).collect();
    let left: Vec<_> = (0..20).map(|_| scale.enter(&router, &asked, router.now())).collect();
    let whole: Vec<_> = (0..20).map(|_| scale.enter(&router, &request("m"), router.now())).collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    scale.tick(&router);
    drop(left);
    for mut one in served {
        one.sent(100, Role::Both);
        one.stream_began(router.now());
        one.first_token(router.now());
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(p90().is_some_and(|p90| (0.9..1.1).contains(&p90)), "{:?}", p90());
    let waiting: Vec<_> = (0..20).map(|_| scale.enter(&router, &asked, router.now())).collect();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(p90().is_some_and(|p90| p90 > 4.0), "{:?}", p90());
    drop((waiting, whole));
}
