//! Whose requests were refused for their own fault lately: of one client, one kind of request, one status.
//! What is refused to them again is passed on as it is, so that a client that keeps asking for what no worker
//! serves costs one attempt for each request, takes no retries from others and puts no worker in doubt. No
//! clock: time is the `Duration` since the start.

use std::{collections::HashMap, time::Duration};

/// How long a client's own fault is remembered: it is looked into again so often.
pub const MEMORY: Duration = Duration::from_secs(10);
/// Faults remembered at once, about 40 bytes each; beyond it all are forgotten, which costs a retry each.
pub const FAULTS_MAX: usize = 4_096;

/// The faults, by a hash of client, kind and status.
#[derive(Debug, Default)]
pub struct OwnFaults {
    until: HashMap<u64, Duration>,
}

impl OwnFaults {
    /// It was the client's own fault.
    pub fn note(&mut self, fault: u64, now: Duration) {
        if self.until.len() >= FAULTS_MAX {
            self.until.retain(|_, until| *until > now);
        }
        if self.until.len() >= FAULTS_MAX {
            self.until.clear();
        }
        self.until.insert(fault, now + MEMORY);
    }

    /// Whether it was, lately.
    pub fn knows(&self, fault: u64, now: Duration) -> bool {
        self.until.get(&fault).is_some_and(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_known_for_a_while_and_they_are_bounded() {
        let mut faults = OwnFaults::default();
        faults.note(7, Duration::ZERO);
        assert!(faults.knows(7, MEMORY / 2) && !faults.knows(8, MEMORY / 2));
        assert!(!faults.knows(7, MEMORY));
        for fault in 0..3 * FAULTS_MAX as u64 {
            faults.note(fault, MEMORY / 2);
            assert!(faults.until.len() <= FAULTS_MAX && faults.knows(fault, MEMORY));
        }
        // Those that are over go before the others.
        let late = 4 * MEMORY;
        faults.note(1, late);
        for fault in 0..FAULTS_MAX as u64 - 1 {
            faults.note(10 * FAULTS_MAX as u64 + fault, late);
        }
        assert!(faults.knows(1, late));
    }
}
