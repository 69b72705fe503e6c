//! A whole worker from its options: model, engine, server. Used by the command and by programs that embed
//! one.

mod engines;
mod error;
mod gpu;
mod kv_memory;
mod kv_transfer;
#[cfg(test)]
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod mixed;
mod spread;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{SystemTime, UNIX_EPOCH};

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::RANKS_MAX;
use keyway_text::{TextError, TextModel};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;

pub use error::{OptionsError, StartError};

use crate::answer::answer_format::{CallFormat, Formats, ReasoningFormat};
use crate::api::{App, ResponseStore, ServedModel};
use crate::device::DeviceChoice;
use crate::engine::backend::Backend;
use crate::engine::block_manager::CacheChange;
use crate::engine::engines::Engines;
use crate::engine::generation_config::{GenerationConfig, GenerationConfigError};
use crate::engine::grammar::GrammarCompiler;
use crate::engine::kv_events::{BoundAddrs, KvEventOptions, Publisher};
use crate::engine::scheduler::StepLimits;
use crate::engine::{EngineHandle, EngineOptions};
use crate::kv_transfer::KvTransferOptions;
use crate::limits::{
    CPU_STEP_DEFAULTS, EXPERT_DEADLINE_MIN as DEADLINE_MIN, GPU_STEP_DEFAULTS, REQUEST_MEMORY_LEAST,
};
use crate::memory;
use crate::metrics::{ExpertMetrics, MetricsPage, StaticInfo};
use crate::model::ExpertParallelOptions;
use crate::model::{KvLayout, LoadedModel, ModelInfo, ModelSource, Quantize, builtin};
use crate::request_memory::{self, RequestMemory};
use crate::{
    limits::ClientBounds,
    server::{self},
};

/// How a worker is started.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The built-in model, the random one, or a checkpoint directory.
    pub model: ModelSource,
    /// Whether the CPU or a GPU computes; [`DeviceChoice::Auto`] leaves it to the worker.
    pub device: DeviceChoice,
    /// How its matrices are kept in memory.
    pub quantize: Quantize,
    /// Whether the KV cache is kept in FP8: a GPU's alone.
    pub fp8_kv: bool,
    /// The model's name for clients; its own name if absent.
    pub served_model_name: Option<String>,
    /// Further names by which clients may ask for it.
    pub served_model_aliases: Vec<String>,
    /// How the model writes its thoughts; as its chat template tells, if absent.
    pub reasoning_format: Option<ReasoningFormat>,
    /// How the model writes calls of functions; as its chat template tells, if absent.
    pub call_format: Option<CallFormat>,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Tokens per KV block, a multiple of 16.
    pub block_size: usize,
    /// KV blocks; if absent, as many as the KV cache's memory holds.
    pub num_kv_blocks: Option<usize>,
    /// Memory of the KV cache, in bytes; if absent, 256 MiB, and on a GPU 0.9 of what is free.
    pub kv_cache_memory: Option<usize>,
    /// Instead: the share of the memory that is free once the weights are loaded, above 0 and at most 1.
    pub memory_utilization: Option<f64>,
    /// Prompt and answer together, in tokens; if absent, what the model and the KV cache allow.
    pub max_model_len: Option<usize>,
    /// Tokens computed in one step, over all sequences; if absent, 512, and on a GPU 4096.
    pub max_batched_tokens: Option<usize>,
    /// Sequences that run at the same time; if absent, 64, and on a GPU 256.
    pub max_running: Option<usize>,
    /// Whether a GPU's next step is planned and started before the tokens of the last one are known.
    pub step_ahead: bool,
    /// Whether a GPU computes both products of few tokens' experts in one launch.
    pub paired_experts: bool,
    /// Processor threads that compute; if absent, as many as there are cores.
    pub threads: Option<usize>,
    /// Memory for requests' bodies, their parsing, rendering and tokenising, in bytes; if absent, 1 GiB, and
    /// with contexts of more than 200,000 tokens what the longest prompts need.
    pub request_memory: Option<usize>,
    /// What clients' connections are held to.
    pub clients: ClientBounds,
    /// Where the state of the prefix cache is published; nowhere if absent.
    pub kv_events: Option<KvEventOptions>,
    /// How KV goes between this worker and others; not at all if absent.
    pub kv_transfer: Option<KvTransferOptions>,
    /// How the model's experts are spread over processes.
    pub expert_parallel: ExpertParallelOptions,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            model: ModelSource::Builtin,
            device: DeviceChoice::Cpu,
            quantize: Quantize::None,
            fp8_kv: false,
            served_model_name: None,
            served_model_aliases: Vec::new(),
            reasoning_format: None,
            call_format: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            block_size: 16,
            num_kv_blocks: None,
            kv_cache_memory: None,
            memory_utilization: None,
            max_model_len: None,
            max_batched_tokens: None,
            max_running: None,
            step_ahead: true,
            paired_experts: false,
            threads: None,
            request_memory: None,
            clients: ClientBounds::default(),
            kv_events: None,
            kv_transfer: None,
            expert_parallel: ExpertParallelOptions::default(),
        }
    }
}

