//! Two CPU workers in this process, for a first try without a fleet. They are real workers on loopback ports,
//! reached over HTTP like any other.

use std::{io, num::NonZeroUsize};

use keyway_worker::{RunningWorker, WorkerOptions};

use crate::config::WorkerConfig;

/// Two, so that routing has something to choose.
const WORKERS: usize = 2;
/// The built-in model's tokens are about 3 bytes of English each, 16 of them a KV block.
pub const BLOCK_BYTES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(47);

/// The running workers; they stop with the process.
#[derive(Debug)]
pub struct Embedded {
    workers: Vec<RunningWorker>,
}

/// Starts them on free loopback ports.
pub async fn start() -> io::Result<Embedded> {
    let mut workers = Vec::with_capacity(WORKERS);
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    for _ in 0..WORKERS {
        let options = WorkerOptions {
            listen: ([127, 0, 0, 1], 0).into(),
            // Each its share: threads beyond the cores would only wait for each other.
            threads: Some((cores / WORKERS).max(1)),
            ..WorkerOptions::default()
        };
        workers.push(keyway_worker::start(options).await.map_err(io::Error::other)?);
    }
    Ok(Embedded { workers })
}

impl Embedded {
    /// How the gateway reaches them.
    pub fn configs(&self) -> Vec<WorkerConfig> {
        // A socket address always makes a valid URL.
        self.workers.iter().filter_map(|worker| format!("http://{}", worker.addr()).parse().ok()).collect()
    }
}
