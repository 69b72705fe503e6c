//! Those who share the places of the gateway: connections, addresses and tenants, each with what it has of
//! them. None may take so much that nothing is left for one that comes later.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What one party may have for each place that is free, the one it asks for included: who gets eight, alone
/// has eight of nine, and however many there are, each that comes finds some free. The rule is that of
/// dynamic thresholds in shared packet buffers (Choudhury and Hahne, IEEE/ACM Transactions on Networking
/// 6(2), 1998).
pub const SHARE: usize = 8;

/// The same of a connection, which leaves some to others from its address.
pub const SHARE_OF_CONNECTION: usize = 4;

/// What a place is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A request whose body is on its way.
    Arriving,
    /// One that has come whole, until its answer's end.
    Serving,
}

/// One connection, address or tenant, with the places and the bytes of request bodies that it has now.
#[derive(Debug, Default)]
pub struct Party {
    places: [AtomicUsize; 2],
    /// Bytes of its requests' bodies that are in memory now.
    bytes: AtomicUsize,
}

impl Party {
    /// Takes a place, of which so many are free. `false`, and nothing taken, if it has so many for each of
    /// them.
    pub fn take(&self, stage: Stage, free: usize, share: usize) -> bool {
        let had = self.places[stage as usize].fetch_add(1, Relaxed);
        let may = had < free.saturating_mul(share);
        if !may {
            self.give(stage);
        }
        may
    }

    /// Gives a place back; how many are left to it.
    pub fn give(&self, stage: Stage) -> usize {
        self.places[stage as usize].fetch_sub(1, Relaxed) - 1
    }

    /// Bytes of request bodies that are held for it.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// So many more are.
    pub fn hold(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Relaxed);
    }

    /// So many are no more.
    pub fn let_go(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Relaxed);
    }

    /// Places that it has.
    pub fn has(&self, stage: Stage) -> usize {
        self.places[stage as usize].load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// How many of so many places each of some parties gets that take turns until none gets any.
    fn shared(places: usize, parties: usize) -> Vec<usize> {
        let all: Vec<Party> = (0..parties).map(|_| Party::default()).collect();
        let mut free = places;
        loop {
            let before = free;
            for party in &all {
                free -= usize::from(party.take(Stage::Serving, free, SHARE));
            }
            if free == before {
                return all.iter().map(|party| party.has(Stage::Serving)).collect();
            }
        }
    }

    #[test]
    fn one_alone_gets_nearly_all_and_two_halves_of_that() {
        assert_eq!(shared(16_384, 1), [14_564]);
        assert_eq!(shared(16_384, 2), [7_711, 7_710]);
        for places in 1..=SHARE {
            assert_eq!(shared(places, 1), [places], "few places are not shared");
        }
    }

    proptest! {
        #[test]
        fn who_comes_later_finds_a_place(more in 1_usize..5_000, greedy in 1_usize..20) {
            let places = SHARE * greedy + more;
            let taken: usize = shared(places, greedy).iter().sum();
            prop_assert!(taken < places);
            prop_assert!(Party::default().take(Stage::Serving, places - taken, SHARE));
        }
    }
}
