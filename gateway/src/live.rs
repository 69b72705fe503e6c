//! What requests are served by, as one value that a reload replaces whole. A request keeps what it began with.

use std::sync::Arc;

use http::HeaderValue;
use parking_lot::RwLock;

use crate::{config::HostRule, cors::Cors, dispatch::Dispatch, tenants::Tenants};

/// What a reload can replace.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Limits, timeouts and tokenizers of requests.
    pub dispatch: Arc<Dispatch>,
    /// Who may come in; everybody where there are none.
    pub tenants: Option<Arc<Tenants>>,
    /// `Bearer …` that operators show.
    pub admin_token: Option<HeaderValue>,
    /// Which pages in browsers may use the API; `None`: nothing is said of that.
    pub cors: Option<Arc<Cors>>,
    /// Hosts that operators may add as workers.
    pub admin_allow: Vec<HostRule>,
}

/// What is in force now. A clone sees the same.
#[derive(Debug, Clone)]
pub struct Live(Arc<RwLock<Arc<Serving>>>);

impl Live {
    /// In force from the start.
    pub fn new(serving: Serving) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(serving))))
    }

    /// What a request that comes now is served by.
    pub fn now(&self) -> Arc<Serving> {
        Arc::clone(&self.0.read())
    }

    /// Other values for requests that come from now on.
    pub fn replace(&self, serving: Serving) {
        *self.0.write() = Arc::new(serving);
    }
}
