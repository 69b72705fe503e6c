//! `keyway-loadtest mock`: a fleet of simulated engines in one process, each on its own port, for OpenAI's
//! APIs and Anthropic's, with real prefix-cache behaviour, vLLM's metrics, KV events and faults on demand. No
//! model runs: tokens are made up, times come from `engine_model`.
//!
//! A request's way: `http.rs` → `request.rs` (what was asked) → `worker.rs` (the engine's lock and thread) →
//! `ticket.rs` (what came out) → `answer.rs` (events, in the words of `answer/words.rs`). Beside it
//! `events.rs` and `event_sockets.rs`, `faults.rs`, `kv.rs` (KV that moves between them), `series.rs`,
//! `embeddings.rs` (answers without tokens).

mod answer;
mod api;
pub mod args;
mod embeddings;
mod event_sockets;
mod events;
mod faults;
mod http;
mod kv;
mod loads;
mod prompt;
mod request;
mod series;
mod ticket;
mod worker;

use std::{fmt::Write as _, io, net::SocketAddr, process::ExitCode, sync::Arc, thread, time::Instant};

use keyway_core::Transfer;
use keyway_wire::kv_event::WireFormat;
use tokio::{
    net::TcpListener,
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::JoinSet,
};

use self::{
    args::{MockArgs, MockArgsError},
    event_sockets::EventSockets,
    events::EventLog,
    kv::KvMover,
    prompt::Vocabulary,
    worker::{Setup, Worker},
};
pub use self::{
    faults::{Fault, Kind, TooManyFaults},
    series::Names,
};
use crate::{
    engine_model::Profile,
    error::Error,
    limits::{MOCK_EVENT_QUEUE_MAX, RUNTIME_THREADS_MAX},
    stdout,
};

/// What a fleet is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// Host or address that all workers listen on, for HTTP and for KV events.
    pub host: String,
    /// How many workers to start, each on a port of its own.
    pub workers: usize,
    /// Worker i listens here + i; 0: each where the system chooses.
    pub base_port: u16,
    /// Name of the model that all workers say they serve.
    pub model: String,
    /// Its speed and bounds.
    pub profile: Profile,
    /// Seconds of engine time in one second.
    pub time_scale: f64,
    /// Tokens generated for requests that set no limit.
    pub output_tokens: u32,
    /// Tokens of a picture in a prompt; 0: those of its text.
    pub image_tokens: u32,
    /// In whose names the workers tell their metrics.
    pub metrics: Names,
    /// Whether prompts' token ids are told to who asks.
    pub render: bool,
    /// What streams say before their first token.
    pub first: First,
    /// What it takes to move KV between the workers, if they do that.
    pub kv_transfer: Option<Transfer>,
    /// How many of the first workers the gateway is told are for prefill, the others being for decode; 0:
    /// each does both.
    pub prefill: usize,
    /// Faults known from the start, each for one worker or for all.
    pub faults: Vec<Fault>,
    /// KV events, if wanted.
    pub kv_events: Option<KvEvents>,
}

/// What a stream says before its first token, as engines and the proxies before them do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum First {
    /// Nothing: the first bytes come with the first token
    #[default]
    None,
    /// What the API's streams begin with, at once: a chunk with the role, `response.created`, `message_start`
    Role,
    /// A comment to keep the connection alive, at once and every 250 ms
    Comment,
}

/// Where and how KV events are published.
#[derive(Debug, Clone, Copy)]
pub struct KvEvents {
    /// Worker i publishes here + i; 0: where the system chooses.
    pub base_port: u16,
    /// Worker i replays here + i; 0: where the system chooses.
    pub replay_base_port: u16,
    /// In which engine's words.
    pub format: WireFormat,
}

/// Where one worker is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Base URL of its HTTP API, with the port it really has.
    pub url: String,
    /// Where to subscribe to KV events, and where to ask for a replay.
    pub kv: Option<(String, String)>,
}

/// Why a fleet cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A worker's port is above all ports.
    #[error("worker {number} would need port {port}: choose a lower base port")]
    Port {
        /// The number of that worker, from 0.
        number: usize,
        /// The port that it would need.
        port: usize,
    },
    /// A worker's port for HTTP cannot be had.
    #[error("cannot listen on {at}: {source}")]
    Http {
        /// The host and port that were asked for.
        at: String,
        /// The system's own error, with which the message ends.
        source: io::Error,
    },
    /// A worker's port for KV events, or for their replay, cannot be had.
    #[error("cannot bind {at:?} for KV events: {source}")]
    KvEvents {
        /// The host and port that were asked for.
        at: String,
        /// The system's own error, with which the message ends.
        source: io::Error,
    },
    /// The system does not say where a worker listens.
    #[error(transparent)]
    Address(io::Error),
    /// A worker's engine has no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// A worker has too many faults from the start.
    #[error(transparent)]
    Faults(#[from] TooManyFaults),
}

impl From<MockArgsError> for Error {
    fn from(error: MockArgsError) -> Self {
        Self::Mock(Box::new(error))
    }
}

impl From<StartError> for Error {
    fn from(error: StartError) -> Self {
        Self::Mock(Box::new(error))
    }
}

