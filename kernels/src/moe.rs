//! The parts of a mixture-of-experts layer around the experts' products: the router's choice
//! (`moe/route.rs`), the grouping of tokens by expert, and the combination of the experts' outputs. Where
//! experts are spread over ranks: who holds which (`moe/placement.rs`), what goes where (`moe/plan.rs`), and
//! the layer itself (`moe/parallel.rs`).

use crate::compute::Compute;
use crate::grid::Grid;
use crate::isa::Body;
use crate::simd::Simd;

pub mod parallel;
mod placement;
mod plan;
mod route;

pub use placement::{Placement, PlacementError};
pub use plan::{ExchangePlan, Part};
pub use route::{GroupScore, Groups, Routing, RoutingError, Scoring, route, route_oracle};

/// What combining one element of one slot takes one thread, in nanoseconds: decides who computes, nothing
/// else.
const NS_PER_TERM: f64 = 0.1;

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
pub fn combine(
    compute: &Compute,
    rows: &[f32],
    places: &[u32],
    weights: &[f32],
    top: usize,
    out: &mut [f32],
) {
    assert!(places.len() == weights.len() && places.len().is_multiple_of(top), "combine: shapes disagree");
    let width = (out.len() * top).checked_div(places.len()).unwrap_or(0);
    assert!(rows.len() == places.len() * width && out.len() * top == rows.len(), "combine: shapes disagree");
    if width == 0 {
        return;
    }
    let tile_rows = compute.tile_rows(out.len() / width, NS_PER_TERM * (top * width) as f64);
    compute.tiles(Grid::new(out, width, tile_rows, width), |mut tile| {
        let slots = tile.rows().start * top..tile.rows().end * top;
        let (places, weights) = (&places[slots.clone()], &weights[slots]);
        compute.isa().run(Combine { rows, places, weights, top, width, out: tile.whole_rows() });
    });
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
                add(out, *weight, &self.rows[*place as usize * self.width..][..self.width]);
            }
        }
    }
}

/// `out += weight * row`, each element rounded once.
#[inline(always)]
fn add(out: &mut [f32], weight: f32, row: &[f32]) {
    for (out, value) in out.iter_mut().zip(row) {
        *out = weight.mul_add(*value, *out);
    }
}

/// [`combine`] of rows that lie in several places: `terms` `[slots]` are a part and a row in it, `parts` each
/// `[rows, width]`. The same sums, and so the same bits.
///
/// # Panics
/// If shapes disagree.
pub fn combine_parts(
    compute: &Compute,
    parts: &[&[f32]],
    terms: &[(u32, u32)],
    weights: &[f32],
    top: usize,
    out: &mut [f32],
) {
    assert!(terms.len() == weights.len() && terms.len().is_multiple_of(top), "combine: shapes disagree");
    let width = (out.len() * top).checked_div(terms.len()).unwrap_or(0);
    assert!(out.len() * top == terms.len() * width, "combine: shapes disagree");
    if width == 0 {
        return;
    }
    let tile_rows = compute.tile_rows(out.len() / width, NS_PER_TERM * (top * width) as f64);
    compute.tiles(Grid::new(out, width, tile_rows, width), |mut tile| {
        let slots = tile.rows().start * top..tile.rows().end * top;
        let (terms, weights) = (&terms[slots.clone()], &weights[slots]);
        compute.isa().run(CombineParts { parts, terms, weights, top, width, out: tile.whole_rows() });
    });
}

struct CombineParts<'a> {
    parts: &'a [&'a [f32]],
    terms: &'a [(u32, u32)],
    weights: &'a [f32],
    top: usize,
    width: usize,
    out: &'a mut [f32],
}

impl Body for CombineParts<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let slots = self.terms.chunks_exact(self.top).zip(self.weights.chunks_exact(self.top));
        for (out, (terms, weights)) in self.out.chunks_exact_mut(self.width).zip(slots) {
            out.fill(0.0);
            for ((part, row), weight) in terms.iter().zip(weights) {
                let rows = self.parts[*part as usize];
                add(out, *weight, &rows[*row as usize * self.width..][..self.width]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, everywhere, same_bits, values};

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
    fn combine_agrees_with_the_oracle_everywhere() {
        for (tokens, top, width) in [(0, 2, 4), (1, 1, 1), (3, 2, 17), (4, 3, 64)] {
            let ids: Vec<u32> = (0..tokens * top).map(|i| (i * 5 % 7) as u32).collect();
            let mut grouping = Grouping::default();
            grouping.group(&ids, 7);
            let (rows, weights) = (values(1, tokens * top * width), values(2, tokens * top));
            let out = everywhere(|compute| {
                let mut out = vec![f32::NAN; tokens * width];
                combine(compute, &rows, &grouping.places, &weights, top, &mut out);
                out
            });
            let exact = combine_oracle(&rows, &grouping.places, &weights, top, width);
            assert_close(&out, &exact, &vec![1e4; out.len()], 1e-6);
        }
    }

    #[test]
    fn combine_sums_in_slot_order_wherever_the_rows_lie() {
        let (top, width) = (4, 33);
        let ids = [3, 0, 2, 1, 1, 3, 0, 2, 2, 1, 3, 0];
        let (slot_rows, weights) = (values(1, ids.len() * width), values(2, ids.len()));
        // Renumbered experts finish in another order; a token's slots are the same.
        let combined = |numbers: [u32; 4]| {
            let mut grouping = Grouping::default();
            grouping.group(&ids.map(|id: usize| numbers[id]), 4);
            let mut rows = vec![f32::NAN; slot_rows.len()];
            for (slot, place) in grouping.places.iter().enumerate() {
                rows[*place as usize * width..][..width].copy_from_slice(&slot_rows[slot * width..][..width]);
            }
            everywhere(|compute| {
                let mut out = vec![f32::NAN; ids.len() / top * width];
                combine(compute, &rows, &grouping.places, &weights, top, &mut out);
                out
            })
        };
        let first = combined([0, 1, 2, 3]);
        assert!(same_bits(&first, &combined([3, 2, 1, 0])) && same_bits(&first, &combined([2, 0, 3, 1])));
    }
}
