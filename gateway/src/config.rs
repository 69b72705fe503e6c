//! The configuration that the gateway runs with, validated. What the file may say is in `config/file.rs`,
//! what may be said of a worker in `config/worker.rs`; where a value comes from (flag, environment, file,
//! default) is decided in `args.rs`.

mod address;
mod cors;
mod discovery;
mod file;
mod kubernetes;
mod peers;
mod resume;
mod scale;
mod stored_state;
mod tenants;
mod timeouts;
mod traces;
mod worker;
mod worker_url;

use std::{fs, net::SocketAddr, num::NonZeroUsize, path::PathBuf, time::Duration};

use http::HeaderValue;
use keyway_core::{pick::Policy, waiting_room::RoomRules};
use keyway_wire::block_hash::HashKey;

pub use self::{
    address::listen_address,
    cors::{Cors, CorsFile, OneOrMany, Origins},
    discovery::{DiscoveryConfig, DiscoveryFile, DnsName, HostRule},
    file::{AuthFile, File, IgnoreTable, LimitsFile, ModelTable, RoutingFile},
    kubernetes::{KubernetesFleet, KubernetesTable, PortRef},
    peers::{PeersConfig, PeersFile},
    resume::{ResumeConfig, ResumeFile},
    scale::{ModelScale, ScaleConfig, ScaleFile},
    stored_state::{StoredStateConfig, StoredStateFile},
    tenants::TenantRules,
    timeouts::Timeouts,
    traces::{GenAi, TraceRules, TracesConfig, TracesFile},
    worker::{KvSource, WorkerConfig, WorkerEntry, WorkerTable, port_of},
};
use crate::{
    limits,
    machine::log::LogFormat,
    net::tls::{TlsError, TlsFiles},
};

/// One line that says what is wrong with the configuration and where.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

impl From<TlsError> for ConfigError {
    fn from(error: TlsError) -> Self {
        Self(error.to_string())
    }
}

/// What the gateway runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address that clients use.
    pub listen: SocketAddr,
    /// Address of the admin listener: metrics, readiness, the fleet; 127.0.0.1:9090 by default.
    pub admin_listen: SocketAddr,
    /// Where a successor asks for the listening sockets.
    pub handover_socket: Option<PathBuf>,
    /// How workers are chosen.
    pub policy: Policy,
    /// How log lines look; `text` by default. Only a restart changes it.
    pub log_format: LogFormat,
    /// The workers; none means embedded ones.
    pub workers: Vec<WorkerConfig>,
    /// Models whose prompts are routed by their tokens, with the folder of each one's tokenizer.
    pub tokenizers: Vec<(String, PathBuf)>,
    /// Bytes of prompt text in one block.
    pub block_bytes: Option<NonZeroUsize>,
    /// Memory for the prefix index.
    pub index_bytes: usize,
    /// Secret of the hash chain.
    pub hash_key: HashKey,
    /// The file that it is from; else it is random.
    pub hash_key_file: Option<PathBuf>,
    /// Whether answers name the worker.
    pub expose_routing: bool,
    /// Where the index is written at the end and read at the start.
    pub snapshot_file: Option<PathBuf>,
    /// Whether workers are asked for the usage of streams whose clients do not ask.
    pub ask_usage: bool,
    /// Whether a request must name its model where workers serve different ones.
    pub require_model: bool,
    /// When requests wait in the gateway; `None`: never.
    pub room: Option<RoomRules>,
    /// How often workers that others send to as well are asked for their load; `None`: no worker is.
    pub load_scrape: Option<Duration>,
    /// How long workers that come up join gradually; `None`: they join at once.
    pub slow_start: Option<Duration>,
    /// Whether a session that a client names decides among equals.
    pub session_hints: bool,
    /// Whether workers are asked where their KV events are.
    pub finds_kv_events: bool,
    /// Prompt tokens that a worker fetches in a millisecond from its other tiers; `None`: these do not count.
    pub fetch_tokens_per_ms: Option<f64>,
    /// What is left out of hashes of text.
    pub ignored: Vec<IgnoreTable>,
    /// File for choices, and the share of them that go there.
    pub decision_log: Option<(PathBuf, f64)>,
    /// Bytes of the largest request body; a larger one is refused with 413.
    pub max_body_bytes: usize,
    /// Largest event of a stream.
    pub max_event_bytes: usize,
    /// Bytes of request bodies at once.
    pub max_body_memory_bytes: usize,
    /// Requests in flight at once.
    pub max_in_flight: usize,
    /// Client connections at once.
    pub max_connections: usize,
    /// Cores that serve clients, at most.
    pub max_cores: usize,
    /// Time for open requests after SIGTERM.
    pub drain_timeout: Duration,
    /// Time between the word that the gateway is going and its listener's end.
    pub drain_delay: Duration,
    /// Where workers that come and go are learned of.
    pub discovery: DiscoveryConfig,
    /// The other gateways in front of the same workers.
    pub peers: Option<PeersConfig>,
    /// What is wanted of each model's fleet.
    pub scale: ScaleConfig,
    /// Where traces go; `None`: nowhere.
    pub traces: Option<TracesConfig>,
    /// Whether and how streams outlive their worker.
    pub resume: ResumeConfig,
    /// Whether requests go to the worker that stores what they name.
    pub stored_state: StoredStateConfig,
    /// File of tenants, with the hashes of their keys; `None`: clients need no key.
    pub tenants_file: Option<PathBuf>,
    /// What holds for all tenants.
    pub tenant_rules: TenantRules,
    /// `Bearer …` that operators show, marked sensitive.
    pub admin_token: Option<HeaderValue>,
    /// Which pages in browsers may use the API; `None`: nothing is said of that.
    pub cors: Option<Cors>,
    /// Certificate and key with which the listener speaks TLS; `None`: it speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// How long the parts of a request may take.
    pub timeouts: Timeouts,
}

