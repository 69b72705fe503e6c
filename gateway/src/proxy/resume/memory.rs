//! How much is kept for the sake of resuming: requests and outputs of all streams together. Who finds no room
//! streams all the same, and is not resumed.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use prometheus::IntGauge;

/// A number of bytes that streams share.
#[derive(Debug)]
pub(super) struct Memory {
    used: AtomicUsize,
    max: usize,
    gauge: IntGauge,
}

/// Some of it; given back on drop.
#[derive(Debug)]
pub(super) struct Reservation {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Memory {
    /// At most `max` bytes, shown by `gauge`.
    pub(super) fn new(max: usize, gauge: IntGauge) -> Self {
        Self { used: AtomicUsize::new(0), max, gauge }
    }

    /// Room for so many bytes, if there is.
    pub(super) fn reserve(self: &Arc<Self>, bytes: usize) -> Option<Reservation> {
        let mut reservation = Reservation { memory: Arc::clone(self), bytes: 0 };
        reservation.grow(bytes).then_some(reservation)
    }
}

impl Reservation {
    /// Room for so many bytes more; whether there was.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let memory = &self.memory;
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= memory.max);
        let grown = memory.used.fetch_update(Relaxed, Relaxed, fits).is_ok();
        if grown {
            memory.gauge.add(bytes as i64);
            self.bytes += bytes;
        }
        grown
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Relaxed);
        self.memory.gauge.sub(self.bytes as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_had_again_and_no_more_than_there_is() {
        let memory = Arc::new(Memory::new(10, IntGauge::new("g", "g").unwrap()));
        let mut six = memory.reserve(6).unwrap();
        assert!(memory.reserve(5).is_none() && !six.grow(5) && six.grow(4));
        assert_eq!(memory.gauge.get(), 10);
        drop(six);
        assert_eq!(memory.gauge.get(), 0);
        assert!(memory.reserve(10).is_some());
    }
}
