//! Rows of `x` rounded to bf16, in pairs, for weights in bf16. What makes up whole tall tiles is interleaved,
//! `[rows / T][K / 2][T]`, so that a tile reads one stream of memory; the few rows behind lie one after the
//! other. A row's pairs are a function of the row alone.

use super::pairs::{NARROW_ROWS, WIDE_ROWS};
use crate::compute::Compute;
use crate::grid::Grid;
use crate::isa::Body;
use crate::simd::{Simd, pair};

/// What rounding one element takes one thread, in nanoseconds: decides who computes, nothing else.
const NS_PER_ELEMENT: f64 = 0.3;

/// The pairs of `R` rows, as a tile's inner loop reads them.
pub(super) trait Rows<const R: usize>: Copy {
    /// How many each row has.
    fn pairs(self) -> usize;

    /// Pair `k` of row `r`; `len` is how many there are.
    fn at(self, k: usize, r: usize, len: usize) -> u32;
}

/// Rows one after the other.
impl<const R: usize> Rows<R> for [&[u32]; R] {
    #[inline(always)]
    fn pairs(self) -> usize {
        self[0].len()
    }

    #[inline(always)]
    fn at(self, k: usize, r: usize, len: usize) -> u32 {
        // Equal lengths by construction; said so that the loop needs no bounds checks.
        self[r][..len][k]
    }
}

/// A tall tile's rows, interleaved: the first pair of every row, then the second, and so on.
impl<const R: usize> Rows<R> for &[[u32; R]] {
    #[inline(always)]
    fn pairs(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn at(self, k: usize, r: usize, len: usize) -> u32 {
        self[..len][k][r]
    }
}

/// Rows of inputs rounded to bf16, two to a word: whole tall tiles, then the rows left over.
#[derive(Debug)]
pub(super) struct Rounded {
    pairs: Vec<u32>,
    per_row: usize,
    /// How many rows are in tall tiles.
    tall: usize,
}

impl Rounded {
    /// Of `x` `[rows, inputs]`.
    pub(super) fn new(compute: &Compute, x: &[f32], inputs: usize) -> Self {
        let (rows, per_row) = (x.len() / inputs, inputs.div_ceil(2));
        let height = compute.isa().run(Height);
        let tall = rows / height * height;
        let mut pairs = vec![0; rows * per_row];
        let (tiles, rest) = pairs.split_at_mut(tall * per_row);
        if tall > 0 {
            let at_once = compute.tile_rows(tall / height, NS_PER_ELEMENT * (height * inputs) as f64);
            let grid = Grid::new(tiles, height * per_row, at_once, height * per_row);
            compute.tiles(grid, |mut tile| {
                let rows = tile.rows().start * height..tile.rows().end * height;
                let x = &x[rows.start * inputs..rows.end * inputs];
                compute.isa().run(Interleave { x, inputs, to: tile.whole_rows() });
            });
        }
        compute.isa().run(Round { x: &x[tall * inputs..], inputs, to: rest });
        Self { pairs, per_row, tall }
    }

    /// How many rows, from the first on, are in tall tiles.
    #[inline(always)]
    pub(super) fn tall(&self) -> usize {
        self.tall
    }

    /// The pairs of the `R` rows from `row` on; `R` is the tall tiles' height and divides `row`.
    #[inline(always)]
    pub(super) fn tile<const R: usize>(&self, row: usize) -> &[[u32; R]] {
        self.pairs[row * self.per_row..(row + R) * self.per_row].as_chunks().0
    }

    /// The pairs of a row that is in no tall tile.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> &[u32] {
        &self.pairs[row * self.per_row..][..self.per_row]
    }
}

/// How many rows a tall tile has.
struct Height;

impl Body for Height {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        if S::WIDE { WIDE_ROWS } else { NARROW_ROWS }
    }
}

struct Round<'a> {
    x: &'a [f32],
    inputs: usize,
    to: &'a mut [u32],
}

impl Body for Round<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, to) in self.x.chunks_exact(self.inputs).zip(self.to.chunks_exact_mut(self.inputs.div_ceil(2)))
        {
            let (pairs, last) = x.as_chunks::<2>();
            for ([first, second], to) in pairs.iter().zip(&mut *to) {
                *to = pair(*first, *second);
            }
            if let [last] = last {
                to[pairs.len()] = pair(*last, 0.0);
            }
        }
    }
}

struct Interleave<'a> {
    x: &'a [f32],
    inputs: usize,
    to: &'a mut [u32],
}

impl Body for Interleave<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        if S::WIDE {
            interleave::<WIDE_ROWS>(self.x, self.inputs, self.to);
        } else {
            interleave::<NARROW_ROWS>(self.x, self.inputs, self.to);
        }
    }
}

#[inline(always)]
fn interleave<const R: usize>(x: &[f32], inputs: usize, to: &mut [u32]) {
    for (x, to) in x.chunks_exact(R * inputs).zip(to.chunks_exact_mut(R * inputs.div_ceil(2))) {
        let rows: [&[f32]; R] = std::array::from_fn(|r| &x[r * inputs..][..inputs]);
        let to = to.as_chunks_mut::<R>().0;
        for (k, to) in to.iter_mut().enumerate() {
            for (r, to) in to.iter_mut().enumerate() {
                let second = if 2 * k + 1 < inputs { rows[r][2 * k + 1] } else { 0.0 };
                *to = pair(rows[r][2 * k], second);
            }
        }
    }
}
