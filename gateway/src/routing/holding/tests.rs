//! Who waits is not bound to the workers that were there when it came.

use keyway_core::{pick::Policy, waiting_room::RoomRules};
use keyway_wire::block_hash::HashKey;
use serde_json::value::RawValue;

use super::*;
use crate::{
    api::Api,
    clock::Clock,
    fleet::{Model, ejection::Ejections},
    metrics::Metrics,
    prompt::request::RequestInfo,
    prompt::{
        request::{self, KeyerConfig},
        session::{SaidBy, Session},
        token_keyer::TokenPrompt,
    },
    routing::setting::Leg,
};

fn keyer() -> KeyerConfig {
    KeyerConfig { key: HashKey::new(1), block_bytes: std::num::NonZeroUsize::new(64).unwrap() }
}

/// A router with this many ready workers, each of which is sent one request at a time.
fn router(workers: u32) -> Arc<Router> {
    let configs: Vec<_> = (1..=workers).map(|i| format!("http://127.0.0.1:{i}").parse().unwrap()).collect();
    let fleet = Arc::new(Fleet::new(&configs, Duration::ZERO, &Ejections::new(Clock::start(), None)));
    fleet.all().iter().for_each(|worker| worker.with_health(|health| health.on_probe(true, Duration::ZERO)));
    let metrics = Arc::new(Metrics::new().unwrap());
    let router = Router::new(fleet, metrics, Clock::start(), Policy::Prefix, keyer(), 1 << 20);
    let rules = RoomRules { horizon_ms: 0.0, ..RoomRules::default() };
    Arc::new(router.with_room(Some(rules)).with_options(crate::routing::RouterOptions {
        slow_start: Some(Duration::from_secs(30)),
        ..Default::default()
    }))
}

