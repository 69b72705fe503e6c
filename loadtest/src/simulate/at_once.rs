//! Where a gateway of a simulated fleet sends a request, it tells the others at once, as a real one does: but
//! for a tenth of the time between two words after it last did.

use keyway_core::OwnLoad;

use super::fleet::Run;
use crate::engine_model::Nanos;

/// The part of the time between two words that passes between two that are said at once, as the gateway has
/// it (`PEER_AT_ONCE_PART`).
const AT_ONCE_PART: Nanos = 10;
/// How long a word is on its way.
const WAY_NS: Nanos = 1_000_000;

/// What each gateway is about to tell at once.
#[derive(Debug)]
pub(super) struct AtOnce {
    /// Time between two words; `None`: gateways tell each other nothing.
    every: Option<Nanos>,
    /// By gateway, to which workers it has sent requests since it last told.
    sent: Vec<Vec<usize>>,
    /// By gateway, when it may tell again.
    due: Vec<Nanos>,
}

impl AtOnce {
    pub(super) fn new(gateways: usize, every: Option<Nanos>) -> Self {
        Self { every, sent: vec![Vec::new(); gateways], due: vec![0; gateways] }
    }

    /// A gateway has sent a request to a worker. When the others hear of it, if that is to be planned.
    pub(super) fn sent(&mut self, gateway: usize, worker: usize, at: Nanos) -> Option<Nanos> {
        let every = self.every?;
        let sent = &mut self.sent[gateway];
        let is_first = sent.is_empty();
        if !sent.contains(&worker) {
            sent.push(worker);
        }
        if !is_first {
            return None;
        }
        let told = at.max(self.due[gateway]);
        self.due[gateway] = told + every / AT_ONCE_PART;
        Some(told + WAY_NS)
    }
}

impl Run<'_> {
    /// All others hear of what a gateway has sent, and placed.
    pub(super) fn hear_at_once(&mut self, gateway: usize, at: Nanos) {
        let sent = std::mem::take(&mut self.at_once.sent[gateway]);
        for listener in (0..self.gateways.len()).filter(|listener| *listener != gateway) {
            for &worker in &sent {
                let others = self.gateways.iter().enumerate().filter(|(other, _)| *other != listener);
                let told = others.fold(OwnLoad::default(), |sum, (_, other)| sum.and(other.told(worker, at)));
                self.gateways[listener].hear_of(worker, at, told);
            }
            self.hear_placements_of(listener, gateway, at);
            self.release(listener, at, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_the_next_ones_together() {
        let every = 50_000_000;
        let mut at_once = AtOnce::new(2, Some(every));
        assert_eq!(at_once.sent(0, 3, 7), Some(7 + WAY_NS));
        assert_eq!((at_once.sent(0, 4, 8), at_once.sent(0, 3, 9)), (None, None));
        assert_eq!(std::mem::take(&mut at_once.sent[0]), [3, 4]);
        assert_eq!(at_once.sent(0, 3, 10), Some(7 + every / 10 + WAY_NS));
        assert_eq!(at_once.sent(1, 3, 10), Some(10 + WAY_NS));
        assert_eq!(AtOnce::new(2, None).sent(0, 3, 7), None);
    }
}
