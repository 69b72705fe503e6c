//! Two engines over real sockets: what one computed the other goes on from, and whatever is wrong with it, or
//! happens on the way, the answer is the same and nothing is left at either end.

mod between;
mod hostile;
mod pulled;
mod refused;
mod shared;

use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::*;
use crate::engine::backend::Backend;
use crate::engine::scheduler::StepLimits;
use crate::engine::sequence::{Event, Generation, GenerationRequest};
use crate::engine::{EngineOptions, spawn};
use crate::metrics::{Metrics, StaticInfo};
use crate::model::{KvLayout, LoadedModel, ModelSource, Quantize};

/// Each way in which models are built, by its folder of test data.
const FAMILIES: [&str; 8] =
    ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3_fp8"];

const KEEP: Duration = Duration::from_secs(120);

/// A worker without its HTTP.
struct Node {
    transfers: Arc<KvTransfers>,
    engine: EngineHandle,
    metrics: Arc<Metrics>,
    _serving: JoinSet<()>,
}

/// What a node computes with, and its secret.
struct Kind {
    source: ModelSource,
    quantize: Quantize,
    block_size: usize,
    key: Option<PathBuf>,
    shared_memory: bool,
}

impl Default for Kind {
    fn default() -> Self {
        Self {
            source: ModelSource::Random,
            quantize: Quantize::None,
            block_size: 16,
            key: None,
            shared_memory: true,
        }
    }
}

/// Without memory that is shared: all goes over TCP.
fn apart() -> Kind {
    Kind { shared_memory: false, ..Kind::default() }
}

fn family(name: &str) -> ModelSource {
    ModelSource::Dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name))
}

impl Node {
    async fn start(kind: Kind) -> Self {
        let model = LoadedModel::load_quantized(&kind.source, kind.quantize).unwrap();
        let numerics_id = model.info.numerics_id.clone();
        let kv = KvLayout { block_size: kind.block_size, num_blocks: 256 };
        let backend: Box<dyn Backend> = Box::new(model.into_backend(kv).unwrap());
        let layout = backend.block_layout().unwrap();
        let info = StaticInfo { model: "m", numerics_id: "n", block_size: 16, num_blocks: 256 };
        let metrics = Arc::new(Metrics::new(&info).unwrap());
        let limits = StepLimits { max_batched_tokens: 64, max_running: 4 };
        let options = EngineOptions {
            limits,
            eos_token_ids: Vec::new(),
            suppress_token_ids: Vec::new(),
            step_ahead: true,
        };
        let engine = spawn(backend, options, Arc::clone(&metrics)).unwrap().handle;
        let listen = "127.0.0.1:0".parse().unwrap();
        let shared_memory = kind.shared_memory;
        let options = KvTransferOptions { listen, host: None, key_file: kind.key, keep: KEEP, shared_memory };
        let identity = Identity { numerics_id, layout, block_size: kind.block_size };
        let mut bound = bind(&options).await.unwrap();
        // Of two places, the fewest: each is used often.
        bound.room_bytes = bound.room_bytes.map(|_| 0);
        let moved = bound.over(engine.clone(), identity, KvTransferMetrics::new().unwrap());
        let (transfers, listener) = moved.unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, Arc::clone(&transfers)));
        Self { transfers, engine, metrics, _serving: serving }
    }

    fn submit(&self, request: GenerationRequest) -> Generation {
        self.engine.submit(vec![request]).unwrap().remove(0)
    }

    /// Computes a prompt and keeps its KV: what a gateway is told of it.
    async fn offered(&self, request: &GenerationRequest) -> RemoteKv {
        let hold = self.held(request).await;
        remote(&self.transfers.offer(Some(hold)).unwrap())
    }

    /// Computes a prompt that is held.
    async fn held(&self, request: &GenerationRequest) -> Arc<Hold> {
        let request = GenerationRequest { max_tokens: 1, keep: true, ..request.clone() };
        events(self.submit(request)).await.2.expect("half of the cache is free")
    }

    /// Answers, with what can be fetched; the tokens, and how many of the prompt's were cached here.
    async fn answer(&self, request: &GenerationRequest, remote: &RemoteKv) -> (Vec<u32>, usize) {
        let imported = self.transfers.fetch(remote, &request.prompt, &request.salt).await;
        let (tokens, cached, _) =
            events(self.submit(GenerationRequest { imported, ..request.clone() })).await;
        (tokens, cached)
    }

    /// Where others find what is cached here.
    fn peer(&self) -> Peer {
        peer("127.0.0.1", self.transfers.addr.port())
    }

    /// Answers, with what the other one has cached; the tokens, and how many of the prompt's were cached.
    async fn pull(&self, request: &GenerationRequest, from: &Peer) -> (Vec<u32>, usize) {
        let imported = self.transfers.pull(from, &request.prompt, &request.salt).await;
        let (tokens, cached, _) =
            events(self.submit(GenerationRequest { imported, ..request.clone() })).await;
        (tokens, cached)
    }

    /// Answers alone.
    async fn alone(&self, request: &GenerationRequest) -> Vec<u32> {
        events(self.submit(request.clone())).await.0
    }

    /// Waits until nothing is held or kept.
    async fn is_empty(&self) {
        let held = || self.metrics.kv_blocks_used.get() + self.metrics.kv_blocks_held.get();
        self.until(|| (held(), self.transfers.kept.len()) == (0, 0)).await;
    }

    /// Waits until that is so, with no clock: where it is virtual, it would run ahead of the engine's thread.
    async fn until(&self, is_so: impl Fn() -> bool) {
        for _ in 0..200_000 {
            // What was sent to the engine before is done.
            self.engine.resident_blocks().await.unwrap();
            if is_so() {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("what is waited for does not come");
    }

    fn imports(&self, outcome: &str) -> u64 {
        self.transfers.metrics.count("import", outcome)
    }

    fn exports(&self, outcome: &str) -> u64 {
        self.transfers.metrics.count("export", outcome)
    }
}

/// What a generation says: its tokens, how many of the prompt's were cached, and what is held of it.
async fn events(mut generation: Generation) -> (Vec<u32>, usize, Option<Arc<Hold>>) {
    let (mut tokens, mut cached, mut hold) = (Vec::new(), 0, None);
    while let Some(event) = poll_fn(|context| generation.poll_next(context)).await {
        match event {
            Event::Token(event) => {
                tokens.push(event.token);
                cached = event.cached_tokens;
            }
            Event::Kept(kept) => hold = Some(kept),
            other => panic!("{other:?}"),
        }
    }
    (tokens, cached, hold)
}

fn remote(said: &Value) -> RemoteKv {
    RemoteKv {
        transfer: u128::from_str_radix(said["remote_request_id"].as_str().unwrap(), 16).unwrap(),
        peer: Peer {
            host: said["remote_host"].as_str().unwrap().to_owned(),
            port: said["remote_port"].as_u64().unwrap() as u16,
        },
        tokens: said["remote_num_tokens"].as_u64().unwrap() as usize,
    }
}

fn peer(host: &str, port: u16) -> Peer {
    Peer { host: host.to_owned(), port }
}

fn request(len: u32, salt: &str) -> GenerationRequest {
    let prompt = (0..len).map(|i| i * 7 % 300).collect();
    let sampling = crate::engine::sampler::Sampling { temperature: 0.0, ..Default::default() };
    GenerationRequest {
        prompt,
        max_tokens: 6,
        ignore_eos: true,
        sampling,
        salt: Arc::from(salt.as_bytes()),
        ..GenerationRequest::default()
    }
}
