//! The workers an index knows, each at a small stable place that residencies can name in two bytes, and their
//! recency lists: one for each owner that a worker holds something of, mostly one. The place of a worker that
//! was removed is given to a later one; its id never is.

use super::cells::NIL;
use super::owners::{Owner, Owners};
use super::residency::{NUMBERS, Recency};
use crate::spread_map::SpreadMap;

/// Names one worker. Never reused within a gateway's life. Rendezvous hashing uses it, so gateways that are
/// to agree on where a new prefix goes must give a worker the same id (one derived from its address, say).
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug)]
pub struct WorkerId(pub u32);

/// Names one of a worker's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListId {
    pub(super) place: u16,
    /// Which of the worker's: 0 is the one in [`Worker`].
    pub(super) nth: u8,
}

/// What the index keeps of one worker.
#[derive(Clone, Copy)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    /// Whether the place is taken.
    known: bool,
    /// Its first list, and whose that is.
    first: Recency,
    first_owner: Owner,
    /// Blocks of its residencies, each of which stands for a span of some.
    pub(super) blocks: u64,
    /// How many of them no worker has accepted yet.
    pub(super) pending: u64,
    /// Number of the last placement there, below [`NUMBERS`].
    number: u32,
    /// What it is computing, where it is exact.
    pub(super) expected: Recency,
    /// Whether it says itself what it holds.
    pub(super) exact: bool,
    /// Whether a request can go on behind some of its blocks only: see [`super::checkpoints`].
    pub(super) by_checkpoints: bool,
    /// The residency it announced last, or one that has gone since: mostly the parent of the next.
    pub(super) last: u32,
    /// Blocks its cache is believed to hold at most; `u32::MAX`: unknown.
    pub(super) capacity: u32,
}

/// A further list of a worker's.
#[derive(Clone, Copy)]
struct List {
    recency: Recency,
    owner: Owner,
}

/// Bytes of one worker: its state, how much it holds, its further lists, its place in the free list, and its
/// share of the map of ids.
pub(super) const WORKER_BYTES: usize = size_of::<Worker>()
    + size_of::<u32>()
    + size_of::<Vec<List>>()
    + FURTHER_LISTS * size_of::<List>()
    + size_of::<u16>()
    + BUCKETS * BUCKET_BYTES;
/// Further lists that there is room for, for each worker: of 256 MiB enough for 65 tenants at each of a
/// thousand workers.
const FURTHER_LISTS: usize = 1;
/// Buckets of the map for each worker, at most: it doubles when seven of eight are taken.
const BUCKETS: usize = 3;
/// An entry of the map and the byte beside it.
const BUCKET_BYTES: usize = size_of::<(WorkerId, u16)>() + 1;

pub(super) struct Workers {
    places: Vec<Worker>,
    /// Residencies of each, on all of its lists: in a row, as a full index asks time and again who has most.
    lens: Vec<u32>,
    /// Each place's further lists. Empty as long as no worker has one; beside the workers, so that a walk
    /// over these stays short.
    further: Vec<Vec<List>>,
    /// Further lists that there is room for.
    lists_left: usize,
    /// As large as there are workers: a choice asks it for each of them, so it has to stay in the processor's
    /// cache.
    by_id: SpreadMap<WorkerId, u16>,
    free: Vec<u16>,
    max: usize,
}

impl Workers {
    /// As many workers at a time as fit into so many bytes, at most 65,534: a run counts its holders in 16
    /// bits.
    pub(super) fn new(byte_budget: usize) -> Self {
        let max = (byte_budget / WORKER_BYTES).min(usize::from(u16::MAX) - 1);
        let (places, free) = (Vec::with_capacity(max), Vec::with_capacity(max));
        let (lens, further, lists_left) = (Vec::with_capacity(max), Vec::new(), max * FURTHER_LISTS);
        Self { places, lens, further, lists_left, by_id: SpreadMap::default(), free, max }
    }

    /// What it takes, and may come to take.
    pub(super) fn bytes(&self) -> usize {
        self.max * WORKER_BYTES
    }

