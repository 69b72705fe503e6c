//! The map from a 64-bit key to its slots, in one allocation of fixed size. It keeps no keys: the caller
//! tells slots of one key from those of others that seem to have it, and says by which tag each is found.
//!
//! A line of the processor's cache has room for twelve slots and a byte for each, its *tag*: so
//! nearly all searches touch one line and, by the tags, no slot of another key. What finds its line full goes
//! on to the next one, and each line counts what has passed it, so that a search knows where to end and
//! nothing has to move when a slot goes. (Compare F14 of github `facebook/folly`, `container/detail`.)

use super::lines::{LINE_BYTES, Line, Lines};

/// Slots of one line.
const WAYS: usize = 12;
/// Where the count of what has passed a line stands, behind the tags, and where its slots do.
const PASSED: usize = WAYS;
const SLOTS: usize = 16;
const _: () = assert!(SLOTS + WAYS * size_of::<u32>() == LINE_BYTES && PASSED + size_of::<u16>() <= SLOTS);

/// Slots to a line of a full table: of more, many would not find room in their own.
const FULL: usize = 9;

/// Spreads keys whose upper bits are alike (2^64 divided by the golden ratio, odd).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// A count that says no more than that something has passed; it stays.
const UNCOUNTED: u16 = u16::MAX;

/// Slots by key. Slot 0 is never one; nor is 0 a tag, so it says that a place is free.
pub(super) struct Table {
    lines: Lines,
}

/// Where a key belongs.
#[derive(Clone, Copy)]
struct Home {
    line: usize,
    tag: u8,
}

impl Table {
    /// Room for `slots` keys; the system backs it with pages only where it is used.
    pub(super) fn new(slots: usize) -> Self {
        Self { lines: Lines::zeroed(Self::lines_for(slots)) }
    }

    /// Lines of a table for `slots` keys.
    const fn lines_for(slots: usize) -> usize {
        slots.div_ceil(FULL)
    }

    /// The slots for which a table fits into so many bytes, where each takes so many elsewhere.
    pub(super) fn slots_in(byte_budget: usize, bytes_each: usize) -> usize {
        // The last line may be for less than its share of slots.
        let rest = byte_budget.saturating_sub(LINE_BYTES) as u128;
        (rest * FULL as u128 / (bytes_each * FULL + LINE_BYTES) as u128) as usize
    }

    pub(super) fn bytes(&self) -> usize {
        self.lines.len() * LINE_BYTES
    }

    /// One more slot of `key`, by this tag. There must be room.
    pub(super) fn insert(&mut self, key: u64, tag: u64, slot: u32) {
        let Some(home) = self.home(key, tag) else { return };
        let mut at = home.line;
        for _ in 0..self.lines.len() {
            let line = self.lines.get_mut(at);
            if let Some(way) = Ways::with(line, 0).next() {
                line[way] = home.tag;
                set_slot(line, way, slot);
                return;
            }
            set_passed(line, passed(line).saturating_add(1));
            at = self.after(at);
        }
    }

    /// Forgets a slot of `key` with this tag.
    pub(super) fn remove(&mut self, key: u64, tag: u64, slot: u32) {
        let Some(home) = self.home(key, tag) else { return };
        let Some((found, way)) = self.find(home, slot) else { return };
        self.lines.get_mut(found)[way] = 0;
        let mut at = home.line;
        while at != found {
            let line = self.lines.get_mut(at);
            match passed(line) {
                UNCOUNTED => {}
                count => set_passed(line, count - 1),
            }
            at = self.after(at);
        }
    }

    /// A slot of `key` with this tag has another number from now on.
    pub(super) fn replace(&mut self, key: u64, tag: u64, slot: u32, by: u32) {
        let Some(home) = self.home(key, tag) else { return };
        if let Some((line, way)) = self.find(home, slot) {
            set_slot(self.lines.get_mut(line), way, by);
        }
    }

    /// Brings the lines of several keys into the processor's cache: it fetches them side by side, where
    /// searches one after the other would each wait for memory.
    pub(super) fn fetch(&self, keys: impl Iterator<Item = u64>) {
        let tag = |key: u64| self.home(key, 0).map_or(0, |home| self.lines.get(home.line)[0]);
        std::hint::black_box(keys.fold(0, |all, key| all ^ tag(key)));
    }

