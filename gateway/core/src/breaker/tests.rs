//! The breaker's transitions at exact times.

use proptest::prelude::*;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Opened at `at` by failures in a row.
fn opened(at: Duration) -> Breaker {
    let mut breaker = Breaker::default();
    for i in 1..=CONSECUTIVE_FAILURES {
        assert_eq!(breaker.end(Verdict::Bad, false, true, at), i == CONSECUTIVE_FAILURES);
    }
    breaker
}

#[test]
fn it_opens_after_failures_in_a_row_and_a_good_answer_between_starts_anew() {
    let mut breaker = Breaker::default();
    for _ in 0..3 {
        for _ in 1..CONSECUTIVE_FAILURES {
            assert!(!breaker.end(Verdict::Bad, false, true, ms(0)));
        }
        assert!(!breaker.end(Verdict::Good, false, true, ms(0)));
    }
    assert!(opened(ms(0)).is_open());
}

#[test]
fn one_trial_at_a_time_and_pauses_that_double() {
    let mut breaker = opened(ms(0));
    let mut now = ms(0);
    for pause in [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000] {
        assert!(!breaker.admits(now + ms(pause - 1)), "closed for {pause} ms");
        now += ms(pause);
        assert!(breaker.admits(now) && breaker.begin(now), "the trial after {pause} ms");
        assert!(!breaker.admits(now), "no second one");
        assert!(!breaker.begin(now), "what was on its way is no trial");
        assert!(breaker.end(Verdict::Bad, true, true, now));
    }
    now += MAX_PAUSE;
    assert!(breaker.begin(now));
    breaker.end(Verdict::Good, true, true, now);
    assert!(!breaker.is_open());
    // The next pause is the first again.
    for _ in 0..CONSECUTIVE_FAILURES {
        breaker.end(Verdict::Bad, false, true, now);
    }
    let nearly = FIRST_PAUSE.saturating_sub(ms(1));
    assert!(breaker.admits(now + FIRST_PAUSE) && !breaker.admits(now + nearly));
}

#[test]
fn answers_that_were_on_their_way_decide_no_trial() {
    let mut breaker = opened(ms(0));
    assert!(breaker.begin(ms(1_000)));
    breaker.end(Verdict::Good, false, true, ms(1_001));
    assert!(breaker.is_open());
    breaker.end(Verdict::Bad, false, true, ms(1_001));
    assert!(!breaker.admits(ms(1_002)), "the trial goes on");
    breaker.end(Verdict::Good, true, true, ms(1_003));
    assert!(!breaker.is_open());
}

#[test]
fn a_trial_that_says_nothing_makes_room_for_another() {
    let mut breaker = opened(ms(0));
    assert!(breaker.begin(ms(1_000)));
    breaker.abandon(true, ms(1_500));
    assert!(breaker.begin(ms(1_500)), "its client left");
    assert!(!breaker.admits(ms(11_499)));
    assert!(breaker.begin(ms(11_500)), "it takes too long");
}

#[test]
fn the_share_of_failures_counts_over_ten_seconds_and_from_some_answers_on() {
    // Every other answer fails: never many in a row.
    let answer = |i: u32| if i.is_multiple_of(2) { Verdict::Good } else { Verdict::Bad };
    let mut breaker = Breaker::default();
    let opened: Vec<u32> = (0..20).filter(|&i| breaker.end(answer(i), false, true, ms(0))).collect();
    assert_eq!(opened, [19], "with the twentieth");

    // The same, spread over so long that never twenty are seen at once.
    let mut breaker = Breaker::default();
    assert!((0..100).all(|i| !breaker.end(answer(i), false, true, ms(600 * u64::from(i)))));

    // Four of five good ones: never.
    let mut breaker = Breaker::default();
    let answer = |i: u32| if i.is_multiple_of(5) { Verdict::Bad } else { Verdict::Good };
    assert!((0..1_000).all(|i| !breaker.end(answer(i), false, true, ms(u64::from(i)))));
}

#[test]
fn a_worker_that_the_fleet_needs_stays_in() {
    let mut breaker = Breaker::default();
    assert!((0..1_000).all(|i| !breaker.end(Verdict::Bad, false, false, ms(i))));
    assert!(breaker.admits(ms(1_000)));
    // Of ten workers nine of which are bad, five go.
    let mut ejected = 0;
    while may_eject(ejected, 10) {
        ejected += 1;
    }
    assert_eq!(ejected, 5);
    assert!(!may_eject(0, 1) && may_eject(0, 2) && !may_eject(1, 3));
}

proptest! {
    #[test]
    fn whatever_happens_a_pause_ends(
        steps in prop::collection::vec((0_u64..20_000, 0_u8..4, any::<bool>()), 0..200),
    ) {
        let mut breaker = Breaker::default();
        let (mut now, mut trial) = (ms(0), false);
        for (wait, step, may_eject) in steps {
            now += ms(wait);
            match step {
                0 => trial = breaker.begin(now),
                1 => drop(breaker.end(Verdict::Good, trial, may_eject, now)),
                2 => drop(breaker.end(Verdict::Bad, trial, may_eject, now)),
                _ => breaker.abandon(trial, now),
            }
            prop_assert!(breaker.admits(now + MAX_PAUSE), "{:?}", breaker);
        }
    }
}
