//! The sum term by term, and the whole loop over a fleet that is a formula: work comes, is computed at a
//! rate, and workers take a while to start.

use proptest::prelude::*;

use super::*;

const RATE: f64 = 1_000.0;
/// Tokens of a request.
const REQUEST: f64 = 50.0;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn rules() -> ScaleRules {
    ScaleRules { min: 0, utilisation: 0.75, ..ScaleRules::default() }
}

fn seen() -> Seen {
    Seen { prefill_tokens_per_s: RATE, ready: 1, ..Seen::default() }
}

#[test]
fn the_terms() {
    let rules = ScaleRules { running_per_worker: Some(20.0), ..rules() };
    let terms = Terms::of(
        &rules,
        &Seen {
            uncached_tokens_per_s: 3_000.0,
            mean_uncached_tokens: 500.0,
            backlog_tokens: 30_000.0,
            running: 50,
            running_mean: 50.0,
            kv_tokens: 64_000.0,
            kv_tokens_per_worker: Some(20_000.0),
            ..seen()
        },
    );
    assert_eq!((terms.prefill, terms.decode, terms.kv), (4.0, 2.5, 4.0));
    // Three for what comes, and one for what one computes in the half of a start, 30 s.
    assert!((terms.backlog - 4.0).abs() < 1e-9);
    assert_eq!(terms.steady(), 4.0);
}

#[test]
fn what_runs_because_work_waits_asks_for_nothing() {
    let rules = ScaleRules { running_per_worker: Some(10.0), ..rules() };
    let full = Seen {
        uncached_tokens_per_s: 1_500.0,
        running: 40,
        running_mean: 40.0,
        kv_tokens: 40_000.0,
        kv_tokens_per_worker: Some(10_000.0),
        ..seen()
    };
    let of = |flow, backlog_tokens| {
        let terms = Terms::of(&rules, &Seen { backlog_tokens, flow, ..full });
        (terms.decode, terms.kv)
    };
    assert_eq!(of(20.0, 1_000.0), (4.0, 5.0), "nothing to catch up with");
    assert_eq!(of(20.0, 9_000.0), (2.0, 2.5));
    assert_eq!(of(80.0, 9_000.0), (4.0, 5.0), "more would run if it could");
    let caught_up = Seen { backlog_tokens: 1_000.0, flow: 20.0, was_behind: true, ..full };
    assert_eq!(Terms::of(&rules, &caught_up).decode, 2.0, "what the backlog left still runs");
    assert_eq!(of(f64::INFINITY, 9_000.0), (4.0, 5.0), "nothing has ended yet");
}

#[test]
fn a_backlog_adds_no_more_than_the_catch_up() {
    let terms = Terms { prefill: 5.0, backlog: 100.0, ..Terms::default() };
    assert_eq!(terms.need(0.5, true), 7.0, "whole workers of 7.5");
    assert_eq!(Terms { backlog: 6.9, ..terms }.need(0.5, true), 6.0);
    assert_eq!(Terms { prefill: 5.6, backlog: 5.9, ..terms }.need(0.5, true), 5.6);
    assert_eq!(Terms { backlog: 1.0, ..terms }.need(0.2, true), 5.0);
    assert_eq!(Terms::default().need(0.2, true), 1.0);
    assert_eq!(Terms::default().need(0.2, false), 0.0);
}

#[test]
fn one_who_waits_wakes_a_fleet_of_none_and_silence_ends_it() {
    let mut scaler = Scaler::new(rules());
    let nobody = Seen { ready: 0, ..seen() };
    assert_eq!(scaler.step(s(0), &nobody).desired, 0);
    let waits = Seen { waiting: 1, ..nobody };
    let sum = scaler.step(s(10), &waits);
    assert_eq!(sum.desired, 1);
    for t in 11..=310 {
        assert_eq!(scaler.step(s(t), &seen()).desired, 1, "at {t}");
    }
    assert_eq!(scaler.step(s(311), &seen()).desired, 0);
    assert_eq!(scaler.step(s(312), &seen()).reason, ScaleReason::Minimum);
}

