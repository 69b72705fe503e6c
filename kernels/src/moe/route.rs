//! The router's choice: which experts serve a token, and with what weights. Checked against the routers of
//! transformers 5.23 named at each option.

use std::fmt;

use crate::compute::Compute;
use crate::isa::Body;
use crate::scalar::exp;
use crate::simd::Simd;

/// DeepSeek-V3 adds it to the sum it divides by; it vanishes in every sum of softmax weights.
const EPSILON: f32 = 1e-20;

/// How a model chooses experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// How many experts are chosen for each token.
    pub top: usize,
    /// What turns logits into weights.
    pub scoring: Scoring,
    /// Whether the chosen weights are divided by their sum.
    pub renormalise: bool,
    /// Factor of every weight, at the end.
    pub scale: f32,
    /// Restricts the choice to the best groups of experts.
    pub groups: Option<Groups>,
}

/// What turns logits into weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts: Qwen3-MoE, Mixtral, DeepSeek-V2.
    SoftmaxAll,
    /// Softmax over the chosen experts: gpt-oss.
    SoftmaxTop,
    /// `1 / (1 + e^-logit)`: DeepSeek-V3.
    Sigmoid,
}

/// Groups of neighbouring experts, of which only the best take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// How many groups there are; it divides the number of experts.
    pub count: usize,
    /// How many of them take part.
    pub keep: usize,
    /// What the groups are ranked by.
    pub by: GroupScore,
}

/// What groups are ranked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// Their best expert: DeepSeek-V2's `group_limited_greedy`.
    Max,
    /// The sum of their two best: DeepSeek-V3.
    TopTwoSum,
}

/// Why experts cannot be routed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoutingError {
    /// There are not so many experts, or none is chosen.
    Top {
        /// How many experts are to be chosen for each token.
        top: usize,
        /// How many there are.
        experts: usize,
    },
    /// The number of groups does not divide the number of experts.
    Uneven {
        /// How many experts there are.
        experts: usize,
        /// How many groups they are to form.
        count: usize,
    },
    /// The groups that take part have fewer experts than are chosen, or there are not so many groups.
    Keep {
        /// How many groups take part.
        keep: usize,
        /// How many groups there are.
        count: usize,
        /// How many experts are to be chosen for each token.
        top: usize,
        /// How many experts there are.
        experts: usize,
    },
}

impl fmt::Display for RoutingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Top { top, experts } => write!(f, "{top} of {experts} experts cannot be chosen"),
            Self::Uneven { experts, count } => {
                write!(f, "{experts} experts do not form {count} equal groups")
            }
            Self::Keep { keep, count, top, experts } => {
                write!(f, "{keep} of {count} groups do not hold {top} of {experts} experts")
            }
        }
    }
}

impl std::error::Error for RoutingError {}

impl Routing {
    /// Whether `experts` can be routed to so; the reason if not.
    pub fn check(&self, experts: usize) -> Result<(), RoutingError> {
        let Self { top, groups, .. } = *self;
        if top == 0 || top > experts {
            return Err(RoutingError::Top { top, experts });
        }
        let Some(Groups { count, keep, .. }) = groups else {
            return Ok(());
        };
        if count == 0 || !experts.is_multiple_of(count) {
            return Err(RoutingError::Uneven { experts, count });
        }
        if keep > count || keep * (experts / count) < top {
            return Err(RoutingError::Keep { keep, count, top, experts });
        }
        Ok(())
    }
}

/// The definition in float64: (expert, weight) pairs of every row of `logits`, in the order of choice.
/// Experts are ranked by score plus `bias`, equal ones by ascending number, groups likewise; the weight is
/// the score alone.
pub fn route_oracle(
    logits: &[f32],
    experts: usize,
    routing: &Routing,
    bias: Option<&[f32]>,
) -> Vec<Vec<(usize, f64)>> {
    logits.chunks(experts).map(|row| route_row_oracle(row, routing, bias)).collect()
}

