//! Puts the parts together: binds both listeners, starts the workers it was given or its own, probes, serves, drains.

use std::{future::Future, io, net::SocketAddr, num::NonZeroUsize, path::PathBuf, sync::Arc, time::Duration};

use keyway_core::RetryBudget;
use parking_lot::Mutex;
use tokio::{sync::watch, task::JoinHandle};

use crate::{
    admin::{self, Admin},
    admin_guard,
    admission::Admission,
    autoscale::Autoscale,
    clock::Clock,
    config::{Config, ConfigError, WorkerConfig},
    decision_log::DecisionLog,
    discovery,
    dispatch::Dispatch,
    ejection::Ejections,
    fleet::Fleet,
    limits,
    members::{Members, Source},
    metrics::Metrics,
    net::{self, Connector},
    probe,
    request::KeyerConfig,
    routing::Router,
    server::{self, Server},
    stack,
    tenants::Tenants,
    tls::ServerTls,
    token_keyer::TokenKeyer,
    upstream::Upstream,
};

/// A gateway that serves. Dropping it does not stop it; [`Gateway::shutdown`] does.
#[derive(Debug)]
pub struct Gateway {
    /// Where clients connect.
    pub addr: SocketAddr,
    /// Where operators connect.
    pub admin_addr: SocketAddr,
    /// `http` or `https`, for clients.
    pub scheme: &'static str,
    router: Arc<Router>,
    members: Arc<Members>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<bool>,
    background: Vec<JoinHandle<()>>,
}

/// Binds and starts. Without `config.workers` and a discovery that is dynamic it can only refuse requests.
pub async fn start(config: &Config) -> io::Result<Gateway> {
    let listener = net::listen(config.listen).await?;
    let admin_listener = net::listen(config.admin_listen).await?;
    let (addr, admin_addr) = (listener.local_addr()?, admin_listener.local_addr()?);

    let clock = Clock::start();
    let metrics = Arc::new(Metrics::new().map_err(io::Error::other)?);
    let ejections = Ejections::new(clock, Some(metrics.ejections.clone()));
    let fleet = Arc::new(Fleet::new(&config.workers, clock.now(), &ejections));
    let upstream = Upstream::new(Connector::new(config.timeouts.connect));
    let keyer = KeyerConfig { key: config.hash_key, block_bytes: block_bytes(config) };
    let tokenizers = config.tokenizers.iter().map(|(name, dir)| (name.as_str(), dir.as_path()));
    let tokens = TokenKeyer::load(tokenizers, Arc::clone(&metrics)).map_err(io::Error::other)?;
    let tokens = Arc::new(tokens);
    let router = router(config, &fleet, &metrics, clock, keyer)?;
    let mut background = Vec::new();
    let members = watch_workers(config, &router, &upstream, &metrics, &mut background);
    let scale = Autoscale::new(config.scale.clone(), Arc::clone(&metrics));
    background.push(tokio::spawn(Arc::clone(&scale).watch(Arc::clone(&router))));

    let dispatch = Dispatch {
        router: Arc::clone(&router),
        scale: Arc::clone(&scale),
        upstream,
        metrics: Arc::clone(&metrics),
        keyer,
        tokens: Arc::clone(&tokens),
        max_body_bytes: config.max_body_bytes,
        expose_routing: config.expose_routing,
        timeouts: config.timeouts,
        retry_budget: Arc::new(Mutex::new(RetryBudget::new(clock.now()))),
    };
    let admission = Admission::new(config.max_in_flight, metrics.in_flight.clone());
    let (stop, stopped) = watch::channel(false);
    let (tls, tenants) = doors(config, clock, &metrics, &mut background).map_err(io::Error::other)?;
    let server = |listener, drain_timeout, tls| Server {
        listener,
        tls,
        max_connections: config.max_connections,
        drain_timeout,
        connections: metrics.connections.clone(),
    };
    let clients = server(listener, config.drain_timeout, tls);
    let operators = server(admin_listener, Duration::ZERO, None);
    let serving =
        tokio::spawn(server::serve(clients, stack::stack(dispatch, admission, tenants), on(stopped)));
    // The admin listener outlives the drain, so that it can be watched; it ends with the process.
    let admin = Admin {
        router: Arc::clone(&router),
        metrics,
        keyer,
        tokens,
        max_body_bytes: config.max_body_bytes,
        members: Arc::clone(&members),
        allow: config.discovery.admin_allow.clone(),
        scale,
    };
    let admin = admin_guard::guarded(config.admin_token.clone(), admin::admin(admin));
    background.push(tokio::spawn(async move {
        server::serve(operators, admin, std::future::pending()).await;
    }));
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    Ok(Gateway { addr, admin_addr, scheme, router, members, stop, serving, background })
}

fn router(
    config: &Config,
    fleet: &Arc<Fleet>,
    metrics: &Arc<Metrics>,
    clock: Clock,
    keyer: KeyerConfig,
) -> io::Result<Arc<Router>> {
    let log = config.decision_log.as_ref();
    let log = log.map(|(path, share)| DecisionLog::open(path, *share, metrics.caches.decision_log.clone()));
    let (fleet, metrics) = (Arc::clone(fleet), Arc::clone(metrics));
    let router = Router::new(fleet, metrics, clock, config.policy, keyer, config.index_bytes);
    let router = router.with_log(log.transpose()?).with_room(config.room);
    Ok(Arc::new(router.with_load_scrape(config.load_scrape).with_slow_start(config.slow_start)))
}

