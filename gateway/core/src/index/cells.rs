//! The index's memory: blocks of one size, each either a run of names or four cells for residencies, so that
//! what is freed of one kind is there for the other. Allocated once; what was freed is used again first.

use super::lines::Pieces;

/// Numbers of 32 bits in a cell, and in a block.
pub(super) const CELL_WORDS: usize = 5;
pub(super) const BLOCK_WORDS: usize = CELLS * CELL_WORDS;
/// Cells that a block has room for.
pub(super) const CELLS: usize = 4;
/// Bytes of a block, and of a cell.
pub(super) const BLOCK_BYTES: usize = BLOCK_WORDS * WORD_BYTES;
pub(super) const CELL_BYTES: usize = CELL_WORDS * WORD_BYTES;
const WORD_BYTES: usize = size_of::<u32>();

/// No block and no cell: number 0 of either is never handed out.
pub(super) const NIL: u32 = 0;
/// The first word of a cell that is free: no run's number.
const FREE: u32 = u32::MAX;
/// Words of a free cell: its neighbours in the list of those.
const BEFORE: usize = 1;
const AFTER: usize = 2;

/// The memory of one block.
pub(super) type Block = [u8; BLOCK_BYTES];
/// The memory of one cell.
pub(super) type Cell = [u8; CELL_BYTES];

pub(super) struct Cells {
    blocks: Pieces<BLOCK_BYTES>,
    /// Blocks that were handed out at some time, the one that never is among them.
    touched: usize,
    /// Free blocks, linked through their first word.
    next_free: u32,
    blocks_free: usize,
    /// Free cells of blocks that have others in use.
    next_spare: u32,
    spare: usize,
}