fn request(prompt: &str) -> RequestInfo {
    request::read(format!(r#"{{"model":"m","prompt":"{}"}}"#, prompt.repeat(500)).as_bytes(), keyer())
}

/// Enters the room; who is chosen is known when it begins.
fn ask(router: &Arc<Router>, prompt: &str) -> tokio::task::JoinHandle<Choice> {
    let (router, asked) = (Arc::clone(router), request(prompt));
    tokio::spawn(async move { router.choose(&asked, &[]).await.unwrap() })
}

/// Tells the only worker's context of the model, in tokens.
fn takes(router: &Router, context: Option<u64>) {
    let json = RawValue::from_string("{}".to_owned()).unwrap();
    let model =
        Model { id: "m".to_owned(), parent: None, json, context, numerics_id: None, kv_source_port: None };
    router.fleet().all()[0].set_models(vec![model]);
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_every_worker_refuses_keeps_nobody_waiting() {
    let router = router(1);
    // Some 100,000 tokens.
    let long = "word".repeat(200);
    takes(&router, Some(8_000));
    let refused = ask(&router, &long).await.unwrap();
    assert_eq!((refused.pick.uncached_tokens, router.index().with(|index| index.len())), (0, 0));
    // It is at the worker, which has nothing to compute of it.
    let next = ask(&router, "two ").await.unwrap();
    assert!(next.pick.uncached_tokens > 300);
    drop((refused, next));
    for context in [None, Some(90_000)] {
        takes(&router, context);
        let first = ask(&router, &long).await.unwrap();
        assert!(first.pick.uncached_tokens > 50_000, "{context:?}");
        let waits = ask(&router, "two ");
        tokio::task::yield_now().await;
        assert!(!waits.is_finished(), "{context:?}");
        drop(first);
        waits.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_begins_on_a_worker_that_comes_up_meanwhile() {
    let router = router(1);
    let first = ask(&router, "one ").await.unwrap();
    let waits = ask(&router, "two ");
    tokio::task::yield_now().await;
    assert!(!waits.is_finished(), "the only worker is busy");
    let came = router.now();
    let second = router.fleet().add(&"http://127.0.0.1:2".parse().unwrap(), router.now());
    second.with_health(|health| health.on_probe(true, router.now()));
    router.fleet_changed();
    let begun = waits.await.unwrap();
    assert_eq!((begun.worker.name.as_str(), router.now()), ("127.0.0.1:2", came));
    assert_eq!(first.worker.name, "127.0.0.1:1");
}

/// A conversation of text has its tokens; once a picture is in it, it has not.
#[tokio::test(start_paused = true)]
async fn a_session_is_drawn_alike_by_text_and_by_tokens() {
    for name in 0..20_u32 {
        // New gateways, so that none is chosen by what another request left.
        let (by_text, by_tokens) = (router(16), router(16));
        clock::sleep(Duration::from_secs(60)).await;
        let session = Some(Session { name: name.into(), said_by: SaidBy::User });
        let of_text = RequestInfo { session, ..request(&format!("{name} ")) };
        let tokens = TokenPrompt { ids: (1_000 * name..1_000 * (name + 1)).collect(), total: 1_000 };
        let of_tokens = RequestInfo { session, tokens: Some(tokens), ..request(&format!("{name} ")) };
        let chosen = by_text.choose(&of_text, &[]).await.unwrap();
        let again = by_tokens.choose(&of_tokens, &[]).await.unwrap();
        assert_eq!(again.worker.name, chosen.worker.name, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cold_worker_is_not_spared_while_others_wait() {
    let router = router(1);
    clock::sleep(Duration::from_secs(60)).await;
    let second = router.fleet().add(&"http://127.0.0.1:2".parse().unwrap(), router.now());
    second.with_health(|health| health.on_probe(true, router.now()));
    router.fleet_changed();
    let setting = router.setting(&request("one "), &[]).unwrap();
    let rates = |others_wait| {
        let candidates = setting.candidates(router.now(), others_wait);
        let rate = |name| {
            let at = setting.workers.iter().position(|worker| worker.name == name).unwrap();
            candidates[at].tokens_per_ms
        };
        (rate("127.0.0.1:1"), rate("127.0.0.1:2"))
    };
    let (warm, cold) = rates(false);
    assert!(cold < 0.2 * warm, "{warm} {cold}");
    let (warm, cold) = rates(true);
    assert!((warm - cold).abs() < 1e-9, "{warm} {cold}");
}

/// Where it went by its tokens, a prompt with a picture is found by those that it begins with.
#[tokio::test(start_paused = true)]
async fn a_conversation_stays_where_it_is_when_its_first_picture_comes() {
    for known in [true, false] {
        let mut stayed = 0;
        for name in 0..20_u32 {
            let router = router(8);
            clock::sleep(Duration::from_secs(60)).await;
            let ids: Vec<u32> = (1_000 * name..1_000 * (name + 1)).collect();
            let tokens = Some(TokenPrompt { ids: ids.clone(), total: 1_000 });
            let of_text = RequestInfo { tokens, ..request(&format!("{name} ")) };
            let mut before = router.choose(&of_text, &[]).await.unwrap();
            before.ticket.stream_began(router.now());
            let worker = before.worker.name.clone();
            drop(before);
            let first_tokens = if known { ids.into() } else { Box::default() };
            let seen = RequestInfo { first_tokens, ..request(&format!("seen {name} ")) };
            let after = router.choose(&seen, &[]).await.unwrap();
            assert_eq!(after.pick.matched_tokens > 800, known, "{}", after.pick.matched_tokens);
            stayed += u32::from(after.worker.name == worker);
        }
        assert_eq!(stayed == 20, known, "{stayed} of 20");
    }
}

/// What others will bring there in KV is what splits alone: a request whose worker computes its prompt does
/// not.
#[tokio::test]
async fn a_request_in_one_leg_is_none_that_brings_its_kv() {
    let router = router(1);
    let choice = router.choose(&request("word "), &[]).await.unwrap();
    let now = router.now();
    let load = choice.worker.load.snapshot(now, 1.0);
    assert_eq!((load.requests, load.handed_per_ms), (1, 0.0));
    choice.worker.load.start_elsewhere(now);
    assert!(choice.worker.load.snapshot(now, 1.0).handed_per_ms > 0.0);
}

/// A worker for one part of requests has computed nothing yet: it is taken to be as fast as those for the
/// other part, not as an unknown one.
#[test]
fn a_worker_for_one_part_is_priced_by_those_for_the_other_until_it_has_computed_some() {
    let configs = ["http://a:1;role=prefill", "http://b:1;role=decode", "http://c:1;role=decode"];
    let configs: Vec<_> = configs.iter().map(|url| url.parse().unwrap()).collect();
    // What these are priced by, if so fast a worker of this name is known.
    let priced = |known: &str, leg: Leg, may_move_kv: bool| {
        let fleet = Arc::new(Fleet::new(&configs, Duration::ZERO, &Ejections::new(Clock::start(), None)));
        for worker in fleet.all().iter() {
            worker.with_health(|health| health.on_probe(true, Duration::ZERO));
            if worker.name == known {
                (0..40).for_each(|_| worker.rate.lock().observe(6_000, 0.1));
            }
        }
        let metrics = Arc::new(Metrics::new().unwrap());
        let router = Router::new(fleet, metrics, Clock::start(), Policy::Prefix, keyer(), 1 << 20);
        let request = RequestInfo { moves_kv: may_move_kv.then_some(Api::Chat), ..request("word ") };
        let setting = router.setting_for(&request, &[], leg).unwrap();
        let candidates = setting.candidates(Duration::from_secs(1), false);
        candidates.iter().map(|one| one.tokens_per_ms.round()).collect::<Vec<_>>()
    };
    assert_eq!(priced("none", Leg::Answer, true), [8.0, 8.0]);
    assert_eq!(priced("none", Leg::Prefill, true), [8.0]);
    assert_eq!(priced("a:1", Leg::Answer, true), [60.0, 60.0]);
    assert_eq!(priced("b:1", Leg::Prefill, true), [60.0]);
    assert_eq!(priced("a:1", Leg::Answer, false), [8.0, 8.0], "there it is compared with none of them");
}
