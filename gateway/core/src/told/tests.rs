//! Who listens comes to know what who tells knows: block for block, in the same order of use.

use std::time::Duration;

use keyway_wire::block_hash::BlockHash;
use proptest::prelude::*;

use super::*;
use crate::index::{Owner, Placement, PrefixIndex, WorkerId};

const INDEX_BYTES: usize = 1 << 18;
const LOG_BYTES: usize = 1 << 20;
const WORKERS: u32 = 3;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn index(capacity: usize) -> PrefixIndex {
    let mut index = PrefixIndex::new(INDEX_BYTES);
    (0..WORKERS).for_each(|worker| index.set_capacity(WorkerId(worker), Some(capacity)));
    index
}

/// A conversation's chain: what all begin with, and then its own.
fn chain(conversation: u64, shared: u64, own: u64) -> Vec<BlockHash> {
    let own = (0..own).map(|block| 1_000_000 * (conversation + 1) + shared * 1_000 + block);
    (1..=shared).chain(own).map(BlockHash).collect()
}

/// One who tells.
struct Teller {
    index: PrefixIndex,
    log: PlacementLog,
    open: Vec<(Placement, Option<Told>)>,
}

/// One who listens.
struct Listener {
    index: PrefixIndex,
    heard: Heard,
    next: u64,
}

impl Teller {
    fn new(capacity: usize) -> Self {
        Self { index: index(capacity), log: PlacementLog::new(LOG_BYTES), open: Vec::new() }
    }

    fn place(&mut self, now: Duration, worker: u32, chain: &[BlockHash]) -> Option<Told> {
        let placement = self.index.place_of(Owner(1), WorkerId(worker), chain);
        let told = self.log.placed(now, Owner(1), chain, &placement);
        self.open.push((placement, told));
        told
    }

    fn close(&mut self, now: Duration, which: usize, began: bool) {
        if self.open.is_empty() {
            return;
        }
        let (placement, told) = self.open.swap_remove(which % self.open.len());
        if began {
            drop(placement);
        } else {
            self.index.withdraw(placement);
        }
        if let Some(told) = told {
            self.log.closed(now, told, began);
        }
    }
}

impl Listener {
    fn new(capacity: usize) -> Self {
        Self { index: index(capacity), heard: Heard::default(), next: 0 }
    }

    fn listen(&mut self, teller: &Teller) -> Vec<Outcome> {
        let said = teller.log.read(self.next, Duration::MAX, usize::MAX);
        self.next = said.next;
        let take = |word: Result<Word, Malformed>| {
            let word = word.unwrap();
            let at = match &word {
                Word::Placed { worker, .. } => Some(*worker).filter(|worker| worker.0 < WORKERS),
                Word::Closed { .. } => None,
            };
            self.heard.take(&mut self.index, &word, at)
        };
        words(&said.bytes).map(take).collect()
    }
}

fn state(index: &mut PrefixIndex) -> Vec<Vec<(Owner, BlockHash)>> {
    index.settle();
    (0..WORKERS).map(|worker| index.by_recency(WorkerId(worker)).collect()).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Place(u32, u64, u64, u64),
    Close(usize, bool),
    Listen,
}

fn step() -> impl Strategy<Value = Step> {
    let place = (0..WORKERS, 0..6_u64, 0..8_u64, 0..30_u64);
    prop_oneof![
        4 => place.prop_map(|(worker, which, shared, own)| Step::Place(worker, which, shared, own)),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, began)| Step::Close(which, began)),
        1 => Just(Step::Listen),
    ]
}

proptest! {
    #[test]
    fn who_hears_all_of_it_knows_the_same(
        steps in prop::collection::vec(step(), 1..120),
        capacity in 20_usize..200,
        gap_s in prop_oneof![Just(0_u64), Just(1), Just(40)],
    ) {
        let (mut teller, mut listener) = (Teller::new(capacity), Listener::new(capacity));
        let mut now = s(0);
        for step in steps {
            match step {
                Step::Place(worker, which, shared, own) => {
                    let _ = teller.place(now, worker, &chain(which, shared, own));
                }
                Step::Close(which, began) => teller.close(now, which, began),
                Step::Listen => {}
            }
            // What is kept for some seconds must be read within them.
            prop_assert!(listener.listen(&teller).iter().all(|outcome| *outcome != Outcome::Unfounded));
            prop_assert_eq!(state(&mut listener.index), state(&mut teller.index));
            now += s(gap_s);
        }
    }

    #[test]
    fn whatever_is_missed_heals_with_the_next_whole_chains(
        steps in prop::collection::vec((0..WORKERS, 0..6_u64, 0..8_u64, 1..30_u64, any::<bool>()), 1..60),
    ) {
        let (mut teller, mut listener) = (Teller::new(10_000), Listener::new(10_000));
        for (worker, which, shared, own, is_lost) in &steps {
            let _ = teller.place(s(0), *worker, &chain(*which, *shared, *own));
            if *is_lost {
                listener.next = teller.log.end();
            } else {
                listener.listen(&teller);
            }
        }
        for (worker, which, shared, own, _) in &steps {
            let _ = teller.place(s(100), *worker, &chain(*which, *shared, *own));
            listener.listen(&teller);
        }
        let sorted = |index: &mut PrefixIndex| {
            state(index).into_iter().map(|mut blocks| { blocks.sort_unstable(); blocks }).collect::<Vec<_>>()
        };
        prop_assert_eq!(sorted(&mut listener.index), sorted(&mut teller.index));
    }

    #[test]
    fn nothing_that_is_said_grows_without_a_bound(bytes in prop::collection::vec(any::<u8>(), 0..2_000)) {
        let mut listener = Listener::new(50);
        for word in words(&bytes).flatten() {
            let at = Some(WorkerId(0));
            listener.heard.take(&mut listener.index, &word, at);
        }
        prop_assert!(listener.heard.open() <= bytes.len() && listener.index.bytes() <= INDEX_BYTES);
    }
}

