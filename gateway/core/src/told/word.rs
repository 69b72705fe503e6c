//! One word on a placement, in bytes: what it is (1), then of one that was made its number (LEB128), the
//! number of its worker (4), its owner (1), the name of the block that it goes on from, if it is not told
//! whole (8), the count of its blocks (LEB128) and their names (8 each); of one that came to an end its
//! number alone. All of it little-endian. Who reads it trusts nobody.

use keyway_wire::block_hash::BlockHash;

use crate::index::{CHAIN_BLOCKS_MAX, Owner, WorkerId};

const WHOLE: u8 = 0;
const BEHIND: u8 = 1;
const ANSWERED: u8 = 2;
const WITHDRAWN: u8 = 3;

/// One word on a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// A request was sent.
    Placed {
        /// Counts who tells it's placements.
        number: u64,
        /// Where it was sent.
        worker: WorkerId,
        /// Whose its blocks are.
        owner: Owner,
        /// The block that the others follow; `None`: they are the whole chain.
        behind: Option<BlockHash>,
        /// Names of blocks.
        blocks: Vec<BlockHash>,
    },
    /// Its worker has begun to answer (`began`), or never will.
    Closed {
        /// Which placement.
        number: u64,
        /// Whether its blocks are in the worker's cache by now.
        began: bool,
    },
}

/// Bytes that are no words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("these bytes say no placements")
    }
}

impl std::error::Error for Malformed {}

impl Word {
    /// Its bytes, behind those that are there.
    pub(super) fn placed(
        out: &mut Vec<u8>,
        number: u64,
        (worker, owner): (WorkerId, Owner),
        behind: Option<BlockHash>,
        blocks: &[BlockHash],
    ) {
        out.push(if behind.is_some() { BEHIND } else { WHOLE });
        write_number(out, number);
        out.extend(worker.0.to_le_bytes());
        out.push(owner.0);
        out.extend(behind.iter().flat_map(|block| block.0.to_le_bytes()));
        write_number(out, blocks.len() as u64);
        out.extend(blocks.iter().flat_map(|block| block.0.to_le_bytes()));
    }

    /// Its bytes, behind those that are there.
    pub(super) fn closed(out: &mut Vec<u8>, number: u64, began: bool) {
        out.push(if began { ANSWERED } else { WITHDRAWN });
        write_number(out, number);
    }
}

/// The words that these bytes say, up to where they make no sense.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = Result<Word, Malformed>> {
    let mut rest = Some(Rest(bytes));
    std::iter::from_fn(move || {
        let left = rest.as_mut().filter(|left| !left.0.is_empty())?;
        let word = left.word().ok_or(Malformed);
        if word.is_err() {
            rest = None;
        }
        Some(word)
    })
}

/// What is left to read.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn word(&mut self) -> Option<Word> {
        let kind = self.take::<1>()?[0];
        let number = self.number()?;
        match kind {
            ANSWERED | WITHDRAWN => Some(Word::Closed { number, began: kind == ANSWERED }),
            WHOLE | BEHIND => {
                let worker = WorkerId(u32::from_le_bytes(self.take()?));
                let owner = Owner(self.take::<1>()?[0]);
                let behind = if kind == BEHIND { Some(self.block()?) } else { None };
                let count = usize::try_from(self.number()?).ok()?;
                // Before anything is made room for.
                if count > CHAIN_BLOCKS_MAX || self.0.len() / size_of::<u64>() < count {
                    return None;
                }
                let blocks = (0..count).map(|_| self.block()).collect::<Option<_>>()?;
                Some(Word::Placed { number, worker, owner, behind, blocks })
            }
            _ => None,
        }
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn block(&mut self) -> Option<BlockHash> {
        self.take().map(|bytes| BlockHash(u64::from_le_bytes(bytes)))
    }

    /// LEB128, in at most ten bytes.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..u64::BITS).step_by(7) {
            let [byte] = self.take()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }
}

fn write_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn word() -> impl Strategy<Value = Word> {
        let names = || prop::collection::vec(any::<u64>().prop_map(BlockHash), 0..20);
        let placed = (any::<u64>(), any::<u32>(), any::<u8>(), any::<Option<u64>>(), names());
        let placed = placed.prop_map(|(number, worker, owner, behind, blocks)| {
            let (worker, owner, behind) = (WorkerId(worker), Owner(owner), behind.map(BlockHash));
            Word::Placed { number, worker, owner, behind, blocks }
        });
        let closed = (any::<u64>(), any::<bool>()).prop_map(|(number, began)| Word::Closed { number, began });
        prop_oneof![placed, closed]
    }

    fn write(out: &mut Vec<u8>, word: &Word) {
        match word {
            Word::Placed { number, worker, owner, behind, blocks } => {
                Word::placed(out, *number, (*worker, *owner), *behind, blocks);
            }
            Word::Closed { number, began } => Word::closed(out, *number, *began),
        }
    }

    proptest! {
        #[test]
        fn words_are_read_as_they_were_written(said in prop::collection::vec(word(), 0..20)) {
            let mut bytes = Vec::new();
            for word in &said {
                write(&mut bytes, word);
            }
            let read: Result<Vec<_>, _> = words(&bytes).collect();
            prop_assert_eq!(read.unwrap(), said);
        }

        #[test]
        fn no_bytes_make_more_of_themselves(
            said in prop::collection::vec(word(), 0..4),
            noise in prop::collection::vec(any::<u8>(), 0..200),
            keep in 0_usize..400,
        ) {
            let mut bytes = Vec::new();
            for word in &said {
                write(&mut bytes, word);
            }
            bytes.truncate(keep);
            bytes.extend(noise);
            let read: Vec<_> = words(&bytes).collect();
            // It ends with the first that makes no sense, and no word is longer than its bytes.
            prop_assert!(read.iter().rev().skip(1).all(Result::is_ok));
            let blocks: usize = read.iter().flatten().map(|word| match word {
                Word::Placed { blocks, .. } => blocks.len(),
                Word::Closed { .. } => 0,
            }).sum();
            prop_assert!(blocks * 8 <= bytes.len() && read.len() <= bytes.len());
        }
    }

    #[test]
    fn a_count_that_no_bytes_follow_makes_room_for_nothing() {
        let mut bytes = Vec::new();
        Word::placed(&mut bytes, 1, (WorkerId(2), Owner(3)), None, &[]);
        bytes.pop();
        write_number(&mut bytes, u64::MAX);
        assert_eq!(words(&bytes).collect::<Vec<_>>(), [Err(Malformed)]);
    }
}