impl WorkerOptions {
    /// What a step holds at most: on a GPU more, which computes many tokens in the time that reading the
    /// weights takes. What is asked for stays as it is, and the other fits it.
    pub(crate) fn limits(&self, is_on_gpu: bool) -> StepLimits {
        let (tokens, running) = if is_on_gpu { GPU_STEP_DEFAULTS } else { CPU_STEP_DEFAULTS };
        StepLimits {
            max_batched_tokens: self.max_batched_tokens.unwrap_or(tokens.max(self.max_running.unwrap_or(0))),
            max_running: self.max_running.unwrap_or(running.min(self.max_batched_tokens.unwrap_or(running))),
        }
    }
}

/// A worker that serves until it is shut down. Dropping it shuts it down too, without waiting.
#[derive(Debug)]
pub struct RunningWorker {
    addr: SocketAddr,
    model_name: String,
    shutdown: oneshot::Sender<()>,
    server: tokio::task::JoinHandle<()>,
    /// The engines' threads, by data-parallel rank, for the shutdown to wait for.
    engines: Vec<std::thread::JoinHandle<()>>,
    engine_stopped: Arc<Notify>,
    handles: Vec<EngineHandle>,
    kv_events: Vec<BoundAddrs>,
    kv_transfer: Option<SocketAddr>,
    /// Gives KV to other workers until it is dropped.
    serving_kv: JoinSet<()>,
}

/// The parts of a model that are ready before its backend is.
struct Loaded {
    model: LoadedModel,
    text: TextModel,
    defaults: GenerationConfig,
}

/// A model that computes: what it is, its KV cache, and what each engine runs.
struct Computing {
    info: ModelInfo,
    kv: KvLayout,
    limits: StepLimits,
    max_model_len: usize,
    backends: Vec<Box<dyn Backend>>,
    experts: Option<Arc<ExpertMetrics>>,
}

/// A model that computes, its text side and its defaults.
type Parts = (Computing, TextModel, GenerationConfig);

/// Where a worker listens. Bound before its model is loaded, so that a port in use is known at once.
struct Bound {
    listener: TcpListener,
    addr: SocketAddr,
    publishers: Vec<Publisher>,
    kv: Option<crate::kv_transfer::Bound>,
}

impl Bound {
    async fn to(options: &WorkerOptions) -> Result<Self, StartError> {
        let listen_error = |source| StartError::Listen { addr: options.listen, source };
        let listener = TcpListener::bind(options.listen).await.map_err(listen_error)?;
        let addr = listener.local_addr().map_err(listen_error)?;
        let publishers = engines::bind_kv_events(options).await?;
        Ok(Self { listener, addr, publishers, kv: kv_transfer::bind(options).await? })
    }
}

