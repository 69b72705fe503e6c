//! The parts of a mixture-of-experts layer around the experts' products: the router's choice, the grouping of
//! tokens by expert, and the combination of the experts' outputs.

use crate::isa::{Body, Isa};
use crate::scalar::exp;
use crate::simd::Simd;

/// Qwen3-MoE's router in float64: softmax over all experts, then the `top` largest by descending probability
/// (equal ones by ascending expert), divided by their sum if `renormalise`. One (expert, weight) list per
/// row.
pub fn route_oracle(logits: &[f32], experts: usize, top: usize, renormalise: bool) -> Vec<Vec<(usize, f64)>> {
    let one = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = row.iter().map(|l| (f64::from(*l) - f64::from(max)).exp()).sum();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        let weight = |e: usize| (f64::from(row[e]) - f64::from(max)).exp() / total;
        let kept: f64 = order[..top].iter().map(|e| weight(*e)).sum();
        let divisor = if renormalise { kept } else { 1.0 };
        order[..top].iter().map(|e| (*e, weight(*e) / divisor)).collect()
    };
    logits.chunks(experts).map(one).collect()
}

/// The router: `logits` `[tokens, experts]` to `ids` and `weights`, each `[tokens, top]`. Slot order is the
/// order of choice, the same for a token in any batch.
///
/// # Panics
/// If shapes disagree or `top` exceeds `experts`.
pub fn route(
    isa: Isa,
    logits: &[f32],
    experts: usize,
    renormalise: bool,
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let tokens = logits.len() / experts;
    assert!(
        logits.len() == tokens * experts
            && ids.len() == weights.len()
            && ids.len().is_multiple_of(tokens.max(1)),
        "route: shapes disagree"
    );
    let top = ids.len() / tokens.max(1);
    assert!(top <= experts, "route: more experts asked for than there are");
    if top > 0 {
        isa.run(Route { logits, experts, top, renormalise, ids, weights });
    }
}

struct Route<'a> {
    logits: &'a [f32],
    experts: usize,
    top: usize,
    renormalise: bool,
    ids: &'a mut [u32],
    weights: &'a mut [f32],
}

impl Body for Route<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let rows = self.logits.chunks_exact(self.experts);
        let slots = self.ids.chunks_exact_mut(self.top).zip(self.weights.chunks_exact_mut(self.top));
        for (row, (ids, weights)) in rows.zip(slots) {
            choose(row, ids);
            let max = row[ids[0] as usize];
            let total: f32 = row.iter().map(|logit| exp(logit - max)).sum();
            for (weight, id) in weights.iter_mut().zip(&*ids) {
                *weight = exp(row[*id as usize] - max) / total;
            }
            if self.renormalise {
                let kept: f32 = weights.iter().sum();
                for weight in weights {
                    *weight /= kept;
                }
            }
        }
    }
}

/// Takes the largest logit not yet taken, the lowest expert among equals, `ids.len()` times. Logits rather
/// than probabilities, which may round to equal values.
#[inline(always)]
fn choose(row: &[f32], ids: &mut [u32]) {
    for slot in 0..ids.len() {
        let mut best = None;
        for (expert, logit) in row.iter().enumerate() {
            if best.is_none_or(|b: usize| *logit > row[b]) && !ids[..slot].contains(&(expert as u32)) {
                best = Some(expert);
            }
        }
        ids[slot] = best.unwrap_or(0) as u32;
    }
}

/// Which slots each expert serves: a permutation of all slots, grouped by expert, ascending within a group.
#[derive(Debug, Default)]
pub struct Grouping {
    /// Expert `e` serves the places `offsets[e]..offsets[e + 1]` of `slots`; `[experts + 1]`.
    pub offsets: Vec<usize>,
    /// Slot (`token * top + choice`) at each place.
    pub slots: Vec<u32>,
    /// Place of each slot: the inverse of `slots`.
    pub places: Vec<u32>,
}

impl Grouping {
    /// Groups the slots of `ids` `[tokens, top]` by expert, reusing this value's memory.
    ///
    /// # Panics
    /// If an id is not below `experts`.
    pub fn group(&mut self, ids: &[u32], experts: usize) {
        self.offsets.clear();
        self.offsets.resize(experts + 1, 0);
        for id in ids {
            self.offsets[*id as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.offsets[expert + 1] += self.offsets[expert];
        }
        self.slots.clear();
        self.slots.resize(ids.len(), 0);
        self.places.clear();
        let mut next = self.offsets.clone();
        for (slot, id) in ids.iter().enumerate() {
            let place = &mut next[*id as usize];
            self.slots[*place] = slot as u32;
            self.places.push(*place as u32);
            *place += 1;
        }
    }
}

/// The combination in float64: `out[t] = sum over slots s of t, in order, of weights[s] * rows[places[s]]`.
pub fn combine_oracle(rows: &[f32], places: &[u32], weights: &[f32], top: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; places.len() / top * width];
    for (slot, (place, weight)) in places.iter().zip(weights).enumerate() {
        for i in 0..width {
            out[slot / top * width + i] += f64::from(*weight) * f64::from(rows[*place as usize * width + i]);
        }
    }
    out
}

