//! The bootstrap on data whose truth is known: nothing planted is rarely found, what is planted nearly
//! always.

use std::slice::from_ref;

use super::*;

const STATS: [Stat; 3] = [Stat::Mean, Stat::Percentile(50.0), Stat::Percentile(90.0)];

/// Waits in a queue with one server at 60 % load: each request's wait depends on the one before it.
fn queue(seed: u64, n: usize, factor: f64) -> Runs {
    let mut wait: f64 = 0.0;
    let requests = (0..n).map(|i| {
        let mut rng = Rng::at(seed, Purpose::Arrival, i as u64);
        wait = (wait + 0.6 - rng.exponential()).max(0.0);
        vec![((wait + 1.0) * factor * 1000.0, 1)]
    });
    Runs { requests: requests.collect() }
}

/// Answers of 50 gaps each; all gaps of an answer share one random factor.
fn clustered(seed: u64, n: usize) -> Runs {
    let request = |i: usize| {
        let mut rng = Rng::at(seed, Purpose::Arrival, i as u64);
        let level = (0.5 * rng.normal()).exp();
        (0..50).map(|_| (level * (1.0 + 0.01 * rng.normal()), 1)).collect()
    };
    Runs { requests: (0..n).map(request).collect() }
}

/// In how many of 40 pairs any figure is significant.
fn found(pair: impl Fn(u64) -> (Runs, Runs, bool)) -> usize {
    let significant = |seed: u64| {
        let (base, new, paired) = pair(seed);
        let p: Vec<f64> =
            compare(&[base], &[new], paired, &STATS, 400, seed).into_iter().flatten().map(|d| d.p).collect();
        holm(&p, 0.05).contains(&true)
    };
    (0..40).filter(|&seed| significant(seed)).count()
}

#[test]
fn a_run_differs_in_nothing_from_itself() {
    let run = queue(1, 500, 1.0);
    for difference in compare(from_ref(&run), from_ref(&run), true, &STATS, 400, 1) {
        let difference = difference.unwrap();
        assert_eq!((difference.change(), difference.interval, difference.p), (0.0, (0.0, 0.0), 1.0));
    }
}

#[test]
fn two_seeds_of_one_queue_seldom_differ() {
    let found = found(|seed| (queue(2 * seed, 800, 1.0), queue(2 * seed + 1, 800, 1.0), false));
    assert!(found <= 5, "{found} of 40");
}

#[test]
fn gaps_of_one_answer_count_as_one_draw() {
    let found = found(|seed| (clustered(2 * seed, 200), clustered(2 * seed + 1, 200), false));
    assert!(found <= 5, "{found} of 40");
}

#[test]
fn a_planted_five_per_cent_is_found() {
    let found = found(|seed| (queue(seed, 800, 1.0), queue(seed, 800, 1.05), true));
    assert_eq!(found, 40);
    let change = compare(&[queue(1, 800, 1.0)], &[queue(1, 800, 1.05)], true, &STATS, 400, 1)[0].unwrap();
    assert!((change.change() - 0.05).abs() < 1e-9);
    assert!(change.interval.0 <= 0.0500001 && change.interval.1 >= 0.0499999, "{change:?}");
}

#[test]
fn a_percentile_needs_requests_above_it() {
    let run = queue(1, 400, 1.0);
    let got = compare(
        from_ref(&run),
        from_ref(&run),
        true,
        &[Stat::Percentile(99.0), Stat::Percentile(98.0)],
        400,
        1,
    );
    assert!(got[0].is_none() && got[1].is_some());
    assert_eq!(compare(&[Runs::default()], &[run], false, &STATS, 400, 1), [None; 3]);
}

#[test]
fn blocks_are_as_long_as_the_memory() {
    let mut rng = Rng::at(1, Purpose::Arrival, 0);
    let noise: Vec<f64> = (0..4000).map(|_| rng.normal()).collect();
    let mut level = 0.0;
    let memory: Vec<f64> = noise
        .iter()
        .map(|x| {
            level = 0.9 * level + x;
            level
        })
        .collect();
    assert!(block_length(&noise) <= 4, "{}", block_length(&noise));
    assert!((20..200).contains(&block_length(&memory)), "{}", block_length(&memory));
    assert_eq!(block_length(&[1.0; 50]), 1);
    assert_eq!(block_length(&[]), 1);
}

#[test]
fn holm_is_between_no_correction_and_bonferroni() {
    assert_eq!(holm(&[0.001, 0.04, 0.02], 0.05), [true, true, true]);
    assert_eq!(holm(&[0.001, 0.04, 0.03], 0.05), [true, false, false]);
    assert_eq!(holm(&[0.02, 0.9, 0.9], 0.05), [false, false, false]);
}

/// Three runs of one side; each run as a whole is up to a tenth slower or faster than another, as machines
/// are.
fn runs(seed: u64, factor: f64) -> Vec<Runs> {
    let level = |k: u64| 1.0 + 0.05 * Rng::at(seed, Purpose::Phase, k).normal();
    (0..3).map(|k| queue(7919 * seed + k, 300, factor * level(k))).collect()
}

#[test]
fn what_differs_from_run_to_run_is_no_finding_and_what_differs_from_side_to_side_is() {
    let significant = |base: &[Runs], new: &[Runs], seed: u64| {
        let p: Vec<f64> =
            compare(base, new, false, &STATS, 400, seed).into_iter().flatten().map(|d| d.p).collect();
        holm(&p, 0.05).contains(&true)
    };
    let count = |factor: f64| {
        (0..30).filter(|&s| significant(&runs(2 * s, 1.0), &runs(2 * s + 1, factor), s)).count()
    };
    let (nothing, planted) = (count(1.0), count(1.6));
    assert!(nothing <= 5, "{nothing} of 30");
    assert!(planted >= 25, "{planted} of 30");
    // Taken for one long run each, the same runs are told apart far too often.
    let joined = |runs: Vec<Runs>| Runs { requests: runs.into_iter().flat_map(|run| run.requests).collect() };
    let naive = (0..30)
        .filter(|&s| significant(&[joined(runs(2 * s, 1.0))], &[joined(runs(2 * s + 1, 1.0))], s))
        .count();
    assert!(naive >= nothing, "{naive} {nothing}");
}
