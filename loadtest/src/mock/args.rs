//! The options of `keyway-loadtest mock`.

use std::time::Duration;

use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use keyway_core::Transfer;
use keyway_wire::kv_event::WireFormat;

use super::{Fault, First, KvEvents, Names, Options};
use crate::{
    engine_model::{self, PROFILES, Profile, UnknownProfile},
    limits::MOCK_WORKERS_MAX,
    units,
};

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  # Eight H100s with Llama 8B on ports 9000 to 9007, at twenty times their speed
  keyway-loadtest mock --workers 8 --base-port 9000 --time-scale 20

  # Small caches, and KV events as vLLM publishes them (ports 5557…, replay on 5657…)
  keyway-loadtest mock --workers 4 --kv-blocks 4096 --kv-events --kv-events-format vllm-map

  # What the gateway itself costs: engines that take no time
  keyway-loadtest mock --profile instant --threads 1

  # Worker 2 is gone from second 30 to 45, and one request in four gets 503
  keyway-loadtest mock --workers 4 --fault 2:die@30s..45s --fault status=503x0.25
  # … or while it runs, on one worker
  curl -d 'stall@0s..5s' http://127.0.0.1:9001/mock/faults     (GET lists, DELETE clears)

Faults: [WORKER:]KIND[=VALUE][xSHARE][@START[..[END]]]
  die           nothing listens, connections break; afterwards it starts anew, its cache empty
  restart       the same, back at once
  stall         the engine does nothing, HTTP goes on
  slow=FACTOR   steps take that many times as long
  status=CODE   requests are refused, with Retry-After
  cut=TOKENS    streams break after that many tokens
  lose-events   batches of KV events are numbered and can be replayed, but are not sent";

/// Options of `mock`.
#[derive(Debug, Args)]
pub struct MockArgs {
    /// Simulated engines, each on a port of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MOCK_WORKERS_MAX)))]
    pub workers: u16,
    /// Worker i listens on this port + i; 0: on ports of the system's choice
    #[arg(long, value_name = "PORT", default_value_t = 9000)]
    pub base_port: u16,
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub host: String,
    /// Name of the model that they say they serve
    #[arg(long, value_name = "NAME", default_value = "mock")]
    pub model: String,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub engine: EngineArgs,
    /// Seconds of engine time in one second
    #[arg(long, value_name = "SPEED", default_value = "1", value_parser = units::positive)]
    pub time_scale: f64,
    /// Tokens generated for a request that sets no limit
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub output_tokens: u32,
    /// Tokens of a picture in a prompt, whatever its size; 0: as many as its base64 has
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub image_tokens: u32,
    /// Whose names /metrics has
    #[arg(long, value_enum, default_value_t = Names::Vllm)]
    pub metrics: Names,
    /// Answer /v1/completions/render and /v1/chat/completions/render with a prompt's token ids, as vLLM does
    /// where it is asked to
    #[arg(long)]
    pub render: bool,
    /// What streams say before their first token
    #[arg(long, value_enum, default_value_t = First::None)]
    pub first: First,
    /// Move KV between the workers as requests ask (kv_transfer_params, in vLLM's words), and say at which
    /// port each is a source
    #[arg(long)]
    pub kv_transfers: bool,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub kv: KvArgs,
    /// Name the first N workers to the gateway as workers for prefill, and the others as workers for decode
    #[arg(long, value_name = "N", default_value_t = 0, requires = "kv_transfers")]
    pub prefill: u16,
    /// What goes wrong, and when; see below
    #[arg(long, value_name = "FAULT")]
    pub fault: Vec<Fault>,
    /// Publish KV events over ZMQ
    #[arg(long)]
    pub kv_events: bool,
    /// Worker i publishes on this port + i; 0: on ports of the system's choice
    #[arg(long, value_name = "PORT", default_value_t = 5557, requires = "kv_events")]
    pub kv_events_base_port: u16,
    /// Worker i replays on this port + i; 0: on ports of the system's choice
    #[arg(long, value_name = "PORT", default_value_t = 5657, requires = "kv_events")]
    pub kv_replay_base_port: u16,
    /// Whose events: vLLM's from v0.24 on, older ones, SGLang's newest, older ones
    #[arg(long, value_enum, default_value_t = EventFormat::VllmMap, requires = "kv_events")]
    pub kv_events_format: EventFormat,
    /// Threads that serve HTTP [default: the machine's, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub threads: Option<u8>,
}