#[test]
fn a_gateway_that_has_just_started_does_not_shrink_the_fleet_it_finds() {
    let mut scaler = Scaler::new(rules());
    let found = Seen { ready: 7, uncached_tokens_per_s: 700.0, running: 1, ..seen() };
    for t in 0..300 {
        assert_eq!(scaler.step(s(t), &found).desired, 7);
    }
    let sum = scaler.step(s(300), &found);
    assert_eq!((sum.desired, sum.peak), (2, 2), "{sum:?}");
}

#[test]
fn one_fewer_must_hold_with_a_margin() {
    let mut scaler = Scaler::new(ScaleRules { scale_in_after: s(10), ..rules() });
    let at = |tokens: f64| Seen { uncached_tokens_per_s: tokens, running: 1, ready: 4, ..seen() };
    // 3 workers at 0.75 bear 2,250; to go from 4 to 3 it must be below 3 * 0.73 = 2,190.
    for t in 0..20 {
        assert_eq!(scaler.step(s(t), &at(2_260.0)).desired, 4);
    }
    for t in 20..60 {
        let sum = scaler.step(s(t), &at(2_200.0));
        assert_eq!((sum.desired, sum.reason), (4, ScaleReason::Held), "{t}: {sum:?}");
    }
    let last: Vec<u32> = (60..72).map(|t| scaler.step(s(t), &at(2_180.0)).desired).collect();
    assert_eq!((last[9], last[11]), (4, 3));
}

#[test]
fn a_missed_slo_of_a_whole_fleet_corrects_the_sum_and_a_fleet_that_starts_does_not() {
    let missed =
        Seen { uncached_tokens_per_s: 7_000.0, running: 9, ready: 10, ttft_p90_s: Some(2.5), ..seen() };
    let run = |seen: Seen| {
        let mut scaler = Scaler::new(rules());
        (0..160).map(|t| scaler.step(s(t), &seen)).last().unwrap()
    };
    let sum = run(missed);
    assert_eq!((sum.guard, sum.desired), (11, 11), "{sum:?}");
    assert!((sum.correction - 10.1 / (7.0 / 0.75)).abs() < 0.01, "{sum:?}");
    for calm in [
        Seen { ttft_p90_s: Some(1.9), ..missed },
        Seen { starting: 1, ..missed },
        Seen { ready: 8, ..missed },
    ] {
        let sum = run(calm);
        assert_eq!((sum.guard, sum.correction), (0, 1.0), "{calm:?}");
    }
}

#[test]
fn a_backlog_that_is_just_gone_is_no_missed_slo() {
    let after = |gone: u64| {
        let at = |t: u64| Seen {
            uncached_tokens_per_s: 1_200.0,
            running: 2,
            ready: 3,
            backlog_tokens: if t < gone { 20_000.0 } else { 0.0 },
            // Those who waited are in the time that is judged for two minutes more.
            ttft_p90_s: Some(if t < gone + 120 { 5.0 } else { 0.5 }),
            ..seen()
        };
        let mut scaler = Scaler::new(rules());
        (0..600).map(|t| scaler.step(s(t), &at(t)).correction).fold(1.0, f64::max)
    };
    // Falls fast enough to be no miss while it is there, too: it is there for one look.
    for gone in 35..=149 {
        assert_eq!(after(gone), 1.0, "gone at {gone}");
    }
    assert!(after(500) > 1.5, "one that stays is a miss");
}

