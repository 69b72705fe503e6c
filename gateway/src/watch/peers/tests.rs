//! What is told and heard between gateways, in virtual time: changes at once, all of it each second, nothing
//! of who is gone.

use std::{future::poll_fn, num::NonZeroUsize, time::Duration};

use keyway_core::{pick::Policy, waiting_room::Share};
use keyway_wire::block_hash::{BlockHash, HashKey};

use super::{
    placements::{PlacementsHeard, PlacementsTold},
    *,
};
use crate::{
    clock::Clock,
    config::WorkerConfig,
    fleet::{Fleet, Worker, ejection::Ejections},
    leaving::Leaving,
    limits::{PEER_ALL_EVERY, PEER_EVERY},
    metrics::Metrics,
    prompt::request::{self, KeyerConfig, RequestInfo},
    proxy::body::Lines,
    routing::Router,
};

/// A router in front of these workers.
fn router(workers: &[&str]) -> Arc<Router> {
    let clock = Clock::start();
    let configs: Vec<_> =
        workers.iter().map(|url| WorkerConfig::all_of(&url.parse().unwrap()).unwrap()).collect();
    let fleet = Arc::new(Fleet::new(&configs.concat(), clock.now(), &Ejections::new(clock, None)));
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() };
    let metrics = Arc::new(Metrics::new().unwrap());
    Arc::new(Router::new(fleet, metrics, clock, Policy::Prefix, keyer, 1 << 16))
}

fn worker(router: &Router, name: &str) -> Arc<Worker> {
    Arc::clone(router.fleet().all().iter().find(|worker| worker.name == name).unwrap())
}

fn telling(router: &Arc<Router>) -> Telling {
    Telling::new(Arc::clone(router), Leaving::new(), GatewayId::draw(), "a=b&every_ms=20")
}

async fn next(telling: &mut Telling) -> Line {
    let line = poll_fn(|cx| telling.poll_line(cx)).await.unwrap();
    assert_eq!(line.last(), Some(&b'\n'));
    serde_json::from_slice(&line).unwrap()
}

fn entry(worker: &str, requests: u64, waiting: u64, waiting_tokens: u64) -> LoadEntry {
    LoadEntry { worker: worker.to_owned(), requests, waiting, waiting_tokens }
}

#[tokio::test(start_paused = true)]
async fn all_is_told_at_first_and_each_second_and_what_changes_meanwhile() {
    let router = router(&["http://a:1", "http://b:1"]);
    let (a, began) = (worker(&router, "a:1"), clock::Instant::now());
    let first = a.load.start(router.now(), 1_600, true);
    let mut telling = telling(&router);
    let line = next(&mut telling).await;
    assert!(line.gateway.is_some() && line.all);
    assert_eq!((line.workers, began.elapsed()), (vec![entry("a:1", 1, 1, 1_600)], Duration::ZERO));

    let second = a.load.start(router.now(), 60, true);
    assert_eq!(
        next(&mut telling).await,
        Line { workers: vec![entry("a:1", 2, 2, 1_660)], ..Line::default() }
    );
    assert_eq!(began.elapsed(), Duration::from_millis(20));
    a.load.first_token(router.now(), &first);
    a.load.end();
    a.load.cancelled(router.now(), &second);
    a.load.end();
    assert_eq!(next(&mut telling).await.workers, [entry("a:1", 0, 0, 0)]);
    // Nothing changes any more.
    let line = next(&mut telling).await;
    assert!(line.all && line.workers.is_empty());
    assert_eq!(began.elapsed(), PEER_ALL_EVERY);
}

/// Requests that are sent are told at once, in a line every tenth of the time between two words; what ends is
/// told with the next word.
#[tokio::test(start_paused = true)]
async fn where_a_request_is_sent_is_told_at_once() {
    let router = router(&["http://a:1", "http://b:1", "http://c:1"]);
    for name in ["a:1", "b:1"] {
        worker(&router, name).with_health(|health| health.on_probe(true, Duration::ZERO));
    }
    let mut telling = Telling::new(Arc::clone(&router), Leaving::new(), GatewayId::draw(), "every_ms=100");
    let first = next(&mut telling).await;
    assert!(first.all && first.workers.is_empty());
    let began = clock::Instant::now();
    let at_ms = || began.elapsed().as_millis();
    clock::sleep(Duration::from_millis(33)).await;
    let request = request_of(7, 0, 1.0, 60);
    let one = router.choose(&request, &[]).await.unwrap();
    let line = next(&mut telling).await;
    assert_eq!((at_ms(), line.workers.len(), line.all), (33, 1, false));
    assert_eq!((line.workers[0].worker.as_str(), line.workers[0].requests), (&*one.worker.name, 1));
    let (two, three) = (router.choose(&request, &[]).await, router.choose(&request, &[]).await);
    let later = next(&mut telling).await;
    let all = [line, later].into_iter().flat_map(|line| line.workers);
    let all: HashMap<String, u64> = all.map(|entry| (entry.worker, entry.requests)).collect();
    assert_eq!((at_ms(), all.values().sum::<u64>()), (43, 3), "{all:?}");
    drop(one);
    clock::sleep(Duration::from_millis(20)).await;
    let line = next(&mut telling).await;
    assert_eq!((at_ms(), line.workers.len()), (100, 1), "what has ended waits for its time: {line:?}");
    drop((two, three));
}

