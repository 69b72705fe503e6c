//! The ids that are remembered, as hashes: so many at most, the oldest go first, and none stays for longer
//! than it is to.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use foldhash::fast::RandomState;
use keyway_core::index::WorkerId;

/// Who stores something, and for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The worker that stores it, which may have left the fleet since.
    pub worker: WorkerId,
    /// The tenant, hashed; 0 where there are none.
    pub tenant: u64,
}

/// One that is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdEntry {
    /// Keyed hash of the id that an answer handed out.
    pub id: u64,
    /// The worker that stores it, and the tenant that may have it.
    pub owner: Owner,
    /// Since when it is known.
    pub since: Duration,
}

/// When an id came, and whether another gateway said it.
#[derive(Debug, Clone, Copy)]
struct Came {
    id: u64,
    since: Duration,
    heard: bool,
}

/// All that are remembered.
#[derive(Debug)]
pub struct Ids {
    known: HashMap<u64, Owner, RandomState>,
    /// Each once, in the order in which they came.
    order: VecDeque<Came>,
    /// How many have gone.
    gone: u64,
    entries_max: usize,
    keep: Duration,
}

impl Ids {
    /// None yet; at most so many, each for so long.
    pub fn new(entries_max: usize, keep: Duration) -> Self {
        Self { known: HashMap::default(), order: VecDeque::new(), gone: 0, entries_max, keep }
    }

    /// Remembers one. Who stores what is known already may be another worker by now, never for another
    /// tenant. Returns whether it is news.
    pub fn insert(&mut self, now: Duration, id: u64, owner: Owner) -> bool {
        self.take(now, id, owner, false)
    }

    /// The same of what another gateway says, which is not told on.
    pub fn hear(&mut self, now: Duration, id: u64, owner: Owner) -> bool {
        self.take(now, id, owner, true)
    }

    fn take(&mut self, now: Duration, id: u64, owner: Owner, heard: bool) -> bool {
        self.expire(now);
        if let Some(known) = self.known.get_mut(&id) {
            let moved = known.tenant == owner.tenant && *known != owner;
            if moved {
                *known = owner;
            }
            return moved;
        }
        if self.order.len() == self.entries_max {
            self.drop_oldest();
        }
        self.known.insert(id, owner);
        self.order.push_back(Came { id, since: now, heard });
        true
    }

