//! The state machine, transition by transition, at exact times.

use proptest::prelude::*;

use super::*;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A worker that answered its first probe at second 100.
fn ready() -> Health {
    let mut health = Health::new(secs(100));
    health.on_probe(true, secs(100));
    health
}

/// A worker taken down by failed probes alone, and when.
fn silent() -> (Health, Duration) {
    let mut health = ready();
    for n in 1..=FAILED_PROBES {
        health.on_probe(false, secs(200 + u64::from(n)));
    }
    (health, secs(200 + u64::from(FAILED_PROBES)))
}

#[test]
fn joins_with_its_first_answered_probe() {
    let mut health = Health::new(secs(3));
    assert_eq!((health.state(), health.routable(), health.next_probe_at()), (State::Joining, false, secs(3)));
    health.on_probe(false, secs(3));
    assert_eq!(health.state(), State::Joining);
    health.on_probe(true, secs(4));
    assert_eq!((health.state(), health.routable()), (State::Ready, true));
    assert_eq!(health.next_probe_at(), secs(4) + PROBE_INTERVAL);
}

#[test]
fn a_connect_failure_takes_it_down_at_once_and_a_probe_brings_it_back() {
    let mut health = ready();
    health.on_success(secs(101));
    health.on_connect_failure(secs(101));
    assert_eq!((health.state(), health.routable()), (State::Down, false));
    assert_eq!(health.next_probe_at(), secs(101) + FIRST_BACKOFF);
    health.on_probe(true, secs(102));
    assert_eq!(health.state(), State::Ready);
}

#[test]
fn probes_of_a_worker_that_is_down_back_off_to_a_cap() {
    let mut health = ready();
    health.on_connect_failure(secs(101));
    let mut delays = Vec::new();
    for _ in 0..40 {
        let now = health.next_probe_at();
        health.on_probe(false, now);
        delays.push(health.next_probe_at().checked_sub(now).unwrap());
    }
    assert_eq!(delays[..3], [FIRST_BACKOFF * 2, FIRST_BACKOFF * 4, FIRST_BACKOFF * 8]);
    assert!(delays.windows(2).all(|pair| pair[0] <= pair[1]));
    assert_eq!(delays[39], MAX_BACKOFF);
    // Coming back resets it.
    health.on_probe(true, secs(900));
    health.on_connect_failure(secs(901));
    assert_eq!(health.next_probe_at(), secs(901) + FIRST_BACKOFF);
}

#[test]
fn where_nobody_is_reached_is_asked_as_often_as_ports_are_looked_at() {
    let mut health = ready();
    health.on_connect_failure(secs(101));
    for _ in 0..40 {
        let now = health.next_probe_at();
        health.on_unreached_probe(now);
        assert!(health.next_probe_at() > now && health.next_probe_at() <= now + LOOK_INTERVAL);
    }
    health.on_probe(true, secs(900));
    assert_eq!(health.state(), State::Ready);
    health.drain(secs(901));
    health.on_unreached_probe(secs(902));
    assert_eq!(health.next_probe_at(), Duration::MAX);
}

#[test]
fn many_failed_connections_at_a_time_count_as_one() {
    let mut health = ready();
    health.on_connect_failure(secs(101));
    let due = health.next_probe_at();
    for _ in 0..100 {
        health.on_connect_failure(secs(101));
    }
    assert_eq!(health.next_probe_at(), due);
}

#[test]
fn busy_is_not_dead() {
    let mut health = ready();
    for second in 101..200 {
        health.on_success(secs(second));
        health.on_probe(false, secs(second));
        health.on_probe(false, secs(second));
        health.on_probe(false, secs(second));
        assert!(health.routable());
    }
}

#[test]
fn only_several_failed_probes_of_a_silent_worker_take_it_down() {
    let mut health = ready();
    let silent_at = secs(100) + ALIVE_WINDOW;
    for _ in 1..FAILED_PROBES {
        health.on_probe(false, silent_at);
        assert!(health.routable());
    }
    health.on_probe(false, silent_at);
    assert_eq!(health.state(), State::Down);
    assert_eq!(health.next_probe_at(), silent_at + FIRST_BACKOFF);

    let mut health = ready();
    for _ in 0..10 {
        health.on_probe(false, silent_at.checked_sub(Duration::from_nanos(1)).unwrap());
    }
    assert!(health.routable());
}