    pub(super) fn get(&self, id: WorkerId) -> Option<u16> {
        self.by_id.get(&id).copied()
    }

    /// The place of this worker, a new one if need be; `None` if there is room for no more workers.
    pub(super) fn get_or_add(&mut self, id: WorkerId) -> Option<u16> {
        if let Some(place) = self.get(id) {
            return Some(place);
        }
        let worker = Worker {
            id,
            known: true,
            first: Recency::default(),
            first_owner: Owner::NOBODY,
            blocks: 0,
            pending: 0,
            number: 0,
            expected: Recency::default(),
            exact: false,
            by_checkpoints: false,
            last: NIL,
            capacity: u32::MAX,
        };
        let place = if let Some(place) = self.free.pop() {
            self[place] = worker;
            place
        } else if self.places.len() < self.max {
            self.places.push(worker);
            self.lens.push(0);
            (self.places.len() - 1) as u16
        } else {
            return None;
        };
        self.by_id.insert(id, place);
        Some(place)
    }

    /// Forgets a worker of which nothing is held or expected any more.
    pub(super) fn remove(&mut self, id: WorkerId) {
        let Some(place) = self.by_id.remove(&id) else { return };
        self[place].known = false;
        if let Some(further) = self.further.get_mut(usize::from(place)) {
            self.lists_left += further.len();
            *further = Vec::new();
        }
        self.free.push(place);
    }

    /// Residencies at the worker of a place.
    pub(super) fn held_at(&self, place: u16) -> u32 {
        self.lens[usize::from(place)]
    }

    /// There are so many more names, of so many blocks.
    pub(super) fn grew(&mut self, place: u16, names: u32, blocks: u64) {
        self.lens[usize::from(place)] += names;
        self[place].blocks += blocks;
    }

    /// There are so many less.
    pub(super) fn shrank(&mut self, place: u16, names: u32, blocks: u64) {
        self.lens[usize::from(place)] -= names;
        self[place].blocks -= blocks;
    }

    /// A number for one more placement there.
    pub(super) fn next_number(&mut self, place: u16) -> u32 {
        let worker = &mut self[place];
        worker.number = (worker.number + 1) % NUMBERS;
        worker.number
    }

    /// Number of the last placement there.
    pub(super) fn number(&self, place: u16) -> u32 {
        self[place].number
    }

    /// How many placements there came after the one of this number.
    pub(super) fn age(&self, place: u16, number: u32) -> u32 {
        self[place].number.wrapping_sub(number) % NUMBERS
    }

    pub(super) fn list(&self, ListId { place, nth }: ListId) -> &Recency {
        match nth {
            0 => &self[place].first,
            nth => &self.further[usize::from(place)][usize::from(nth) - 1].recency,
        }
    }

    pub(super) fn list_mut(&mut self, ListId { place, nth }: ListId) -> &mut Recency {
        match nth {
            0 => &mut self[place].first,
            nth => &mut self.further[usize::from(place)][usize::from(nth) - 1].recency,
        }
    }

    /// Whose list it is.
    pub(super) fn owner(&self, ListId { place, nth }: ListId) -> Owner {
        match nth {
            0 => self[place].first_owner,
            nth => self.further[usize::from(place)][usize::from(nth) - 1].owner,
        }
    }

    /// Whether the worker has no further lists.
    pub(super) fn has_one_list(&self, place: u16) -> bool {
        self.further(place).is_empty()
    }

    /// The worker's lists, with their owners; some may be empty.
    pub(super) fn lists(&self, place: u16) -> impl Iterator<Item = (ListId, Owner, &Recency)> {
        let first = &self[place];
        let further = self.further(place).iter().map(|list| (list.owner, &list.recency));
        let all = std::iter::once((first.first_owner, &first.first)).chain(further);
        (0..).zip(all).map(move |(nth, (owner, list))| (ListId { place, nth }, owner, list))
    }

    /// The owner's list there, if it has one.
    pub(super) fn find_list(&self, place: u16, owner: Owner) -> Option<ListId> {
        if self[place].first_owner == owner {
            return Some(ListId { place, nth: 0 });
        }
        let further = self.further(place).iter().position(|list| list.owner == owner)?;
        Some(ListId { place, nth: further as u8 + 1 })
    }

