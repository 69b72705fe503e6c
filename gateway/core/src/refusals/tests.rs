//! Pauses, trials, convictions: at exact times, and of any history.

use proptest::prelude::*;

use super::*;

const CHAT: u64 = 1;
const EMBED: u64 = 2;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Refused at once, at this time.
fn refuse(refusals: &mut Refusals, at: Duration) -> Mark {
    refusals.begin(CHAT, at);
    refusals.refused(CHAT, at, at, None)
}

#[test]
fn pauses_double_and_one_request_tries_it_after_each() {
    let (mut refusals, mut now) = (Refusals::default(), ms(1_000));
    for pause in [50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 15_000, 15_000] {
        assert_eq!(refusals.stance(CHAT, now), Stance::Willing);
        refuse(&mut refusals, now);
        assert_eq!(refusals.stance(CHAT, now), Stance::Refusing(now + ms(pause)));
        assert_eq!(refusals.stance(EMBED, now), Stance::Willing, "another kind is none of its business");
        now += ms(pause);
    }
    refusals.begin(CHAT, now);
    assert_eq!(refusals.stance(CHAT, now), Stance::OnTrial);
    assert!(!refusals.served(CHAT, now));
    assert!(refusals.is_empty());
    refuse(&mut refusals, now);
    assert_eq!(refusals.stance(CHAT, now), Stance::Refusing(now + FIRST_PAUSE), "it begins anew");
}

#[test]
fn a_burst_that_was_on_its_way_is_one_refusal() {
    let mut refusals = Refusals::default();
    for i in 0..20 {
        refusals.refused(CHAT, ms(100), ms(103 + i), None);
    }
    assert_eq!(refusals.stance(CHAT, ms(123)), Stance::Refusing(ms(153)));
    // Nor does an answer to one of them say that it takes more.
    refusals.served(CHAT, ms(100));
    assert_eq!(refusals.stance(CHAT, ms(124)), Stance::Refusing(ms(153)));
    // One that was sent in spite of it was taken.
    refusals.served(CHAT, ms(125));
    assert_eq!(refusals.stance(CHAT, ms(126)), Stance::Willing);
}

#[test]
fn retry_after_is_heeded_within_a_bound() {
    for (said, heeded) in
        [(0, 50), (30, 50), (1_000, 1_000), (7_000, 7_000), (60_000, 60_000), (3_600_000, 60_000)]
    {
        let mut refusals = Refusals::default();
        refusals.refused(CHAT, ms(10), ms(20), Some(ms(said)));
        assert_eq!(refusals.stance(CHAT, ms(20)), Stance::Refusing(ms(20 + heeded)), "{said}");
    }
    // Of many at once the longest.
    let mut refusals = Refusals::default();
    refusals.refused(CHAT, ms(10), ms(20), None);
    refusals.refused(CHAT, ms(10), ms(21), Some(ms(2_000)));
    refusals.refused(CHAT, ms(10), ms(22), Some(ms(1_000)));
    assert_eq!(refusals.stance(CHAT, ms(22)), Stance::Refusing(ms(2_021)));
}

#[test]
fn a_trial_that_is_not_refused_in_twice_the_time_that_a_refusal_took_makes_room_for_the_next() {
    for (took, patience) in [(0, 100), (40, 100), (300, 600), (30_000, 10_000)] {
        let mut refusals = Refusals::default();
        refusals.refused(CHAT, ms(0), ms(took), None);
        let due = ms(took + 50);
        refusals.begin(CHAT, due);
        assert_eq!(refusals.stance(CHAT, due + ms(patience - 1)), Stance::OnTrial, "{took}");
        assert_eq!(refusals.stance(CHAT, due + ms(patience)), Stance::Willing, "{took}");
        refusals.begin(CHAT, due + ms(patience));
        assert_eq!(refusals.stance(CHAT, due + ms(patience + 1)), Stance::OnTrial, "{took}");
    }
}

#[test]
fn what_was_the_request_s_own_fault_leaves_nothing_behind() {
    let mut refusals = Refusals::default();
    let mark = refuse(&mut refusals, ms(100));
    refusals.dismiss(mark, ms(110));
    assert!(refusals.is_empty());
    // A trial's fault: the next one may try at once, and the pause does not grow.
    refuse(&mut refusals, ms(200));
    let mark = refuse(&mut refusals, ms(250));
    refusals.dismiss(mark, ms(260));
    assert_eq!(refusals.stance(CHAT, ms(260)), Stance::Willing);
    refuse(&mut refusals, ms(300));
    assert_eq!(refusals.stance(CHAT, ms(300)), Stance::Refusing(ms(400)));
    // What was dismissed does not come back, and an old mark says nothing of another time.
    refusals.dismiss(mark, ms(310));
    assert_eq!(refusals.stance(CHAT, ms(310)), Stance::Refusing(ms(400)));
    refusals.served(CHAT, ms(400));
    refuse(&mut refusals, ms(500));
    refusals.dismiss(mark, ms(501));
    assert!(!refusals.convict(mark));
    assert_eq!(refusals.stance(CHAT, ms(501)), Stance::Refusing(ms(550)));
}

#[test]
fn three_convictions_without_a_good_answer_make_a_misconfigured_worker_and_one_good_answer_ends_it() {
    let mut refusals = Refusals::default();
    let marks = [100, 150, 250].map(|at| refuse(&mut refusals, ms(at)));
    assert_eq!(marks.map(|mark| refusals.convict(mark)), [false, false, true]);
    let last = refuse(&mut refusals, ms(450));
    assert!(!refusals.convict(last), "it is said once");
    assert!(refusals.misconfigured(None) && refusals.misconfigured(Some(ms(99))));
    assert!(!refusals.misconfigured(Some(ms(300))), "it serves others");
    assert!(refusals.served(CHAT, ms(850)));
    assert!(!refusals.misconfigured(None) && refusals.is_empty());
}