#[test]
fn an_answered_probe_or_request_starts_the_count_again() {
    let mut health = ready();
    let silent_at = secs(200);
    health.on_probe(false, silent_at);
    health.on_probe(false, silent_at);
    health.on_probe(true, silent_at);
    health.on_probe(false, silent_at + ALIVE_WINDOW);
    health.on_probe(false, silent_at + ALIVE_WINDOW);
    assert!(health.routable());
}

#[test]
fn an_answer_brings_back_who_only_failed_its_probes_but_not_who_refuses_connections() {
    let (mut health, at) = silent();
    assert_eq!(health.state(), State::Down);
    health.on_success(at);
    assert_eq!(health.state(), State::Ready);

    let (mut health, at) = silent();
    health.on_connect_failure(at);
    health.on_success(at);
    assert_eq!(health.state(), State::Down);

    let mut health = ready();
    health.on_connect_failure(secs(101));
    health.on_success(secs(102));
    assert_eq!(health.state(), State::Down);
}

#[test]
fn draining_is_for_good() {
    let mut health = ready();
    health.drain(secs(101));
    health.on_probe(true, secs(102));
    health.on_success(secs(102));
    health.on_connect_failure(secs(102));
    assert_eq!((health.state(), health.routable()), (State::Draining, false));
    assert_eq!(health.next_probe_at(), Duration::MAX);
}

#[test]
fn a_paused_worker_is_not_chosen_and_comes_back_as_it_was() {
    let mut health = ready();
    assert!(health.pause(true, secs(101)) && !health.pause(true, secs(102)));
    assert_eq!((health.state(), health.routable()), (State::Paused, false));
    health.on_success(secs(103));
    health.on_probe(true, secs(104));
    assert_eq!(health.state(), State::Paused, "what it answers does not change what its list says");
    assert!(health.pause(false, secs(105)));
    assert_eq!((health.state(), health.routable()), (State::Ready, true));

    health.pause(true, secs(106));
    health.on_connect_failure(secs(107));
    assert_eq!(health.state(), State::Down);
    health.pause(false, secs(108));
    assert_eq!(health.next_probe_at(), secs(108), "its return is news worth a probe");
}

#[test]
fn an_engine_that_sleeps_is_not_chosen_whatever_its_probes_say_until_it_wakes_or_starts_anew() {
    let mut health = ready();
    assert!(health.sleep(true) && !health.sleep(true));
    health.on_probe(true, secs(101));
    assert_eq!((health.state(), health.routable()), (State::Paused, false));
    // Its list and its engine each have a say.
    health.pause(true, secs(102));
    assert!(health.sleep(false));
    assert_eq!(health.state(), State::Paused);
    health.pause(false, secs(103));
    assert_eq!(health.state(), State::Ready);

    health.sleep(true);
    health.on_connect_failure(secs(104));
    health.on_probe(true, secs(105));
    assert_eq!(health.state(), State::Ready, "another process is awake");
}

proptest! {
    /// Whatever happens, the next probe is due within the cap, and an answered one makes the worker ready.
    #[test]
    fn a_worker_can_always_come_back(events in prop::collection::vec((0_u8..8, 0_u64..30), 0..60)) {
        let mut now = Duration::ZERO;
        let mut health = Health::new(now);
        for (event, wait) in events {
            now += secs(wait);
            match event {
                0 => health.on_probe(true, now),
                1 => health.on_probe(false, now),
                2 => health.on_connect_failure(now),
                3 => drop(health.on_look(Look::Refused, now)),
                4 => drop(health.on_look(Look::Open, now)),
                5 => drop(health.on_look(Look::Unknown, now)),
                6 => health.on_probe_not_sent(now),
                _ => health.on_success(now),
            }
            prop_assert!(health.next_probe_at() <= now + MAX_BACKOFF);
            prop_assert!(health.next_look_at() <= now + LOOK_INTERVAL);
            prop_assert!(health.state() != State::Down || health.seems_dead_since().is_some_and(|then| then <= now));
            let mut probed = health.clone();
            probed.on_probe(true, now);
            prop_assert!(probed.routable());
            probed.on_look(Look::Open, now);
            prop_assert_eq!(probed.seems_dead_since(), None);
        }
    }
}

#[test]
fn who_comes_back_is_new_and_who_stays_is_not() {
    let mut health = Health::new(secs(0));
    health.on_probe(true, secs(10));
    health.on_probe(true, secs(15));
    assert_eq!(health.up_for(secs(40)), secs(30));
    health.on_connect_failure(secs(50));
    health.on_probe(true, secs(60));
    assert_eq!(health.up_for(secs(61)), secs(1));
}

