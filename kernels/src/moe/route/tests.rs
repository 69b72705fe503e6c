//! Every kind of router against its definition.

use super::*;
use crate::check::{assert_close, everywhere, values};

const PLAIN: Routing =
    Routing { top: 2, scoring: Scoring::SoftmaxAll, renormalise: true, scale: 1.0, groups: None };

/// Logits whose scores are equal, in f32 and f64 alike, only if they are.
fn logits(seed: u64, n: usize) -> Vec<f32> {
    values(seed, n).iter().map(|v| (v.clamp(-4.0, 4.0) * 64.0).round() / 32.0).collect()
}

fn routed(
    compute: &Compute,
    logits: &[f32],
    experts: usize,
    routing: &Routing,
    bias: Option<&[f32]>,
) -> (Vec<u32>, Vec<f32>) {
    let slots = logits.len() / experts * routing.top;
    let (mut ids, mut weights) = (vec![u32::MAX; slots], vec![f32::NAN; slots]);
    route(compute, logits, experts, routing, bias, &mut ids, &mut weights);
    (ids, weights)
}

fn check(logits: &[f32], experts: usize, routing: &Routing, bias: Option<&[f32]>) {
    let weights = everywhere(|compute| routed(compute, logits, experts, routing, bias).1);
    let exact: Vec<(usize, f64)> =
        route_oracle(logits, experts, routing, bias).into_iter().flatten().collect();
    let exact_weights: Vec<f64> = exact.iter().map(|(_, weight)| *weight).collect();
    assert_close(&weights, &exact_weights, &vec![f64::from(routing.scale); exact.len()], 1e-6);
    let ids = routed(&Compute::single(), logits, experts, routing, bias).0;
    let exact_ids: Vec<u32> = exact.iter().map(|(id, _)| *id as u32).collect();
    assert_eq!(ids, exact_ids, "{routing:?}");
}

#[test]
fn every_router_agrees_with_the_oracle() {
    for scoring in [Scoring::SoftmaxAll, Scoring::SoftmaxTop, Scoring::Sigmoid] {
        for renormalise in [false, true] {
            for (tokens, experts, top) in [(0, 4, 2), (1, 1, 1), (5, 8, 2), (3, 33, 33), (2, 128, 8)] {
                let logits = logits(experts as u64, tokens * experts);
                let routing = Routing { top, scoring, renormalise, scale: 2.5, groups: None };
                check(&logits, experts, &routing, None);
            }
        }
    }
}

#[test]
fn groups_and_the_correction_bias_agree_with_the_oracle() {
    let bias: Vec<f32> = values(9, 32).iter().map(|v| v.clamp(-1.0, 1.0) * 0.3).collect();
    let logits = logits(10, 40 * 32);
    for scoring in [Scoring::SoftmaxAll, Scoring::Sigmoid] {
        for by in [GroupScore::Max, GroupScore::TopTwoSum] {
            for (count, keep) in [(8, 1), (8, 4), (4, 4), (32, 6), (1, 1)] {
                let groups = Some(Groups { count, keep, by });
                let routing = Routing { top: 4, scoring, groups, ..PLAIN };
                check(&logits, 32, &routing, None);
                check(&logits, 32, &routing, Some(&bias));
            }
        }
    }
}

#[test]
fn logits_far_apart_are_still_told_apart() {
    // As probabilities all but the first are 0.
    check(&[300.0, -100.0, 10.0, 20.0], 4, &Routing { top: 3, ..PLAIN }, None);
}

#[test]
fn equal_experts_and_groups_are_taken_in_ascending_order() {
    let (ids, weights) =
        routed(&Compute::single(), &[1.0, 2.0, 2.0, 2.0], 4, &Routing { top: 3, ..PLAIN }, None);
    assert_eq!(ids, [1, 2, 3]);
    assert!(weights.iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-6));
    let groups = Some(Groups { count: 3, keep: 2, by: GroupScore::Max });
    let routing = Routing { groups, ..PLAIN };
    let (ids, _) = routed(&Compute::single(), &[0.0, 2.0, 1.0, 2.0, 2.0, 2.0], 6, &routing, None);
    assert_eq!(ids, [1, 3]);
}

#[test]
fn a_routing_that_does_not_suit_is_named() {
    let groups = |count, keep| Some(Groups { count, keep, by: GroupScore::Max });
    for (routing, reason) in [
        (Routing { top: 9, ..PLAIN }, "9 of 8 experts cannot be chosen"),
        (Routing { groups: groups(3, 1), ..PLAIN }, "8 experts do not form 3 equal groups"),
        (Routing { top: 3, groups: groups(4, 1), ..PLAIN }, "1 of 4 groups do not hold 3 of 8 experts"),
    ] {
        assert_eq!(routing.check(8), Err(reason.to_owned()));
    }
    assert_eq!(Routing { groups: groups(4, 1), ..PLAIN }.check(8), Ok(()));
}
