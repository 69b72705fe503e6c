//! The lists of rows' rules on a device: where each sequence's lies and how far it has come. A list is copied
//! when it is not there, and from then on takes its sequence's tokens on the device. So all may be forgotten
//! at any time: the host knows every token but the last, and the last is taken there.

use std::collections::HashMap;

use keyway_kernels::cuda::rules::{RULE_WORDS, RowRules, list, list_words};
use keyway_kernels::cuda::{Device, DeviceError, Slice};

use super::room::Grown;
use crate::engine::backend::{Draw, Rules};

// Both are small in tests, so that lists and room come to their ends.
/// Rules that a list has room for at least, beside those it is made with: so many new ids later it is made
/// anew.
const SPARE: usize = if cfg!(test) { 4 } else { 64 };
/// Rules that there is room for at least, once there are any: 1 MiB.
const ROOM_MIN: usize = if cfg!(test) { 1 } else { 1 << 16 };

/// A row that is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) draw: Option<Draw<'a>>,
    /// The row of the step's tokens in which its chunk's last one stands, and whether that is a placeholder.
    pub(super) token: usize,
    pub(super) is_pending: bool,
}

/// The sequences' lists of rules on the device, kept from step to step in one buffer.
#[derive(Debug, Default)]
pub(super) struct RuleLists {
    known: HashMap<u64, Known>,
    room: Grown,
    /// Rules for which there is room, headers among them; the room behind `end` is free.
    capacity: usize,
    end: usize,
}

/// A list that is there.
#[derive(Debug, Clone, Copy)]
struct Known {
    first: usize,
    capacity: usize,
    /// Rules that it has at most.
    len: usize,
    /// Tokens that it counts.
    generated: Option<usize>,
}

impl Known {
    /// Whether it lacks only the last of the sequence's tokens; `None` if it is of no use.
    fn lacks_one(&self, rules: &Rules<'_>) -> Option<bool> {
        match (self.generated, rules.generated) {
            (own, wanted) if own == wanted => Some(false),
            (Some(own), Some(wanted)) if own + 1 == wanted && self.len < self.capacity => Some(true),
            _ => None,
        }
    }
}

impl RuleLists {
    /// Where all lists lie.
    pub(super) fn lists(&self) -> Slice<u32> {
        self.room.whole()
    }

    /// Forgets what is there: a step may not have been carried out.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.end = 0;
    }

    /// Brings the rows' lists to the device; each row's rules, without its mask, where it has any. How often
    /// the room moved.
    pub(super) fn prepare(
        &mut self,
        device: &mut dyn Device,
        rows: &[Wanted<'_>],
    ) -> Result<(Vec<Option<RowRules>>, u64), DeviceError> {
        if let Some(placed) = self.place_all(device, rows)? {
            return Ok((placed, 0));
        }
        self.forget();
        let needed = rows.iter().filter_map(|row| row.draw.and_then(|draw| draw.rules));
        let needed: usize = needed.map(|rules| 1 + room_for(rules.list.list().len() + 1)).sum();
        let mut moves = 0;
        if needed > self.capacity {
            self.capacity = (2 * needed).next_power_of_two().max(ROOM_MIN);
            moves = self.room.reserve(device, self.capacity * RULE_WORDS * size_of::<u32>())?;
        }
        let placed = self.place_all(device, rows)?;
        Ok((placed.ok_or_else(|| DeviceError("rules that have no room".into()))?, moves))
    }

    /// `None` if there is no room for all.
    fn place_all(
        &mut self,
        device: &mut dyn Device,
        rows: &[Wanted<'_>],
    ) -> Result<Option<Vec<Option<RowRules>>>, DeviceError> {
        let mut placed = Vec::with_capacity(rows.len());
        for row in rows {
            placed.push(match row.draw.and_then(|draw| draw.rules) {
                None => None,
                Some(rules) => match self.place(device, &rules, row)? {
                    None => return Ok(None),
                    Some(rules) => Some(rules),
                },
            });
        }
        Ok(Some(placed))
    }

    /// `None` if there is no room.
    fn place(
        &mut self,
        device: &mut dyn Device,
        rules: &Rules<'_>,
        row: &Wanted<'_>,
    ) -> Result<Option<RowRules>, DeviceError> {
        let known = self.known.get(&rules.sequence).copied();
        let current = known.and_then(|known| known.lacks_one(rules).map(|lacks| (known, lacks)));
        let (known, takes) = if let Some((known, takes)) = current {
            (Known { len: known.len + usize::from(takes), ..known }, takes)
        } else {
            let takes = row.is_pending && rules.generated.is_some();
            let Some(made) = self.make(device, rules, known, takes)? else { return Ok(None) };
            (made, takes)
        };
        self.known.insert(rules.sequence, Known { generated: rules.generated, ..known });
        let [repetition, frequency, presence] = rules.penalties;
        Ok(Some(RowRules {
            list: Some(known.first),
            token: takes.then_some(row.token),
            mask: None,
            holds: rules.holds,
            repetition,
            frequency,
            presence,
        }))
    }

    /// Copies a list, in the place of an older one if there is room, from which it is to take a token or not;
    /// `None` if there is no room.
    fn make(
        &mut self,
        device: &mut dyn Device,
        rules: &Rules<'_>,
        old: Option<Known>,
        takes: bool,
    ) -> Result<Option<Known>, DeviceError> {
        let made = rules.list.list();
        let len = made.len() + usize::from(takes);
        let old = old.filter(|old| len + SPARE / 2 <= old.capacity).map(|old| (old.first, old.capacity));
        let Some((first, capacity)) = old.or_else(|| self.take_room(len)) else { return Ok(None) };
        let offset = first * RULE_WORDS * size_of::<u32>();
        let at = self.room.slice(offset, list_words(made.len()));
        device.overwrite(at, &list(&made, capacity))?;
        Ok(Some(Known { first, capacity, len, generated: None }))
    }

    /// Room for a list that is to grow: where it begins, and for how many rules.
    fn take_room(&mut self, len: usize) -> Option<(usize, usize)> {
        let (first, capacity) = (self.end, room_for(len));
        self.end += 1 + capacity;
        (self.end <= self.capacity).then_some((first, capacity))
    }
}

/// Rules for which a list of `len` gets room.
fn room_for(len: usize) -> usize {
    len + len / 4 + SPARE
}
