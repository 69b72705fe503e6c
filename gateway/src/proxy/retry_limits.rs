//! What the attempts of all requests share: how many more there may be, and which requests are not worth one.

use std::{sync::Arc, time::Duration};

use keyway_core::RetryBudget;
use keyway_wire::block_hash::HashKey;
use parking_lot::Mutex;

use crate::proxy::{own_fault::ClientFaults, poison::Poisons};

/// Clones share all of it.
#[derive(Debug, Clone)]
pub struct RetryLimits {
    /// How many requests may be sent again, beside those that come.
    pub budget: Arc<Mutex<RetryBudget>>,
    /// Clients whose requests were refused for their own fault lately.
    pub own_faults: Arc<ClientFaults>,
    /// Requests that broke workers lately.
    pub poisons: Arc<Poisons>,
}

impl RetryLimits {
    /// Nothing was sent again yet. Clients and requests are kept by names that `key` makes.
    pub fn new(key: HashKey, now: Duration) -> Self {
        Self {
            budget: Arc::new(Mutex::new(RetryBudget::new(now))),
            own_faults: Arc::new(ClientFaults::new(key)),
            poisons: Arc::new(Poisons::new(key)),
        }
    }
}