/// Starts a worker on the current tokio runtime: bound and ready when this returns.
pub async fn start(options: WorkerOptions) -> Result<RunningWorker, StartError> {
    check_options(&options)?;
    let gpu = gpu::choose(&options)?;
    let bound = Bound::to(&options).await?;
    let parts = computing(gpu, &options).await?;
    serve(options, bound, parts)
}

/// Starts the engines and the server over a model.
fn serve(options: WorkerOptions, bound: Bound, parts: Parts) -> Result<RunningWorker, StartError> {
    let Bound { listener, addr, publishers, kv: kv_bound } = bound;
    let kv_events: Vec<BoundAddrs> = publishers.iter().map(Publisher::addrs).collect();
    let (computing, text, defaults) = parts;
    let Computing { info, kv, limits, max_model_len, backends, experts } = computing;
    let model_name = options.served_model_name.unwrap_or_else(|| info.name.clone());
    let eos_token_ids = eos_token_ids(&info, &text);
    let engine_options = EngineOptions {
        limits,
        eos_token_ids: eos_token_ids.clone(),
        suppress_token_ids: suppressed(&defaults, info.vocab_size),
        step_ahead: options.step_ahead,
    };
    let static_info = StaticInfo {
        model: &model_name,
        numerics_id: &info.numerics_id,
        block_size: kv.block_size,
        num_blocks: kv.num_blocks,
    };
    let kv_ready = kv_transfer::ready(kv_bound, &backends, &info.numerics_id)?;
    let started = engines::start(backends, &engine_options, &static_info, publishers)?;
    let kv_transfer = kv_transfer::start(kv_ready, &started.handles)?;
    let kv_source_port = kv_transfer.source_port(addr);
    let request_memory =
        options.request_memory.unwrap_or_else(|| request_memory::default_bytes(max_model_len));
    let app = Arc::new(App {
        memory: Arc::new(RequestMemory::new(request_memory)),
        clients: options.clients,
        responses: ResponseStore::default(),
        kv_events: kv_events.clone(),
        kv_transfers: kv_transfer.transfers,
        engines: Engines::new(started.handles.clone()),
        grammars: GrammarCompiler::new(Arc::clone(&text.tokenizer), info.vocab_size, eos_token_ids.clone()),
        formats: Formats::of(&text, options.reasoning_format, options.call_format),
        text,
        defaults,
        metrics: MetricsPage::new(started.metrics, experts).with_kv_transfer(kv_transfer.metrics),
        model: ServedModel {
            names: [std::slice::from_ref(&model_name), &options.served_model_aliases].concat(),
            max_model_len,
            vocab_size: info.vocab_size,
            eos_token_ids,
            numerics_id: info.numerics_id.clone(),
            kv_source_port,
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        },
    });
    let (shutdown, shutdown_asked) = oneshot::channel();
    let server = tokio::spawn(server::serve(listener, app, shutdown_asked));
    log_ready(addr, &model_name, &info, kv, max_model_len);
    engines::log_kv_events(&kv_events);
    let (engines, engine_stopped, handles) = (started.threads, started.stopped, started.handles);
    Ok(RunningWorker {
        addr,
        model_name,
        shutdown,
        server,
        engines,
        engine_stopped,
        handles,
        kv_events,
        kv_transfer: kv_transfer.addr,
        serving_kv: kv_transfer.serving,
    })
}

impl RunningWorker {
    /// Where it listens for clients, with the port that the system chose if the options have 0.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The model's name for clients.
    pub fn model_name(&self) -> &str {
        &self.model_name
    }

    /// Where KV events are published; `None` if they are not. Of the first engine, if there are several.
    pub fn kv_events_addr(&self) -> Option<SocketAddr> {
        self.kv_events_addrs().next()
    }

    /// Where each engine's KV events are published, by data-parallel rank; nothing if they are not.
    pub fn kv_events_addrs(&self) -> impl Iterator<Item = SocketAddr> {
        self.kv_events.iter().map(|addrs| addrs.publish)
    }

    /// Where KV events are replayed; `None` if they are not. Of the first engine, if there are several.
    pub fn kv_replay_addr(&self) -> Option<SocketAddr> {
        self.kv_events.first().and_then(|addrs| addrs.replay)
    }