/// Looks at a port as they fall due, closed from `closed_at` on. Returns when the worker went down.
fn looked_at(health: &mut Health, closed_at: Duration, until: Duration) -> Option<Duration> {
    loop {
        let now = health.next_look_at();
        if now > until {
            return None;
        }
        let look = if now >= closed_at { Look::Refused } else { Look::Open };
        if health.on_look(look, now) {
            return Some(now);
        }
    }
}

#[test]
fn a_closed_port_takes_an_idle_worker_down_within_two_seconds_whenever_it_closes() {
    for millis in (0..3_000).step_by(50) {
        let closed_at = secs(200) + Duration::from_millis(millis);
        let mut health = ready();
        let down = looked_at(&mut health, closed_at, secs(300)).unwrap();
        assert!(
            down.saturating_sub(closed_at) < secs(2),
            "closed {millis} ms later: {:?}",
            down.saturating_sub(closed_at)
        );
        assert_eq!(health.state(), State::Down);
        assert!(health.seems_dead_since().is_some_and(|then| closed_at <= then && then < down));
        assert!(health.refused(), "an answer over an old connection does not bring it back");
        assert_eq!(health.next_probe_at(), down + FIRST_BACKOFF);
    }
}

#[test]
fn a_listener_that_is_replaced_is_not_missed() {
    let mut health = ready();
    assert!(!health.on_look(Look::Refused, secs(110)));
    assert_eq!(health.next_look_at(), secs(110) + SECOND_LOOK);
    assert!(!health.on_look(Look::Open, secs(110) + SECOND_LOOK));
    assert!(!health.on_look(Look::Refused, secs(120)), "the count starts again");
    assert!(health.routable());
    assert_eq!(health.seems_dead_since(), None);
}

#[test]
fn a_port_that_does_not_answer_or_could_not_be_looked_at_says_nothing() {
    let mut health = ready();
    for second in 101..200 {
        assert!(!health.on_look(Look::Unknown, secs(second)));
        health.on_probe_not_sent(secs(second));
    }
    assert!(health.routable());
    assert_eq!((health.seems_dead_since(), health.next_probe_at()), (None, secs(199) + LOOK_INTERVAL));
    health.on_look(Look::Refused, secs(200));
    health.on_look(Look::Unknown, secs(200));
    assert!(health.on_look(Look::Refused, secs(201)), "nor does it contradict those before");
}

#[test]
fn an_answer_over_a_kept_connection_does_not_open_the_port() {
    let mut health = ready();
    health.on_look(Look::Refused, secs(110));
    health.on_probe(true, secs(110));
    health.on_success(secs(110));
    assert!(health.on_look(Look::Refused, secs(110) + SECOND_LOOK));
    assert_eq!(health.state(), State::Down);
}

#[test]
fn who_drains_behind_a_closed_port_seems_dead_until_it_opens() {
    let mut health = ready();
    health.drain(secs(110));
    assert!(health.wants_look());
    health.on_look(Look::Refused, secs(111));
    assert_eq!(health.seems_dead_since(), None, "one look is no proof");
    assert!(!health.on_look(Look::Refused, secs(111) + SECOND_LOOK));
    assert_eq!((health.state(), health.seems_dead_since()), (State::Draining, Some(secs(111))));
    health.on_look(Look::Refused, secs(115));
    assert_eq!(health.seems_dead_since(), Some(secs(111)), "since then, not since the last look");
    health.on_look(Look::Open, secs(116));
    assert_eq!(health.seems_dead_since(), None);
}

#[test]
fn who_lets_its_probes_fail_for_long_seems_dead_until_it_answers() {
    let (mut health, at) = silent();
    assert_eq!(health.seems_dead_since(), Some(at));
    assert!(!health.wants_look(), "its probes find out more");
    health.on_look(Look::Open, at);
    assert_eq!(health.seems_dead_since(), Some(at), "a port alone answers nothing");
    health.on_success(at);
    assert_eq!(health.seems_dead_since(), None);

    let mut health = ready();
    health.on_connect_failure(secs(101));
    assert_eq!(health.seems_dead_since(), Some(secs(101)));
    health.on_probe(true, secs(102));
    assert_eq!(health.seems_dead_since(), None);
}
