//! How many requests may be in flight. The permit lives in the answer's body, not only until its head: a stream
//! holds its place for as long as it streams. Over the limit a request is refused at once, never queued.

use std::sync::Arc;

use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::Error;

/// Hands out permits.
#[derive(Debug, Clone)]
pub struct Admission {
    permits: Arc<Semaphore>,
    limit: usize,
    gauge: IntGauge,
}

impl Admission {
    /// At most `limit` requests at once, counted in `gauge`.
    pub fn new(limit: usize, gauge: IntGauge) -> Self {
        Self { permits: Arc::new(Semaphore::new(limit)), limit, gauge }
    }

    /// A permit, or the refusal.
    pub fn admit(&self) -> Result<Permit, Error> {
        let permit = Arc::clone(&self.permits)
            .try_acquire_owned()
            .map_err(|_| Error::Overloaded { limit: self.limit })?;
        self.gauge.inc();
        Ok(Permit { _permit: permit, gauge: self.gauge.clone() })
    }
}

/// One request's place; given back on drop.
#[derive(Debug)]
pub struct Permit {
    _permit: OwnedSemaphorePermit,
    gauge: IntGauge,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_is_held_until_dropped() {
        let admission = Admission::new(1, IntGauge::new("g", "g").unwrap());
        let held = admission.admit().unwrap();
        assert_eq!(admission.admit().unwrap_err(), Error::Overloaded { limit: 1 });
        drop(held);
        assert!(admission.admit().is_ok());
        assert_eq!(admission.gauge.get(), 0);
    }
}