impl TryFrom<File> for Config {
    type Error = ConfigError;

    fn try_from(file: File) -> Result<Self, ConfigError> {
        let listen = file.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8080)));
        let policy = file.policy.as_deref().map(str::parse::<Policy>).transpose();
        let workers = workers(&file.worker)?;
        let tokenizers = tokenizers(file.model)?;
        let hash_key = match &file.routing.hash_key_file {
            Some(path) => HashKey::from_bytes(
                &fs::read(path)
                    .map_err(|error| ConfigError(format!("hash_key_file {}: {error}", path.display())))?,
            ),
            None => HashKey::new(fastrand::u64(..)),
        };
        let share = file.routing.decision_log_share.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&share) {
            return Err(ConfigError("routing.decision_log_share must be between 0 and 1".to_owned()));
        }
        let (room, fetch_tokens_per_ms) =
            (room_rules(&file.routing, &file.scale)?, fetch_rate(&file.routing)?);
        let rules = TenantRules { isolate: file.auth.isolate.unwrap_or(true), steering: file.auth.steering };
        let limits = &file.limits;
        let config = Self {
            listen,
            admin_listen: file.admin_listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 9090))),
            handover_socket: file.handover_socket,
            policy: policy
                .map_err(|error| ConfigError(format!("policy: {error}")))?
                .unwrap_or(Policy::Prefix),
            log_format: file.log_format.unwrap_or_default(),
            workers,
            tokenizers,
            block_bytes: file.routing.block_bytes,
            index_bytes: file.routing.index_bytes.unwrap_or(limits::INDEX_BYTES),
            hash_key,
            hash_key_file: file.routing.hash_key_file,
            snapshot_file: file.routing.snapshot_file,
            ask_usage: file.routing.ask_usage.unwrap_or(true),
            require_model: file.routing.require_model.unwrap_or(true),
            expose_routing: file.routing.expose,
            room,
            load_scrape: millis_or_never(file.routing.load_scrape_ms.unwrap_or(1_000)),
            slow_start: millis_or_never(file.routing.slow_start_ms.unwrap_or(30_000)),
            session_hints: file.routing.session_hints.unwrap_or(true),
            finds_kv_events: file.routing.find_kv_events.unwrap_or(true),
            fetch_tokens_per_ms,
            ignored: file.routing.ignore,
            decision_log: file.routing.decision_log.map(|path| (path, share)),
            max_body_bytes: limits.max_body_bytes.unwrap_or(limits::MAX_BODY_BYTES),
            max_event_bytes: limits.max_event_bytes.unwrap_or(limits::MAX_EVENT_BYTES),
            max_body_memory_bytes: limits.max_body_memory_bytes.unwrap_or(limits::MAX_BODY_MEMORY_BYTES),
            max_in_flight: limits.max_in_flight.unwrap_or(limits::MAX_IN_FLIGHT),
            max_connections: limits.max_connections.unwrap_or(limits::MAX_CONNECTIONS),
            max_cores: limits.max_cores.unwrap_or(usize::MAX),
            drain_timeout: limits.drain_seconds.map_or(limits::DRAIN_TIMEOUT, Duration::from_secs),
            drain_delay: limits.drain_delay_seconds.map_or(Duration::ZERO, Duration::from_secs),
            discovery: DiscoveryConfig::try_from(&file.discovery)?,
            peers: file.peers.validated()?,
            scale: ScaleConfig::try_from(&file.scale)?,
            traces: file.traces.validated()?,
            resume: ResumeConfig::from(&file.resume),
            stored_state: StoredStateConfig::from(&file.stored_state),
            tenants_file: file.auth.tenants_file,
            tenant_rules: rules,
            admin_token: file.auth.admin_token_file.as_ref().map(worker::read_key).transpose()?,
            cors: file.cors.validated()?,
            tls: file.tls,
            timeouts: Timeouts::try_from(limits)?,
        };
        config.allows_something()?;
        Ok(config)
    }
}

