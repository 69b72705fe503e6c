//! What the ranks of a group agree on, and where what lies in a rank's mailbox: `peer.cuh` computes the same.
//! Moves nothing.

use std::fmt;

use crate::cuda::DeviceError;
use crate::cuda::constants::numbers::PACKET_BYTES as PACKET;
use crate::cuda::constants::peer::{self, RANKS_MAX, ROW_BYTES};

/// Bytes before a mailbox's messages: flags, and whose fault it is if the group has failed.
pub const CONTROL_BYTES: usize = peer::CONTROL_BYTES;
/// Experts a token may have at most: a lane of a warp for each.
pub const TOP_MAX: usize = peer::LANES;
/// Ranks times experts of a rank at most: 36 KB of a block's shared memory, of the 48 KB that every block may
/// have.
pub const PAIRS_MAX: usize = 4096;
/// Tokens of a rank in a round at most: the blocks of a launch along one side.
pub const TOKENS_MAX: usize = 65_535;
/// Mailboxes of one allocation begin at multiples of this.
const MAILBOX_ALIGNMENT: usize = 256;

/// The sizes that all ranks of a group agree on. A mailbox holds, twice, a message from each rank (where each
/// expert's rows end, the rows by expert, the tokens) and an output for each of the rank's own slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Ranks of the group.
    pub ranks: usize,
    /// Experts that a rank holds at most.
    pub held: usize,
    /// Tokens that a rank has in a round at most.
    pub tokens: usize,
    /// Experts of a token.
    pub top: usize,
    /// Elements of a token, bf16.
    pub width: usize,
}

/// Why there can be no group of such sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutError {
    /// There are none of something, or too many.
    Count {
        /// What is counted, in the plural.
        what: &'static str,
        /// How many of them there are.
        count: usize,
        /// How many there may be; at least 1.
        most: usize,
    },
    /// A token of so many elements does not fill whole packets.
    Width(usize),
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { what, count, most } => {
                write!(f, "peers: {count} {what}, where 1 to {most} can be")
            }
            Self::Width(width) => {
                write!(f, "peers: rows of {width} elements are not whole packets of {}", PACKET / 2)
            }
        }
    }
}

impl std::error::Error for LayoutError {}

impl From<LayoutError> for DeviceError {
    fn from(error: LayoutError) -> Self {
        Self(error.to_string())
    }
}