fn route_row_oracle(logits: &[f32], routing: &Routing, bias: Option<&[f32]>) -> Vec<(usize, f64)> {
    let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let score: Vec<f64> = match routing.scoring {
        Scoring::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        Scoring::SoftmaxAll => logits.iter().map(|logit| logit.exp() / total).collect(),
        Scoring::SoftmaxTop => logits.clone(),
    };
    let bias = |expert: usize| bias.map_or(0.0, |bias| f64::from(bias[expert]));
    let rank: Vec<f64> = (0..logits.len()).map(|expert| score[expert] + bias(expert)).collect();
    let descending = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
        order
    };
    let mut order = descending(&rank);
    if let Some(Groups { count, keep, by }) = routing.groups {
        let size = logits.len() / count;
        let of_group = |group: &[f64]| {
            let order = descending(group);
            let taken = if by == GroupScore::Max { 1 } else { 2 };
            order.iter().take(taken).map(|expert| group[*expert]).sum::<f64>()
        };
        let groups = descending(&rank.chunks(size).map(of_group).collect::<Vec<_>>());
        order.retain(|expert| groups[..keep].contains(&(expert / size)));
    }
    order.truncate(routing.top);
    let chosen: f64 = order.iter().map(|expert| logits[*expert].exp()).sum();
    let weight = |expert: usize| match routing.scoring {
        Scoring::Sigmoid | Scoring::SoftmaxAll => score[expert],
        Scoring::SoftmaxTop => logits[expert].exp() / chosen,
    };
    let kept: f64 = order.iter().map(|expert| weight(*expert)).sum();
    let divisor = if routing.renormalise { kept + 1e-20 } else { 1.0 };
    order.iter().map(|e| (*e, weight(*e) / divisor * f64::from(routing.scale))).collect()
}

/// The router: `logits` `[tokens, experts]` to `ids` and `weights`, each `[tokens, routing.top]`. Slot order
/// is the order of choice, the same for a token in any batch. `correction_bias` `[experts]` takes part in the
/// choice but not in the weights (DeepSeek-V3's `e_score_correction_bias`).
///
/// # Panics
/// If shapes disagree, or `routing` does not suit the number of experts ([`Routing::check`]).
pub fn route(
    compute: &Compute,
    logits: &[f32],
    experts: usize,
    routing: &Routing,
    correction_bias: Option<&[f32]>,
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let tokens = logits.len() / experts;
    assert!(routing.check(experts).is_ok(), "route: the routing does not suit {experts} experts");
    assert!(
        logits.len() == tokens * experts
            && ids.len() == tokens * routing.top
            && weights.len() == ids.len()
            && correction_bias.is_none_or(|bias| bias.len() == experts),
        "route: shapes disagree"
    );
    let mut ranks = vec![0.0; experts + routing.groups.map_or(0, |groups| groups.count)];
    let (ranks, group_scores) = ranks.split_at_mut(experts);
    compute.isa().run(Route { logits, routing, correction_bias, ids, weights, ranks, group_scores });
}

struct Route<'a> {
    logits: &'a [f32],
    routing: &'a Routing,
    correction_bias: Option<&'a [f32]>,
    ids: &'a mut [u32],
    weights: &'a mut [f32],
    /// Memory for what one token's experts are ranked by, `[experts]`.
    ranks: &'a mut [f32],
    /// Memory for what its groups are ranked by, `[groups]`.
    group_scores: &'a mut [f32],
}

impl Body for Route<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { routing, ranks, group_scores, .. } = self;
        let rows = self.logits.chunks_exact(ranks.len());
        let slots = self.ids.chunks_exact_mut(routing.top).zip(self.weights.chunks_exact_mut(routing.top));
        for (row, (ids, weights)) in rows.zip(slots) {
            rank(row, routing, self.correction_bias, ranks);
            if let Some(groups) = routing.groups {
                drop_groups(ranks, groups, group_scores);
            }
            choose(ranks, ids);
            weigh(row, routing.scoring, ids, weights);
            finish(weights, routing);
        }
    }
}