#[test]
fn one_worker_that_should_be_two_does_not_double_every_later_fleet() {
    let one = Seen { uncached_tokens_per_s: 700.0, running: 1, ttft_p90_s: Some(2.5), ..seen() };
    let mut scaler = Scaler::new(rules());
    let sum = (0..160).map(|t| scaler.step(s(t), &one)).last().unwrap();
    assert_eq!((sum.guard, sum.desired), (2, 2), "{sum:?}");
    assert!((sum.correction - 1.1).abs() < 0.01, "{sum:?}");
    let six = Seen { uncached_tokens_per_s: 4_200.0, running: 6, ready: 2, ttft_p90_s: None, ..seen() };
    let sum = (160..300).map(|t| scaler.step(s(t), &six)).last().unwrap();
    assert_eq!(sum.desired, 8, "7 for what comes and what waits, and a tenth: {sum:?}");
}

#[test]
fn answers_that_come_slowly_are_the_guard_s_business_too() {
    let slow = Seen {
        uncached_tokens_per_s: 3_000.0,
        running: 9,
        ready: 10,
        ttft_p90_s: Some(0.1),
        itl_p90_s: Some(0.06),
        ..seen()
    };
    let run = |itl_slo_s| {
        let mut scaler = Scaler::new(ScaleRules { itl_slo_s, ..rules() });
        (0..160).map(|t| scaler.step(s(t), &slow)).last().unwrap()
    };
    assert_eq!((run(Some(0.05)).guard, run(Some(0.05)).desired), (11, 11));
    assert_eq!((run(Some(0.07)).guard, run(None).guard), (0, 0));
}

#[test]
fn a_backlog_that_is_worked_off_before_anybody_comes_asks_for_nobody() {
    // Four for what comes; in half a start, 30 s, the one that they have to spare computes 30,000.
    let of = |backlog_tokens| {
        let there = Seen { uncached_tokens_per_s: 3_000.0, backlog_tokens, ready: 4, ..seen() };
        Terms::of(&rules(), &there).need(0.4, true)
    };
    assert_eq!((of(29_000.0), of(59_000.0), of(61_000.0), of(1e9)), (4.0, 4.0, 5.0, 5.0));
    // Where two do the work of three, a minute's work of one will wait when somebody comes.
    let two = Seen { uncached_tokens_per_s: 3_000.0, ready: 2, ..seen() };
    let terms = Terms::of(&rules(), &two);
    assert_eq!((terms.growth, terms.need(0.4, true)), (2.0, 5.0));
}

#[test]
fn the_maximum_and_the_minimum_hold() {
    let mut scaler = Scaler::new(ScaleRules { min: 2, max: 5, ..rules() });
    assert_eq!(scaler.step(s(0), &seen()).desired, 2);
    let sum = scaler.step(s(1), &Seen { uncached_tokens_per_s: 1e9, ..seen() });
    assert_eq!((sum.desired, sum.reason), (5, ScaleReason::Maximum));
}

/// `desiredReplicas` of Kubernetes' HPA with a target of 1: the ceiling, unless it is within a tenth.
fn hpa(value: f64, replicas: u32) -> u32 {
    if (value / f64::from(replicas) - 1.0).abs() <= 0.1 { replicas } else { value.ceil() as u32 }
}

#[test]
fn an_hpa_goes_down_by_one_although_it_leaves_a_tenth_alone() {
    assert_eq!(hpa(12.0, 13), 13);
    for there in 1..=18 {
        for desired in 1..=there {
            assert_eq!(hpa(scaler_value(desired, there), there), desired, "{desired} of {there}");
        }
    }
    assert_eq!((scaler_value(0, 5), scaler_value(6, 5)), (0.0, 6.0));
}

/// What became of a step of the load.
#[derive(Debug)]
struct Course {
    /// Desired and ready workers, and the backlog's seconds, each second.
    trace: Vec<(u32, u32, f64)>,
}

impl Course {
    fn peak(&self) -> u32 {
        self.trace.iter().map(|at| at.0).max().unwrap()
    }

