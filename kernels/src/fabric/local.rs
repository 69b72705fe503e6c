//! Ranks that are threads of one process: messages change hands. For tests, and for a group in one address
//! space.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Cause, Fabric, FabricError, Phase, blamed};

/// One of the ranks of a group in this process.
#[derive(Debug)]
pub struct Local {
    hub: Arc<Hub>,
    rank: usize,
    capacity: usize,
    exchange: u64,
    outboxes: Vec<Vec<u32>>,
    inboxes: Vec<Vec<u32>>,
    failed: Option<FabricError>,
}

#[derive(Debug)]
struct Hub {
    /// What each rank has been sent.
    mail: Vec<(Mutex<Mail>, Condvar)>,
}

#[derive(Debug)]
struct Mail {
    /// From each rank, the oldest first: a rank that is ahead sends its next message before this one is
    /// taken.
    queues: Vec<VecDeque<Vec<u32>>>,
    /// Who has left, and who is at fault for it.
    gone: Vec<Option<u32>>,
}

impl Mail {
    /// Who is at fault if there is no message of `from`: a rank that left because of another one says so, one
    /// that is through and left only keeps those waiting who still want something of it.
    fn fault(&self, from: usize, deadline: Duration) -> Option<(usize, Cause)> {
        let mut faults =
            self.gone.iter().enumerate().filter_map(|(i, fault)| Some((i, blamed((*fault)?, deadline))));
        faults.find(|(left, (rank, _))| *left == from || left != rank).map(|(_, fault)| fault)
    }
}

impl Local {
    /// A group of `size` ranks whose messages have at most `capacity` words.
    pub fn group(size: usize, capacity: usize) -> Vec<Self> {
        let mail = || Mail { queues: vec![VecDeque::new(); size], gone: vec![None; size] };
        let hub = Hub { mail: (0..size).map(|_| (Mutex::new(mail()), Condvar::new())).collect() };
        let hub = Arc::new(hub);
        let rank = |rank| Self {
            hub: Arc::clone(&hub),
            rank,
            capacity,
            exchange: 0,
            outboxes: vec![Vec::new(); size],
            inboxes: vec![Vec::new(); size],
            failed: None,
        };
        (0..size).map(rank).collect()
    }

    fn error(&self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        FabricError { rank, exchange: self.exchange, phase, layer: None, cause }
    }

    fn receive(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        let until = Instant::now() + deadline;
        let (mail, bell) = &self.hub.mail[self.rank];
        let mut mail = lock(mail);
        for from in (0..self.inboxes.len()).filter(|from| *from != self.rank) {
            loop {
                if let Some(message) = mail.queues[from].pop_front() {
                    self.inboxes[from] = message;
                    break;
                }
                if let Some((rank, cause)) = mail.fault(from, deadline) {
                    return Err(self.error(rank, phase, cause));
                }
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(self.error(from, phase, Cause::Deadline(deadline)));
                }
                mail = bell.wait_timeout(mail, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(())
    }
}

fn lock(mail: &Mutex<Mail>) -> MutexGuard<'_, Mail> {
    mail.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fabric for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.outboxes.len()
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn outbox(&mut self, to: usize, words: usize) -> Result<&mut [u32], FabricError> {
        if words > self.capacity {
            let cause = Cause::TooLong { words, capacity: self.capacity };
            return Err(self.error(to, Phase::Dispatch, cause));
        }
        self.outboxes[to].resize(words, 0);
        Ok(&mut self.outboxes[to])
    }

    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.exchange += 1;
        for to in (0..self.size()).filter(|to| *to != self.rank) {
            // The last message from there gives its memory to the next one.
            let empty = std::mem::take(&mut self.inboxes[to]);
            let message = std::mem::replace(&mut self.outboxes[to], empty);
            self.outboxes[to].clear();
            let (mail, bell) = &self.hub.mail[to];
            lock(mail).queues[self.rank].push_back(message);
            bell.notify_one();
        }
        let received = self.receive(phase, deadline);
        self.failed = received.clone().err();
        received
    }

    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        let error = self.error(rank, phase, cause);
        self.failed.get_or_insert(error).clone()
    }

    fn inbox(&self, from: usize) -> &[u32] {
        &self.inboxes[from]
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let gone = || self.error(self.rank, Phase::Dispatch, Cause::Gone);
        let fault = self.failed.clone().unwrap_or_else(gone).blame();
        for (mail, bell) in &self.hub.mail {
            lock(mail).gone[self.rank] = Some(fault);
            bell.notify_one();
        }
    }
}