/// Takes the configured workers into the fleet, and those that are found later.
fn watch_workers(
    config: &Config,
    router: &Arc<Router>,
    upstream: &Upstream,
    metrics: &Arc<Metrics>,
    background: &mut Vec<JoinHandle<()>>,
) -> Arc<Members> {
    let members = Members::new(Arc::clone(router), upstream.clone(), Arc::clone(metrics));
    for worker in router.fleet().all() {
        if worker.kv_source().is_some() && config.tokenizers.is_empty() {
            tracing::warn!(worker = %worker.name, "its KV events match no prompt without the model's tokenizer (--tokenizer)");
        }
        members.adopt(worker, Source::Static);
    }
    let watching = discovery::watch(config.discovery.clone(), Arc::clone(&members), Arc::clone(metrics));
    background.push(tokio::spawn(watching));
    members
}

/// What stands before clients.
type Doors = (Option<Arc<ServerTls>>, Option<Arc<Tenants>>);

/// TLS and tenants, both following their files.
fn doors(
    config: &Config,
    clock: Clock,
    metrics: &Metrics,
    background: &mut Vec<JoinHandle<()>>,
) -> Result<Doors, ConfigError> {
    let tls = config.tls.clone().map(ServerTls::load).transpose()?;
    if let Some(tls) = &tls {
        background.push(tokio::spawn(Arc::clone(tls).follow_files()));
    }
    let load = |(path, isolate): (PathBuf, bool)| {
        Tenants::load(path, isolate, config.hash_key, clock, metrics.tenants.clone())
    };
    let tenants = config.tenants.clone().map(load).transpose()?;
    if let Some(tenants) = &tenants {
        background.push(tokio::spawn(Arc::clone(tenants).follow_file()));
    }
    Ok((tls, tenants))
}

async fn on(mut stopped: watch::Receiver<bool>) {
    // An error means that the gateway was dropped without a shutdown: serve on.
    if stopped.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn block_bytes(config: &Config) -> NonZeroUsize {
    config.block_bytes.unwrap_or(NonZeroUsize::new(limits::BLOCK_BYTES).unwrap_or(NonZeroUsize::MIN))
}

impl Gateway {
    /// Waits until a worker is ready, at most `patience`.
    pub async fn ready(&self, patience: Duration) -> bool {
        probe::first_ready(&self.router, patience).await
    }

    /// Stops accepting, lets open requests finish, then stops. Returns whether all finished in time.
    pub async fn shutdown(self) -> bool {
        self.stop.send_replace(true);
        let drained = self.serving.await.unwrap_or(false);
        self.background.iter().for_each(JoinHandle::abort);
        self.members.stop();
        drained
    }
}

/// Serves until `shutdown`; what `keyway` without a subcommand does.
pub async fn run(mut config: Config, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let embedded = if config.workers.is_empty() && !config.discovery.is_dynamic() {
        Some(embedded(&mut config).await?)
    } else {
        None
    };
    let gateway = start(&config).await?;
    tracing::info!("admin on http://{}", gateway.admin_addr);
    if embedded.is_some() {
        gateway.ready(Duration::from_secs(10)).await;
    }
    tracing::info!(policy = %config.policy, workers = config.workers.len(), "listening on {}://{}", gateway.scheme, gateway.addr);
    if embedded.is_some() {
        welcome(&gateway, &config.workers);
    }
    shutdown.await;
    if !gateway.shutdown().await {
        tracing::warn!("some requests did not finish within the drain time and were cut");
    }
    Ok(())
}

#[cfg(feature = "embedded-worker")]
async fn embedded(config: &mut Config) -> io::Result<crate::embedded::Embedded> {
    let workers = crate::embedded::start().await?;
    config.workers = workers.configs();
    config.block_bytes = config.block_bytes.or(Some(crate::embedded::BLOCK_BYTES));
    Ok(workers)
}

#[cfg(not(feature = "embedded-worker"))]
async fn embedded(_: &mut Config) -> io::Result<std::convert::Infallible> {
    let message =
        "no worker is configured and this build has no embedded ones; add --worker http://HOST:PORT";
    std::future::ready(Err(io::Error::new(io::ErrorKind::InvalidInput, message))).await
}

fn welcome(gateway: &Gateway, workers: &[WorkerConfig]) {
    let names: Vec<String> = workers.iter().map(WorkerConfig::name).collect();
    let (addr, admin) = (gateway.addr, gateway.admin_addr);
    eprintln!(
        "\nNo worker is configured, so keyway started {count} embedded CPU workers ({names}) with the built-in model,\n\
         which answers questions about Keyway.\n\
         Put it before your own with: keyway --worker http://HOST:PORT --worker …\n\n\
         Try:\n  curl http://{addr}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"How do I add a worker?\"}}],\"stream\":true}}' -N\n  \
         curl http://{admin}/workers\n",
        count = workers.len(),
        names = names.join(", "),
        model = gateway.router.fleet().model_ids().first().map_or("keyway-builtin", String::as_str),
    );
}
