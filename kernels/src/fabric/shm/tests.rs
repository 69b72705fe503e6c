//! What only shared memory can be asked: who is at fault when several ranks wait.

use std::thread;

use super::*;

const MOMENT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(60);

fn group() -> [Shm; 3] {
    let file = Shm::create(3, 4).unwrap();
    std::array::from_fn(|rank| Shm::attach(&file, rank).unwrap())
}

/// All go through an exchange together.
fn together(ranks: &mut [Shm; 3]) {
    thread::scope(|scope| {
        let each = ranks.each_mut().map(|rank| scope.spawn(|| rank.exchange(Phase::Dispatch, LONG)));
        let _ = each.map(|rank| rank.join().unwrap().unwrap());
    });
}

/// Rank 2 stalls after its message of exchange 2 has gone to rank 0 alone: rank 1 waits for it, and rank 0,
/// one exchange on, for rank 1. By then rank 0 has written over what rank 2 had of it in exchange 1.
#[test]
fn a_rank_that_waits_itself_is_not_at_fault() {
    let mut ranks = group();
    together(&mut ranks);
    let [mut zero, mut one, two] = ranks;
    two.memory.place(2, 0, 2).number.store(2, Ordering::Release);
    thread::scope(|scope| {
        let waits = scope.spawn(move || one.exchange(Phase::Dispatch, LONG));
        zero.exchange(Phase::Dispatch, LONG).unwrap();
        let error = zero.exchange(Phase::Combine, MOMENT).unwrap_err();
        assert_eq!((error.rank, error.exchange), (2, 3));
        assert_eq!(waits.join().unwrap().unwrap_err().rank, 2, "it is told");
    });
}

/// Rank 1 has all that it needs of exchange 1 and does not come to exchange 2.
#[test]
fn a_rank_that_has_all_it_needs_is_at_fault() {
    let mut ranks = group();
    together(&mut ranks);
    let [mut zero, _one, mut two] = ranks;
    thread::scope(|scope| {
        let waits = scope.spawn(move || two.exchange(Phase::Combine, LONG));
        assert_eq!(zero.exchange(Phase::Combine, MOMENT).unwrap_err().rank, 1);
        assert_eq!(waits.join().unwrap().unwrap_err().rank, 1, "it is told");
    });
}
