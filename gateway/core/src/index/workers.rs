//! The workers an index knows, each at a small stable place that slots can name in two bytes. The place of a
//! worker that was removed is given to a later one; its id never is.

use super::slab::{NIL, Recency};
use crate::spread_map::SpreadMap;

/// Names one worker. Never reused within a gateway's life. Rendezvous hashing uses it, so gateways that are to
/// agree on where a new prefix goes must give a worker the same id (one derived from its address, say).
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug)]
pub struct WorkerId(pub u32);

/// What the index keeps of one worker.
#[derive(Clone, Copy)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    /// Whether the place is taken.
    known: bool,
    pub(super) recency: Recency,
    /// What it is computing, where it is exact.
    pub(super) expected: Recency,
    /// Whether it says itself what it holds.
    pub(super) exact: bool,
    /// The residency it announced last, or one that has gone since: mostly the parent of the next.
    pub(super) last: u32,
    /// Blocks its cache is believed to hold at most; `u32::MAX`: unknown.
    pub(super) capacity: u32,
}

/// Bytes of one worker: its state, its place in the free list, and its share of the map of ids.
pub(super) const WORKER_BYTES: usize = size_of::<Worker>() + size_of::<u16>() + BUCKETS * BUCKET_BYTES;
/// Buckets of the map for each worker, at most: it doubles when seven of eight are taken.
const BUCKETS: usize = 3;
/// An entry of the map and the byte beside it.
const BUCKET_BYTES: usize = size_of::<(WorkerId, u16)>() + 1;

pub(super) struct Workers {
    places: Vec<Worker>,
    /// As large as there are workers: a choice asks it for each of them, so it has to stay in the processor's cache.
    by_id: SpreadMap<WorkerId, u16>,
    free: Vec<u16>,
    max: usize,
}

impl Workers {
    /// As many workers at a time as fit into so many bytes, at most 65,535.
    pub(super) fn new(byte_budget: usize) -> Self {
        let max = (byte_budget / WORKER_BYTES).min(usize::from(u16::MAX));
        let (places, free) = (Vec::with_capacity(max), Vec::with_capacity(max));
        Self { places, by_id: SpreadMap::default(), free, max }
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
        let (recency, expected) = (Recency::default(), Recency::default());
        let worker =
            Worker { id, known: true, recency, expected, exact: false, last: NIL, capacity: u32::MAX };
        let place = if let Some(place) = self.free.pop() {
            self[place] = worker;
            place
        } else if self.places.len() < self.max {
            self.places.push(worker);
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
        self.free.push(place);
    }

    /// The worker with the most residencies; the lowest id among equals.
    pub(super) fn largest(&self) -> Option<u16> {
        self.iter().max_by_key(|&(id, place)| (self[place].recency.len, std::cmp::Reverse(id))).map(|of| of.1)
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
