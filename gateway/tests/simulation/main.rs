//! The whole gateway in a simulated network, one thread and one seed a run: clients leave, workers crash,
//! hang, fail and break off, links lose and hold what is sent. What must hold of every run is in
//! `properties.rs`. Real sockets and processes are what `tests/` has. `SEEDS=1000 cargo test -p keyway
//! --features simulation --test simulation` runs more seeds, `SEED=7` one.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

mod client;
mod log;
mod properties;
mod schedule;
mod worker;
mod world;

use std::{ops::Range, time::Duration};

use self::{
    log::Event,
    properties::{
        all_are_served, answers_are_whole_or_say_so, begun_at_most, is_in_good_standing,
        nothing_is_begun_behind_an_answer, nothing_is_in_flight, refusals, who_left_is_worked_for_no_longer,
    },
    schedule::{Act, Mood, Plan, Schedule},
    world::{PLACES, REQUEST_TIMEOUT, World},
};

/// Streams end with their worker.
const NO_RESUME: &str = "[resume]\nenabled = false\n";
/// Streams outlive their worker, by their text.
const RESUME: &str = "[resume]\ncontinue_text = true\n";
/// Attempts of a request, and workers asked to go on with a stream.
const ATTEMPTS: usize = 3;
/// Times that one attempt may be begun: once more where a kept connection ends under it.
const SENDS: usize = 2;

/// The seeds of a test.
fn seeds(count: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SEEDS").unwrap_or(count),
    }
}

/// Plays what a seed means.
fn play(seed: u64, toml: &str) -> (World, Schedule) {
    let schedule = Schedule::draw(seed);
    let mut world = World::new(seed, schedule.latency, toml, REQUEST_TIMEOUT);
    world.play(&schedule);
    (world, schedule)
}

/// What must hold when all clients are gone.
fn nothing_is_left(world: &mut World) {
    let idle =
        world.run_while_not(Duration::from_secs(10), |world| world.open().iter().all(|open| *open == 0));
    assert!(idle, "workers still work: {:?}", world.open());
    // The autoscaler's gauges follow once a second.
    world.run_until(world.now() + Duration::from_secs(2));
    let metrics = world.page("/metrics");
    nothing_is_in_flight(&metrics);
}

#[test]
fn streams_end_with_their_worker_and_nothing_is_left() {
    let mut aborted = 0;
    for seed in seeds(64) {
        eprintln!("seed {seed}");
        let (mut world, schedule) = play(seed, NO_RESUME);
        nothing_is_left(&mut world);
        let lines = world.log().read();
        answers_are_whole_or_say_so(&schedule, &lines);
        nothing_is_begun_behind_an_answer(&lines);
        begun_at_most(SENDS * ATTEMPTS, &lines);
        aborted += who_left_is_worked_for_no_longer(&schedule, &lines);
    }
    assert!(aborted > 0, "no client left while a worker worked for it");
}

#[test]
fn streams_outlive_their_worker_and_nothing_is_left() {
    let mut continued = 0;
    for seed in seeds(64) {
        eprintln!("seed {seed}");
        let (mut world, schedule) = play(seed, RESUME);
        nothing_is_left(&mut world);
        let lines = world.log().read();
        answers_are_whole_or_say_so(&schedule, &lines);
        begun_at_most(SENDS * 2 * ATTEMPTS, &lines);
        who_left_is_worked_for_no_longer(&schedule, &lines);
        let goes_on = |(_, event): &&_| matches!(event, Event::Begun { from: 1.., .. });
        continued += lines.iter().filter(goes_on).count();
    }
    assert!(continued > 0, "no stream was continued");
}

