//! A thread with a runtime of its own for each core, where clients' connections are served: a connection, the
//! worker's that answers it and their timers are woken by the thread that they run on, so that an event of a
//! stream crosses no thread. What concerns all (accepting, operators, probes, KV events) stays on the runtime
//! that began them. A connection stays where it was put; nothing is stolen, so what takes a core for long
//! must not run here (`threads.rs`).

use std::{
    cell::Cell,
    future::Future,
    io,
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

use crate::{
    clock::{self, Instant},
    limits::{CORE_BEAT, CORE_KEEPS_STREAMS},
};

thread_local! {
    /// Which core's thread this is; `None`: another one.
    static HERE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The threads. They end when nothing holds them any more: neither a listener nor a connection that they
/// serve.
#[derive(Debug)]
pub struct Cores(Box<[Core]>);

#[derive(Debug)]
struct Core {
    runtime: Handle,
    /// Connections and streams that are served there.
    tasks: AtomicUsize,
    _stop: oneshot::Sender<()>,
}

/// One task of a core; no longer counted on drop.
struct Task {
    cores: Arc<Cores>,
    core: usize,
}

impl Cores {
    /// Starts so many threads, named `keyway-core-0` and so on, each with a runtime of its own.
    pub fn start(count: usize) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self((0..count).map(Core::start).collect::<io::Result<_>>()?)))
    }

    /// Runs a connection where there is least to do.
    pub fn run(self: &Arc<Self>, connection: impl Future<Output: Send> + Send + 'static) {
        self.run_at(self.idlest(), connection);
    }

    /// Runs one of a connection's streams: where its connection is, unless there is much more to do than
    /// elsewhere. Each of its events would cross two threads.
    pub fn run_near(self: &Arc<Self>, stream: impl Future<Output: Send> + Send + 'static) {
        let (idlest, tasks) = (self.idlest(), |core: usize| self.0.get(core).map_or(0, Core::tasks));
        let near = HERE.get().filter(|&here| tasks(here) <= tasks(idlest) + CORE_KEEPS_STREAMS);
        self.run_at(near.unwrap_or(idlest), stream);
    }

    fn run_at(self: &Arc<Self>, core: usize, future: impl Future<Output: Send> + Send + 'static) {
        let Some(there) = self.0.get(core) else { return };
        there.tasks.fetch_add(1, Relaxed);
        let task = Task { cores: Arc::clone(self), core };
        there.runtime.spawn(async move {
            let _task = task;
            future.await
        });
    }

    /// Waits until each has done something that it is given now. Returns which one has not by then, if one
    /// has not.
    pub async fn stuck(&self, patience: Duration) -> Option<usize> {
        let deadline = Instant::now() + patience;
        let asked: Vec<_> = self.0.iter().map(|core| core.runtime.spawn(async {})).collect();
        for (at, done) in asked.into_iter().enumerate() {
            if clock::timeout_at(deadline, done).await.is_err() {
                return Some(at);
            }
        }
        None
    }

    /// The one with the fewest tasks.
    fn idlest(&self) -> usize {
        self.0.iter().enumerate().min_by_key(|(_, core)| core.tasks()).map_or(0, |(at, _)| at)
    }
}

impl Core {
    fn start(at: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name(format!("keyway-core-{at}")).spawn(move || {
            HERE.set(Some(at));
            // Ends with an error, as nothing is ever sent.
            runtime.block_on(async {
                let mut stopped = pin!(stopped);
                while clock::timeout(CORE_BEAT, stopped.as_mut()).await.is_err() {}
            });
        })?;
        Ok(Self { runtime: handle, tasks: AtomicUsize::new(0), _stop: stop })
    }

    fn tasks(&self) -> usize {
        self.tasks.load(Relaxed)
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(core) = self.cores.0.get(self.core) {
            core.tasks.fetch_sub(1, Relaxed);
        }
    }
}

/// One of each for every core's thread, and one for all others.
#[derive(Debug)]
pub struct PerCore<T> {
    cores: Box<[Line<T>]>,
    elsewhere: Line<T>,
}

/// Alone on its cache lines: what one core writes, its neighbours need not fetch again.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T> PerCore<T> {
    /// The one of this core's thread; other threads have one in common.
    pub fn here(&self) -> &T {
        &HERE.get().and_then(|core| self.cores.get(core)).unwrap_or(&self.elsewhere).0
    }

    /// Those of all cores, and last the one for all other threads.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.cores.iter().chain([&self.elsewhere]).map(|line| &line.0)
    }
}

impl<T: Default> Default for PerCore<T> {
    fn default() -> Self {
        let cores = (0..count()).map(|_| Line::default()).collect();
        Self { cores, elsewhere: Line::default() }
    }
}

/// Cores that this process may use, as it found them at first.
pub fn count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get))
}

#[cfg(test)]
mod tests;
