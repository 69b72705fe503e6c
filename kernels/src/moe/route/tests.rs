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
        assert_eq!(routing.check(8).unwrap_err().to_string(), reason);
    }
    assert_eq!(Routing { groups: groups(4, 1), ..PLAIN }.check(8), Ok(()));
}

/// References: `DeepseekV3TopkRouter`, `DeepseekV2TopkRouter` (group_limited_greedy), `GptOssTopKRouter` and
/// `MixtralTopKRouter` of transformers 5.23 with the unit matrix as weight; the first leaves
/// the order of its choices open.
#[test]
fn the_routers_of_transformers_are_matched() {
    let logits =
        [[0.5, -1.25, 2.0, 0.75, -0.5, 1.5, 1.0, -2.0], [3.0, -0.25, 0.125, 1.75, 2.5, -1.0, 0.25, 2.25]]
            .concat();
    let bias = [0.0, 0.25, -0.5, 0.125, 0.0625, -0.25, 0.5, 0.375];
    let groups = |by| Some(Groups { count: 4, keep: 2, by });
    let plain = Routing { top: 3, ..PLAIN };
    let deepseek_v3 =
        Routing { scoring: Scoring::Sigmoid, scale: 2.5, groups: groups(GroupScore::TopTwoSum), ..plain };
    let deepseek_v2 = Routing { renormalise: false, scale: 16.0, groups: groups(GroupScore::Max), ..plain };
    let gpt_oss = Routing { scoring: Scoring::SoftmaxTop, renormalise: false, ..plain };
    let softmax_top =
        [0.506_480_396, 0.307_195_902, 0.186_323_732, 0.481_024_265, 0.291_755_974, 0.227_219_775];
    for (routing, bias, exact_ids, exact) in [
        (
            deepseek_v3,
            Some(bias.as_slice()),
            [6, 3, 7, 7, 6, 0],
            [1.194_977_283, 1.110_175_252, 0.194_847_286, 0.934_787_631, 0.580_904_603, 0.984_307_766],
        ),
        (
            deepseek_v2,
            None,
            [2, 5, 3, 0, 4, 1],
            [6.099_374_771, 3.699_457_884, 1.747_500_181, 6.292_187_214, 3.816_404_581, 0.243_974_566],
        ),
        (gpt_oss, None, [2, 5, 6, 0, 4, 7], softmax_top),
        (plain, None, [2, 5, 6, 0, 4, 7], softmax_top),
    ] {
        let (ids, weights) = routed(&Compute::single(), &logits, 8, &routing, bias);
        assert_eq!(ids, exact_ids, "{routing:?}");
        assert_close(&weights, &exact, &[f64::from(routing.scale); 6], 5e-7);
    }
}