    /// Where other workers fetch KV; `None` if they cannot.
    pub fn kv_transfer_addr(&self) -> Option<SocketAddr> {
        self.kv_transfer
    }

    /// Every block of the prefix cache between two steps, parents first; `None` if the engine is gone. For
    /// diagnosis: what a follower of the KV events should have come to. Of the first engine, if there are
    /// several.
    pub async fn resident_blocks(&self) -> Option<Vec<CacheChange>> {
        self.resident_blocks_of(0).await
    }

    /// [`RunningWorker::resident_blocks`] of the engine of a data-parallel rank.
    pub async fn resident_blocks_of(&self, rank: usize) -> Option<Vec<CacheChange>> {
        self.handles.get(rank)?.resident_blocks().await
    }

    /// Waits until an engine is gone, which before a shutdown means that it failed.
    pub async fn engine_stopped(&mut self) {
        self.engine_stopped.notified().await;
    }

    /// Takes no more connections, lets open answers end (for 25 s at most), and ends the engine.
    pub async fn shutdown(self) {
        let _ = self.shutdown.send(());
        drop(self.handles);
        if self.server.await.is_err() {
            tracing::error!("the server's task failed");
        }
        drop(self.serving_kv);
        let joined = blocking(move || self.engines.into_iter().all(|engine| engine.join().is_ok()));
        if !matches!(joined.await, Ok(true)) {
            tracing::error!("an engine's thread failed");
        }
    }
}

/// Loads the model and makes it compute where it can; its text side and its defaults, too.
async fn computing(gpu: Option<(gpu::Gpu, usize)>, options: &WorkerOptions) -> Result<Parts, StartError> {
    let source = options.model.clone();
    // A GPU has number types of its own.
    let quantize = if gpu.is_some() { Quantize::None } else { options.quantize };
    let ranks = options.expert_parallel.size;
    let Loaded { model, text, defaults } = blocking(move || load(&source, quantize, ranks)).await??;
    let is_on_gpu = gpu.is_some();
    let computing = match gpu {
        Some(gpu) => gpu::start(gpu, model, options).await,
        None => on_cpu(model, options).await,
    };
    let computing = match computing {
        Err(error) if is_on_gpu => {
            gpu::fall_back(options, error)?;
            let (source, quantize) = (options.model.clone(), options.quantize);
            let Loaded { model, .. } = blocking(move || load(&source, quantize, ranks)).await??;
            on_cpu(model, options).await?
        }
        computing => computing?,
    };
    Ok((computing, text, defaults))
}

/// Makes a model compute on the CPU, its experts spread over processes if asked for.
async fn on_cpu(model: LoadedModel, options: &WorkerOptions) -> Result<Computing, StartError> {
    let (info, limits) = (model.info.clone(), options.limits(false));
    let (kv, max_model_len) = kv_memory::kv_layout(options, &info, kv_memory::Place::Host)?;
    let compute = Compute::new(threads(options.threads));
    let spread = spread::plan(options, &model, kv, max_model_len)?;
    let backend = blocking(move || model.into_backend(kv)).await??.with_compute(compute);
    let (backend, experts) = match spread {
        None => (backend, None),
        Some(spread) => {
            let (backend, experts) = spread::start(spread, backend).await?;
            (backend, Some(experts))
        }
    };
    let backends = engines::backends(engines::count(options), backend, experts.as_ref())?;
    Ok(Computing { info, kv, limits, max_model_len, backends, experts })
}

/// Runs what would hold up the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, StartError> {
    tokio::task::spawn_blocking(work).await.map_err(StartError::engine)
}