impl Layout {
    /// Why there can be no such group, if so.
    pub fn check(&self) -> Result<(), LayoutError> {
        let Self { ranks, held, tokens, top, width } = *self;
        let fits = |what: &'static str, count: usize, most: usize| {
            let fits = (1..=most).contains(&count);
            if fits { Ok(()) } else { Err(LayoutError::Count { what, count, most }) }
        };
        fits("ranks", ranks, RANKS_MAX)?;
        fits("pairs of a rank and one of its experts", ranks * held, PAIRS_MAX)?;
        fits("tokens of a rank", tokens, TOKENS_MAX)?;
        fits("experts of a token", top, TOP_MAX)?;
        if width == 0 || !width.is_multiple_of(PACKET / 2) {
            return Err(LayoutError::Width(width));
        }
        Ok(())
    }

    /// Slots that a rank's own tokens have at most.
    pub fn slots(&self) -> usize {
        self.tokens * self.top
    }

    /// Rows that can come for a rank's experts at most: all slots of all ranks.
    pub fn rows(&self) -> usize {
        self.ranks * self.slots()
    }

    /// Bytes of a mailbox.
    pub fn mailbox_bytes(&self) -> usize {
        (self.outputs_at(0) + 2 * self.slots() * self.row_bytes()).next_multiple_of(MAILBOX_ALIGNMENT)
    }

    /// The byte of a mailbox at which the message of rank `from` in `round` begins: where each expert's rows
    /// end.
    pub fn message_at(&self, round: u32, from: usize) -> usize {
        CONTROL_BYTES + ((round % 2) as usize * self.ranks + from) * self.message_bytes()
    }

    /// Behind a message's beginning: its rows, pairs of a token's place and a slot.
    pub fn rows_at(&self) -> usize {
        (self.held * 4).next_multiple_of(PACKET)
    }

    /// Behind a message's beginning: its tokens.
    pub fn tokens_at(&self) -> usize {
        self.rows_at() + (self.slots() * ROW_BYTES).next_multiple_of(PACKET)
    }

    /// The byte of a mailbox at which the outputs for the rank's own slots in `round` begin.
    pub fn outputs_at(&self, round: u32) -> usize {
        let before = CONTROL_BYTES + 2 * self.ranks * self.message_bytes();
        before + (round % 2) as usize * self.slots() * self.row_bytes()
    }

    fn message_bytes(&self) -> usize {
        self.tokens_at() + self.tokens * self.row_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.width * 2
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        (1..=RANKS_MAX, 1..=128_usize, 1..=300_usize, 1..=TOP_MAX, 1..=900_usize).prop_map(
            |(ranks, held, tokens, top, packets)| Layout { ranks, held, tokens, top, width: packets * 8 },
        )
    }

    /// All that a mailbox holds, as ranges of bytes.
    fn regions(layout: &Layout) -> Vec<std::ops::Range<usize>> {
        let control = 0..CONTROL_BYTES;
        let mut regions = vec![control];
        for round in [7, 8] {
            for from in 0..layout.ranks {
                let at = layout.message_at(round, from);
                regions.push(at..at + layout.held * 4);
                regions.push(at + layout.rows_at()..at + layout.rows_at() + layout.slots() * ROW_BYTES);
                let tokens = at + layout.tokens_at();
                regions.push(tokens..tokens + layout.tokens * layout.width * 2);
            }
            let outputs = layout.outputs_at(round);
            regions.push(outputs..outputs + layout.slots() * layout.width * 2);
        }
        regions
    }

    proptest! {
        /// Nothing overlaps, whatever two rounds one after another hold; all is within, and begins at a
        /// packet.
        #[test]
        fn nothing_in_a_mailbox_overlaps(layout in layouts()) {
            prop_assert_eq!(layout.check(), Ok(()));
            let mut regions = regions(&layout);
            prop_assert!(regions.iter().all(|region| region.start.is_multiple_of(PACKET)));
            regions.sort_by_key(|region| region.start);
            prop_assert!(regions.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(regions.last().is_some_and(|last| last.end <= layout.mailbox_bytes()));
        }

        /// Rounds take turns, at the end of numbers too, where 0 is left out.
        #[test]
        fn a_round_has_the_places_of_the_one_before_the_last(layout in layouts(), round in 1..u32::MAX - 2) {
            let places = |round| (layout.message_at(round, 0), layout.outputs_at(round));
            prop_assert_eq!(places(round), places(round + 2));
            prop_assert_ne!(places(round), places(round + 1));
            prop_assert_ne!(places(u32::MAX), places(2));
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_reason() {
        let layout = Layout { ranks: 8, held: 16, tokens: 16, top: 8, width: 7168 };
        assert_eq!(layout.check(), Ok(()));
        let refused = [
            (Layout { ranks: 33, ..layout }, "33 ranks"),
            (Layout { held: 513, ..layout }, "4104 pairs"),
            (Layout { held: 0, ..layout }, "0 pairs"),
            (Layout { tokens: 65_536, ..layout }, "65536 tokens"),
            (Layout { top: 33, ..layout }, "33 experts"),
            (Layout { width: 7172, ..layout }, "7172 elements"),
        ];
        for (layout, reason) in refused {
            let error = DeviceError::from(layout.check().unwrap_err());
            assert!(error.0.starts_with("peers: ") && error.0.contains(reason), "{layout:?}: {error}");
        }
    }
}
