//! Grouped messages over threads: a mover of channels in place of NCCL, which may break.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::*;
use crate::fabric::{Local, tests::each};

const PATIENCE: Duration = Duration::from_secs(30);
/// For what must fail; a rank that is awake needs far less to say so.
const SHORT: Duration = Duration::from_secs(1);

/// Moves messages of one rank to and from threads. It has only the messages of lengths that were told, as
/// NCCL.
#[derive(Debug)]
pub(in crate::fabric) struct Channels {
    to: Vec<Sender<Vec<u32>>>,
    from: Vec<Receiver<Vec<u32>>>,
    outboxes: Vec<Vec<u32>>,
    inboxes: Vec<Vec<u32>>,
    /// Swaps after which nothing reaches it.
    breaks_after: usize,
}

impl Mover for Channels {
    type Error = io::Error;

    fn outbox(&mut self, to: usize, words: usize) -> Option<&mut [u32]> {
        self.outboxes[to].resize(words, 0);
        Some(&mut self.outboxes[to])
    }

    fn swap(&mut self, sent: &[usize], expected: &[usize], until: Instant) -> io::Result<()> {
        for (to, words) in sent.iter().enumerate().filter(|(_, words)| **words > 0) {
            let message = self.outboxes[to][..*words].to_vec();
            // Who is gone takes nothing, which no sender of a group hears of.
            let _ = self.to[to].send(message);
        }
        if self.breaks_after == 0 {
            return Err(io::Error::other("the cable is out"));
        }
        self.breaks_after -= 1;
        for (from, words) in expected.iter().enumerate().filter(|(_, words)| **words > 0) {
            let left = until.saturating_duration_since(Instant::now());
            self.inboxes[from] = self.from[from].recv_timeout(left).map_err(io::Error::other)?;
            assert_eq!(self.inboxes[from].len(), *words, "a length that was not told");
        }
        Ok(())
    }

    fn inbox(&self, from: usize, words: usize) -> &[u32] {
        &self.inboxes[from][..words]
    }
}

/// A group whose control is made of threads too; rank `i` hears nothing after `breaks[i]` swaps.
pub(in crate::fabric) fn group(size: usize, capacity: usize, breaks: &[usize]) -> Vec<GroupedRank<Channels>> {
    let mut to: Vec<Vec<Sender<Vec<u32>>>> = (0..size).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<Receiver<Vec<u32>>>> = (0..size).map(|_| Vec::new()).collect();
    for sender in &mut to {
        for receiver in &mut from {
            let (end, other) = channel();
            sender.push(end);
            receiver.push(other);
        }
    }
    let ends = Local::group(size, 1).into_iter().zip(to.into_iter().zip(from)).enumerate();
    let made = ends.map(|(rank, (control, (to, from)))| {
        let breaks_after = breaks.get(rank).copied().unwrap_or(usize::MAX);
        let boxes = || vec![Vec::new(); size];
        let mover = Channels { to, from, outboxes: boxes(), inboxes: boxes(), breaks_after };
        GroupedRank::new(Box::new(control), mover, capacity)
    });
    made.collect()
}

fn send_all(rank: &mut GroupedRank<Channels>, words: usize) {
    for to in (0..rank.size()).filter(|to| *to != rank.rank()).collect::<Vec<_>>() {
        rank.outbox(to, words).unwrap().fill(7);
    }
}

/// Others than the one that hears nothing go on, and learn it in the next exchange.
#[test]
fn a_rank_that_nothing_reaches_is_named_by_all() {
    let errors = thread::scope(|scope| {
        let ranks = group(3, 16, &[9, 2, 9]).into_iter().map(|mut rank| {
            scope.spawn(move || {
                loop {
                    send_all(&mut rank, 3);
                    if let Err(error) = rank.exchange(Phase::Combine, PATIENCE) {
                        break error;
                    }
                }
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let (exchange, why) = if rank == 1 { (3, "the cable is out") } else { (4, "") };
        assert_eq!((error.rank, error.exchange), (1, exchange), "rank {rank}: {error}");
        assert_eq!(error.cause, Cause::Unreached(why.into()));
    }
}

/// The others have read what it says, and act on it, before it has heard all of them.
#[test]
fn a_rank_that_is_told_of_its_own_fault_says_what_it_knows_of_it() {
    let mut ranks = group(2, 16, &[]);
    let mut quick = ranks.remove(0);
    quick.fail(1, Phase::Combine, Cause::Unreached(String::new()));
    drop(quick);
    let error = ranks[0].broken(Phase::Combine, PATIENCE, "the cable is out".into());
    assert_eq!(
        (error.rank, error.exchange, error.cause),
        (1, 0, Cause::Unreached("the cable is out".into()))
    );
}

/// Rank 2 says how long its messages are and sends none: those who wait for them name it.
#[test]
fn a_rank_that_stalls_between_lengths_and_messages_is_named() {
    let mut ranks = group(3, 16, &[]);
    let mut stalls = ranks.pop().unwrap();
    thread::scope(|scope| {
        let waiting: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                scope.spawn(move || {
                    send_all(&mut rank, 2);
                    let error = rank.exchange(Phase::Dispatch, SHORT).unwrap_err();
                    // Who leaves first would be gone for the other.
                    (error, rank)
                })
            })
            .collect();
        stalls.tell(|_| 2, Phase::Dispatch, PATIENCE).unwrap();
        for waiting in waiting {
            let (error, _rank) = waiting.join().unwrap();
            assert_eq!((error.rank, &error.cause), (2, &Cause::Deadline(SHORT)), "{error}");
        }
    });
}

#[test]
fn a_rank_sends_itself_nothing() {
    let mut ranks = group(2, 16, &[]);
    assert!(ranks[0].outbox(0, 1).is_err() && ranks[0].lengths == [0, 0]);
}

#[test]
fn nothing_is_moved_where_nothing_is_sent() {
    let group = group(2, 16, &[0, 0]).into_iter().map(|rank| Box::new(rank) as Box<dyn Fabric>).collect();
    each(group, |mut rank| {
        for _ in 0..3 {
            rank.exchange(Phase::Result, PATIENCE).unwrap();
        }
    });
}
