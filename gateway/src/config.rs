//! The configuration that the gateway runs with, validated. What the file may say is in `config/file.rs`,
//! what may be said of a worker in `config/worker.rs`; where a value comes from (flag, environment, file,
//! default) is decided in `args.rs`.

mod address;
mod cors;
mod discovery;
mod file;
mod hint;
mod kubernetes;
mod kv_transfer;
mod limits;
mod models;
mod oidc;
mod peers;
mod price;
mod resume;
mod routing;
mod scale;
mod store;
mod stored_state;
mod tenants;
mod timeouts;
mod traces;
mod usage;
mod worker;
mod worker_url;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use http::HeaderValue;
use keyway_core::pick::Policy;

pub use self::{
    address::listen_address,
    cors::{Cors, CorsFile, OneOrMany, Origins},
    discovery::{DiscoveryConfig, DiscoveryFile, DnsName, HostRule},
    file::{AuthFile, File, IgnoreTable, LimitsFile, RoutingFile},
    kubernetes::{KubernetesFleet, KubernetesTable, PortRef},
    kv_transfer::KvTransfer,
    limits::LimitsConfig,
    models::{ModelRules, ModelRulesByName, ModelTable, Translate},
    oidc::{KeysAt, OidcConfig, OidcFile, trusted},
    peers::{PeersConfig, PeersFile},
    price::{PriceTable, Prices},
    resume::{ResumeConfig, ResumeFile},
    routing::{RoutingConfig, SplitFile},
    scale::{ModelScale, ScaleConfig, ScaleFile},
    store::{Secret, StoreConfig, StoreFile},
    stored_state::{StoredStateConfig, StoredStateFile},
    tenants::{BudgetUnits, TenantRules},
    timeouts::Timeouts,
    traces::{GenAi, TraceRules, TracesConfig, TracesFile},
    usage::{UsageConfig, UsageFile},
    worker::{KvSource, RankError, Role, WorkerConfig, WorkerEntry, WorkerTable, port_of},
};
use crate::{
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
    /// Which requests go to other models than they name.
    pub models: ModelRulesByName,
    /// How prompts are identified, the index sized and requests made to wait.
    pub routing: RoutingConfig,
    /// What clients may take, and how long they have at the end.
    pub limits: LimitsConfig,
    /// Where workers that come and go are learned of.
    pub discovery: DiscoveryConfig,
    /// The other gateways in front of the same workers.
    pub peers: Option<PeersConfig>,
    /// What is wanted of each model's fleet.
    pub scale: ScaleConfig,
    /// Where traces go; `None`: nowhere.
    pub traces: Option<TracesConfig>,
    /// Where it is kept who has used how much; `None`: nowhere.
    pub usage: Option<UsageConfig>,
    /// Whether and how streams outlive their worker.
    pub resume: ResumeConfig,
    /// Whether requests go to the worker that stores what they name.
    pub stored_state: StoredStateConfig,
    /// By what tenants' limits are kept together with other gateways; `None`: this one keeps them by itself.
    pub store: Option<StoreConfig>,
    /// Whose signed tokens are believed in place of keys; `None`: nobody's.
    pub oidc: Option<OidcConfig>,
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
        let discovery = DiscoveryConfig::try_from(&file.discovery)?;
        if !discovery.finds_workers()
            && !workers.is_empty()
            && workers.iter().all(WorkerConfig::is_for_prefill)
        {
            return Err(ConfigError(
                "no worker answers: each has the role prefill; give one the role decode".to_owned(),
            ));
        }
        let (tokenizers, models) = models::validated(file.model)?;
        let peers = file.peers.validated()?;
        let admin_token = file.auth.admin_token_file.as_ref().map(worker::read_key).transpose()?;
        let mut routing = RoutingConfig::of(file.routing, &file.scale)?;
        if routing.hash_key_file.is_none()
            && let Some(key) = peers.as_ref().and_then(|peers| peers.hash_key(admin_token.as_ref()))
        {
            routing.hash_key = key;
        }
        let scale = ScaleConfig::try_from(&file.scale)?;
        let scale = ScaleConfig { prefill_from_tokens: routing.prefill_from_tokens, ..scale };
        let oidc = file.auth.oidc.as_ref().map(|oidc| oidc.validated(file.auth.tenants_file.is_some()));
        let oidc = oidc.transpose()?;
        let usage = file.usage.validated()?;
        let rules = TenantRules {
            isolate: file.auth.isolate.unwrap_or(true),
            steering: file.auth.steering,
            budgets: BudgetUnits::of(usage.as_ref()),
        };
        Ok(Self {
            listen,
            admin_listen: file.admin_listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 9090))),
            handover_socket: file.handover_socket,
            policy: policy
                .map_err(|error| ConfigError(format!("policy: {error}")))?
                .unwrap_or(Policy::Prefix),
            log_format: file.log_format.unwrap_or_default(),
            workers,
            tokenizers,
            models,
            routing,
            limits: LimitsConfig::try_from(&file.limits)?,
            discovery,
            peers,
            scale,
            traces: file.traces.validated()?,
            usage,
            resume: ResumeConfig::from(&file.resume),
            stored_state: StoredStateConfig::from(&file.stored_state),
            store: file.store.validated()?,
            oidc,
            tenants_file: file.auth.tenants_file,
            tenant_rules: rules,
            admin_token,
            cors: file.cors.validated()?,
            tls: file.tls,
            timeouts: Timeouts::try_from(&file.limits)?,
        })
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

fn millis_or_never(ms: u64) -> Option<Duration> {
    (ms > 0).then(|| Duration::from_millis(ms))
}

fn first_duplicate(names: impl Iterator<Item = String>) -> Option<String> {
    let mut seen = std::collections::HashSet::new();
    names.into_iter().find(|name| !seen.insert(name.clone()))
}

#[cfg(test)]
mod tests;
