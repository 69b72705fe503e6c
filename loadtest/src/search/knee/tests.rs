//! The search against queues of known capacity, in virtual time.

use super::*;
use crate::schedule::{
    arrivals::{Arrival, arrivals},
    rate::RateShape,
};

/// Seconds that the server works on one request; it works on one at a time, in order.
const SERVICE_S: f64 = 0.01;
/// The objective: this share of requests ends within this time.
const BOUND_S: f64 = 0.05;
const SHARE: f64 = 0.9;

/// Attainment of `requests` Poisson arrivals at `rate` in the queue.
fn probe(rate: f64, requests: usize, seed: u64) -> Probe {
    let shape = RateShape::constant(rate);
    let (mut free_s, mut kept) = (0.0_f64, 0);
    for due_ns in arrivals(&shape, Arrival::Poisson, 1.0, seed).take(requests) {
        let due_s = due_ns as f64 / 1e9;
        free_s = free_s.max(due_s) + SERVICE_S;
        kept += usize::from(free_s - due_s < BOUND_S);
    }
    Probe { load: rate, attainment: kept as f64 / requests as f64 / SHARE, requests: requests as u64 }
}

/// The exact share of an M/D/1 queue's requests that wait at most `wait_s`, at `rate`. A. K. Erlang, "The
/// theory of probabilities and telephone conversations", 1909.
fn exact_share(rate: f64, wait_s: f64) -> f64 {
    let (load, t) = (rate * SERVICE_S, wait_s / SERVICE_S);
    let mut factorial = 1.0;
    let terms = (0..=t.floor() as i32).map(|k| {
        factorial *= f64::from(k.max(1));
        let x = load * (f64::from(k) - t);
        x.powi(k) / factorial * (-x).exp()
    });
    (1.0 - load) * terms.sum::<f64>()
}

/// The rate at which the queue just keeps the objective.
fn exact_knee() -> f64 {
    let (mut low, mut high) = (1.0, 99.0);
    while high - low > 1e-9 {
        let middle = f64::midpoint(low, high);
        // A request must end before the bound, so it may wait a hair less than the rest of it.
        let keeps = exact_share(middle, BOUND_S - SERVICE_S - 1e-9) >= SHARE;
        (low, high) = if keeps { (middle, high) } else { (low, middle) };
    }
    low
}

fn search(settings: Settings, mut measure: impl FnMut(f64, u64) -> Probe) -> (Knee, usize) {
    let mut search = Search::new(settings);
    for seed in 0.. {
        match search.next() {
            Step::Try(load) => search.add(measure(load, seed)),
            Step::Done(found) => return (found, seed as usize),
        }
    }
    unreachable!()
}

const SETTINGS: Settings = Settings { from: 1.0, to: 1e6, tolerance: 0.05, repeats: 3, whole: false };

#[test]
fn the_knee_of_a_queue_of_known_capacity_is_found_within_five_per_cent() {
    let exact = exact_knee();
    assert!((60.0..95.0).contains(&exact), "{exact}");
    for run in 0..20 {
        let (found, probes) = search(SETTINGS, |rate, seed| probe(rate, 2000, 1000 * run + seed));
        let Knee::Knee { load, low, high } = found else { panic!("{found:?}") };
        assert!((load / exact - 1.0).abs() < 0.05, "run {run}: {load}, not {exact}");
        assert!(low <= load && load <= high);
        assert!(probes < 30, "{probes} probes");
    }
}

#[test]
fn a_sharp_edge_is_bracketed() {
    let step = |edge: f64| {
        move |load: f64, _| Probe { load, attainment: if load <= edge { 1.1 } else { 0.5 }, requests: 100 }
    };
    for edge in [0.3, 1.0, 7.7, 1234.5] {
        let (found, _) = search(SETTINGS, step(edge));
        let Knee::Knee { low, high, .. } = found else { panic!("{found:?}") };
        assert!(low <= edge && edge < high && high / low < 1.0501, "{edge}: {low} {high}");
    }
    for edge in [1.0, 2.0, 9.0, 63.0, 500.0] {
        let whole = Settings { whole: true, tolerance: 0.001, ..SETTINGS };
        let (found, _) = search(whole, step(edge));
        assert_eq!(found, Knee::Knee { load: edge, low: edge, high: edge + 1.0 });
    }
}

#[test]
fn an_edge_outside_the_range_is_said() {
    let always = |attainment: f64| move |load: f64, _| Probe { load, attainment, requests: 9 };
    assert_eq!(search(Settings { to: 100.0, ..SETTINGS }, always(1.0)).0, Knee::AboveAll(100.0));
    assert!(matches!(search(SETTINGS, always(0.9)).0, Knee::BelowAll(load) if load < 0.01));
    assert_eq!(search(Settings { whole: true, ..SETTINGS }, always(0.9)).0, Knee::BelowAll(1.0));
}

#[test]
fn noise_at_the_edge_ends() {
    let (_, probes) = search(SETTINGS, |load, seed| {
        let noise = if seed % 2 == 0 { 0.3 } else { -0.3 };
        Probe { load, attainment: 1.0 + (10.0 - load) / 100.0 + noise, requests: 50 }
    });
    assert!(probes <= limits::SEARCH_PROBES_MAX + 20, "{probes}");
}
