//! Starts a worker's engines: one, or with data-parallel attention one for each rank, each with its own
//! series and KV events.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::Notify;

use super::{StartError, WorkerOptions};
use crate::engine::backend::Backend;
use crate::engine::kv_events::{self, BoundAddrs, KvEventsError, Layout, Publisher, Recorder};
use crate::engine::{self, EngineHandle, EngineOptions};
use crate::metrics::{ExpertMetrics, Metrics, StaticInfo};
use crate::model::Joint;
use crate::parallel::data_parallel;

/// Running engines, by data-parallel rank.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) handles: Vec<EngineHandle>,
    pub(super) metrics: Vec<Arc<Metrics>>,
    pub(super) threads: Vec<JoinHandle<()>>,
    /// Told when the first of them ends.
    pub(super) stopped: Arc<Notify>,
}

/// How many engines these options ask for.
pub(super) fn count(options: &WorkerOptions) -> usize {
    if options.expert_parallel.data_parallel_attention { options.expert_parallel.size } else { 1 }
}

/// Binds the sockets for every engine's KV events, where they are wanted.
pub(super) async fn bind_kv_events(options: &WorkerOptions) -> Result<Vec<Publisher>, StartError> {
    let mut publishers = Vec::new();
    for rank in 0..count(options) {
        let Some(of_all) = &options.kv_events else { continue };
        let no_port = || KvEventsError::NoPort { addr: of_all.publish.clone(), rank };
        let of_rank = of_all.of_rank(rank).ok_or_else(no_port)?;
        publishers.push(kv_events::bind(&of_rank).await?);
    }
    Ok(publishers)
}

/// What each of `count` engines runs; the backend's group tells `experts` if it has one.
pub(super) fn backends(
    count: usize,
    backend: impl Joint + 'static,
    experts: Option<&Arc<ExpertMetrics>>,
) -> Result<Vec<Box<dyn Backend>>, StartError> {
    match experts {
        Some(experts) if count > 1 => {
            let ranks = data_parallel::backends(backend, count, Arc::clone(experts));
            let ranks = ranks.map_err(StartError::engine)?;
            Ok(ranks.into_iter().map(|rank| Box::new(rank) as _).collect())
        }
        _ => Ok(vec![Box::new(backend)]),
    }
}

/// Starts an engine over each backend.
pub(super) fn start(
    backends: Vec<Box<dyn Backend>>,
    options: &EngineOptions,
    info: &StaticInfo<'_>,
    publishers: Vec<Publisher>,
) -> Result<Started, StartError> {
    let count = backends.len();
    let (handles, metrics, threads) = (Vec::new(), Vec::new(), Vec::new());
    let mut started = Started { handles, metrics, threads, stopped: Arc::default() };
    let mut publishers = publishers.into_iter();
    for (rank, backend) in backends.into_iter().enumerate() {
        let metrics = Metrics::of_rank(info, (count > 1).then_some(rank)).map_err(StartError::engine)?;
        let metrics = Arc::new(metrics);
        let recorder = publishers.next().map(|publisher| publish(publisher, rank, &*backend, &metrics));
        let spawned =
            engine::spawn(backend, options.clone(), Arc::clone(&metrics)).map_err(StartError::engine)?;
        if let Some(recorder) = recorder {
            spawned.handle.follow(recorder);
        }
        let stopped = Arc::clone(&started.stopped);
        tokio::spawn(async move {
            // Its sender is dropped with the engine's thread; nothing is ever sent.
            let _ = spawned.stopped.await;
            stopped.notify_one();
        });
        started.handles.push(spawned.handle);
        started.metrics.push(metrics);
        started.threads.push(spawned.thread);
    }
    Ok(started)
}

/// Starts the publisher of an engine's KV events; the engine's end of it.
fn publish(publisher: Publisher, rank: usize, backend: &dyn Backend, metrics: &Arc<Metrics>) -> Recorder {
    let merged = metrics.kv_event_batches_merged.clone();
    let (recorder, follower) = kv_events::channel(backend.num_blocks(), merged);
    let layout = Layout {
        block_size: backend.block_size() as u32,
        groups: backend.cache_groups().to_vec(),
        data_parallel_rank: rank as u32,
    };
    // It ends with the engine, which drops its end.
    tokio::spawn(publisher.run(follower, layout, Arc::clone(metrics)));
    recorder
}

/// Says where KV events are.
pub(super) fn log_kv_events(addrs: &[BoundAddrs]) {
    let of = |rank: usize| if addrs.len() > 1 { format!(" of rank {rank}") } else { String::new() };
    let log = |what: &str, rank: usize, addr: SocketAddr| {
        tracing::info!("KV {what}{} on tcp://{addr}", of(rank));
    };
    for (rank, BoundAddrs { publish, replay }) in addrs.iter().enumerate() {
        log("events", rank, *publish);
        if let Some(replay) = replay {
            log("replay", rank, *replay);
        }
    }
}