    /// The owner's list there, a new one if need be. Where there is room for none, it shares the list of the
    /// owner that holds the most: that one gives way first, so no other owner loses by it.
    pub(super) fn find_or_add_list(&mut self, place: u16, owner: Owner, owners: &Owners) -> ListId {
        if let Some(list) = self.find_list(place, owner) {
            return list;
        }
        if self[place].first.len == 0 {
            self[place].first_owner = owner;
            return ListId { place, nth: 0 };
        }
        let empty = self.further(place).iter().position(|list| list.recency.len == 0);
        if let Some(further) = empty {
            self.further[usize::from(place)][further].owner = owner;
            return ListId { place, nth: further as u8 + 1 };
        }
        if self.lists_left == 0 {
            let most = self.lists(place).max_by_key(|(_, owner, _)| owners.of(*owner));
            return most.map_or(ListId { place, nth: 0 }, |(list, ..)| list);
        }
        if self.further.is_empty() {
            self.further.reserve_exact(self.max);
        }
        if self.further.len() < self.places.len() {
            self.further.resize_with(self.places.len(), Vec::new);
        }
        self.lists_left -= 1;
        // No two lists have one owner, so they are 256 at most.
        let further = &mut self.further[usize::from(place)];
        further.reserve_exact(1);
        further.push(List { recency: Recency::default(), owner });
        ListId { place, nth: further.len() as u8 }
    }

    /// The owner's list with the most residencies; the one of the lowest worker's id among equals.
    pub(super) fn largest(&self, owner: Owner) -> Option<ListId> {
        self.largest_alone(owner).or_else(|| self.largest_of_all(owner))
    }

    /// The same where those workers that hold the most hold it for this owner alone: no list is longer than
    /// all of its worker's together.
    fn largest_alone(&self, owner: Owner) -> Option<ListId> {
        let most = self.lens.iter().fold(0, |most, len| *len.max(&most));
        let places = (0..).zip(&self.lens).filter(|(_, len)| **len == most).map(|(place, _)| place);
        let mut largest: Option<u16> = None;
        for place in places {
            if most == 0 || self[place].first_owner != owner || !self.has_one_list(place) {
                return None;
            }
            if largest.is_none_or(|other| self[place].id < self[other].id) {
                largest = Some(place);
            }
        }
        largest.map(|place| ListId { place, nth: 0 })
    }

    fn largest_of_all(&self, owner: Owner) -> Option<ListId> {
        let mut largest: Option<(ListId, u32)> = None;
        let mut see = |list: ListId, len: u32| {
            let is_larger = largest.is_none_or(|(other, most)| {
                len > most || (len == most && self[list.place].id < self[other.place].id)
            });
            if is_larger && len > 0 {
                largest = Some((list, len));
            }
        };
        // Of all workers, so in one row: mostly there are no further lists to look at.
        for (place, worker) in (0..).zip(&self.places).filter(|(_, worker)| worker.first_owner == owner) {
            see(ListId { place, nth: 0 }, worker.first.len);
        }
        for (place, further) in (0..).zip(&self.further) {
            for (nth, list) in (1..).zip(further).filter(|(_, list)| list.owner == owner) {
                see(ListId { place, nth }, list.recency.len);
            }
        }
        largest.map(|(list, _)| list)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// One more than the largest place.
    pub(super) fn places(&self) -> usize {
        self.places.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerId, u16)> {
        let known = (0..).zip(&self.places).filter(|(_, worker)| worker.known);
        known.map(|(place, worker)| (worker.id, place))
    }

    fn further(&self, place: u16) -> &[List] {
        self.further.get(usize::from(place)).map_or(&[], Vec::as_slice)
    }
}

impl std::ops::Index<u16> for Workers {
    type Output = Worker;

    fn index(&self, place: u16) -> &Worker {
        &self.places[usize::from(place)]
    }
}

impl std::ops::IndexMut<u16> for Workers {
    fn index_mut(&mut self, place: u16) -> &mut Worker {
        &mut self.places[usize::from(place)]
    }
}
