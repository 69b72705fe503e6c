//! Ranks that are processes of one machine: messages lie in memory that all of them map. Nothing is copied: a
//! rank writes its message where the receiver reads it.
//!
//! Each pair of ranks has two places for messages, used in turn. A rank writes its message of exchange n + 2
//! over that of n: by then it has received the other's message of n + 1, which that one sent after it had
//! read the message of n (an inbox is read until the next exchange). A message is there once its place bears
//! the exchange's number; who waits watches the numbers for a while and then sleeps on its bell, a futex.

mod memory;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use self::memory::{Layout, Memory};
use super::{Cause, Fabric, FabricError, Phase, RANKS_MAX, blamed};

/// Looks at the other ranks' numbers before sleeping: some 20 us, which a wake-up takes at the worst of quiet
/// times.
const SPINS: u32 = 4000;

/// One of the ranks of a group in shared memory.
#[derive(Debug)]
pub struct Shm {
    memory: Arc<Memory>,
    rank: usize,
    exchange: u64,
    /// Words of the messages to be sent, by rank.
    lengths: Vec<u32>,
    /// Words of the messages received, by rank.
    received: Vec<usize>,
    spins: u32,
    failed: Option<FabricError>,
}

/// Tells a group that one of its ranks is gone: for whoever watches the processes.
#[derive(Debug, Clone)]
pub struct Alarm {
    memory: Arc<Memory>,
}

impl Alarm {
    /// Ends every exchange, under way or to come, with the word that `rank` is gone. The first call counts.
    pub fn rank_is_gone(&self, rank: usize) {
        let phase = Phase::Dispatch;
        self.memory.blame(&FabricError { rank, exchange: 0, phase, layer: None, cause: Cause::Gone });
    }
}

impl Shm {
    /// New shared memory for `size` ranks and messages of at most `capacity` words. It takes what is written
    /// to it, and goes when the last process has closed it.
    pub fn create(size: usize, capacity: usize) -> io::Result<OwnedFd> {
        assert!((1..=RANKS_MAX).contains(&size), "shm: 1 to {RANKS_MAX} ranks");
        memory::create(Layout { size, capacity })
    }

    /// Rank `rank` of the group in `file`, which [`Shm::create`] made. No two ends may have the same rank.
    pub fn attach(file: impl AsFd, rank: usize) -> io::Result<Self> {
        let memory = Memory::map(file.as_fd())?;
        let size = memory.layout().size;
        if rank >= size {
            return Err(io::Error::other(format!("the group has {size} ranks, there is no rank {rank}")));
        }
        let spare = available_parallelism().map_or(1, usize::from) >= size;
        Ok(Self {
            memory: Arc::new(memory),
            rank,
            exchange: 0,
            lengths: vec![0; size],
            received: vec![0; size],
            // Who spins where another rank has no processor only keeps it waiting.
            spins: if spare { SPINS } else { 0 },
            failed: None,
        })
    }

    /// For whoever watches the ranks' processes.
    pub fn alarm(&self) -> Alarm {
        Alarm { memory: Arc::clone(&self.memory) }
    }

    fn error(&self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        FabricError { rank, exchange: self.exchange, phase, layer: None, cause }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.lengths.len()).filter(move |other| *other != rank)
    }

    fn send(&mut self) {
        for to in self.others() {
            let place = self.memory.place(self.rank, to, self.exchange);
            place.words.store(std::mem::take(&mut self.lengths[to]), Ordering::Relaxed);
            // Whoever sees the number sees the message.
            place.number.store(self.exchange as u32, Ordering::Release);
            self.memory.ring(to);
        }
    }

    /// The first rank whose message is not there.
    fn missing(&self) -> Option<usize> {
        let is_here = |from: usize| {
            let place = self.memory.place(from, self.rank, self.exchange);
            place.number.load(Ordering::Acquire) == self.exchange as u32
        };
        self.others().find(|from| !is_here(*from))
    }

    /// Who is at fault if `missing` sends nothing: that rank, unless it waits itself for a message of the
    /// exchange before; then who owes that one, and so on. Ranks that wait give up almost at once, so each
    /// must find the same one.
    fn culprit(&self, mut missing: usize) -> usize {
        for exchange in (1..self.exchange).rev() {
            let owes = |from: &usize| {
                let place = self.memory.place(*from, missing, exchange);
                let behind = (exchange as u32).wrapping_sub(place.number.load(Ordering::Acquire));
                *from != missing && behind.cast_signed() > 0
            };
            match (0..self.lengths.len()).find(owes) {
                Some(from) => missing = from,
                None => break,
            }
        }
        missing
    }

    fn wait(&self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        let mut spins = 0;
        let mut until = None;
        loop {
            let rung = self.memory.rung(self.rank);
            let Some(missing) = self.missing() else { return Ok(()) };
            let fault = self.memory.fault().load(Ordering::Acquire);
            if fault != 0 {
                let (rank, cause) = blamed(fault, deadline);
                return Err(self.error(rank, phase, cause));
            }
            if spins < self.spins {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            // The clock is asked only of those who wait long.
            let until = *until.get_or_insert_with(|| Instant::now() + deadline);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.error(self.culprit(missing), phase, Cause::Deadline(deadline)));
            }
            self.memory.sleep(self.rank, rung, left);
        }
    }

    fn receive(&mut self) -> Result<(), (usize, Cause)> {
        for from in self.others() {
            let words = self.memory.place(from, self.rank, self.exchange).words.load(Ordering::Relaxed);
            if words as usize > self.capacity() {
                return Err((from, Cause::Protocol("a message longer than its place")));
            }
            self.received[from] = words as usize;
        }
        Ok(())
    }
}

impl Fabric for Shm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.lengths.len()
    }

    fn capacity(&self) -> usize {
        self.memory.layout().capacity
    }

    #[allow(unsafe_code)]
    fn outbox(&mut self, to: usize, words: usize) -> Result<&mut [u32], FabricError> {
        let capacity = self.capacity();
        if words > capacity {
            return Err(self.error(to, Phase::Dispatch, Cause::TooLong { words, capacity }));
        }
        self.lengths[to] = words as u32;
        // SAFETY: this is the only end of its rank, so nobody else writes the place, and its receiver does
        // not read it until it bears the next exchange's number (see the head of this file). The reference
        // ends before the next call of `exchange`, which needs `self`.
        Ok(unsafe { self.memory.message_mut(self.rank, to, self.exchange + 1, words) })
    }

    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.exchange += 1;
        self.send();
        let done = self.wait(phase, deadline);
        let done = done.and_then(|()| self.receive().map_err(|(from, cause)| self.error(from, phase, cause)));
        if let Err(error) = &done {
            self.received.fill(0);
            self.memory.blame(error);
        }
        self.failed = done.clone().err();
        done
    }

    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        let error = self.error(rank, phase, cause);
        self.memory.blame(&error);
        self.failed.get_or_insert(error).clone()
    }

    #[allow(unsafe_code)]
    fn inbox(&self, from: usize) -> &[u32] {
        if from == self.rank {
            return &[];
        }
        // SAFETY: `received` is not 0 only after an exchange in which the message came; its sender writes the
        // place again only after this rank's next exchange, which needs `self` exclusively.
        unsafe { self.memory.message(from, self.rank, self.exchange, self.received[from]) }
    }
}