    /// When another number was desired, and which.
    fn changes(&self) -> Vec<(usize, u32)> {
        let pairs = self.trace.windows(2).enumerate();
        pairs.filter(|(_, pair)| pair[0].0 != pair[1].0).map(|(t, pair)| (t + 1, pair[1].0)).collect()
    }

    fn turns(&self) -> usize {
        let changes = self.trace.windows(2).map(|pair| i64::from(pair[1].0) - i64::from(pair[0].0));
        let signs: Vec<i64> = changes.filter(|change| *change != 0).map(i64::signum).collect();
        signs.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    /// Seconds from `from` on until the backlog is worth less than `slo` for good.
    fn recovers_after(&self, from: usize, slo: f64) -> usize {
        self.trace[from..].iter().rposition(|at| at.2 > slo).map_or(0, |last| last + 1)
    }
}

/// A fleet as a formula: `load(t)` workers' worth of tokens come each second, every worker computes `RATE`,
/// whoever is asked for is there after `start_s`. The measured rate is off by `noise`.
fn course(rules: ScaleRules, seconds: u64, start_s: u64, noise: f64, load: impl Fn(u64) -> f64) -> Course {
    let (window, slo) = (rules.window, rules.ttft_slo_s);
    let mut scaler = Scaler::new(rules);
    let mut rate = TokenRate::new(window);
    let (mut backlog, mut ready, mut starting) = (0.0_f64, 2_u32, Vec::<u64>::new());
    let mut trace = Vec::new();
    for t in 0..seconds {
        let now = s(t);
        starting.retain(|at| {
            let there = *at <= t;
            ready += u32::from(there);
            !there
        });
        let come = load(t) * RATE;
        let requests = (come / REQUEST).round() as u32;
        for i in 0..requests {
            rate.add(now + s(1) * i / requests, REQUEST);
        }
        backlog = (backlog + come - f64::from(ready) * RATE).max(0.0);
        let wait = if ready == 0 { f64::INFINITY } else { backlog / (f64::from(ready) * RATE) };
        let sum = scaler.step(
            now,
            &Seen {
                uncached_tokens_per_s: rate.per_second(now + s(1)),
                backlog_tokens: backlog,
                waiting: u64::from(backlog > 0.0),
                running: u64::from(come > 0.0),
                prefill_tokens_per_s: RATE * noise,
                ttft_p90_s: Some(wait + slo / 4.0),
                ready,
                starting: starting.len() as u32,
                ..Seen::default()
            },
        );
        let there = ready + starting.len() as u32;
        for _ in there..sum.desired {
            starting.push(t + start_s);
        }
        let surplus = there.saturating_sub(sum.desired);
        let unstarted = surplus.min(starting.len() as u32);
        starting.truncate(starting.len() - unstarted as usize);
        ready -= surplus - unstarted;
        trace.push((sum.desired, ready, wait));
    }
    Course { trace }
}

#[test]
fn a_step_of_six_times_and_back_is_followed_without_swinging() {
    for start_s in [30, 60, 120] {
        // 1.5 workers' worth, then 9, then 1.5 again: 10 at 0.9.
        let rules = ScaleRules { start: s(start_s), ..ScaleRules::default() };
        let load = |t| if (600..2_200).contains(&t) { 9.0 } else { 1.5 };
        let slow = course(ScaleRules { catch_up: 0.0, ..rules.clone() }, 4_000, start_s, 1.0, load);
        let course = course(rules, 4_000, start_s, 1.0, load);
        let recovered = course.recovers_after(600, 2.0);
        assert!(recovered < slow.recovers_after(600, 2.0), "{start_s}: {recovered}");
        assert!(recovered <= 60 + 3 * start_s as usize, "{start_s}: {recovered}");
        assert!(course.peak() <= 13, "{start_s}: {}", course.peak());
        assert!(course.turns() <= 2, "{start_s}: {:?}", course.changes());
        assert!((10..=11).contains(&course.trace[1_800].0), "{start_s}: {:?}", course.trace[1_800]);
        assert!((2..=3).contains(&course.trace[3_999].0), "{start_s}: {:?}", course.trace[3_999]);
    }
}

#[test]
fn a_rate_that_is_believed_too_high_is_corrected_by_the_guard() {
    // Believed 1.6 times what it is: the sum alone says 7.5, one worker short of the 9 that bear the load.
    let course = course(rules(), 2_400, 60, 1.6, |t| if t >= 300 { 9.0 } else { 1.0 });
    let last = course.trace[2_399];
    assert!(last.2 < 2.0 && (9..=13).contains(&last.0), "{last:?}");
    assert!(course.turns() <= 2, "{:?}", course.changes());
}

proptest! {
    #[test]
    fn parts_of_several_gateways_add_up(
        parts in prop::collection::vec((0.0..1e5_f64, 0.0..1e5_f64, 0_u64..100, 0.0..1e5_f64), 1..5)
    ) {
        let rules = ScaleRules { running_per_worker: Some(8.0), ..rules() };
        let one = |(uncached, backlog, running, kv): (f64, f64, u64, f64)| Terms::of(&rules, &Seen {
            uncached_tokens_per_s: uncached,
            backlog_tokens: backlog,
            running,
            kv_tokens: kv,
            kv_tokens_per_worker: Some(1e4),
            ..seen()
        });
        let whole = one(parts.iter().fold((0.0, 0.0, 0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2, a.3 + b.3)));
        let sum = |part: fn(&Terms) -> f64| parts.iter().map(|p| part(&one(*p))).sum::<f64>();
        for part in [|t: &Terms| t.prefill, |t: &Terms| t.backlog, |t: &Terms| t.decode, |t: &Terms| t.kv] {
            prop_assert!((sum(part) - part(&whole)).abs() <= 1e-9 * (1.0 + part(&whole)));
        }
    }

    #[test]
    fn the_result_is_within_bounds_and_enough_whatever_is_seen(
        steps in prop::collection::vec(
            (0_u64..600, 0.0..1e6_f64, 0.0..1e7_f64, 0_u64..1_000, 0_u32..40, 0_u32..10, prop::option::of(0.0..20.0_f64)),
            1..60
        ),
        rate in prop_oneof![Just(0.0), Just(f64::NAN), 1.0..1e5_f64],
        min in 0_u32..4, more in 0_u32..30,
    ) {
        let rules = ScaleRules { min, max: min + more, ..rules() };
        let mut scaler = Scaler::new(rules.clone());
        let mut now = Duration::ZERO;
        for (pause, uncached, backlog, running, ready, starting, ttft_p90_s) in steps {
            now += s(pause);
            let sum = scaler.step(now, &Seen {
                uncached_tokens_per_s: uncached,
                mean_uncached_tokens: 100.0,
                backlog_tokens: backlog,
                running,
                prefill_tokens_per_s: rate,
                ready,
                starting,
                ttft_p90_s,
                ..Seen::default()
            });
            prop_assert!((min..=min + more).contains(&sum.desired), "{:?}", sum);
            prop_assert!(f64::from(sum.desired) + 1e-3 >= sum.need.min(f64::from(rules.max)), "{:?}", sum);
            prop_assert!((1.0..=MAX_CORRECTION).contains(&sum.correction));
        }
    }

    #[test]
    fn a_steady_load_is_asked_for_once(load in 0.3..20.0_f64, noise in 0.8..1.1_f64, start_s in 10_u64..150) {
        let course = course(rules(), 1_500, start_s, noise, |_| load);
        prop_assert!(course.turns() <= 2, "{:?}", course.changes());
        let needed = load / 0.75 / noise;
        let last = f64::from(course.trace[1_499].0);
        prop_assert!(last >= load && last <= (needed * 0.75 / 0.73 * 1.2).ceil() + 1.0, "{last} for {needed}");
    }
}
