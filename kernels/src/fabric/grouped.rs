//! Messages that are moved all at once, by a [`Mover`] that must be told how long each of them is: NCCL's
//! grouped sends and receives between GPUs (`cuda/gpu/nccl.rs`). Another fabric, the control, carries the
//! lengths first. So nothing is begun that a rank which stays away would leave hanging, and it is the control
//! that says which rank that is. Knows no device.

use std::fmt;
use std::time::{Duration, Instant};

use super::{Cause, Fabric, FabricError, Phase};

/// In the place of a length: what others sent in the exchange before did not come.
const BROKEN: u32 = u32::MAX;

/// What moves the messages of one rank.
pub trait Mover: Send + fmt::Debug {
    /// Why messages did not come.
    type Error: std::error::Error;

    /// Memory for the next message to rank `to`, of `words` words; `None` if there is none left.
    fn outbox(&mut self, to: usize, words: usize) -> Option<&mut [u32]>;

    /// Sends `sent[to]` words to each rank and fetches `expected[from]` words of each, which sends as many at
    /// about the same time. Gives up at `until`, after which it is not called again.
    fn swap(&mut self, sent: &[usize], expected: &[usize], until: Instant) -> Result<(), Self::Error>;

    /// The last message of rank `from`, of `words` words.
    fn inbox(&self, from: usize, words: usize) -> &[u32];
}

/// One of the ranks of a group whose messages a [`Mover`] moves. A rank that is lost in the middle of an
/// exchange is named by the control afterwards: after two deadlines at most.
#[derive(Debug)]
pub struct GroupedRank<M> {
    control: Box<dyn Fabric>,
    mover: M,
    capacity: usize,
    exchange: u64,
    /// Words of the messages to be sent, by rank.
    lengths: Vec<usize>,
    /// Words of the messages received, by rank.
    received: Vec<usize>,
    failed: Option<FabricError>,
}

impl<M: Mover> GroupedRank<M> {
    /// The rank that `control` has, whose messages hold at least a word. Messages have at most `capacity`
    /// words.
    pub fn new(control: Box<dyn Fabric>, mover: M, capacity: usize) -> Self {
        let size = control.size();
        assert!(control.capacity() > 0 && capacity < BROKEN as usize, "grouped: capacities");
        Self {
            control,
            mover,
            capacity,
            exchange: 0,
            lengths: vec![0; size],
            received: vec![0; size],
            failed: None,
        }
    }

    fn error(&self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        FabricError { rank, exchange: self.exchange, phase, layer: None, cause }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<M> {
        let rank = self.control.rank();
        (0..self.lengths.len()).filter(move |other| *other != rank)
    }

    /// One word to each rank and from each, in their order; this rank's own is what it would have sent
    /// itself.
    fn tell(
        &mut self,
        word: impl Fn(usize) -> u32,
        phase: Phase,
        deadline: Duration,
    ) -> Result<Vec<u32>, FabricError> {
        for to in self.others() {
            self.control.outbox(to, 1)?[0] = word(to);
        }
        self.control.exchange(phase, deadline)?;
        let mut told = vec![word(self.control.rank()); self.lengths.len()];
        for from in self.others() {
            let &[word] = self.control.inbox(from) else {
                return Err(self.error(from, phase, Cause::Protocol("no length")));
            };
            told[from] = word;
        }
        Ok(told)
    }

    fn run(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        let lengths = std::mem::take(&mut self.lengths);
        self.lengths = vec![0; lengths.len()];
        let told = self.tell(|to| lengths[to] as u32, phase, deadline)?;
        for from in self.others() {
            if told[from] == BROKEN {
                return Err(self.error(from, phase, Cause::Unreached(String::new())));
            }
            if told[from] as usize > self.capacity {
                return Err(self.error(from, phase, Cause::Protocol("a length beyond the fabric's")));
            }
            self.received[from] = told[from] as usize;
        }
        self.received[self.control.rank()] = 0;
        if self.received.iter().chain(&lengths).all(|words| *words == 0) {
            return Ok(());
        }
        let until = Instant::now() + deadline;
        let moved = self.mover.swap(&lengths, &self.received, until);
        moved.map_err(|fault| self.broken(phase, deadline, fault.to_string()))
    }

    /// Whose fault it is that messages did not come: who does not say that it is there, or else the first of
    /// those to whom they did not. (A rank that says nothing because it has nothing to do is taken for one
    /// that is not there.)
    fn broken(&mut self, phase: Phase, deadline: Duration, fault: String) -> FabricError {
        let rank = self.control.rank();
        let told = match self.tell(|_| BROKEN, phase, deadline) {
            Ok(told) => told,
            // Who has read it already may say so before this rank has read all; what it knows itself is more.
            Err(error) if error.rank == rank => return self.error(rank, phase, Cause::Unreached(fault)),
            Err(error) => return error,
        };
        let first = told.iter().position(|word| *word == BROKEN).unwrap_or(rank);
        self.error(first, phase, Cause::Unreached(if first == rank { fault } else { String::new() }))
    }
}

impl<M: Mover> Fabric for GroupedRank<M> {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.lengths.len()
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn outbox(&mut self, to: usize, words: usize) -> Result<&mut [u32], FabricError> {
        let (capacity, phase) = (self.capacity, Phase::Dispatch);
        if words > capacity {
            return Err(self.error(to, phase, Cause::TooLong { words, capacity }));
        }
        if to == self.control.rank() {
            // No rank would fetch it.
            return Err(self.error(to, phase, Cause::Protocol("nothing: it is this rank itself")));
        }
        self.lengths[to] = words;
        let none = self.error(self.control.rank(), phase, Cause::Protocol("nothing: it has no memory left"));
        self.mover.outbox(to, words).ok_or(none)
    }

    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.exchange += 1;
        let done = self.run(phase, deadline);
        if let Err(error) = &done {
            self.received.fill(0);
            // A rank that comes to the control later is told; the control knows already of what it found
            // itself.
            self.control.fail(error.rank, phase, error.cause.clone());
        }
        self.failed = done.clone().err();
        done
    }

    fn inbox(&self, from: usize) -> &[u32] {
        if self.received[from] == 0 { &[] } else { self.mover.inbox(from, self.received[from]) }
    }

    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        let error = self.control.fail(rank, phase, cause);
        self.failed.get_or_insert(error).clone()
    }
}

#[cfg(test)]
pub(super) mod tests;
