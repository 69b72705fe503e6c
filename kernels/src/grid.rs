//! A row-major matrix cut into equal rectangles, so that several threads can write it at once. It only knows
//! who may write where; [`crate::compute::Compute`] decides who does.

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix and how it is cut. The last tile of a row or column of tiles may be smaller.
#[derive(Debug)]
pub(crate) struct Grid<'a, T = f32> {
    start: *mut T,
    rows: usize,
    width: usize,
    tile_rows: usize,
    tile_columns: usize,
    matrix: PhantomData<&'a mut [T]>,
}

// SAFETY: a grid stands for the exclusive reference it was made of, which may be sent and shared; access goes
// through `tile`, whose callers keep the tiles apart.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for Grid<'_, T> {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl<T: Send> Sync for Grid<'_, T> {}

impl<'a, T> Grid<'a, T> {
    /// `matrix` `[rows, width]` in tiles of `tile_rows` by `tile_columns`.
    ///
    /// # Panics
    /// If `matrix` is not whole rows, or a tile is empty.
    pub(crate) fn new(matrix: &'a mut [T], width: usize, tile_rows: usize, tile_columns: usize) -> Self {
        assert!(tile_rows > 0 && tile_columns > 0, "grid: a tile is empty");
        let rows = matrix.len().checked_div(width).unwrap_or(0);
        assert!(matrix.len() == rows * width, "grid: the matrix is not whole rows");
        Self { start: matrix.as_mut_ptr(), rows, width, tile_rows, tile_columns, matrix: PhantomData }
    }

    /// How many tiles there are.
    pub(crate) fn len(&self) -> usize {
        self.rows.div_ceil(self.tile_rows) * self.width.div_ceil(self.tile_columns)
    }

    /// Tile `i`, counted along the columns first.
    ///
    /// # Safety
    /// Each `i` is asked for at most once in a grid's life.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn tile(&self, i: usize) -> Tile<'_, T> {
        assert!(i < self.len(), "grid: no such tile");
        let across = self.width.div_ceil(self.tile_columns);
        let (row, column) = (i / across * self.tile_rows, i % across * self.tile_columns);
        Tile {
            start: self.start,
            width: self.width,
            rows: row..(row + self.tile_rows).min(self.rows),
            columns: column..(column + self.tile_columns).min(self.width),
            grid: PhantomData,
        }
    }

    /// The only tile, if there is but one: most operations of a small model, hence without a division.
    #[inline(always)]
    pub(crate) fn only_tile(&mut self) -> Option<Tile<'_, T>> {
        let whole = self.tile_rows >= self.rows && self.tile_columns >= self.width;
        (whole && self.rows > 0 && self.width > 0).then_some(Tile {
            start: self.start,
            width: self.width,
            rows: 0..self.rows,
            columns: 0..self.width,
            grid: PhantomData,
        })
    }

    /// Calls `work` with one tile after the other.
    #[allow(unsafe_code)]
    pub(crate) fn in_order(self, work: impl Fn(Tile<'_, T>)) {
        for i in 0..self.len() {
            // SAFETY: `i` ascends, and `self` ends here.
            work(unsafe { self.tile(i) });
        }
    }
}

/// A rectangle of a matrix, of which its holder alone may read and write.
#[derive(Debug)]
pub(crate) struct Tile<'a, T = f32> {
    start: *mut T,
    width: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    grid: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// Its rows in the matrix.
    #[inline(always)]
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Its columns in the matrix.
    #[inline(always)]
    pub(crate) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// The tile's part of the matrix's row `row`.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(self.rows.contains(&row), "grid: the row is not in the tile");
        // SAFETY: row and columns lie in the matrix, and in no other tile of its grid.
        unsafe {
            let start = self.start.add(row * self.width + self.columns.start);
            std::slice::from_raw_parts_mut(start, self.columns.len())
        }
    }

    /// The whole tile as one slice, where it has all columns of the matrix.
    ///
    /// # Panics
    /// If it has not.
    #[allow(unsafe_code)]
    pub(crate) fn whole_rows(&mut self) -> &mut [T] {
        assert!(self.columns.len() == self.width, "grid: the tile is not whole rows");
        // SAFETY: the rows lie one behind the other in the matrix, and in no other tile of its grid.
        unsafe {
            let start = self.start.add(self.rows.start * self.width);
            std::slice::from_raw_parts_mut(start, self.rows.len() * self.width)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_lies_in_one_tile() {
        for (rows, width, tile_rows, tile_columns) in [(1, 1, 1, 1), (5, 7, 2, 3), (4, 6, 9, 6), (0, 3, 1, 1)]
        {
            let mut matrix = vec![0.0; rows * width];
            Grid::new(&mut matrix, width, tile_rows, tile_columns).in_order(|mut tile| {
                let columns = tile.columns();
                for row in tile.rows() {
                    for (column, element) in columns.clone().zip(tile.row(row)) {
                        *element += (row * width + column + 1) as f32;
                    }
                }
            });
            assert!(matrix.iter().enumerate().all(|(i, element)| *element == (i + 1) as f32));
        }
    }

    #[test]
    fn an_only_tile_is_the_matrix() {
        for (rows, width, tile_rows, tile_columns, only) in [
            (2, 3, 2, 3, true),
            (2, 3, 9, 9, true),
            (2, 3, 1, 3, false),
            (2, 3, 2, 2, false),
            (0, 3, 1, 3, false),
        ] {
            let mut matrix = vec![0.0; rows * width];
            let mut grid = Grid::new(&mut matrix, width, tile_rows, tile_columns);
            assert_eq!(grid.only_tile().is_some(), only);
            if let Some(mut tile) = grid.only_tile() {
                assert_eq!((tile.rows(), tile.columns()), (0..rows, 0..width));
                tile.whole_rows().fill(1.0);
                assert_eq!(matrix, [1.0; 6]);
            }
        }
    }

    #[test]
    fn tiles_of_all_columns_are_slices() {
        let mut matrix = vec![0.0; 15];
        Grid::new(&mut matrix, 3, 2, 3).in_order(|mut tile| {
            let first = tile.rows().start as f32;
            tile.whole_rows().fill(first);
        });
        assert_eq!(matrix, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]);
    }
}
