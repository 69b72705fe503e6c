//! What requests are served by, as one value that a reload replaces whole. A request keeps what it began
//! with.

use std::sync::Arc;

use http::HeaderValue;
use parking_lot::RwLock;
use tokio::sync::watch;

use crate::{
    access::tenants::Tenants,
    config::{Cors, HostRule},
    proxy::dispatch::Dispatch,
};

/// What a reload can replace.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Limits, timeouts and tokenizers of requests.
    pub dispatch: Arc<Dispatch>,
    /// Tenants whose keys let requests in; `None`: every client may come in.
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
pub struct Live(Arc<InForce>);

#[derive(Debug)]
struct InForce {
    serving: RwLock<Arc<Serving>>,
    admin_token: watch::Sender<Option<HeaderValue>>,
}

impl Live {
    /// In force from the start.
    pub fn new(serving: Serving) -> Self {
        let admin_token = watch::Sender::new(serving.admin_token.clone());
        Self(Arc::new(InForce { serving: RwLock::new(Arc::new(serving)), admin_token }))
    }

    /// What a request that comes now is served by.
    pub fn now(&self) -> Arc<Serving> {
        Arc::clone(&self.0.serving.read())
    }

    /// Other values for requests that come from now on.
    pub fn replace(&self, serving: Serving) {
        self.0.admin_token.send_replace(serving.admin_token.clone());
        *self.0.serving.write() = Arc::new(serving);
    }

    /// `Bearer …` that operators show, as it is at any time.
    pub fn admin_token(&self) -> watch::Receiver<Option<HeaderValue>> {
        self.0.admin_token.subscribe()
    }
}
