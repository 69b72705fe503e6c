//! What is learned of a model's requests and workers, and how fast it gives way.

use super::*;
use crate::{
    clock::Clock,
    config::{ScaleConfig, ScaleFile, WorkerConfig},
    fleet::{Fleet, ejection::Ejections},
};

#[test]
fn what_is_held_is_a_mean_and_grows_by_half_an_answer() {
    let mut state = PoolState::new(&ScaleConfig::try_from(&ScaleFile::default()).unwrap().default);
    for tokens in [100; 400] {
        state.learn_answer(tokens);
    }
    (state.running, state.held_tokens) = (10, 5_000.0);
    for t in 0..600 {
        state.hold(Duration::from_secs(t), 1.0);
    }
    let (running, tokens) = state.hold(Duration::from_secs(600), 1.0);
    assert!((running - 10.0).abs() < 1e-3 && (tokens - 5_500.0).abs() < 1.0, "{running} {tokens}");
    // A moment without anything is a moment.
    (state.running, state.held_tokens) = (0, 0.0);
    let (running, tokens) = state.hold(Duration::from_secs(601), 1.0);
    assert!(running > 9.0 && tokens > 5_000.0, "{running} {tokens}");
    assert_eq!(state.hold(Duration::from_secs(632), 1.0), (0.0, 0.0), "and a window of them is nothing");
}

#[test]
fn a_worker_that_looks_slow_under_load_is_believed_slowly() {
    let mut state = PoolState::new(&ScaleConfig::try_from(&ScaleFile::default()).unwrap().default);
    let s = Duration::from_secs;
    state.take_rate(s(0), Some(1_000.0), (false, None));
    assert_eq!(state.rate, 1_000.0, "a measurement replaces the guess at once");
    state.take_rate(s(1), Some(4_000.0), (false, None));
    assert_eq!(state.rate, 4_000.0);
    state.take_rate(s(31), Some(2_000.0), (false, None));
    assert!((3_250.0..3_400.0).contains(&state.rate), "{}", state.rate);
    for t in 32..1_500 {
        state.take_rate(s(t), Some(2_000.0), (false, None));
    }
    assert!((1_999.0..2_050.0).contains(&state.rate), "{}", state.rate);
    state.take_rate(s(1_500), None, (false, None));
    assert!(state.rate < 2_050.0);
}

#[test]
fn what_full_workers_compute_is_kept_and_gives_way_over_an_hour() {
    let mut state = PoolState::new(&ScaleConfig::try_from(&ScaleFile::default()).unwrap().default);
    let s = Duration::from_secs;
    state.take_rate(s(0), Some(4_000.0), (false, None));
    state.take_rate(s(30), Some(3_500.0), (true, Some(3_000.0)));
    assert_eq!(state.rate, 3_000.0);
    state.take_rate(s(31), Some(3_500.0), (true, None));
    state.take_rate(s(60), Some(3_500.0), (true, Some(2_900.0)));
    assert_eq!(state.rate, 2_970.0);
    for t in 61..=360 {
        state.take_rate(s(t), Some(4_000.0), (false, None));
    }
    assert!(
        state.rate < 3_070.0,
        "five minutes with little to do say little about full ones: {}",
        state.rate
    );
    for t in 361..=15_000 {
        state.take_rate(s(t), Some(4_000.0), (false, None));
    }
    assert!(state.rate > 3_900.0, "{}", state.rate);
}

#[test]
fn all_engines_behind_an_address_are_one_worker_to_a_sum() {
    let sum = |engines: u32| {
        let address = |host: u32| format!("http://10.0.0.{host}:8000").parse::<WorkerConfig>().unwrap();
        let configs: Vec<_> = (1..=3).flat_map(|host| address(host).split(engines).unwrap()).collect();
        let fleet = Fleet::new(&configs, Duration::ZERO, &Ejections::new(Clock::start(), None));
        let workers = fleet.all();
        // What it can in all is the same, by however many engines.
        for worker in workers.iter().filter(|worker| !worker.name.starts_with("10.0.0.3")) {
            worker.with_health(|health| health.on_probe(true, Duration::ZERO));
            worker.residency.capacity.lock().tell(Some(u64::from(8_000 / engines)));
            for _ in 0..64 {
                worker.rate.lock().observe(4_000, f64::from(engines));
            }
        }
        let mut state = PoolState::new(&ScaleConfig::try_from(&ScaleFile::default()).unwrap().default);
        state.sum(Duration::from_secs(1), &workers.iter().collect::<Vec<_>>()).0
    };
    let (one, four) = (sum(1), sum(4));
    assert_eq!((one.ready, one.starting, one.kv_tokens_per_worker), (2, 1, Some(8_000.0)));
    assert!((3_999.0..4_001.0).contains(&one.prefill_tokens_per_s), "{}", one.prefill_tokens_per_s);
    let figures = |seen: &Seen| (seen.ready, seen.starting, seen.kv_tokens_per_worker);
    assert_eq!(figures(&four), figures(&one));
    let ratio = four.prefill_tokens_per_s / one.prefill_tokens_per_s;
    assert!((0.99..1.01).contains(&ratio), "{ratio}");
}
