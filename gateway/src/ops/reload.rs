//! The configuration read again while the gateway runs, on SIGHUP or `POST /reload`: taken over whole or not
//! at all. All that can fail is done before anything changes. Requests keep what they began with, streams are
//! not touched; what only a new process can change is named. Certificates and tenants' files are followed
//! without it (`tls.rs`, `tenants.rs`).

mod changes;

use std::{path::Path, sync::Arc};

use parking_lot::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};

pub use self::changes::Changes;
use crate::{
    access::{
        admission::Admission,
        body_memory::BodyMemory,
        tenants::{HeldBy, SharedLimits, Tenants},
    },
    clock::Clock,
    config::{Config, ConfigError, DiscoveryConfig, WorkerConfig},
    edge::{
        live::{Live, Serving},
        server::Intake,
    },
    ledger::Ledger,
    metrics::Metrics,
    net::tls::{self, Prepared, ServerTls},
    prompt::{ignored::Ignored, token_keyer::TokenKeyer},
    proxy::{dispatch::AnswerOptions, message_threads::Threaded, model_names::ModelNames},
    routing::{LegRules, Router},
    translation::AsChats,
    upstream::Upstream,
    watch::{
        discovery,
        members::{Listed, Members, Source},
        peers::Peers,
    },
};

/// Where the configuration comes from: the file, with environment and flags over it.
pub type ConfigReader = Box<dyn Fn() -> Result<Config, ConfigError> + Send + Sync>;

/// The parts of a gateway that a reload reaches.
#[derive(Debug)]
pub struct Parts {
    /// What requests are served by.
    pub live: Live,
    /// The fleet: its workers join and drain as the new configuration lists them.
    pub members: Arc<Members>,
    /// Policy, and the rules of the waiting room.
    pub router: Arc<Router>,
    /// Its time to connect.
    pub upstream: Upstream,
    /// Requests in flight, bounded by the new `limits.max_in_flight`.
    pub admission: Admission,
    /// How many bytes of their bodies.
    pub body_memory: BodyMemory,
    /// Clients' connections: how many there may be, and the times for their heads and for the drain.
    pub intake: Arc<Intake>,
    /// Certificates of the clients' listener, replaced where `tls` changes; `None`: it speaks no TLS.
    pub tls: Option<Arc<ServerTls>>,
    /// Where reloads are counted, and where it is shown whether the last one was taken over.
    pub metrics: Arc<Metrics>,
    /// By what tenants' limits hold over several gateways, if they do.
    pub shared: Option<Arc<SharedLimits>>,
    /// Where it is kept who has used how much, if it is.
    pub ledger: Option<Arc<Ledger>>,
    /// Time for the limits of tenants, where a reload is the first to name a file of them.
    pub clock: Clock,
    /// The other gateways that this one listens to, followed anew where `peers` changes.
    pub peers: Arc<Peers>,
    /// The task that looks for workers.
    pub discovery: Mutex<JoinHandle<()>>,
}

/// Reads the configuration again and takes it over.
pub struct Reloader {
    reader: ConfigReader,
    parts: Parts,
    /// What was in force at the last reload, or the start.
    current: tokio::sync::Mutex<Config>,
    /// Workers in this process, which serve where none are configured.
    embedded: Vec<WorkerConfig>,
}

/// All that a new configuration needs and that could have failed.
struct Plan {
    config: Config,
    changes: Changes,
    serving: Serving,
    tls: Option<Prepared>,
}

impl std::fmt::Debug for Reloader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reloader").field("parts", &self.parts).finish_non_exhaustive()
    }
}

/// Starts to look for workers that come and go.
pub fn look_for_workers(
    config: &DiscoveryConfig,
    members: &Arc<Members>,
    metrics: &Arc<Metrics>,
) -> JoinHandle<()> {
    tokio::spawn(discovery::watch(config.clone(), Arc::clone(members), Arc::clone(metrics)))
}

impl Reloader {
    /// For a gateway that runs by `current`.
    pub fn new(
        reader: ConfigReader,
        current: Config,
        embedded: Vec<WorkerConfig>,
        parts: Parts,
    ) -> Arc<Self> {
        Arc::new(Self { reader, parts, current: tokio::sync::Mutex::new(current), embedded })
    }

    /// Reads the configuration again and takes it over; says what is other now. An error changes nothing.
    pub async fn reload(self: &Arc<Self>) -> Result<Changes, ConfigError> {
        // One after the other: SIGHUP and an operator's command may meet.
        let mut current = self.current.lock().await;
        let (this, old) = (Arc::clone(self), current.clone());
        let planned = spawn_blocking(move || this.plan(&old)).await;
        let planned =
            planned.unwrap_or_else(|error| Err(ConfigError(format!("it could not be read: {error}"))));
        let outcome = if planned.is_ok() { "applied" } else { "refused" };
        self.parts.metrics.lifecycle.reloads.with_label_values(&[outcome]).inc();
        self.parts.metrics.lifecycle.last_reload_ok.set(i64::from(planned.is_ok()));
        let plan = planned.inspect_err(|error| {
            tracing::error!(%error, "the configuration was not taken over; the old one stays in force");
        })?;
        let changes = plan.changes.clone();
        let old = std::mem::replace(&mut *current, plan.config.clone());
        self.apply(&old, plan);
        tracing::info!(%changes, "the configuration was read again");
        Ok(changes)
    }

    /// What is in force.
    pub async fn current(&self) -> Config {
        self.current.lock().await.clone()
    }

