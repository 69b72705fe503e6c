//! What is kept, for how long, and who gets what of it.

use super::*;

fn message(topic: &'static str, length: usize) -> Message {
    Message { topic: topic.into(), pieces: vec![vec![7; length].into()] }
}

fn all() -> Topics {
    let mut topics = Topics::default();
    assert!(topics.add(b"", 0));
    topics
}

/// Reads to the end; the bytes of each message that was taken, and how many were gone.
fn read(ring: &Ring, next: &mut u64, topics: &Topics) -> (Vec<usize>, u64) {
    let (mut taken, mut gone) = (Vec::new(), 0);
    while *next < ring.end() {
        let mut unsent = Unsent::default();
        gone += ring.read(next, topics, &mut unsent);
        assert!(
            unsent.pieces() <= 1 || unsent.bytes() <= TOGETHER_BYTES && unsent.pieces() <= TOGETHER_PIECES
        );
        taken.extend(unsent.lengths());
    }
    (taken, gone)
}

#[test]
fn the_oldest_go_by_number_and_by_bytes_and_who_is_late_misses_them() {
    let mut ring = Ring::new(3, 1000);
    for length in 1..=5 {
        ring.push(message("a", length));
    }
    assert_eq!((ring.kept.len(), ring.end(), ring.bytes), (3, 5, 12));
    let mut next = 1;
    assert_eq!(read(&ring, &mut next, &all()), (vec![3, 4, 5], 1));
    assert_eq!(next, 5);
    ring.push(message("a", 990));
    assert_eq!((ring.kept.len(), ring.bytes), (3, 999));
    ring.push(message("a", 2));
    assert_eq!((ring.kept.len(), ring.bytes), (3, 997));
    ring.push(message("a", 10));
    assert_eq!((ring.kept.len(), ring.bytes), (2, 12));
    // One that is larger than all may be is kept alone.
    ring.push(message("a", 5000));
    assert_eq!((ring.kept.len(), ring.bytes), (1, 5000));
    assert_eq!(read(&ring, &mut next, &all()), (vec![5000], 3));
}

#[test]
fn each_gets_what_it_wants_from_when_it_said_so() {
    let mut ring = Ring::new(10, 1000);
    for (topic, length) in [("kv@a", 1), ("x", 2), ("kv@b", 3), ("kv@a", 4)] {
        ring.push(message(topic, length));
    }
    let mut topics = Topics::default();
    assert!(topics.add(b"kv@", 0));
    assert_eq!(read(&ring, &mut 0, &topics), (vec![1, 3, 4], 0));
    let mut late = Topics::default();
    assert!(late.add(b"kv@", 3));
    assert_eq!(read(&ring, &mut 0, &late), (vec![4], 0));
    assert_eq!(read(&ring, &mut 0, &Topics::default()), (vec![], 0));
}

#[test]
fn what_is_taken_at_a_time_is_bounded() {
    let mut ring = Ring::new(10_000, 100 << 20);
    for _ in 0..1000 {
        ring.push(message("a", 10));
    }
    for _ in 0..10 {
        ring.push(message("a", TOGETHER_BYTES / 2 - 1));
    }
    ring.push(message("a", 2 * TOGETHER_BYTES));
    ring.push(message("a", 1));
    let mut unsent = Unsent::default();
    let mut next = 0;
    ring.read(&mut next, &all(), &mut unsent);
    assert_eq!((next, unsent.pieces()), (TOGETHER_PIECES as u64, TOGETHER_PIECES));
    // And how many are looked at, though none is wanted.
    let mut other = Topics::default();
    assert!(other.add(b"b", 0));
    ring.read(&mut next, &other, &mut Unsent::default());
    assert_eq!(next, (TOGETHER_PIECES + LOOK_MAX) as u64);
    assert_eq!(read(&ring, &mut 0, &all()).0.len(), 1012);
}