/// A running fleet. It ends when it is dropped.
#[derive(Debug)]
pub struct Fleet {
    /// Where each worker is, in the order of their numbers.
    pub addresses: Vec<Address>,
    ports: Vec<u16>,
    workers: Vec<Arc<Worker>>,
    tasks: JoinSet<()>,
}

/// Runs a fleet until SIGINT or SIGTERM.
pub fn run(args: &MockArgs) -> Result<ExitCode, Error> {
    let options = args.options()?;
    let cores = thread::available_parallelism().map_or(1, usize::from).min(RUNTIME_THREADS_MAX);
    let threads = args.threads.map_or(cores, usize::from);
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    runtime.block_on(async {
        let fleet = Fleet::start(&options).await?;
        stdout::print(&fleet.describe(&options))?;
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        tokio::select! { _ = interrupt.recv() => (), _ = terminate.recv() => () }
        Ok(ExitCode::SUCCESS)
    })
}

// === impl Fleet ===

impl Fleet {
    /// Binds all ports and starts serving; an error says which port could not be had.
    pub async fn start(options: &Options) -> Result<Self, StartError> {
        let setup = Arc::new(Setup {
            model: options.model.clone(),
            profile: options.profile.clone(),
            time_scale: options.time_scale,
            output_tokens: options.output_tokens,
            image_tokens: options.image_tokens,
            metrics: options.metrics,
            render: options.render,
            first: options.first,
            kv: options.kv_transfer.map(|transfer| KvMover::new(options.workers, transfer)),
            zero: Instant::now(),
            vocabulary: Vocabulary::default(),
        });
        let (addresses, ports, workers) = Default::default();
        let mut fleet = Self { addresses, ports, workers, tasks: JoinSet::new() };
        for number in 0..options.workers {
            fleet.add(options, number, Arc::clone(&setup)).await?;
        }
        if let Some(mover) = &setup.kv {
            mover.introduce(fleet.ports.iter().copied().zip(fleet.workers.iter().cloned()));
        }
        Ok(fleet)
    }

    async fn add(&mut self, options: &Options, number: usize, setup: Arc<Setup>) -> Result<(), StartError> {
        let at = format!("{}:{}", options.host, port(options.base_port, number)?);
        let listener = TcpListener::bind(&at).await.map_err(|source| StartError::Http { at, source })?;
        let addr = listener.local_addr().map_err(StartError::Address)?;
        let sockets = match options.kv_events {
            Some(kv) => {
                let ports = (port(kv.base_port, number)?, port(kv.replay_base_port, number)?);
                Some((EventSockets::bind(&options.host, ports.0, ports.1).await?, kv.format))
            }
            None => None,
        };
        self.ports.push(addr.port());
        self.addresses.push(Address {
            url: format!("http://{addr}"),
            kv: sockets.as_ref().map(|(sockets, _)| sockets.urls()),
        });
        let (live, received) = mpsc::channel(MOCK_EVENT_QUEUE_MAX);
        let events = sockets.as_ref().map(|(_, format)| EventLog::new(*format, live));
        let worker = Arc::new(Worker::new(number, setup, events));
        for fault in options.faults.iter().filter(|fault| fault.worker.is_none_or(|worker| worker == number))
        {
            worker.add_fault(*fault)?;
        }
        self.serve(worker, listener, addr)?;
        if let (Some((sockets, format)), Some(worker)) = (sockets, self.workers.last()) {
            self.tasks.spawn(sockets.serve(Arc::clone(worker), format, received));
        }
        Ok(())
    }

    fn serve(
        &mut self,
        worker: Arc<Worker>,
        listener: TcpListener,
        addr: SocketAddr,
    ) -> Result<(), StartError> {
        let own = Arc::clone(&worker);
        let thread = thread::Builder::new().name(format!("engine-{}", worker.number));
        thread.spawn(move || own.keep_time()).map_err(StartError::Thread)?;
        self.tasks.spawn(http::serve(Arc::clone(&worker), listener, addr));
        self.workers.push(worker);
        Ok(())
    }

    /// Says where everything is, and how to put `keyway` in front of it.
    fn describe(&self, options: &Options) -> String {
        let (profile, mut out) = (&options.profile, String::new());
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{} ({}), {} KV blocks of {} tokens, at {} times its speed",
            profile.name, profile.about, profile.kv_blocks, profile.block_tokens, options.time_scale
        );
        let mut hint = String::from("keyway");
        for (number, Address { url, kv }) in self.addresses.iter().enumerate() {
            let _ = write!(out, "worker {number} ready on {url}");
            let _ = write!(hint, " \\\n    --worker '{url}");
            if let Some((events, replay)) = kv {
                let _ = write!(out, ", KV events on {events}, replay on {replay}");
                let _ = write!(hint, ";kv-events={events};kv-replay={replay}");
            }
            match options.prefill {
                0 => {}
                prefill if number < prefill => hint.push_str(";role=prefill"),
                _ => hint.push_str(";role=decode"),
            }
            out.push('\n');
            hint.push('\'');
        }
        let _ = writeln!(out, "put a gateway in front of it:\n  {hint}");
        out
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.workers.iter().for_each(|worker| worker.stop());
    }
}

fn port(base: u16, number: usize) -> Result<u16, StartError> {
    if base == 0 {
        return Ok(0);
    }
    let port = usize::from(base) + number;
    u16::try_from(port).map_err(|_| StartError::Port { number, port })
}