    /// The slot that `key` most likely has with this tag, of its own line alone; 0 if none there seems to be.
    #[inline]
    pub(super) fn likely(&self, key: u64, tag: u64) -> u32 {
        let Some(home) = self.home(key, tag) else { return 0 };
        let line = self.lines.get(home.line);
        Ways::with(line, home.tag).next().map_or(0, |way| slot(line, way))
    }

    /// The slots of `key` with this tag, and maybe some of others.
    #[inline]
    pub(super) fn tagged(&self, key: u64, tag: u64) -> Slots<'_> {
        self.slots(self.home(key, tag), |home| Some(home.tag))
    }

    /// The slots of `key` with one of these tags, each once, and maybe some of others.
    pub(super) fn tagged_any(&self, key: u64, tags: impl Iterator<Item = u64>) -> impl Iterator<Item = u32> {
        let mut any = [0_u64; 4];
        for tag in tags.map(tag_of) {
            any[usize::from(tag / 64)] |= 1 << (tag % 64);
        }
        let mut slots = self.all(key);
        std::iter::from_fn(move || {
            while let Some((line, way)) = slots.next_way() {
                let line = self.lines.get(line);
                if any[usize::from(line[way] / 64)] & 1 << (line[way] % 64) != 0 {
                    return Some(slot(line, way));
                }
            }
            None
        })
    }

    /// All slots of `key`, and some of others.
    pub(super) fn all(&self, key: u64) -> Slots<'_> {
        self.slots(self.home(key, 0), |_| None)
    }

    #[inline]
    fn slots(&self, home: Option<Home>, tag: impl Fn(Home) -> Option<u8>) -> Slots<'_> {
        let Some(home) = home else {
            return Slots { table: self, ways: Ways(0), line: 0, tag: None, left: 0 };
        };
        let ways = Ways::of(self.lines.get(home.line), tag(home));
        Slots { table: self, ways, line: home.line, tag: tag(home), left: self.lines.len() }
    }

    /// Where this slot is.
    fn find(&self, home: Home, of: u32) -> Option<(usize, usize)> {
        let mut at = home.line;
        for _ in 0..self.lines.len() {
            let line = self.lines.get(at);
            if let Some(way) = Ways::with(line, home.tag).find(|way| slot(line, *way) == of) {
                return Some((at, way));
            }
            if passed(line) == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Multiply and shift: any number of lines works, not only powers of two. `None` without any.
    #[inline]
    fn home(&self, key: u64, tag: u64) -> Option<Home> {
        let line = ((u128::from(key.wrapping_mul(SPREAD)) * self.lines.len() as u128) >> 64) as usize;
        (!self.lines.is_empty()).then_some(Home { line, tag: tag_of(tag) })
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() { 0 } else { at + 1 }
    }
}

/// By bits that say nothing yet of the line: those have the greatest weight.
fn tag_of(tag: u64) -> u8 {
    ((tag.wrapping_mul(SPREAD) >> 16) as u8).max(1)
}

/// What a search finds, line by line.
pub(super) struct Slots<'a> {
    table: &'a Table,
    ways: Ways,
    line: usize,
    /// None: it may be any.
    tag: Option<u8>,
    /// Lines that were not looked at yet, this one among them.
    left: usize,
}

impl Slots<'_> {
    /// Where the next one is: its line, and its place there.
    #[inline]
    fn next_way(&mut self) -> Option<(usize, usize)> {
        loop {
            if let Some(way) = self.ways.next() {
                return Some((self.line, way));
            }
            if self.left <= 1 || passed(self.table.lines.get(self.line)) == 0 {
                return None;
            }
            self.left -= 1;
            self.line = self.table.after(self.line);
            self.ways = Ways::of(self.table.lines.get(self.line), self.tag);
        }
    }
}

impl Iterator for Slots<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        let (line, way) = self.next_way()?;
        Some(slot(self.table.lines.get(line), way))
    }
}

/// The places of a line that bear one tag, from the first on: a bit for each, at the top of its byte.
struct Ways(u128);

impl Ways {
    const LOW: u128 = u128::MAX / 255 * 127;
    const ALL: u128 = u128::MAX >> (u128::BITS as usize - 8 * WAYS);

    #[inline]
    fn with(line: &Line, tag: u8) -> Self {
        let (tags, _) = line.as_chunks();
        let differ = u128::from_le_bytes(tags[0]) ^ (u128::MAX / 255 * u128::from(tag));
        // A byte's top bit stays free of the others' sum exactly where all of it is 0.
        Self(!(((differ & Self::LOW) + Self::LOW) | differ | Self::LOW) & Self::ALL)
    }

