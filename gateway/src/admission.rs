//! How many requests may be in flight. The permit lives in the answer's body, not only until its head: a stream
//! holds its place for as long as it streams. Over the limit a request is refused at once, never queued.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use prometheus::IntGauge;

use crate::error::Error;

/// Hands out permits.
#[derive(Debug, Clone)]
pub struct Admission(Arc<Places>);

#[derive(Debug)]
struct Places {
    limit: AtomicUsize,
    taken: AtomicUsize,
    gauge: IntGauge,
}

impl Admission {
    /// At most `limit` requests at once, counted in `gauge`.
    pub fn new(limit: usize, gauge: IntGauge) -> Self {
        Self(Arc::new(Places { limit: limit.into(), taken: 0.into(), gauge }))
    }

    /// Another limit from now on; who is in stays.
    pub fn set_limit(&self, limit: usize) {
        self.0.limit.store(limit, Relaxed);
    }

    /// A permit, or the refusal.
    pub fn admit(&self) -> Result<Permit, Error> {
        let limit = self.0.limit.load(Relaxed);
        self.0
            .taken
            .fetch_update(Relaxed, Relaxed, |taken| (taken < limit).then_some(taken + 1))
            .map_err(|_| Error::Overloaded { limit })?;
        self.0.gauge.inc();
        Ok(Permit(Arc::clone(&self.0)))
    }
}

/// One request's place; given back on drop.
#[derive(Debug)]
pub struct Permit(Arc<Places>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Relaxed);
        self.0.gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_is_held_until_dropped() {
        let gauge = IntGauge::new("g", "g").unwrap();
        let admission = Admission::new(1, gauge.clone());
        let held = admission.admit().unwrap();
        assert_eq!(admission.admit().unwrap_err(), Error::Overloaded { limit: 1 });
        drop(held);
        assert!(admission.admit().is_ok());
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn a_lower_limit_waits_for_those_above_it_to_leave() {
        let admission = Admission::new(3, IntGauge::new("g", "g").unwrap());
        let mut held: Vec<_> = (0..3).map(|_| admission.admit().unwrap()).collect();
        admission.set_limit(2);
        held.pop();
        assert_eq!(admission.admit().unwrap_err(), Error::Overloaded { limit: 2 });
        held.pop();
        assert!(admission.admit().is_ok());
        admission.set_limit(4);
        held.extend((0..3).map(|_| admission.admit().unwrap()));
        assert!(admission.admit().is_err());
    }
}
