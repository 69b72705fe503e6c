//! Whose requests failed for their own fault lately ([`keyway_core::own_faults`]): of one client (a tenant,
//! else a key), one kind of request, and what it was answered. Its like is passed on at once, as the worker
//! says it.

use std::time::Duration;

use http::{HeaderValue, StatusCode, header::AUTHORIZATION};
use keyway_core::own_faults::OwnFaults;
use keyway_wire::block_hash::{Chain, HashKey};
use parking_lot::Mutex;

use crate::{access::tenants::X_API_KEY, proxy::asked::Asked};

/// How a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestFailure {
    /// A worker answered it with this error status.
    Status(StatusCode),
    /// By an error in its stream, before any content, that blames the request.
    InBand,
}

/// The clients' own faults.
#[derive(Debug)]
pub struct ClientFaults {
    faults: Mutex<OwnFaults>,
    key: HashKey,
}

impl ClientFaults {
    /// None yet. They are kept by names that this key makes.
    pub fn new(key: HashKey) -> Self {
        Self { faults: Mutex::default(), key }
    }

    /// Whether requests like this failed so for their client's own fault lately.
    pub fn knows(&self, asked: &Asked, answered: RequestFailure, now: Duration) -> bool {
        self.faults.lock().knows(self.name(asked, answered), now)
    }

    /// Remembers that several workers found fault with this one, and answered so.
    pub fn note(&self, asked: &Asked, answered: RequestFailure, now: Duration) {
        self.faults.lock().note(self.name(asked, answered), now);
    }

    fn name(&self, asked: &Asked, answered: RequestFailure) -> u64 {
        let visit = asked.record.visit();
        let key = || {
            let headers = &asked.parts.headers;
            let key = headers.get(AUTHORIZATION).or_else(|| headers.get(X_API_KEY));
            key.map_or(&[][..], HeaderValue::as_bytes)
        };
        let whose = visit.as_ref().map_or_else(key, |visit| visit.tenant().name().as_bytes());
        let answered = if let RequestFailure::Status(status) = answered { status.as_u16() } else { 0 };
        let mut name = Chain::new(self.key, whose);
        name.hash(&asked.info.kind.to_le_bytes());
        name.hash(&answered.to_le_bytes())
    }
}