    /// The places with this tag; without one, all that are taken.
    #[inline]
    fn of(line: &Line, tag: Option<u8>) -> Self {
        match tag {
            Some(tag) => Self::with(line, tag),
            None => Self(!Self::with(line, 0).0 & (Self::ALL & !Self::LOW)),
        }
    }
}

impl Iterator for Ways {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let way = self.0.trailing_zeros() as usize / 8;
        (self.0 != 0).then(|| {
            self.0 &= self.0 - 1;
            way
        })
    }
}

fn slot(line: &Line, way: usize) -> u32 {
    u32::from_ne_bytes(line.as_chunks().0[SLOTS / 4 + way])
}

fn set_slot(line: &mut Line, way: usize, slot: u32) {
    line.as_chunks_mut().0[SLOTS / 4 + way] = slot.to_ne_bytes();
}

fn passed(line: &Line) -> u16 {
    u16::from_ne_bytes(line.as_chunks().0[PASSED / 2])
}

fn set_passed(line: &mut Line, count: u16) {
    line.as_chunks_mut().0[PASSED / 2] = count.to_ne_bytes();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Slots of few keys, so that lines are full and what belongs to one lies in the next, past the last
        /// one too.
        #[test]
        fn equals_a_map(ops in prop::collection::vec((0_u32..60, any::<bool>()), 0..400)) {
            let slots = 42_usize;
            let key_of = |slot: u32| u64::from(slot / 2 % 3).wrapping_mul(0xF1DE_83E1_9937_733D);
            let mut table = Table::new(slots);
            let mut model: BTreeSet<u32> = BTreeSet::new();
            for (slot, insert) in ops {
                let slot = slot + 1;
                if insert && model.len() < slots && model.insert(slot) {
                    table.insert(key_of(slot), slot.into(), slot);
                } else if !insert {
                    table.remove(key_of(slot), slot.into(), slot);
                    model.remove(&slot);
                }
                for key in (1..=6).map(key_of) {
                    let mut of_key: Vec<u32> = table.all(key).filter(|slot| key_of(*slot) == key).collect();
                    of_key.sort_unstable();
                    let expected = model.iter().copied().filter(|slot| key_of(*slot) == key);
                    prop_assert_eq!(of_key, expected.collect::<Vec<_>>());
                }
                for slot in 1..=60 {
                    let found = table.tagged(key_of(slot), slot.into()).any(|found| found == slot);
                    prop_assert_eq!(found, model.contains(&slot));
                }
            }
            // Once all is gone, no search goes past its own line.
            for slot in 1..=60 {
                table.remove(key_of(slot), slot.into(), slot);
            }
            prop_assert!((0..table.lines.len()).all(|at| passed(table.lines.get(at)) == 0));
        }

        #[test]
        fn the_ways_of_a_tag_are_its_bytes(line in prop::collection::vec(0_u8..4, LINE_BYTES), tag in 0_u8..4) {
            let line: Line = line.try_into().unwrap();
            let expected: Vec<usize> = (0..WAYS).filter(|way| line[*way] == tag).collect();
            prop_assert_eq!(Ways::with(&line, tag).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_table_of_nothing_finds_nothing() {
        let mut table = Table::new(0);
        table.insert(1, 1, 1);
        table.remove(1, 1, 1);
        assert_eq!((table.all(1).next(), table.bytes(), table.likely(1, 1)), (None, 0, 0));
    }

    #[test]
    fn a_full_table_has_room_for_all_of_its_slots_and_most_at_home() {
        let slots = 100_000;
        let mut table = Table::new(slots);
        let key = |slot: u32| u64::from(slot).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(29);
        (1..=slots as u32).for_each(|slot| table.insert(key(slot), key(slot), slot));
        assert!((1..=slots as u32).all(|slot| table.tagged(key(slot), key(slot)).any(|found| found == slot)));
        let home = (1..=slots as u32).filter(|slot| {
            let home = table.home(key(*slot), key(*slot)).unwrap();
            Ways::with(table.lines.get(home.line), home.tag)
                .any(|way| super::slot(table.lines.get(home.line), way) == *slot)
        });
        let home = home.count();
        assert!(home >= slots * 8 / 10, "{home}");
        assert!(table.bytes() <= slots * 8 + LINE_BYTES);
        assert!(Table::slots_in(table.bytes() + slots * 32, 32) <= slots);
        assert!(Table::slots_in(table.bytes() + slots * 32, 32) >= slots - 10);
    }
}
