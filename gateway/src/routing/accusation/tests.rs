//! What a refusal does to the choices after it, and what becomes of it when others have said what they think.

use std::{num::NonZeroUsize, time::Duration};

use http::StatusCode;
use keyway_core::{
    breaker::CONSECUTIVE_FAILURES,
    pick::Policy,
    refusals::{CONVICTIONS, FIRST_PAUSE},
};
use keyway_wire::block_hash::HashKey;

use super::*;
use crate::{
    clock::Clock,
    fleet::{Fleet, ejection::Ejections},
    metrics::Metrics,
    prompt::request::{self, KeyerConfig, RequestInfo},
    routing::Choice,
};

const PATH: &str = "/v1/chat/completions";
const BUSY: Charge = Charge::Busy { retry_after: None };
const UNAUTHORIZED: Charge = Charge::Rejected(StatusCode::UNAUTHORIZED);

fn keyer() -> KeyerConfig {
    KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() }
}

fn router(workers: u32, policy: Policy) -> Arc<Router> {
    let (clock, metrics) = (Clock::start(), Arc::new(Metrics::new().unwrap()));
    let configs: Vec<_> = (1..=workers).map(|i| format!("http://127.0.0.1:{i}").parse().unwrap()).collect();
    let fleet = Arc::new(Fleet::new(&configs, Duration::ZERO, &Ejections::new(clock, None)));
    fleet.all().iter().for_each(|worker| worker.with_health(|health| health.on_probe(true, Duration::ZERO)));
    Arc::new(Router::new(fleet, metrics, clock, policy, keyer(), 1 << 20))
}

fn request(prompt: &str) -> RequestInfo {
    request::read(format!(r#"{{"model":"m","prompt":"{}"}}"#, prompt.repeat(500)).as_bytes(), keyer())
}

async fn choose(router: &Arc<Router>, prompt: &str) -> Choice {
    router.choose(&request(prompt), &[]).await.unwrap()
}

/// Gives a worker a request that it refuses.
async fn refused(router: &Arc<Router>, worker: &str, charge: Charge) -> Accusation {
    for i in 0.. {
        let mut choice = choose(router, &format!("{i} ")).await;
        if choice.worker.name == worker {
            return choice.ticket.accuse(charge, PATH);
        }
    }
    unreachable!()
}

#[tokio::test(start_paused = true)]
async fn who_refuses_holds_nothing_of_the_prompt_counts_no_load_and_is_tried_by_one_at_a_time() {
    for policy in Policy::ALL {
        let router = router(2, policy);
        let mut first = choose(&router, "the same ").await;
        let refuser = Arc::clone(&first.worker);
        drop(first.ticket.accuse(BUSY, PATH));
        assert_eq!((refuser.load.requests(), refuser.load.waiting_prefill_tokens()), (1, 0), "{policy}");
        assert_eq!(router.cached_tokens(&refuser), 0, "{policy}");
        drop(first);
        assert_eq!(refuser.load.requests(), 0);
        let choices = async |prompt: &str| {
            let mut choices = Vec::new();
            for _ in 0..8 {
                choices.push(choose(&router, prompt).await);
            }
            choices.iter().filter(|choice| choice.worker.name == refuser.name).count()
        };
        assert_eq!(choices("the same ").await, 0, "{policy}");
        tokio::time::advance(FIRST_PAUSE).await;
        let tried = choices("another ").await;
        assert!(tried <= 1, "{policy}: {tried} at once");
    }
}

#[tokio::test(start_paused = true)]
async fn what_explain_says_is_what_is_chosen() {
    let router = router(3, Policy::Prefix);
    let mut first = choose(&router, "the same ").await;
    let refuser = first.worker.name.clone();
    first.ticket.first_token(router.now());
    let mut second = choose(&router, "the same ").await;
    assert_eq!(second.worker.name, refuser, "its prefix is there");
    drop(second.ticket.accuse(BUSY, PATH));
    let setting = router.setting(&request("the same "), &[]).unwrap();
    let (candidates, pick) = router.preview(&setting).unwrap();
    assert_eq!(candidates.len(), 3);
    let chosen = &setting.workers[pick.index].name;
    assert_ne!(*chosen, refuser);
    assert_eq!(choose(&router, "the same ").await.worker.name, *chosen);
    assert!(candidates.iter().any(|candidate| candidate.matched_blocks > 0), "what it holds is still known");
}

#[tokio::test(start_paused = true)]
async fn three_convictions_name_a_worker_misconfigured_and_dismissals_never_do() {
    let router = router(2, Policy::RoundRobin);
    let worker = Arc::clone(&router.fleet().all()[0]);
    for _ in 0..5 * CONVICTIONS {
        drop(refused(&router, &worker.name, UNAUTHORIZED).await);
        assert!(!worker.standing.refuses_something());
    }
    for _ in 0..CONVICTIONS {
        assert_eq!(worker.condition(), "ready");
        refused(&router, &worker.name, UNAUTHORIZED).await.upheld();
        tokio::time::advance(FIRST_PAUSE * 64).await;
    }
    assert_eq!(worker.condition(), "misconfigured");
    let mut choice = choose(&router, "a ").await;
    while choice.worker.name != worker.name {
        choice = choose(&router, "a ").await;
    }
    choice.ticket.first_token(router.now());
    assert_eq!(worker.condition(), "ready");
}

#[tokio::test(start_paused = true)]
async fn failures_count_for_the_breaker_where_others_served_the_request_and_not_where_they_failed_too() {
    let router = router(2, Policy::RoundRobin);
    let worker = Arc::clone(&router.fleet().all()[0]);
    for _ in 0..3 * CONSECUTIVE_FAILURES {
        drop(refused(&router, &worker.name, Charge::Failed).await);
    }
    assert!(worker.routable(), "it was the request");
    for i in 0..CONSECUTIVE_FAILURES {
        assert!(worker.routable());
        let accusation = refused(&router, &worker.name, Charge::Failed).await;
        if i % 2 == 0 {
            accusation.upheld();
        } else {
            accusation.undecided();
        }
        assert_eq!(worker.condition() == "ejected", i + 1 == CONSECUTIVE_FAILURES);
        tokio::time::advance(FIRST_PAUSE * 64).await;
    }
}

#[tokio::test(start_paused = true)]
async fn with_all_refusing_all_are_asked_and_whose_time_comes_first_before_the_others() {
    let router = router(3, Policy::LeastLoaded);
    let names: Vec<_> = router.fleet().all().iter().map(|worker| worker.name.clone()).collect();
    let after = |seconds| Charge::Busy { retry_after: Some(Duration::from_secs(seconds)) };
    drop(refused(&router, &names[0], after(9)).await);
    drop(refused(&router, &names[1], after(2)).await);
    drop(refused(&router, &names[2], after(5)).await);
    let first = choose(&router, "a ").await;
    assert_eq!(first.worker.name, names[1]);
    let mut tried = vec![first.worker.id];
    for name in [&names[2], &names[0]] {
        let next = router.choose(&request("a "), &tried).await.unwrap();
        assert_eq!(next.worker.name, *name);
        tried.push(next.worker.id);
    }
}