impl Cells {
    /// Room for so many blocks, reserved now and written when used.
    pub(super) fn new(blocks: usize) -> Self {
        let blocks = Pieces::zeroed(if blocks == 0 { 0 } else { blocks + 1 });
        Self { blocks, touched: 1, next_free: NIL, blocks_free: 0, next_spare: NIL, spare: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * BLOCK_BYTES
    }

    /// Whether there are so many blocks and, beside these, so many cells to be had.
    pub(super) fn has_room(&self, blocks: usize, cells: usize) -> bool {
        let more = cells.saturating_sub(self.spare).div_ceil(CELLS);
        blocks + more <= self.blocks_free + self.blocks.len().saturating_sub(self.touched)
    }

    /// Blocks at most, and those of which some is in use.
    #[cfg(test)]
    pub(super) fn max_blocks(&self) -> usize {
        self.blocks.len().saturating_sub(1)
    }

    #[cfg(test)]
    pub(super) fn used_blocks(&self) -> usize {
        self.touched - 1 - self.blocks_free
    }

    /// Whether there may be something at this block's number.
    pub(super) fn has_block(&self, block: u32) -> bool {
        (block as usize) < self.blocks.len()
    }

    #[inline]
    pub(super) fn block(&self, block: u32) -> &Block {
        self.blocks.get(block as usize)
    }

    #[inline]
    pub(super) fn block_mut(&mut self, block: u32) -> &mut Block {
        self.blocks.get_mut(block as usize)
    }

    #[inline]
    pub(super) fn cell(&self, cell: u32) -> &Cell {
        &self.block(cell / CELLS as u32).as_chunks().0[cell as usize % CELLS]
    }

    #[inline]
    pub(super) fn cell_mut(&mut self, cell: u32) -> &mut Cell {
        &mut self.block_mut(cell / CELLS as u32).as_chunks_mut().0[cell as usize % CELLS]
    }

    /// A block. The caller has looked for room.
    pub(super) fn take_block(&mut self) -> u32 {
        debug_assert!(self.has_room(1, 0));
        if self.next_free == NIL {
            self.touched += 1;
            return (self.touched - 1) as u32;
        }
        let block = self.next_free;
        self.next_free = word(self.block(block), 0);
        self.blocks_free -= 1;
        block
    }

    pub(super) fn give_block(&mut self, block: u32) {
        let next = self.next_free;
        set_word(self.block_mut(block), 0, next);
        self.next_free = block;
        self.blocks_free += 1;
    }

    /// A cell. The caller has looked for room.
    pub(super) fn take_cell(&mut self) -> u32 {
        if self.next_spare == NIL {
            let first = self.take_block() * CELLS as u32;
            // In this order: they are then handed out one beside the other.
            (first..first + CELLS as u32).rev().for_each(|cell| self.add_free(cell));
        }
        let cell = self.next_spare;
        self.take_free(cell);
        cell
    }

    pub(super) fn give_cell(&mut self, cell: u32) {
        self.add_free(cell);
        let first = cell - cell % CELLS as u32;
        let all = first..first + CELLS as u32;
        if all.clone().all(|cell| word(self.cell(cell), 0) == FREE) {
            all.for_each(|cell| self.take_free(cell));
            self.give_block(first / CELLS as u32);
        }
    }

    fn add_free(&mut self, cell: u32) {
        let after = self.next_spare;
        *self.cell_mut(cell) = of_words([FREE, NIL, after, 0, 0]);
        if after != NIL {
            set_word(self.cell_mut(after), BEFORE, cell);
        }
        self.next_spare = cell;
        self.spare += 1;
    }

    fn take_free(&mut self, cell: u32) {
        let [_, before, after, ..] = words(self.cell(cell));
        match before {
            NIL => self.next_spare = after,
            before => set_word(self.cell_mut(before), AFTER, after),
        }
        if after != NIL {
            set_word(self.cell_mut(after), BEFORE, before);
        }
        self.spare -= 1;
    }
}

/// A number in the memory of a block or a cell.
#[inline]
pub(super) fn word(memory: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(memory.as_chunks().0[at])
}

#[inline]
pub(super) fn set_word(memory: &mut [u8], at: usize, word: u32) {
    memory.as_chunks_mut().0[at] = word.to_ne_bytes();
}

/// All numbers of a cell.
#[inline]
pub(super) fn words(cell: &Cell) -> [u32; CELL_WORDS] {
    std::array::from_fn(|at| word(cell, at))
}

/// The memory of a cell with these numbers.
#[inline]
pub(super) fn of_words(words: [u32; CELL_WORDS]) -> Cell {
    let mut cell = [0; CELL_BYTES];
    for (at, one) in words.into_iter().enumerate() {
        set_word(&mut cell, at, one);
    }
    cell
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_and_cells_are_each_one_s_own_and_none_is_lost(
            ops in prop::collection::vec((any::<bool>(), any::<bool>(), any::<prop::sample::Index>()), 0..300),
        ) {
            const MAX: usize = 6;
            let mut cells = Cells::new(MAX);
            let (mut blocks_used, mut cells_used): (Vec<u32>, Vec<u32>) = Default::default();
            let mut number = 1;
            for (of_block, takes, which) in ops {
                match (of_block, takes) {
                    (true, true) if cells.has_room(1, 0) => {
                        let block = cells.take_block();
                        *cells.block_mut(block) = [block as u8; BLOCK_BYTES];
                        blocks_used.push(block);
                    }
                    (false, true) if cells.has_room(0, 1) => {
                        let cell = cells.take_cell();
                        *cells.cell_mut(cell) = of_words([number, cell, cell, cell, cell]);
                        cells_used.push(cell);
                        number += 1;
                    }
                    (true, false) if !blocks_used.is_empty() => {
                        cells.give_block(blocks_used.swap_remove(which.index(blocks_used.len())));
                    }
                    (false, false) if !cells_used.is_empty() => {
                        cells.give_cell(cells_used.swap_remove(which.index(cells_used.len())));
                    }
                    _ => {}
                }
                prop_assert!(blocks_used.iter().all(|block| *cells.block(*block) == [*block as u8; BLOCK_BYTES]));
                prop_assert!(cells_used.iter().all(|cell| words(cells.cell(*cell))[1..] == [*cell; 4]));
                let with_cells: std::collections::BTreeSet<u32> = cells_used.iter().map(|cell| cell / 4).collect();
                let free = MAX - blocks_used.len() - with_cells.len();
                prop_assert!(cells.has_room(free, 0) && !cells.has_room(free + 1, 0));
                let in_parts = 4 * with_cells.len() - cells_used.len();
                prop_assert!(cells.has_room(free, in_parts) && !cells.has_room(free, in_parts + 1));
            }
        }
    }

    #[test]
    fn nothing_has_no_room() {
        assert!(!Cells::new(0).has_room(1, 0) && !Cells::new(0).has_room(0, 1) && Cells::new(0).bytes() == 0);
    }
}
