//! The word that the gateway is to end, and that it has begun to: between the admin listener, which may ask
//! for the end and answers `/readyz`, and `run.rs`, which does it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::watch;

/// Whether the gateway is on its way out, or was asked to be.
#[derive(Debug)]
pub struct Leaving {
    asked: watch::Sender<bool>,
    began: AtomicBool,
    succeeded: AtomicBool,
}

impl Leaving {
    /// A gateway that is not on its way out, nor asked to be.
    pub fn new() -> Arc<Self> {
        let (began, succeeded) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { asked: watch::Sender::new(false), began, succeeded })
    }

    /// Asks the gateway to drain and end.
    pub fn ask(&self) {
        self.asked.send_replace(true);
    }

    /// Whether it has begun to.
    pub fn began(&self) -> bool {
        self.began.load(Ordering::Acquire)
    }

    /// It begins to. `succeeded`: another process has its sockets.
    pub fn begin(&self, succeeded: bool) {
        self.succeeded.store(succeeded, Ordering::Relaxed);
        // A thread that sees `began` sees `succeeded` as well.
        self.began.store(true, Ordering::Release);
    }

    /// Whether clients that come now are another process's.
    pub fn succeeded(&self) -> bool {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// Completes when it was asked to.
    pub async fn asked(&self) {
        // The sender is this very value.
        drop(self.asked.subscribe().wait_for(|asked| *asked).await);
    }
}
