//! Three sessions, and a worker whose cache holds two of them.

use std::{num::NonZeroUsize, sync::Arc};

use keyway_core::{pick::Policy, waiting_room::RoomRules, working_sets::SetRules};
use keyway_wire::block_hash::HashKey;

use super::*;
use crate::{
    clock::{self, Clock},
    fleet::{Fleet, ejection::Ejections},
    metrics::Metrics,
    prompt::{
        request::{self, KeyerConfig},
        session::{SaidBy, Session},
    },
    routing::Router,
};

/// What the worker computes, prompt tokens in a second.
const RATE: f64 = 100.0;
const PROMPT_TOKENS: usize = 400;

fn keyer() -> KeyerConfig {
    KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() }
}

/// A router with one slow worker, whose cache holds so many tokens.
fn router(cache_tokens: u64, pauses: Option<SetRules>) -> Arc<Router> {
    let clock = Clock::start();
    let url = "http://127.0.0.1:1".parse().unwrap();
    let fleet = Arc::new(Fleet::new(&[url], Duration::ZERO, &Ejections::new(clock, None)));
    let worker = Arc::clone(&fleet.all()[0]);
    worker.with_health(|health| health.on_probe(true, Duration::ZERO));
    worker.residency.capacity.lock().tell(Some(cache_tokens));
    for _ in 0..100 {
        worker.rate.lock().observe(1_000, 1_000.0 / RATE);
    }
    let metrics = Arc::new(Metrics::new().unwrap());
    let router = Router::new(fleet, metrics, clock, Policy::Prefix, keyer(), 1 << 20);
    Arc::new(router.with_room(Some(RoomRules { pauses, ..RoomRules::default() })))
}

/// A turn of a session: all say something else.
fn asks(session: u64) -> RequestInfo {
    let text = format!("{session:03} ").repeat(PROMPT_TOKENS);
    let request = request::read(format!(r#"{{"model":"m","prompt":"{text}"}}"#).as_bytes(), keyer());
    RequestInfo { session: Some(Session { name: session, said_by: SaidBy::Header }), ..request }
}

/// Has a turn answered, and says how long it waited.
async fn turn(router: &Arc<Router>, session: u64) -> Duration {
    let asked = router.now();
    let mut choice = router.choose(&asks(session), &[]).await.unwrap();
    let waited = router.now().saturating_sub(asked);
    clock::sleep(Duration::from_secs_f64(choice.pick.uncached_tokens as f64 / RATE)).await;
    choice.ticket.stream_began(router.now());
    clock::sleep(Duration::from_millis(50)).await;
    waited
}

/// Two sessions take turns for a while, about one a second each.
async fn two_go_on(router: &Arc<Router>) {
    go_on(router, &[1, 2]).await;
}

/// Sessions that all fit take turns for a while.
async fn go_on(router: &Arc<Router>, sessions: &[u64]) {
    for _ in 0..40 {
        for &session in sessions {
            assert!(turn(router, session).await < Duration::from_millis(500), "there is room for them");
            clock::sleep(Duration::from_millis(500)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_third_session_waits_where_two_fit_until_one_is_silent() {
    let rules = SetRules::default();
    let router = router(1_200, Some(rules));
    two_go_on(&router).await;
    let waited = turn(&router, 3).await;
    // The first has been silent for a second, and is waited for a little longer than it ever took.
    assert!(waited > Duration::from_millis(200) && waited < rules.longest_pause / 2, "{waited:?}");
    assert_eq!(router.metrics.session_pause.get_sample_count(), 1);
    assert!((1..=2).contains(&router.holding.sessions()));
}

#[tokio::test(start_paused = true)]
async fn none_waits_for_longer_than_may_be_while_the_others_go_on() {
    let rules = SetRules { longest_pause: Duration::from_secs(10), ..SetRules::default() };
    let router = router(1_200, Some(rules));
    two_go_on(&router).await;
    let third = tokio::spawn({
        let router = Arc::clone(&router);
        async move { turn(&router, 3).await }
    });
    while !third.is_finished() {
        for session in [1, 2] {
            turn(&router, session).await;
            clock::sleep(Duration::from_millis(300)).await;
        }
    }
    let waited = third.await.unwrap();
    assert!(
        (rules.longest_pause..rules.longest_pause + Duration::from_secs(5)).contains(&waited),
        "{waited:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn none_waits_where_all_fit_or_where_that_is_off() {
    for (cache_tokens, pauses) in [(2_000, Some(SetRules::default())), (1_200, None)] {
        let router = router(cache_tokens, pauses);
        two_go_on(&router).await;
        let waited = turn(&router, 3).await;
        assert!(waited < Duration::from_millis(500), "{cache_tokens}: {waited:?}");
        assert_eq!(router.metrics.session_pause.get_sample_count(), 0);
    }
}

/// The worker has room for one session; the third would have come in before the fourth.
#[tokio::test(start_paused = true)]
async fn no_room_is_kept_for_a_session_whose_client_has_left() {
    let router = router(700, Some(SetRules::default()));
    go_on(&router, &[1]).await;
    let third = tokio::spawn({
        let router = Arc::clone(&router);
        async move { turn(&router, 3).await }
    });
    clock::sleep(Duration::from_millis(10)).await;
    assert!(!third.is_finished());
    third.abort();
    assert!(third.await.is_err());
    let waited = turn(&router, 4).await;
    assert!((Duration::from_millis(100)..Duration::from_secs(5)).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn sessions_have_nothing_where_a_cache_is_gone() {
    let gone: [fn(&Router, &Worker); 3] = [Router::cache_is_lost, Router::worker_left, Router::worker_failed];
    for gone in gone {
        let router = router(1_200, Some(SetRules::default()));
        two_go_on(&router).await;
        assert!(router.holding.sessions() > 0);
        let worker = Arc::clone(&router.fleet().all()[0]);
        gone(&router, &worker);
        assert_eq!(router.holding.sessions(), 0);
        worker.with_health(|health| health.on_probe(true, router.now()));
        let waited = turn(&router, 3).await;
        assert!(waited < Duration::from_millis(500), "{waited:?}");
    }
}
