//! Makes a gateway's parts out of its configuration and joins them; sockets and the order of their beginning
//! and end are `run.rs`' business.

use std::{io, num::NonZeroUsize, path::PathBuf, sync::Arc};

use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::{
    access::{
        admission::Admission,
        body_memory::BodyMemory,
        oidc::Oidc,
        tenants::{HeldBy, SharedLimits, Tenants},
    },
    clock::{self, Clock},
    config::{Config, ConfigError},
    edge::{
        live::{Live, Serving},
        server::Intake,
    },
    fleet::{Fleet, ejection::Ejections},
    ledger::Ledger,
    limits,
    machine::descriptors::Shortages,
    metrics::Metrics,
    net::{Connector, tls::ServerTls},
    ops::{
        history::History,
        reload::{Parts, look_for_workers},
    },
    prompt::{drift::DriftDoctor, ignored::Ignored, request::KeyerConfig, token_keyer::TokenKeyer},
    proxy::{
        dispatch::{AnswerOptions, Dispatch},
        message_threads::Threaded,
        model_names::ModelNames,
        reading::BodyReader,
        request_reader::RequestReader,
        resume::Resumer,
        retry_limits::RetryLimits,
    },
    routing::{LegRules, Router, RouterOptions, decision_log::DecisionLog, snapshot::Memory},
    scale::autoscale::Autoscale,
    stored_state::StoredState,
    telemetry::trace::Traces,
    translation::AsChats,
    upstream::Upstream,
    watch::{
        members::{Members, Source},
        peers::Peers,
    },
};

/// The parts, before any client is let in.
#[derive(Debug)]
pub struct Assembly {
    /// Those that a reload reaches.
    pub parts: Parts,
    /// How many workers each model needs.
    pub scale: Arc<Autoscale>,
    /// The last hour, for operators.
    pub history: Arc<History>,
    /// Reads and writes the snapshot of the index, where a file for it is configured.
    pub memory: Memory,
    /// What runs beside them.
    pub background: Vec<JoinHandle<()>>,
    /// Where spans go, if they do.
    pub traces: Option<Traces>,
    /// Where it is kept who has used how much, if it is.
    pub ledger: Option<Arc<Ledger>>,
}

/// Makes all parts; workers are probed from now on.
pub fn assemble(config: &Config) -> io::Result<Assembly> {
    let clock = Clock::start();
    let metrics = Arc::new(Metrics::new().map_err(io::Error::other)?);
    let ejections = Ejections::new(clock, Some(metrics.ejections.clone()));
    let fleet = Arc::new(Fleet::new(&config.workers, clock.now(), &ejections));
    let shortages = Shortages::new(metrics.lifecycle.shortages.clone());
    let upstream = Upstream::new(Connector::new(config.timeouts.connect), shortages);
    let keyer = KeyerConfig { key: config.routing.hash_key, block_bytes: block_bytes(config) };
    let router = router(config, &fleet, &metrics, clock, keyer)?;
    let memory = Memory { file: config.routing.snapshot_file.clone(), router: Arc::clone(&router), keyer };
    memory.read(config.routing.index_bytes);
    let members = members(config, &router, &upstream, &metrics);
    let discovery = Mutex::new(look_for_workers(&config.discovery, &members, &metrics));
    let scale = Autoscale::new(config.scale.clone(), Arc::clone(&metrics));
    let traces = traces(config, &upstream, &metrics);
    let history = Arc::new(History::default());
    let mut background = vec![tokio::spawn(Arc::clone(&scale).watch(Arc::clone(&router)))];

    let admission =
        Admission::new(config.limits.max_in_flight, metrics.arriving.clone(), metrics.in_flight.clone());
    let body_memory = BodyMemory::new(config.limits.max_body_memory_bytes, metrics.body_memory.clone());
    let intake =
        Intake::new(config.limits.max_connections, config.timeouts.header_read, config.limits.drain_timeout);
    let shared = shared_limits(config, clock, &metrics, &mut background);
    let tls = tls(config, &metrics, &mut background).map_err(io::Error::other)?;
    let ledger = ledger(config, &metrics, &mut background);
    let oidc = oidc(config, clock, (&metrics, &upstream), &mut background);
    let held_by = HeldBy { shared: shared.clone(), oidc, ledger: ledger.clone() };
    let tenants = tenants(config, clock, &metrics, &held_by).map_err(io::Error::other)?;
    let live = Live::new(Serving {
        dispatch: Arc::new(dispatch(config, &admission, &body_memory, &router, &scale, &upstream, keyer)?),
        tenants,
        admin_token: config.admin_token.clone(),
        cors: config.cors.clone().map(Arc::new),
        admin_allow: config.discovery.admin_allow.clone(),
    });
    background.push(tokio::spawn(follow_tenants(live.clone())));
    background.push(tokio::spawn(Arc::clone(&history).keep(Arc::clone(&router), live.clone())));
    let peers = Arc::new(Peers::new(&router, &upstream, live.admin_token()));
    let parts = Parts {
        live,
        members,
        router,
        upstream,
        admission,
        body_memory,
        intake,
        tls,
        metrics,
        shared,
        ledger: ledger.clone(),
        clock,
        peers,
        discovery,
    };
    Ok(Assembly { parts, scale, history, memory, background, traces, ledger })
}