    /// Who stores it; `None` where the id is not known, or was known for longer than ids are kept.
    pub fn get(&mut self, now: Duration, id: u64) -> Option<Owner> {
        self.expire(now);
        self.known.get(&id).copied()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// How long each stays.
    pub fn keep(&self) -> Duration {
        self.keep
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// All of them, from the oldest on.
    pub fn iter(&self) -> impl Iterator<Item = IdEntry> {
        self.order.iter().filter_map(|came| self.entry(came))
    }

    /// Those of its own that came behind so many, some of them at most, and how many that makes.
    pub fn told_after(&self, seen: u64, told_max: usize) -> (Vec<IdEntry>, u64) {
        let skip = usize::try_from(seen.saturating_sub(self.gone)).unwrap_or(usize::MAX);
        let looked = self.order.len().saturating_sub(skip).min(told_max);
        let some = self.order.iter().skip(skip).take(looked).filter(|came| !came.heard);
        let next = self.gone.max(seen) + looked as u64;
        (some.filter_map(|came| self.entry(came)).collect(), next)
    }

    fn entry(&self, came: &Came) -> Option<IdEntry> {
        let owner = *self.known.get(&came.id)?;
        Some(IdEntry { id: came.id, owner, since: came.since })
    }

    fn expire(&mut self, now: Duration) {
        while self.order.front().is_some_and(|oldest| now.saturating_sub(oldest.since) > self.keep) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.order.pop_front() {
            self.known.remove(&oldest.id);
            self.gone += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::STORED_ID_BYTES;

    fn owner(worker: u32, tenant: u64) -> Owner {
        Owner { worker: WorkerId(worker), tenant }
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_oldest_go_first_and_none_stays_for_too_long() {
        let mut ids = Ids::new(2, at(10));
        assert!(ids.insert(at(0), 1, owner(1, 0)) && ids.insert(at(1), 2, owner(1, 0)));
        assert!(ids.insert(at(2), 3, owner(1, 0)));
        assert_eq!((ids.get(at(2), 1), ids.len()), (None, 2));
        assert!(ids.get(at(11), 2).is_some());
        assert_eq!((ids.get(at(12), 2), ids.len()), (None, 1));
        assert!(ids.get(at(13), 3).is_none() && ids.is_empty());
    }

    #[test]
    fn another_worker_may_take_an_id_over_and_another_tenant_may_not() {
        let mut ids = Ids::new(9, at(9));
        assert!(ids.insert(at(0), 1, owner(1, 7)));
        assert!(!ids.insert(at(0), 1, owner(1, 7)));
        assert!(ids.insert(at(0), 1, owner(2, 7)));
        assert!(!ids.insert(at(0), 1, owner(3, 8)));
        assert_eq!(ids.get(at(0), 1), Some(owner(2, 7)));
    }

    #[test]
    fn one_takes_no_more_memory_than_it_counts_for() {
        let mut ids = Ids::new(1 << 16, at(9));
        assert!((0..1 << 16).all(|id| ids.insert(at(0), id, owner(1, 0))));
        // A table is full at seven eighths, and twice as large from then on.
        let entry = size_of::<(u64, Owner)>() + 1;
        let bytes = ids.known.capacity() * 8 / 7 * entry + ids.order.capacity() * size_of::<Came>();
        assert!(bytes <= STORED_ID_BYTES << 16, "{} a piece", bytes >> 16);
    }

    #[test]
    fn each_of_its_own_is_told_once_in_pieces_whatever_goes_meanwhile() {
        let mut ids = Ids::new(4, at(9));
        let told = |(entries, next): (Vec<IdEntry>, u64)| {
            (entries.iter().map(|entry| entry.id).collect::<Vec<_>>(), next)
        };
        (1..=3).for_each(|id| assert!(ids.insert(at(0), id, owner(1, 0))));
        assert!(ids.hear(at(0), 4, owner(1, 0)));
        assert_eq!(told(ids.told_after(0, 2)), (vec![1, 2], 2));
        assert_eq!(told(ids.told_after(2, 2)), (vec![3], 4));
        assert_eq!(told(ids.told_after(4, 2)), (vec![], 4));
        (5..=8).for_each(|id| assert!(ids.insert(at(1), id, owner(1, 0))));
        assert_eq!(told(ids.told_after(4, 9)), (vec![5, 6, 7, 8], 8));
        // Some went before they were told.
        assert_eq!(told(ids.told_after(2, 3)), (vec![5, 6, 7], 7));
        assert_eq!(told(ids.told_after(99, 3)), (vec![], 99));
    }

    proptest! {
        #[test]
        fn it_says_what_a_list_would_say(steps in prop::collection::vec((0_u64..12, 0_u32..3, 0_u64..2, 0_u64..4), 0..80)) {
            let (mut ids, mut list, mut now) = (Ids::new(5, at(9)), Vec::<(u64, Owner, u64)>::new(), 0);
            for (id, worker, tenant, later) in steps {
                now += later;
                list.retain(|(_, _, since)| now - since <= 9);
                match list.iter_mut().find(|(known, _, _)| *known == id) {
                    Some((_, known, _)) if known.tenant == tenant => known.worker = WorkerId(worker),
                    Some(_) => {}
                    None => list.push((id, owner(worker, tenant), now)),
                }
                if list.len() > 5 {
                    list.remove(0);
                }
                ids.insert(at(now), id, owner(worker, tenant));
                for id in 0..12 {
                    let listed = list.iter().find(|(known, _, _)| *known == id).map(|(_, owner, _)| *owner);
                    prop_assert_eq!(ids.get(at(now), id), listed);
                }
                prop_assert_eq!(ids.iter().map(|entry| entry.id).collect::<Vec<_>>(), list.iter().map(|(id, _, _)| *id).collect::<Vec<_>>());
            }
        }
    }
}