/// The sum of a family's series.
fn sum(metrics: &str, name: &str) -> f64 {
    let series = metrics.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[test]
fn connections_that_close_as_they_like_cost_no_client_an_answer_and_no_worker_its_place() {
    let (mut dropped, mut races) = (0, 0.0);
    for seed in seeds(64) {
        eprintln!("seed {seed}");
        let schedule = Schedule::of_requests(seed);
        let mut world = World::new(seed, schedule.latency, NO_RESUME, REQUEST_TIMEOUT);
        (0..schedule::WORKERS).for_each(|worker| world.act(Act::Mood(worker, Mood::Fickle)));
        world.play(&schedule);
        nothing_is_left(&mut world);
        let lines = world.log().read();
        answers_are_whole_or_say_so(&schedule, &lines);
        let served = lines.iter().filter(|(_, event)| matches!(event, Event::Answered { seen, .. } if seen.status == 200 && seen.errors == 0 && seen.whole));
        assert_eq!(served.count(), schedule.plans.len(), "seed {seed}: a client saw a close");
        let metrics = world.page("/metrics");
        assert_eq!(sum(&metrics, "keyway_worker_ready"), schedule::WORKERS as f64, "seed {seed}");
        let blamed =
            ["keyway_worker_ejections_total", "keyway_retries_total"].map(|name| sum(&metrics, name));
        assert_eq!(blamed, [0.0; 2], "seed {seed}");
        races += sum(&metrics, "keyway_connection_races_total");
        dropped += world.dropped();
    }
    assert!(dropped > 0 && races > 0.0, "{dropped} connections closed, {races} under a request");
}

#[test]
fn no_client_sees_a_refusal_while_a_good_worker_is_free_which_is_never_out() {
    let (mut refused, mut asked) = (0, 0);
    for seed in seeds(64) {
        eprintln!("seed {seed}");
        let (schedule, good) = Schedule::refusals(seed);
        let mut world = World::new(seed, schedule.latency, RESUME, REQUEST_TIMEOUT);
        world.play(&schedule);
        nothing_is_left(&mut world);
        let lines = world.log().read();
        answers_are_whole_or_say_so(&schedule, &lines);
        all_are_served(&lines);
        begun_at_most(1, &lines);
        is_in_good_standing(good, &world.page("/metrics"));
        refused += refusals(&lines);
        asked += schedule.plans.len();
    }
    assert!(refused > 0, "no worker refused: the test proves nothing");
    assert!(refused < asked / 3, "{refused} refusals for {asked} requests");
}

#[test]
fn no_client_sees_a_stream_that_ends_before_its_time_while_another_worker_can_go_on() {
    let mut ended = 0;
    for seed in seeds(64) {
        eprintln!("seed {seed}");
        let (schedule, _) = Schedule::endings(seed);
        let mut world = World::new(seed, schedule.latency, RESUME, REQUEST_TIMEOUT);
        world.play(&schedule);
        nothing_is_left(&mut world);
        let lines = world.log().read();
        answers_are_whole_or_say_so(&schedule, &lines);
        all_are_served(&lines);
        begun_at_most(2 * ATTEMPTS, &lines);
        ended += lines.iter().filter(|(_, event)| matches!(event, Event::Ended { .. })).count();
    }
    assert!(ended > 0, "no stream ended before its time: the test proves nothing");
}

#[test]
fn what_is_silent_at_a_worker_that_was_told_to_end_goes_on_elsewhere() {
    let (mut silent, mut begun) = (0, 0);
    for seed in seeds(16) {
        eprintln!("seed {seed}");
        let schedule = Schedule::leavings(seed);
        // A minute for the whole: no clock of the answer's own runs out before it is looked after.
        let mut world = World::new(seed, schedule.latency, RESUME, Duration::from_secs(60));
        world.play(&schedule);
        nothing_is_left(&mut world);
        let lines = world.log().read();
        all_are_served(&lines);
        silent += lines.iter().filter(|(_, event)| matches!(event, Event::Aborted { .. })).count();
        begun += lines.iter().filter(|(_, event)| matches!(event, Event::Begun { .. })).count();
    }
    assert!(silent > 0, "of {begun} answers none fell silent: the test proves nothing");
}

#[test]
fn all_places_are_back_after_any_schedule() {
    for seed in seeds(4) {
        eprintln!("seed {seed}");
        let (mut world, _) = play(seed, NO_RESUME);
        nothing_is_left(&mut world);
        let ready = |world: &mut World| {
            let metrics = world.page("/metrics");
            let is_ready = |line: &&str| line.starts_with("keyway_worker_ready{") && line.ends_with(" 1");
            metrics.lines().filter(is_ready).count() == schedule::WORKERS
        };
        assert!(world.run_while_not(Duration::from_secs(60), ready), "workers do not come back");
        let places = PLACES as u32;
        let now = world.now();
        let plan = |id: u32, after_ms| Plan {
            id,
            host: 0,
            at: now + Duration::from_millis(after_ms),
            http2: false,
            stream: true,
            tokens: 30,
            pace: Duration::from_millis(20),
            patience: None,
        };
        // One after the other, so that there is a head of each when one more comes, and none has ended.
        let first = 1_000;
        // Of three addresses, each within its share of what is free when it comes.
        let crowds = [("crowd", 0..places - 10, 0), ("second", places - 10..places - 5, 100)];
        for (name, numbers, after_ms) in crowds {
            world.clients(name, numbers.map(|number| plan(first + number, after_ms)).collect());
        }
        let third =
            (places - 5..=places).map(|number| plan(first + number, if number < places { 200 } else { 300 }));
        let later = plan(first + places + 1, 3_000);
        world.clients("third", third.chain([later]).collect());
        world.run_to_the_end();
        let lines = world.log().read();
        let status = |id: u32| {
            lines.iter().find_map(|(_, event)| match event {
                Event::Answered { id: answered, seen } if *answered == id => Some(seen.status),
                _ => None,
            })
        };
        for number in 0..=places + 1 {
            let expected = if number == places { 503 } else { 200 };
            assert_eq!(status(first + number), Some(expected), "request {number} of {places} places");
        }
        nothing_is_left(&mut world);
    }
}

/// A stream of so many tokens, 50 ms apart.
fn stream(id: u32, at_ms: u64, tokens: u32) -> Plan {
    Plan {
        id,
        host: 0,
        at: Duration::from_millis(at_ms),
        http2: false,
        stream: true,
        tokens,
        pace: Duration::from_millis(50),
        patience: None,
    }
}

/// A cluster whose workers answer `/health` after 30 s, and whether all of them are ready after a minute.
fn are_ready_with_slow_health(streams: Vec<Plan>) -> bool {
    let mut world = World::new(1, Duration::from_millis(5), NO_RESUME, Duration::from_secs(120));
    world.run_until(Duration::from_secs(1));
    (0..schedule::WORKERS).for_each(|worker| world.act(Act::SlowHealth(worker, true)));
    world.clients("clients-0", streams);
    world.run_until(Duration::from_secs(60));
    let metrics = world.page("/metrics");
    let ready: Vec<_> = metrics.lines().filter(|line| line.starts_with("keyway_worker_ready{")).collect();
    let begun = |event: &Event| matches!(event, Event::Begun { .. });
    let begun = world.log().read().iter().filter(|(_, event)| begun(event)).count();
    eprintln!("{begun} answers begun, {ready:?}");
    ready.iter().all(|line| line.ends_with(" 1"))
}

#[test]
fn a_worker_that_streams_but_answers_health_late_stays_in_rotation() {
    let short = (0..236).map(|id| stream(id, 1_000 + 250 * u64::from(id), 20)).collect();
    assert!(are_ready_with_slow_health(short), "a busy worker was taken for dead");
    let all_along = (0..12).map(|id| stream(id, 1_000, 1_300)).collect();
    assert!(
        are_ready_with_slow_health(all_along),
        "a worker was taken for dead while it said token after token"
    );
    assert!(
        !are_ready_with_slow_health(Vec::new()),
        "silent workers with slow health are not down: the test proves nothing"
    );
}

#[test]
fn a_seed_means_one_history() {
    for seed in seeds(8) {
        for toml in [NO_RESUME, RESUME] {
            let history = || play(seed, toml).0.log().read();
            let (first, second) = (history(), history());
            let differs = first.iter().zip(&second).find(|(one, other)| one != other);
            assert_eq!(differs, None, "seed {seed}");
            assert_eq!(first.len(), second.len(), "seed {seed}");
        }
    }
}