/// What experts are chosen by. For softmax the logits, where these rank alike: probabilities may round to
/// equal values.
#[inline(always)]
fn rank(row: &[f32], routing: &Routing, bias: Option<&[f32]>, ranks: &mut [f32]) {
    let sums = bias.is_some() || routing.groups.is_some_and(|groups| groups.by == GroupScore::TopTwoSum);
    match routing.scoring {
        Scoring::Sigmoid => {
            for (rank, logit) in ranks.iter_mut().zip(row) {
                *rank = sigmoid(*logit);
            }
        }
        Scoring::SoftmaxAll if sums => {
            let max = largest(row);
            let mut total = 0.0;
            for (rank, logit) in ranks.iter_mut().zip(row) {
                *rank = exp(*logit - max);
                total += *rank;
            }
            for rank in &mut *ranks {
                *rank /= total;
            }
        }
        Scoring::SoftmaxAll | Scoring::SoftmaxTop => ranks.copy_from_slice(row),
    }
    if let Some(bias) = bias {
        for (rank, bias) in ranks.iter_mut().zip(bias) {
            *rank += bias;
        }
    }
}

#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut max = f32::NEG_INFINITY;
    for value in row {
        max = if *value > max { *value } else { max };
    }
    max
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Takes the experts of all but the best groups out of the choice; of equal groups the lower one is better.
#[inline(always)]
fn drop_groups(ranks: &mut [f32], groups: Groups, scores: &mut [f32]) {
    let size = ranks.len() / groups.count;
    for (score, group) in scores.iter_mut().zip(ranks.chunks_exact(size)) {
        *score = group_score(group, groups.by);
    }
    for (group, ranks) in ranks.chunks_exact_mut(size).enumerate() {
        let mut better = 0;
        for (other, score) in scores.iter().enumerate() {
            better += usize::from(*score > scores[group] || (*score == scores[group] && other < group));
        }
        if better >= groups.keep {
            ranks.fill(f32::NEG_INFINITY);
        }
    }
}

#[inline(always)]
fn group_score(ranks: &[f32], by: GroupScore) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for rank in ranks {
        if *rank > best {
            (best, second) = (*rank, best);
        } else if *rank > second {
            second = *rank;
        }
    }
    match by {
        GroupScore::TopTwoSum if ranks.len() > 1 => best + second,
        GroupScore::TopTwoSum | GroupScore::Max => best,
    }
}

/// Takes the largest rank not yet taken, the lowest expert among equals, `ids.len()` times.
#[inline(always)]
fn choose(ranks: &[f32], ids: &mut [u32]) {
    for slot in 0..ids.len() {
        let mut best = None;
        for (expert, rank) in ranks.iter().enumerate() {
            if best.is_none_or(|b: usize| *rank > ranks[b]) && !ids[..slot].contains(&(expert as u32)) {
                best = Some(expert);
            }
        }
        ids[slot] = best.unwrap_or(0) as u32;
    }
}

/// The scores of the chosen experts.
#[inline(always)]
fn weigh(row: &[f32], scoring: Scoring, ids: &[u32], weights: &mut [f32]) {
    if scoring == Scoring::Sigmoid {
        for (weight, id) in weights.iter_mut().zip(ids) {
            *weight = sigmoid(row[*id as usize]);
        }
        return;
    }
    let max = largest(row);
    let mut total = 0.0;
    if scoring == Scoring::SoftmaxAll {
        for logit in row {
            total += exp(logit - max);
        }
    } else {
        for id in ids {
            total += exp(row[*id as usize] - max);
        }
    }
    for (weight, id) in weights.iter_mut().zip(ids) {
        *weight = exp(row[*id as usize] - max) / total;
    }
}

/// Divides by the sum and scales, where the model does.
#[inline(always)]
fn finish(weights: &mut [f32], routing: &Routing) {
    if routing.renormalise {
        let mut kept = 0.0;
        for weight in &*weights {
            kept += *weight;
        }
        for weight in &mut *weights {
            *weight /= kept + EPSILON;
        }
    }
    for weight in weights {
        *weight *= routing.scale;
    }
}

#[cfg(test)]
mod tests;