/// So that another gateway sends what goes on from it there, too.
#[tokio::test(start_paused = true)]
async fn a_placement_is_told_with_the_request_that_it_is_of() {
    let router = telling_router(&["http://a:1"], 1);
    worker(&router, "a:1").with_health(|health| health.on_probe(true, Duration::ZERO));
    let query = "every_ms=100&placements=1";
    let mut telling = Telling::new(Arc::clone(&router), Leaving::new(), GatewayId::draw(), query);
    next(&mut telling).await;
    clock::sleep(Duration::from_millis(5)).await;
    let began = clock::Instant::now();
    let choice = router.choose(&request_of(7, 0, 1.0, 60), &[]).await.unwrap();
    let line = next(&mut telling).await;
    assert_eq!(
        (began.elapsed(), line.workers),
        (Duration::ZERO, vec![entry("a:1", 1, 1, choice.pick.uncached_tokens)])
    );
    assert!(line.placed.is_some_and(|placed| !placed.words.is_empty() && !placed.workers.is_empty()));
}

#[tokio::test(start_paused = true)]
async fn tokens_that_fall_as_they_are_computed_are_told_now_and_then() {
    let router = router(&["http://a:1"]);
    let a = worker(&router, "a:1");
    for _ in 0..200 {
        a.rate.lock().observe(10_000, 1.0);
    }
    let _waits = a.load.start(router.now(), 10_000, true);
    let mut telling = telling(&router);
    let mut told = Vec::new();
    while told.len() < 10 {
        told.extend(next(&mut telling).await.workers.iter().map(|entry| entry.waiting_tokens));
    }
    assert_eq!(told[0], 10_000);
    assert!(told.windows(2).all(|pair| pair[1] < pair[0]), "{told:?}");
    let steps = told.windows(2).map(|pair| (pair[0] - pair[1]) * 16 / pair[0]);
    assert!(steps.clone().min() >= Some(1) && steps.max() < Some(8), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn what_others_say_is_summed_and_goes_with_them() {
    let router = router(&["http://a:1", "http://b:1"]);
    let own = GatewayId::draw();
    let hearsay = Hearsay::new(own, Arc::clone(&router));
    assert!(hearsay.hear(own).is_none(), "itself");
    let id = GatewayId::draw();
    let (one, two) = (hearsay.hear(id).unwrap(), hearsay.hear(GatewayId::draw()).unwrap());
    assert!(hearsay.hear(id).is_none(), "at two addresses");
    let at = |name: &str| {
        let now = worker(&router, name).load.snapshot(router.now(), 1.0);
        (now.requests, now.waiting_prefill_tokens)
    };
    let line = |all, workers| Line { all, workers, ..Line::default() };
    one.says(&line(true, vec![entry("a:1", 3, 2, 900), entry("b:1", 1, 0, 0), entry("nobody:1", 9, 9, 9)]))
        .unwrap();
    two.says(&line(true, vec![entry("a:1", 1, 1, 50)])).unwrap();
    assert_eq!((at("a:1"), at("b:1")), ((4, 950), (1, 0)));
    one.says(&line(false, vec![entry("a:1", 1, 0, 0)])).unwrap();
    assert_eq!((at("a:1"), at("b:1")), ((2, 50), (1, 0)));
    one.says(&line(true, vec![entry("a:1", 1, 0, 0)])).unwrap();
    assert_eq!((at("a:1"), at("b:1")), ((2, 50), (0, 0)));
    drop(two);
    assert_eq!(at("a:1"), (1, 0));
    assert!(hearsay.hear(id).is_none());
    drop(one);
    assert_eq!(at("a:1"), (0, 0));
    assert!(hearsay.hear(id).is_some());
}

#[tokio::test(start_paused = true)]
async fn how_many_requests_come_is_told_now_and_then_and_counted_with_ones_own() {
    let (one, other) = (router(&["http://a:1", "http://b:1"]), router(&["http://a:1", "http://b:1"]));
    let a = worker(&one, "a:1");
    let send = || {
        let waits = a.load.start(one.now(), 100, true);
        a.load.first_token(one.now(), &waits);
        a.load.end();
    };
    (0..3).for_each(|_| send());
    let mut telling = telling(&one);
    let voice = Hearsay::new(GatewayId::draw(), Arc::clone(&other)).hear(GatewayId::draw()).unwrap();
    let arrivals = |name: &str| arrivals_of(&other, name);
    let own = a.load.arrivals_per_ms(one.now());
    // None is there any more, and they have come.
    let line = next(&mut telling).await;
    voice.says(&line).unwrap();
    assert!(line.workers.is_empty() && (arrivals("a:1") / own - 1.0).abs() < 0.01, "{line:?}");
    assert_eq!(arrivals("b:1"), 0.0);
    worker(&other, "a:1").load.start(other.now(), 100, true);
    let both = arrivals("a:1") / own;
    assert!((both - 4.0 / 3.0).abs() < 0.01, "{both}");
    send();
    let mut lines = 0;
    let told = loop {
        let line = next(&mut telling).await;
        voice.says(&line).unwrap();
        if let Some(arrivals) = line.arrivals {
            break arrivals;
        }
        lines += 1;
        assert!(arrivals("a:1") > 0.0, "what was told stays while all is told");
    };
    let now = a.load.arrivals_per_ms(one.now()) * 1e3;
    assert!(lines >= 4 && (told["a:1"] - now).abs() < 1e-3 && told.len() == 1, "{lines} {told:?} {now}");
    for nothing in [f64::NAN, -1.0, f64::INFINITY] {
        let arrivals = Some([("b:1".to_owned(), nothing)].into());
        voice.says(&Line { arrivals, ..Line::default() }).unwrap();
        assert_eq!(arrivals_of(&other, "b:1"), 0.0, "{nothing}");
    }
}

/// A request of an owner, of so many tokens, about.
fn request_of(owner: u32, priority: i32, weight: f64, tokens: usize) -> RequestInfo {
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() };
    let body = format!(r#"{{"model":"m","prompt":"{owner} {}"}}"#, "word ".repeat(tokens));
    let request = request::read(body.as_bytes(), keyer);
    RequestInfo { share: Share { owner, priority, weight, ..Share::default() }, ..request }
}

#[tokio::test(start_paused = true)]
async fn what_owners_have_had_and_which_priorities_wait_is_told_and_heeded() {
    let urls = ["http://a:1"];
    let (one, other) = (router(&urls), router(&urls));
    for router in [&one, &other] {
        worker(router, "a:1").with_health(|health| health.on_probe(true, Duration::ZERO));
    }
    let mut telling = telling(&one);
    assert_eq!(next(&mut telling).await.owners, []);
    // One begins, and keeps the worker busy for long; another waits.
    let (own, urgent) = (request_of(7, 0, 2.0, 60_000), request_of(7, 1, 2.0, 60_000));
    let begun = one.choose(&own, &[]).await.unwrap();
    let waiting = tokio::spawn({
        let one = Arc::clone(&one);
        async move { one.choose(&urgent, &[]).await }
    });
    tokio::task::yield_now().await;
    // Where it was sent comes before.
    assert_eq!(next(&mut telling).await.owners, []);
    let line = next(&mut telling).await;
    let told = line.owners[0];
    let had = begun.pick.uncached_tokens as f64 / 2.0;
    assert_eq!((line.owners.len(), told.owner, told.priority, told.waits), (1, 7, 1, Some(1)));
    assert!((told.had - had).abs() < 1.0, "{told:?} {had}");
    // As long as one waits it is said again, and no longer.
    assert_eq!(next(&mut telling).await.owners, [told]);
    drop((begun, waiting.await.unwrap().unwrap()));
    assert_eq!(next(&mut telling).await.owners[0].waits, None);

    // At the other gateway the worker has something to do, and room for more.
    let voice = Hearsay::new(GatewayId::draw(), Arc::clone(&other)).hear(GatewayId::draw()).unwrap();
    worker(&other, "a:1").load.start(other.now(), 2_000, true);
    let low = |tokens| request_of(8, 0, 1.0, tokens);
    let first = other.choose(&low(50), &[]).await.unwrap();
    voice.says(&Line { owners: vec![told], ..Line::default() }).unwrap();
    let began = clock::Instant::now();
    let later = other.choose(&low(60), &[]).await.unwrap();
    assert!(
        began.elapsed() >= Duration::from_millis(100),
        "{:?}: it has let the other go first",
        began.elapsed()
    );
    drop((first, later));
}

fn arrivals_of(router: &Router, name: &str) -> f64 {
    worker(router, name).load.snapshot(router.now(), 1.0).pace.arrivals_per_ms
}

#[test]
fn a_line_says_who_speaks_once_and_ids_are_what_they_are() {
    let id: GatewayId = serde_json::from_str("\"00000000000000ff\"").unwrap();
    let line = Line { gateway: Some(id), all: true, workers: vec![entry("a:1", 1, 0, 7)], ..Line::default() };
    let text = serde_json::to_string(&line).unwrap();
    let expected = r#"{"gateway":"00000000000000ff","all":true,"workers":[{"worker":"a:1","requests":1,"waiting":0,"waiting_tokens":7}]}"#;
    assert_eq!(text, expected);
    assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    for wrong in ["\"\"", "\"xyz\"", "7"] {
        assert!(serde_json::from_str::<GatewayId>(wrong).is_err(), "{wrong}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_asks_for_no_time_or_an_odd_one_gets_one_that_is_fit() {
    let router = router(&["http://a:1"]);
    let a = worker(&router, "a:1");
    for (query, expected) in [
        ("", PEER_EVERY),
        ("every_ms=soon", PEER_EVERY),
        ("every_ms=0", Duration::from_millis(10)),
        ("every_ms=4000", Duration::from_secs(1)),
    ] {
        let mut telling = Telling::new(Arc::clone(&router), Leaving::new(), GatewayId::draw(), query);
        next(&mut telling).await;
        let (began, request) = (clock::Instant::now(), a.load.start(router.now(), 1, true));
        next(&mut telling).await;
        assert_eq!(began.elapsed(), expected, "{query:?}");
        a.load.cancelled(router.now(), &request);
        a.load.end();
    }
}

/// A router that tells its placements, by names of this key.
fn telling_router(workers: &[&str], key: u64) -> Arc<Router> {
    let clock = Clock::start();
    let configs: Vec<_> =
        workers.iter().map(|url| WorkerConfig::all_of(&url.parse().unwrap()).unwrap()).collect();
    let fleet = Arc::new(Fleet::new(&configs.concat(), clock.now(), &Ejections::new(clock, None)));
    let keyer = KeyerConfig { key: HashKey::new(key), block_bytes: NonZeroUsize::new(64).unwrap() };
    let metrics = Arc::new(Metrics::new().unwrap());
    let router = Router::new(fleet, metrics, clock, Policy::Prefix, keyer, 1 << 16);
    Arc::new(router.with_told_placements(1 << 16))
}

/// Sends a chain to a worker; what is told to who has listened from the start.
fn place(router: &Arc<Router>, told: &mut PlacementsTold, name: &str, blocks: u64) -> PlacementNews {
    let chain: Vec<BlockHash> = (1..=blocks).map(BlockHash).collect();
    let worker = worker(router, name);
    drop(router.place_for_tests(&worker, &chain));
    told.news(router).unwrap()
}

fn heard(router: &Arc<Router>, outcome: &str) -> f64 {
    let text = String::from_utf8(router.metrics().render()).unwrap();
    let series = format!("keyway_peer_placements_heard_total{{outcome=\"{outcome}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn what_one_places_others_find_there_too() {
    let (one, two) = (telling_router(&["http://a:1", "http://b:1"], 1), telling_router(&["http://b:1"], 1));
    let mut told = PlacementsTold::from_now(&one).unwrap();
    let first = told.news(&one).unwrap();
    assert!(first.words.is_empty() && first.names == two.names_check() && told.news(&one).is_none());
    let mut voice = PlacementsHeard::default();
    let resident = |router: &Arc<Router>| {
        let id = worker(router, "b:1").id;
        router.index().with(|index| index.resident(id))
    };
    voice.take(&place(&one, &mut told, "b:1", 9), &two).unwrap();
    assert_eq!((resident(&two), heard(&two, "recorded")), (9, 1.0));
    let more = place(&one, &mut told, "b:1", 12);
    assert!(more.words.len() < 80, "what it adds alone: {}", more.words);
    voice.take(&more, &two).unwrap();
    assert_eq!(resident(&two), 12);
    voice.take(&place(&one, &mut told, "a:1", 9), &two).unwrap();
    assert_eq!((resident(&two), heard(&two, "elsewhere")), (12, 1.0));
    // One who names otherwise is not believed, and who says nonsense is.
    let other = telling_router(&["http://b:1"], 2);
    voice.take(&more, &other).unwrap();
    assert_eq!((resident(&other), heard(&other, "other_names")), (0, 1.0));
    for words in ["_", "AAAA", "CQ"] {
        let news = PlacementNews { words: words.to_owned(), ..first.clone() };
        assert!(PlacementsHeard::default().take(&news, &two).is_err(), "{words}");
    }
    let silent = router(&["http://b:1"]);
    assert!(PlacementsTold::from_now(&silent).is_none());
}