    /// Stops what only reloads know of.
    pub fn stop(&self) {
        self.parts.discovery.lock().abort();
        self.parts.peers.stop();
    }

    fn plan(&self, old: &Config) -> Result<Plan, ConfigError> {
        let mut config = (self.reader)()?;
        if config.workers.is_empty() && !config.discovery.is_dynamic() {
            if self.embedded.is_empty() {
                let why = "no worker is configured, and embedded ones start only with the process";
                return Err(ConfigError(why.to_owned()));
            }
            config.workers.clone_from(&self.embedded);
            config.routing.block_bytes = config.routing.block_bytes.or(old.routing.block_bytes);
        }
        let changes = Changes::between(old, &config);
        changes.keep_what_needs_a_restart(old, &mut config);
        let now = self.parts.live.now();
        let mut dispatch = (*now.dispatch).clone();
        if config.tokenizers != old.tokenizers {
            let of = |(name, dir): &(String, std::path::PathBuf)| (name.clone(), dir.clone());
            let all: Vec<_> = config.tokenizers.iter().map(of).collect();
            let all = all.iter().map(|(name, dir)| (name.as_str(), Path::new(dir)));
            dispatch.requests.tokens = Arc::new(TokenKeyer::load(
                all,
                self.parts.body_memory.prompts(),
                Arc::clone(&self.parts.metrics),
            )?);
        }
        let requests = &mut dispatch.requests;
        requests.bodies.max_bytes = config.limits.max_body_bytes;
        requests.bodies.names = Arc::new(ModelNames::new(&config.models));
        requests.bodies.ignored = Arc::new(Ignored::new(&config.routing.ignored)?);
        requests.require_model = config.routing.require_model;
        requests.session_hints = config.routing.session_hints;
        dispatch.answers = AnswerOptions::of(&config);
        dispatch.room_wait = config.routing.room_wait();
        dispatch.timeouts = config.timeouts;
        dispatch.requests.as_chats = AsChats::of(&config.models);
        dispatch.requests.threaded = Threaded::of(&config.models);
        let tenants = self.tenants(now.tenants.as_ref(), old, &config)?;
        let tls = config.tls.as_ref().filter(|_| config.tls != old.tls).map(tls::prepare).transpose()?;
        let serving = Serving {
            dispatch: Arc::new(dispatch),
            tenants,
            admin_token: config.admin_token.clone(),
            cors: config.cors.clone().map(Arc::new),
            admin_allow: config.discovery.admin_allow.clone(),
        };
        Ok(Plan { config, changes, serving, tls })
    }

    fn tenants(
        &self,
        known: Option<&Arc<Tenants>>,
        old: &Config,
        new: &Config,
    ) -> Result<Option<Arc<Tenants>>, ConfigError> {
        let Some(path) = new.tenants_file.clone() else { return Ok(None) };
        let rules = new.tenant_rules.clone();
        let unchanged = old.tenants_file == new.tenants_file && old.tenant_rules == new.tenant_rules;
        match known {
            // Its file is followed anyway.
            Some(same) if unchanged => Ok(Some(Arc::clone(same))),
            Some(other) => other.moved(path, rules).map(Some),
            None => {
                let (clock, counted) = (self.parts.clock, self.parts.metrics.tenants.clone());
                // Whose tokens are believed is said at the start, with a file of tenants.
                let (shared, ledger) = (self.parts.shared.clone(), self.parts.ledger.clone());
                let held_by = HeldBy { shared, oidc: None, ledger };
                Tenants::load(path, rules, new.routing.hash_key, clock, counted, held_by).map(Some)
            }
        }
    }

    /// Puts the plan into force, part by part. No step can fail, so that none is left half done.
    fn apply(&self, old: &Config, plan: Plan) {
        let (parts, config) = (&self.parts, &plan.config);
        parts.live.replace(plan.serving);
        if let (Some(tls), Some(prepared)) = (&parts.tls, plan.tls) {
            tls.change(prepared);
        }
        parts.admission.set_limit(config.limits.max_in_flight);
        parts.body_memory.set_limit(config.limits.max_body_memory_bytes);
        parts.intake.set(
            config.limits.max_connections,
            config.timeouts.header_read,
            config.limits.drain_timeout,
        );
        parts.upstream.set_connect_timeout(config.timeouts.connect);
        parts.router.set_rules(config.policy, config.routing.room);
        parts.router.set_leg_rules(LegRules::of(&config.routing));
        let listed: Vec<Listed> = config.workers.iter().cloned().map(Listed::from).collect();
        parts.members.set(Source::Static, &listed);
        if config.discovery != old.discovery {
            let mut looking = parts.discovery.lock();
            looking.abort();
            for source in gone(&old.discovery, &config.discovery) {
                parts.members.set(source, &[]);
            }
            *looking = look_for_workers(&config.discovery, &parts.members, &parts.metrics);
        }
        if config.peers != old.peers {
            parts.peers.follow(config.peers.as_ref());
        }
        // Who waits may go elsewhere now.
        parts.router.fleet_changed();
    }
}

/// Sources that no task looks at any more: their workers drain.
fn gone(old: &DiscoveryConfig, new: &DiscoveryConfig) -> Vec<Source> {
    let file = (old.file.is_some() && new.file.is_none()).then_some(Source::File);
    let dns = (new.dns.len()..old.dns.len()).map(Source::Dns);
    let kubernetes = (new.kubernetes.len()..old.kubernetes.len()).map(Source::Kubernetes);
    file.into_iter().chain(dns).chain(kubernetes).collect()
}