/// Where it is kept who has used how much, if it is.
fn ledger(config: &Config, metrics: &Metrics, background: &mut Vec<JoinHandle<()>>) -> Option<Arc<Ledger>> {
    let ledger = Ledger::new(config.usage.clone()?, metrics.usage.clone());
    background.push(tokio::spawn(Arc::clone(&ledger).keep()));
    Some(ledger)
}

fn dispatch(
    config: &Config,
    admission: &Admission,
    body_memory: &BodyMemory,
    router: &Arc<Router>,
    scale: &Arc<Autoscale>,
    upstream: &Upstream,
    keyer: KeyerConfig,
) -> io::Result<Dispatch> {
    let metrics = router.metrics();
    let tokenizers = config.tokenizers.iter().map(|(name, dir)| (name.as_str(), dir.as_path()));
    let tokens =
        TokenKeyer::load(tokenizers, body_memory.prompts(), Arc::clone(metrics)).map_err(io::Error::other)?;
    let retries = RetryLimits::new(keyer.key, router.now());
    let bodies = BodyReader {
        keyer,
        ignored: Arc::new(Ignored::new(&config.routing.ignored).map_err(io::Error::other)?),
        memory: body_memory.clone(),
        max_bytes: config.limits.max_body_bytes,
        names: Arc::new(ModelNames::new(&config.models)),
    };
    let requests = RequestReader {
        bodies,
        tokens: Arc::new(tokens),
        session_hints: config.routing.session_hints,
        require_model: config.routing.require_model,
        as_chats: AsChats::of(&config.models),
        threaded: Threaded::of(&config.models),
        router: Arc::clone(router),
    };
    Ok(Dispatch {
        admission: admission.clone(),
        requests,
        resumer: resumer(config, router, upstream, retries.clone()),
        router: Arc::clone(router),
        scale: Arc::clone(scale),
        upstream: upstream.clone(),
        metrics: Arc::clone(metrics),
        doctor: Arc::new(DriftDoctor::new(config.routing.hash_key, metrics)),
        answers: AnswerOptions::of(config),
        room_wait: config.routing.room_wait(),
        timeouts: config.timeouts,
        retries,
    })
}

fn resumer(config: &Config, router: &Arc<Router>, upstream: &Upstream, retries: RetryLimits) -> Arc<Resumer> {
    let metrics = Arc::clone(router.metrics());
    let (router, upstream) = (Arc::clone(router), upstream.clone());
    Arc::new(Resumer::new(router, upstream, retries, metrics, config.resume))
}

/// Where spans go, if they do.
fn traces(config: &Config, upstream: &Upstream, metrics: &Metrics) -> Option<Traces> {
    let traces = config.traces.as_ref()?;
    let spans = metrics.traces.spans.clone();
    tracing::info!(collector = %traces.endpoint, "requests are traced");
    Some(Traces::start(traces.clone(), upstream.clone(), spans))
}