#[test]
fn turns_tell_what_they_add_and_now_and_then_all() {
    let mut teller = Teller::new(10_000);
    let bytes = |teller: &mut Teller, at: u64, own: u64| {
        let from = teller.log.end();
        let _ = teller.place(s(at), 0, &chain(1, 100, own));
        teller.log.read(from, Duration::MAX, usize::MAX).bytes.len() / 8
    };
    assert_eq!(bytes(&mut teller, 0, 20), 120 + 1);
    assert_eq!(bytes(&mut teller, 10, 30), 10 + 2);
    assert_eq!(bytes(&mut teller, 50, 40), 10 + 2);
    assert_eq!(bytes(&mut teller, 61, 50), 150 + 1, "a minute after it was told whole");
    assert_eq!(bytes(&mut teller, 62, 60), 10 + 2);
    // Who begins to listen knows nothing.
    teller.log.listened_to(s(63));
    assert_eq!(bytes(&mut teller, 63, 70), 170 + 1);
    // Others that part from it where it parted before go on from there.
    let _ = teller.place(s(63), 0, &chain(2, 100, 5));
    let from = teller.log.end();
    let _ = teller.place(s(63), 0, &chain(3, 100, 5));
    assert_eq!(teller.log.read(from, Duration::MAX, usize::MAX).bytes.len() / 8, 5 + 2);
}

#[test]
fn the_log_is_bounded_and_who_is_slow_misses_the_oldest() {
    let mut log = PlacementLog::new(10_000);
    let mut index = index(10_000);
    let mut place = |log: &mut PlacementLog, at: u64, which: u64| {
        let chain = chain(which, 0, 50);
        let placement = index.place(WorkerId(0), &chain);
        log.placed(s(at), Owner::NOBODY, &chain, &placement).unwrap();
        assert!(log.bytes() <= 10_000);
    };
    (0..100).for_each(|which| place(&mut log, 0, which));
    let said = log.read(0, Duration::MAX, usize::MAX);
    assert_eq!((said.missed + said.placements, said.next), (100, 100));
    assert!(said.placements >= 10 && said.workers == [WorkerId(0)]);
    assert!(!log.has_after(said.next) && log.has_after(said.next - 1));
    // No more at a time than is asked for, and a word at least.
    let first = log.read(said.missed, Duration::MAX, 1);
    assert_eq!((first.placements, first.next, first.missed), (1, said.missed + 1, 0));
    // What is old goes, whether it was read or not.
    place(&mut log, 6, 200);
    assert_eq!(log.read(said.next, Duration::MAX, usize::MAX).placements, 1);
    assert_eq!(log.read(0, Duration::MAX, usize::MAX).missed, 100);
    // Who begins to listen hears the last two seconds of it, and who listens late nothing younger.
    place(&mut log, 9, 201);
    assert_eq!(log.listened_to(s(10)), 101);
    assert_eq!(log.read(100, s(8), usize::MAX).placements, 1);
}

#[test]
fn workers_that_say_themselves_what_they_hold_are_not_spoken_of_or_heard_of() {
    let (mut teller, mut listener) = (Teller::new(100), Listener::new(100));
    teller.index.set_exact(WorkerId(0), true);
    assert!(teller.place(s(0), 0, &chain(1, 0, 9)).is_none() && teller.log.bytes() == 0);
    listener.index.set_exact(WorkerId(1), true);
    let _ = teller.place(s(0), 1, &chain(1, 0, 9));
    assert_eq!(listener.listen(&teller), [Outcome::Elsewhere]);
    assert_eq!((listener.index.expected(), listener.heard.open()), (0, 0));
}

#[test]
fn what_one_who_is_gone_had_not_begun_is_taken_back() {
    let (mut teller, mut listener) = (Teller::new(100), Listener::new(100));
    let _ = teller.place(s(0), 0, &chain(1, 0, 9));
    let _ = teller.place(s(0), 0, &chain(2, 0, 9));
    teller.close(s(0), 0, true);
    listener.listen(&teller);
    listener.heard.withdraw_all(&mut listener.index);
    listener.index.settle();
    assert_eq!((listener.index.resident(WorkerId(0)), listener.heard.open()), (9, 0));
}

#[test]
fn placements_that_nobody_closes_are_accepted_in_the_end() {
    let (mut teller, mut listener) = (Teller::new(10_000), Listener::new(10_000));
    (teller.index, listener.index) = (PrefixIndex::new(8 * INDEX_BYTES), PrefixIndex::new(8 * INDEX_BYTES));
    for which in 0..9_000 {
        let _ = teller.place(s(0), 0, &chain(which, 0, 1));
        if which % 100 == 0 {
            listener.listen(&teller);
        }
    }
    listener.listen(&teller);
    assert_eq!((listener.heard.open(), listener.index.resident(WorkerId(0))), (8192, 9_000));
    listener.heard.withdraw_all(&mut listener.index);
    listener.index.settle();
    assert_eq!(listener.index.resident(WorkerId(0)), 9_000 - 8192);
}