/// The combination: `rows` `[slots, width]` in [`Grouping`]'s order, `out` `[tokens, width]`. Always in slot
/// order, whichever expert finished first.
///
/// # Panics
/// If shapes disagree.
pub fn combine(isa: Isa, rows: &[f32], places: &[u32], weights: &[f32], top: usize, out: &mut [f32]) {
    assert!(places.len() == weights.len() && places.len().is_multiple_of(top), "combine: shapes disagree");
    let width = (out.len() * top).checked_div(places.len()).unwrap_or(0);
    assert!(rows.len() == places.len() * width && out.len() * top == rows.len(), "combine: shapes disagree");
    if width > 0 {
        isa.run(Combine { rows, places, weights, top, width, out });
    }
}

struct Combine<'a> {
    rows: &'a [f32],
    places: &'a [u32],
    weights: &'a [f32],
    top: usize,
    width: usize,
    out: &'a mut [f32],
}

impl Body for Combine<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let slots = self.places.chunks_exact(self.top).zip(self.weights.chunks_exact(self.top));
        for (out, (places, weights)) in self.out.chunks_exact_mut(self.width).zip(slots) {
            out.fill(0.0);
            for (place, weight) in places.iter().zip(weights) {
                let row = &self.rows[*place as usize * self.width..][..self.width];
                for (out, value) in out.iter_mut().zip(row) {
                    *out = weight.mul_add(*value, *out);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, on_every_isa, values};

    fn routed(isa: Isa, logits: &[f32], experts: usize, top: usize, norm: bool) -> (Vec<u32>, Vec<f32>) {
        let slots = logits.len() / experts * top;
        let (mut ids, mut weights) = (vec![0; slots], vec![0.0; slots]);
        route(isa, logits, experts, norm, &mut ids, &mut weights);
        (ids, weights)
    }

    #[test]
    fn the_router_agrees_with_the_oracle_on_every_isa() {
        for (tokens, experts, top) in [(0, 4, 2), (1, 1, 1), (5, 8, 2), (3, 33, 33), (2, 128, 8)] {
            for norm in [false, true] {
                let logits = values(experts as u64, tokens * experts);
                let weights = on_every_isa(|isa| routed(isa, &logits, experts, top, norm).1);
                let exact: Vec<(usize, f64)> =
                    route_oracle(&logits, experts, top, norm).into_iter().flatten().collect();
                let exact_weights: Vec<f64> = exact.iter().map(|(_, w)| *w).collect();
                assert_close(&weights, &exact_weights, &vec![1.0; exact.len()], 1e-6);
                let ids = routed(Isa::detect(), &logits, experts, top, norm).0;
                assert!(ids.iter().zip(&exact).all(|(id, (exact_id, _))| *id as usize == *exact_id));
            }
        }
    }

    #[test]
    fn equal_experts_are_taken_in_ascending_order() {
        let (ids, weights) = routed(Isa::detect(), &[1.0, 2.0, 2.0, 2.0], 4, 3, true);
        assert_eq!(ids, [1, 2, 3]);
        assert!(weights.iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-6));
    }

    #[test]
    fn grouping_is_a_permutation_in_expert_order() {
        let mut grouping = Grouping::default();
        for ids in [vec![], vec![2, 0, 2, 1, 0, 2], vec![3; 5]] {
            grouping.group(&ids, 4);
            assert_eq!(grouping.offsets.len(), 5);
            assert_eq!(*grouping.offsets.last().unwrap(), ids.len());
            for expert in 0..4 {
                let served = &grouping.slots[grouping.offsets[expert]..grouping.offsets[expert + 1]];
                assert!(served.iter().all(|slot| ids[*slot as usize] as usize == expert));
                assert!(served.is_sorted());
            }
            for (slot, place) in grouping.places.iter().enumerate() {
                assert_eq!(grouping.slots[*place as usize] as usize, slot);
            }
        }
    }

    #[test]
    fn combine_agrees_with_the_oracle_on_every_isa() {
        for (tokens, top, width) in [(0, 2, 4), (1, 1, 1), (3, 2, 17), (4, 3, 64)] {
            let ids: Vec<u32> = (0..tokens * top).map(|i| (i * 5 % 7) as u32).collect();
            let mut grouping = Grouping::default();
            grouping.group(&ids, 7);
            let (rows, weights) = (values(1, tokens * top * width), values(2, tokens * top));
            let out = on_every_isa(|isa| {
                let mut out = vec![f32::NAN; tokens * width];
                combine(isa, &rows, &grouping.places, &weights, top, &mut out);
                out
            });
            let exact = combine_oracle(&rows, &grouping.places, &weights, top, width);
            assert_close(&out, &exact, &vec![1e4; out.len()], 1e-6);
        }
    }
}
