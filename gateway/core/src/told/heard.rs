//! What one other gateway has said of its placements: they are recorded as this gateway's own are, until
//! their workers answer or do not. Nothing that it says makes anything grow without a bound.

use std::collections::VecDeque;

use super::word::Word;
use crate::index::{Placement, PrefixIndex, WorkerId};
use crate::spread_map::SpreadMap;

/// Placements of one gateway that are open at a time; the oldest of more counts as accepted.
const OPEN_MAX: usize = 8192;

/// One gateway that is heard.
#[derive(Debug, Default)]
pub struct Heard {
    open: SpreadMap<u64, Placement>,
    /// Their numbers, in the order of their coming; closed ones among them.
    order: VecDeque<u64>,
}

/// What became of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is in the index.
    Recorded,
    /// It goes on from a block that is not known here. The chain is told whole again in a while.
    Unfounded,
    /// There is no such worker, or it says itself what it holds.
    Elsewhere,
    /// A placement was closed.
    Closed,
}

impl Heard {
    /// Takes a word. `at`: which worker it is here, if it is one whose cache is modelled.
    pub fn take(&mut self, index: &mut PrefixIndex, word: &Word, at: Option<WorkerId>) -> Outcome {
        match word {
            Word::Placed { number, owner, behind, blocks, .. } => {
                let Some(worker) = at else { return Outcome::Elsewhere };
                let placement = match behind {
                    Some(block) => index.place_behind(*owner, worker, *block, blocks),
                    None => Some(index.place_of(*owner, worker, blocks)),
                };
                let Some(placement) = placement else { return Outcome::Unfounded };
                if placement.is_expected() {
                    // It has come to say itself what it holds, since it was looked at.
                    index.finish(placement);
                    return Outcome::Elsewhere;
                }
                // One of the same number is accepted by this: nobody numbers twice.
                if self.open.insert(*number, placement).is_none() {
                    self.order.push_back(*number);
                }
                self.bound();
                Outcome::Recorded
            }
            Word::Closed { number, began } => {
                let placement = self.open.remove(number);
                if let Some(placement) = placement.filter(|_| !began) {
                    index.withdraw(placement);
                }
                Outcome::Closed
            }
        }
    }

    /// It is heard no more: what its requests had not begun is taken back.
    pub fn withdraw_all(&mut self, index: &mut PrefixIndex) {
        self.order.clear();
        for (_, placement) in self.open.drain() {
            index.withdraw(placement);
        }
    }

    /// Placements that are open.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    fn bound(&mut self) {
        while self.order.len() > OPEN_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.open.remove(&oldest);
            }
        }
        // Closed ones, which are mostly the oldest, take no place.
        while self.order.front().is_some_and(|oldest| !self.open.contains_key(oldest)) {
            self.order.pop_front();
        }
    }
}