#[test]
fn a_burst_of_refusals_is_one_case() {
    let mut refusals = Refusals::default();
    let marks: Vec<_> = (0..10).map(|_| refusals.refused(CHAT, ms(100), ms(101), None)).collect();
    assert!(!marks.into_iter().any(|mark| refusals.convict(mark)));
    assert!(!refusals.misconfigured(None));
}

#[test]
fn kinds_are_bounded_and_the_oldest_goes() {
    let mut refusals = Refusals::default();
    for kind in 0..10 * KINDS_MAX as u64 {
        refusals.refused(kind, ms(kind), ms(kind), Some(RETRY_AFTER_MAX));
        assert!(refusals.kinds.len() <= KINDS_MAX);
        assert_ne!(refusals.stance(kind, ms(kind)), Stance::Willing);
    }
    assert_eq!(refusals.stance(0, ms(400)), Stance::Willing);
}

#[test]
fn where_all_refuse_those_are_asked_whose_pause_ends_first() {
    let (soon, late) = (Stance::Refusing(ms(1_000)), Stance::Refusing(ms(1_101)));
    let (willing, trial) = (Stance::Willing, Stance::OnTrial);
    let asked = |stances: &[Stance]| {
        let eligible = Eligible::among(stances.iter().copied());
        stances.iter().map(|stance| eligible.has(*stance)).collect::<Vec<_>>()
    };
    assert_eq!(asked(&[late, willing, trial, willing]), [false, true, false, true]);
    assert_eq!(asked(&[late, trial, soon]), [false, true, false]);
    assert_eq!(asked(&[late, soon]), [false, true]);
    assert_eq!(asked(&[Stance::Refusing(ms(1_100)), soon]), [true, true]);
    assert_eq!(asked(&[late]), [true]);
    assert_eq!(asked(&[]), [false; 0]);
}

proptest! {
    /// Whatever comes when, and however it is answered: somebody is always asked, and who is asked is never
    /// worse off than who is not.
    #[test]
    fn somebody_is_always_asked(stances in prop::collection::vec((0_u8..3, 0_u64..500), 1..12)) {
        let stances: Vec<_> = stances.into_iter().map(|(which, at)| match which {
            0 => Stance::Willing,
            1 => Stance::OnTrial,
            _ => Stance::Refusing(ms(at)),
        }).collect();
        let eligible = Eligible::among(stances.iter().copied());
        prop_assert!(stances.iter().any(|stance| eligible.has(*stance)));
        if stances.contains(&Stance::Willing) {
            prop_assert!(stances.iter().all(|stance| eligible.has(*stance) == (*stance == Stance::Willing)));
        }
    }

    /// A worker that refuses until some moment and serves from then on, asked whenever it may be: how long it
    /// is left alone, how often it is asked in vain, and how soon it is back.
    #[test]
    fn a_worker_is_left_alone_for_no_longer_than_it_has_refused_and_asked_seldom(
        gaps_us in prop::collection::vec(0_u64..60_000, 200..2_000),
        refuses_ms in 1_u64..20_000,
        took_us in 0_u64..5_000,
    ) {
        let took = Duration::from_micros(took_us);
        let (mut refusals, mut now) = (Refusals::default(), Duration::ZERO);
        let (mut first, mut in_vain, mut away) = (None, 0_u32, Duration::ZERO);
        for gap in gaps_us {
            now += Duration::from_micros(gap);
            if refusals.stance(CHAT, now) != Stance::Willing {
                continue;
            }
            refusals.begin(CHAT, now);
            if now >= ms(refuses_ms) {
                now += Duration::from_micros(1);
                refusals.served(CHAT, now);
                prop_assert!(refusals.is_empty(), "it is back");
                continue;
            }
            refusals.refused(CHAT, now, now + took, None);
            now += took;
            let began = *first.get_or_insert(now);
            in_vain += 1;
            let Stance::Refusing(until) = refusals.stance(CHAT, now) else { panic!("just refused") };
            prop_assert!(until <= now + FIRST_PAUSE + now.saturating_sub(began), "{until:?} at {now:?}");
            prop_assert!(until <= now + MAX_PAUSE);
            away = away.max(until);
        }
        let most = 2 + (refuses_ms as f64 / 50.0 + 1.0).log2() as u32 + (refuses_ms / 15_000) as u32;
        prop_assert!(in_vain <= most, "{in_vain} in vain in {refuses_ms} ms");
    }

    /// Any calls in any order: times stay within bounds and nothing panics.
    #[test]
    fn any_history_leaves_it_alone_within_bounds(
        steps in prop::collection::vec((0_u64..300, 0_u8..6, 0_u64..4, 0_u64..100_000), 0..300),
    ) {
        let (mut refusals, mut now) = (Refusals::default(), ms(1_000));
        let mut marks = Vec::new();
        for (gap, what, kind, some) in steps {
            now += ms(gap);
            let sent = now.saturating_sub(ms(some % 900));
            match what {
                0 => refusals.begin(kind, now),
                1 => marks.push(refusals.refused(kind, sent, now, None)),
                2 => marks.push(refusals.refused(kind, sent, now, Some(ms(some)))),
                3 => drop(refusals.served(kind, sent)),
                4 => {
                    if let Some(mark) = marks.pop() {
                        refusals.dismiss(mark, now);
                    }
                }
                _ => drop(marks.first().map(|mark| refusals.convict(*mark))),
            }
            for kind in 0..4 {
                if let Stance::Refusing(until) = refusals.stance(kind, now) {
                    prop_assert!(until > now && until <= now + RETRY_AFTER_MAX);
                }
            }
        }
    }
}