fn router(
    config: &Config,
    fleet: &Arc<Fleet>,
    metrics: &Arc<Metrics>,
    clock: Clock,
    keyer: KeyerConfig,
) -> io::Result<Arc<Router>> {
    let log = config.routing.decision_log.as_ref();
    let log = log.map(|(path, share)| DecisionLog::open(path, *share, metrics.caches.decision_log.clone()));
    let stored =
        StoredState::new(config.stored_state, config.routing.hash_key, clock, metrics.stored_state.clone());
    let (fleet, metrics) = (Arc::clone(fleet), Arc::clone(metrics));
    let router = Router::new(fleet, metrics, clock, config.policy, keyer, config.routing.index_bytes);
    // Who has others beside it keeps an index that goes by their words too.
    let router = match &config.peers {
        Some(_) => router.with_told_placements(config.routing.index_bytes),
        None => router,
    };
    let router = router.with_log(log.transpose()?).with_room(config.routing.room).with_stored_state(stored);
    router.set_leg_rules(LegRules::of(&config.routing));
    Ok(Arc::new(router.with_options(RouterOptions {
        load_scrape: config.routing.load_scrape,
        slow_start: config.routing.slow_start,
        fetch_tokens_per_ms: config.routing.fetch_tokens_per_ms,
    })))
}

/// Takes the configured workers into the fleet.
fn members(
    config: &Config,
    router: &Arc<Router>,
    upstream: &Upstream,
    metrics: &Arc<Metrics>,
) -> Arc<Members> {
    // Without its model's tokenizer what a worker says matches only prompts of ids.
    if !config.tokenizers.is_empty() {
        router.tokens_come();
    }
    let (router_of, metrics) = (Arc::clone(router), Arc::clone(metrics));
    let members = Members::new(router_of, upstream.clone(), metrics, config.routing.finds_kv_events);
    for worker in router.fleet().all().iter() {
        if worker.kv_source().is_some() && config.tokenizers.is_empty() {
            tracing::warn!(worker = %worker.name, "its KV events match only prompts of token ids without the model's tokenizer (--tokenizer)");
        }
        members.adopt(Arc::clone(worker), Source::Static);
    }
    members
}

/// TLS before clients, which follows its files.
fn tls(
    config: &Config,
    metrics: &Metrics,
    background: &mut Vec<JoinHandle<()>>,
) -> Result<Option<Arc<ServerTls>>, ConfigError> {
    let certificates = &metrics.lifecycle.certificates;
    let tls = config.tls.as_ref().map(|files| ServerTls::load(files, certificates.clone())).transpose()?;
    if let Some(tls) = &tls {
        background.push(tokio::spawn(Arc::clone(tls).follow_files()));
    }
    Ok(tls)
}

/// By what tenants' limits hold over several gateways, where a store is configured; it is asked from now on.
fn shared_limits(
    config: &Config,
    clock: Clock,
    metrics: &Metrics,
    background: &mut Vec<JoinHandle<()>>,
) -> Option<Arc<SharedLimits>> {
    let store = config.store.clone()?;
    let shared = SharedLimits::new(store, clock, metrics.store.clone(), metrics.peers.clone());
    background.push(tokio::spawn(Arc::clone(&shared).keep()));
    Some(shared)
}

/// Who judges tokens in place of keys, where an issuer is configured; its keys are fetched from now on.
fn oidc(
    config: &Config,
    clock: Clock,
    (metrics, upstream): (&Metrics, &Upstream),
    background: &mut Vec<JoinHandle<()>>,
) -> Option<Arc<Oidc>> {
    let oidc = Oidc::new(config.oidc.clone()?, clock, metrics.oidc.clone());
    background.push(tokio::spawn(Arc::clone(&oidc).keep(upstream.clone())));
    Some(oidc)
}

fn tenants(
    config: &Config,
    clock: Clock,
    metrics: &Metrics,
    held_by: &HeldBy,
) -> Result<Option<Arc<Tenants>>, ConfigError> {
    let load = |path: PathBuf| {
        let (rules, salt_key) = (config.tenant_rules.clone(), config.routing.hash_key);
        Tenants::load(path, rules, salt_key, clock, metrics.tenants.clone(), held_by.clone())
    };
    config.tenants_file.clone().map(load).transpose()
}

/// Looks at the file of whichever tenants are in force, for ever.
async fn follow_tenants(live: Live) {
    loop {
        clock::sleep(limits::TENANTS_RELOAD_INTERVAL).await;
        let tenants = live.now().tenants.clone();
        if let Some(tenants) = tenants {
            tenants.look();
            tenants.keep_budgets().await;
        }
    }
}

fn block_bytes(config: &Config) -> NonZeroUsize {
    config.routing.block_bytes.unwrap_or(NonZeroUsize::new(limits::BLOCK_BYTES).unwrap_or(NonZeroUsize::MIN))
}