impl Config {
    /// That no limit is 0.
    fn allows_something(&self) -> Result<(), ConfigError> {
        let limits = [
            ("max_body_bytes", self.max_body_bytes),
            ("max_event_bytes", self.max_event_bytes),
            ("max_body_memory_bytes", self.max_body_memory_bytes),
            ("max_in_flight", self.max_in_flight),
            ("max_connections", self.max_connections),
            ("max_cores", self.max_cores),
        ];
        match limits.iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(ConfigError(format!("limits.{name} must be above 0"))),
            None => Ok(()),
        }
    }
}

/// The workers of a list, each once.
pub fn workers(entries: &[WorkerEntry]) -> Result<Vec<WorkerConfig>, ConfigError> {
    let workers = entries.iter().map(|entry| match entry {
        WorkerEntry::Url(url) => WorkerConfig::all_of(&url.parse()?),
        WorkerEntry::Table(table) => WorkerConfig::all_of(table),
    });
    let workers = workers.collect::<Result<Vec<_>, _>>()?.concat();
    match first_duplicate(workers.iter().map(WorkerConfig::name)) {
        Some(twice) => Err(ConfigError(format!("worker {twice} is listed twice"))),
        None => Ok(workers),
    }
}

fn tokenizers(models: Vec<ModelTable>) -> Result<Vec<(String, PathBuf)>, ConfigError> {
    let tokenizers: Vec<_> = models.into_iter().map(|model| (model.name, model.tokenizer)).collect();
    match first_duplicate(tokenizers.iter().map(|(name, _)| name.clone())) {
        Some(twice) => Err(ConfigError(format!("model {twice} has two tokenizers"))),
        None => Ok(tokenizers),
    }
}

fn room_rules(file: &RoutingFile, scale: &ScaleFile) -> Result<Option<RoomRules>, ConfigError> {
    let default = RoomRules::default();
    let horizon_ms = file.hold_horizon_ms.unwrap_or(default.horizon_ms);
    if !horizon_ms.is_finite() || horizon_ms < 0.0 {
        return Err(ConfigError("routing.hold_horizon_ms must be 0 or more".to_owned()));
    }
    let max_waiting = file.hold_max.unwrap_or(default.max_waiting);
    if file.shed_after_ms == Some(0) {
        return Err(ConfigError("routing.shed_after_ms must be above 0".to_owned()));
    }
    let shed_after = file.shed_after_ms.map(Duration::from_millis);
    let scaled_for = scale.ttft_slo_seconds.and_then(|slo_s| Duration::try_from_secs_f64(slo_s).ok());
    let objective = file.ttft_objective_ms.map_or(scaled_for, millis_or_never);
    let rules = RoomRules { horizon_ms, max_waiting, objective, shed_after, ..default };
    Ok(file.hold.unwrap_or(true).then_some(rules))
}

fn fetch_rate(file: &RoutingFile) -> Result<Option<f64>, ConfigError> {
    let per_second = file.fetch_tokens_per_second.unwrap_or(limits::FETCH_TOKENS_PER_SECOND);
    if !per_second.is_finite() || per_second < 0.0 {
        return Err(ConfigError("routing.fetch_tokens_per_second must be 0 or more".to_owned()));
    }
    Ok((per_second > 0.0).then_some(per_second / 1e3))
}

fn millis_or_never(ms: u64) -> Option<Duration> {
    (ms > 0).then(|| Duration::from_millis(ms))
}

fn first_duplicate(names: impl Iterator<Item = String>) -> Option<String> {
    let mut seen = std::collections::HashSet::new();
    names.into_iter().find(|name| !seen.insert(name.clone()))
}

#[cfg(test)]
mod tests;
