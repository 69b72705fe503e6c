//! The thread that follows all workers' KV events. What a worker says takes no time of those that serve
//! clients, accept them or probe workers: it is read, decoded and applied here, in slices between which the
//! other workers' events have their turn. At a lower priority than theirs it would fall behind where all
//! cores are busy, and requests would go by what workers held before.

use std::{future::Future, io, sync::OnceLock, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    task::JoinHandle,
};

/// The thread, which begins with the first worker that publishes events and ends with this.
#[derive(Debug, Default)]
pub struct EventThread(OnceLock<Option<Running>>);

#[derive(Debug)]
struct Running {
    runtime: Handle,
    _stop: oneshot::Sender<()>,
}

impl EventThread {
    /// Has it follow one worker.
    pub fn spawn(&self, following: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        // A simulated network is of one thread.
        if cfg!(feature = "simulation") {
            return tokio::spawn(following);
        }
        let running = self.0.get_or_init(|| match Running::start() {
            Ok(running) => Some(running),
            Err(error) => {
                tracing::warn!(%error, "KV events have no thread of their own: a large batch delays probes");
                None
            }
        });
        match running {
            Some(running) => running.runtime.spawn(following),
            None => tokio::spawn(following),
        }
    }
}

impl Running {
    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name("keyway-events".to_owned()).spawn(move || {
            // Ends with an error, as nothing is ever sent.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { runtime: handle, _stop: stop })
    }
}