/// Why the options name no fleet.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum MockArgsError {
    /// No engine has the profile that is named.
    #[error(transparent)]
    Profile(#[from] UnknownProfile),
    /// No worker would answer.
    #[error("--prefill {prefill} of {workers} workers: at least one must be for decode")]
    Prefill {
        /// How many were asked for.
        prefill: u16,
        /// How many workers there would be.
        workers: usize,
    },
    /// A fault is for a worker that the fleet does not have.
    #[error("--fault {fault}: there are only {workers} workers, counted from 0")]
    Worker {
        /// The fault that was asked for.
        fault: Fault,
        /// How many workers there would be.
        workers: usize,
    },
}

/// Which engine is simulated; shared with `simulate`.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Accelerator and model whose speed is simulated
    #[arg(long, default_value = "h100-8b", value_parser = PossibleValuesParser::new(PROFILES.map(|profile| profile.name)))]
    pub profile: String,
    /// KV blocks of each worker [default: the profile's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_blocks: Option<u32>,
    /// Tokens of a KV block [default: the profile's; without --kv-blocks the number of tokens stays]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub block_size: Option<u32>,
    /// Most tokens in one step [default: the profile's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_batched_tokens: Option<u32>,
    /// Most requests running at once [default: the profile's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_running: Option<u32>,
}

/// What moving KV takes; shared with `simulate`.
#[derive(Debug, Clone, Copy, Args)]
pub struct KvArgs {
    /// Gbit/s at which a worker sends KV, and receives it; several transfers share that
    #[arg(long = "kv-gbit", value_name = "GBIT", default_value = "100", value_parser = units::positive)]
    gbit: f64,
    /// KiB of KV for each token (128: eight billion parameters, grouped queries, 16 bits)
    #[arg(long = "kv-kib", value_name = "KIB", default_value = "128", value_parser = units::positive)]
    kib: f64,
    /// Time of each transfer before its first byte
    #[arg(long = "kv-handover", value_name = "TIME", default_value = "36ms", value_parser = units::duration)]
    handover: Duration,
}

/// The forms of KV events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[expect(missing_docs, reason = "the names say it; the option's help says more")]
pub enum EventFormat {
    VllmMap,
    VllmArray,
    SglangMap,
    SglangArray,
}

impl EngineArgs {
    /// The profile with what was set.
    pub fn profile(&self) -> Result<Profile, UnknownProfile> {
        let mut profile = engine_model::named(&self.profile)?;
        if let Some(block_tokens) = self.block_size {
            profile.kv_blocks = (profile.kv_tokens() / u64::from(block_tokens)) as u32;
            profile.block_tokens = block_tokens;
        }
        profile.kv_blocks = self.kv_blocks.unwrap_or(profile.kv_blocks);
        profile.token_budget = self.max_batched_tokens.unwrap_or(profile.token_budget);
        profile.running_max = self.max_running.unwrap_or(profile.running_max);
        Ok(profile)
    }
}

impl KvArgs {
    /// What a transfer takes that has the network for itself.
    pub fn transfer(&self) -> Transfer {
        let ms_per_token = self.kib * 1024.0 * 8.0 / (self.gbit * 1e6);
        Transfer { handover_ms: self.handover.as_secs_f64() * 1e3, ms_per_token }
    }
}

impl MockArgs {
    /// The fleet that was asked for.
    pub fn options(&self) -> Result<Options, MockArgsError> {
        let workers = usize::from(self.workers);
        let misses = |fault: &&Fault| fault.worker.is_some_and(|worker| worker >= workers);
        if let Some(&fault) = self.fault.iter().find(misses) {
            return Err(MockArgsError::Worker { fault, workers });
        }
        if self.prefill > 0 && usize::from(self.prefill) >= workers {
            return Err(MockArgsError::Prefill { prefill: self.prefill, workers });
        }
        Ok(Options {
            host: self.host.clone(),
            workers,
            base_port: self.base_port,
            model: self.model.clone(),
            profile: self.engine.profile()?,
            time_scale: self.time_scale,
            output_tokens: self.output_tokens,
            image_tokens: self.image_tokens,
            metrics: self.metrics,
            render: self.render,
            first: self.first,
            kv_transfer: self.kv_transfers.then(|| self.kv.transfer()),
            prefill: usize::from(self.prefill),
            faults: self.fault.clone(),
            kv_events: self.kv_events.then_some(KvEvents {
                base_port: self.kv_events_base_port,
                replay_base_port: self.kv_replay_base_port,
                format: match self.kv_events_format {
                    EventFormat::VllmMap => WireFormat::VllmMap,
                    EventFormat::VllmArray => WireFormat::VllmArray,
                    EventFormat::SglangMap => WireFormat::SglangMap,
                    EventFormat::SglangArray => WireFormat::SglangArray,
                },
            }),
        })
    }
}
