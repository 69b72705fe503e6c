//! The workers an index knows, each at a small stable place that slots can name in two bytes. The place of a
//! worker that was removed is given to a later one; its id never is.

use super::slab::Recency;

/// Names one worker. Never reused within a gateway's life. Rendezvous hashing uses it, so gateways that are to
/// agree on where a new prefix goes must give a worker the same id (one derived from its address, say).
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug)]
pub struct WorkerId(pub u32);

/// What the index keeps of one worker.
#[derive(Clone, Copy)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) recency: Recency,
    /// Blocks its cache is believed to hold at most; `u32::MAX`: unknown.
    pub(super) capacity: u32,
}

/// Bytes of one worker: its state, its entry in the order of ids, and its place in the free list.
pub(super) const WORKER_BYTES: usize = size_of::<Worker>() + size_of::<(WorkerId, u16)>() + size_of::<u16>();

pub(super) struct Workers {
    places: Vec<Worker>,
    /// Ids in order, each with its place.
    by_id: Vec<(WorkerId, u16)>,
    free: Vec<u16>,
    max: usize,
}

impl Workers {
    /// Room for `max` workers at a time, at most 65,535.
    pub(super) fn new(max: usize) -> Self {
        let max = max.min(usize::from(u16::MAX));
        Self {
            places: Vec::with_capacity(max),
            by_id: Vec::with_capacity(max),
            free: Vec::with_capacity(max),
            max,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.places.capacity() * size_of::<Worker>()
            + self.by_id.capacity() * size_of::<(WorkerId, u16)>()
            + self.free.capacity() * size_of::<u16>()
    }

    pub(super) fn get(&self, id: WorkerId) -> Option<u16> {
        self.position(id).ok().map(|at| self.by_id[at].1)
    }

    /// The place of this worker, a new one if need be; `None` if there is room for no more workers.
    pub(super) fn get_or_add(&mut self, id: WorkerId) -> Option<u16> {
        let at = match self.position(id) {
            Ok(at) => return Some(self.by_id[at].1),
            Err(at) => at,
        };
        if self.by_id.len() == self.max {
            return None;
        }
        let worker = Worker { id, recency: Recency::default(), capacity: u32::MAX };
        let place = if let Some(place) = self.free.pop() {
            self[place] = worker;
            place
        } else {
            self.places.push(worker);
            (self.places.len() - 1) as u16
        };
        self.by_id.insert(at, (id, place));
        Some(place)
    }

    /// Forgets a worker that holds nothing any more.
    pub(super) fn remove(&mut self, id: WorkerId) {
        if let Ok(at) = self.position(id) {
            self.free.push(self.by_id.remove(at).1);
        }
    }

    /// The worker with the most residencies; the lowest id among equals.
    pub(super) fn largest(&self) -> Option<u16> {
        let largest =
            self.by_id.iter().max_by_key(|&&(id, place)| (self[place].recency.len, std::cmp::Reverse(id)));
        largest.map(|&(_, place)| place)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerId, u16)> {
        self.by_id.iter().copied()
    }

    fn position(&self, id: WorkerId) -> Result<usize, usize> {
        self.by_id.binary_search_by_key(&id, |&(id, _)| id)
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