fn check_options(options: &WorkerOptions) -> Result<(), OptionsError> {
    let positive = [
        ("block size", options.block_size),
        ("number of KV blocks", options.num_kv_blocks.unwrap_or(1)),
        ("maximal model length", options.max_model_len.unwrap_or(1)),
        ("number of batched tokens", options.max_batched_tokens.unwrap_or(1)),
        ("number of running sequences", options.max_running.unwrap_or(1)),
        ("number of threads", options.threads.unwrap_or(1)),
        ("KV cache's memory", options.kv_cache_memory.unwrap_or(1)),
        ("expert-parallel size", options.expert_parallel.size),
    ];
    if let Some((what, _)) = positive.iter().find(|(_, value)| *value == 0) {
        return Err(OptionsError::Zero(what));
    }
    if let Some(share) = options.memory_utilization
        && !(f64::MIN_POSITIVE..=1.0).contains(&share)
    {
        return Err(OptionsError::MemoryUtilization(share));
    }
    if let Some(bytes) = options.request_memory.filter(|bytes| *bytes < REQUEST_MEMORY_LEAST) {
        return Err(OptionsError::RequestMemory(bytes));
    }
    let ExpertParallelOptions { size, data_parallel_attention, deadline, .. } = options.expert_parallel;
    if size > RANKS_MAX {
        return Err(OptionsError::Ranks(size));
    }
    if data_parallel_attention && size == 1 {
        return Err(OptionsError::AttentionOfOneRank);
    }
    if data_parallel_attention && options.memory_utilization.is_some() {
        return Err(OptionsError::AttentionMemory);
    }
    if deadline < DEADLINE_MIN {
        return Err(OptionsError::Deadline);
    }
    if let (Some(tokens), Some(running)) = (options.max_batched_tokens, options.max_running)
        && tokens < running
    {
        return Err(OptionsError::TokensBelowRunning { tokens, running });
    }
    Ok(())
}

/// The built-in model's tokenizer and chat template.
pub fn builtin_text() -> Result<TextModel, TextError> {
    TextModel::from_json(builtin::TOKENIZER, builtin::TOKENIZER_CONFIG)
}

fn load(source: &ModelSource, quantize: Quantize, ranks: usize) -> Result<Loaded, StartError> {
    let model = LoadedModel::load_share(source, quantize, ranks)?;
    let (text, defaults) = match source {
        ModelSource::Builtin => (
            builtin_text()?,
            GenerationConfig::from_json(builtin::GENERATION_CONFIG)
                .map_err(GenerationConfigError::Builtin)?,
        ),
        ModelSource::Random => {
            (TextModel::builtin(), GenerationConfig::random(model.info.vocab_size, &model.info.eos_token_ids))
        }
        ModelSource::Dir(dir) => (TextModel::from_dir(dir)?, GenerationConfig::from_dir(dir)?),
    };
    Ok(Loaded { model, text, defaults })
}

/// As many as asked for, or as there are cores; one if the system does not say.
pub(crate) fn threads(asked: Option<usize>) -> NonZeroUsize {
    asked.and_then(NonZeroUsize::new).or_else(|| available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN)
}

fn eos_token_ids(info: &ModelInfo, text: &TextModel) -> Vec<u32> {
    let mut ids = info.eos_token_ids.clone();
    ids.extend(text.eos_token_id);
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn suppressed(defaults: &GenerationConfig, vocab_size: usize) -> Vec<u32> {
    let ids = defaults.suppress_tokens.iter().flatten().copied();
    ids.filter(|id| (*id as usize) < vocab_size).collect()
}

fn log_ready(addr: SocketAddr, model: &str, info: &ModelInfo, kv: KvLayout, max_model_len: usize) {
    // The KV cache is reserved, not touched: what is held beside the weights is everything else.
    let other = memory::resident_bytes().map(|held| held.saturating_sub(info.weight_bytes) >> 20);
    tracing::info!(
        model,
        max_model_len,
        kv_blocks = kv.num_blocks,
        block_size = kv.block_size,
        kv_mib = (kv.num_blocks * kv.block_size * info.kv_bytes_per_block_position) >> 20,
        weights_mib = info.weight_bytes >> 20,
        other_mib = other,
        numerics_id = info.numerics_id,
        "ready on http://{addr}"
    );
}
