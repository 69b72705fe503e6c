//! From a configuration to a gateway that serves, and to its end: gets the listening sockets, starts the
//! workers it was given or its own, serves, hands over or drains. How its parts are made is `assemble.rs`'
//! business, what is read again while it runs `reload.rs`'.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
};

use crate::{
    clock,
    config::{Config, WorkerConfig},
    edge::{
        admin_guard,
        live::Live,
        server::{self, Intake, Server},
        stack::{self, Stack, Written},
    },
    leaving::Leaving,
    ledger::Ledger,
    limits::{FEW_CONNECTIONS, HANDOVER_WORKERS_TIMEOUT, MAX_CONNECTIONS, OPERATORS_DRAIN},
    machine::{
        cores::Cores,
        descriptors::{self, Shortages},
        log::LogFormat,
    },
    metrics::Metrics,
    net,
    ops::{
        admin::{self, Admin},
        reload::{ConfigReader, Reloader},
    },
    process::{
        assemble::{Assembly, assemble},
        handover::{self, Legacy, Predecessor},
        signals::{Order, Signals},
        sockets::{Handles, Sockets},
        systemd,
        welcome::welcome,
    },
    routing::{Router, snapshot::Memory},
    scale::{autoscale::Autoscale, external_scaler::ExternalScaler},
    telemetry::trace::Traces,
    watch::{members::Members, peers::Peers, probe},
};

/// A gateway that serves. Dropping it does not stop it; [`Gateway::shutdown`] does.
#[derive(Debug)]
pub struct Gateway {
    /// Address of the clients' listener, as its socket has it: for port 0, with the port that was chosen.
    pub addr: SocketAddr,
    /// Address of the operators' listener, as its socket has it.
    pub admin_addr: SocketAddr,
    /// Where KEDA connects, if it does.
    pub scaler_addr: Option<SocketAddr>,
    /// `http` or `https`, for clients.
    pub scheme: &'static str,
    router: Arc<Router>,
    members: Arc<Members>,
    reloader: Arc<Reloader>,
    intake: Arc<Intake>,
    leaving: Arc<Leaving>,
    memory: Memory,
    /// For a successor, until it is asked for no more.
    handles: Option<Handles>,
    /// Clients are let in.
    opened: watch::Sender<bool>,
    /// Operators are.
    operated: watch::Sender<bool>,
    /// Whether other gateways' index was taken, or none was to be had.
    caught_up: watch::Receiver<bool>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<bool>,
    /// Operators are the successor's from now on.
    retire: watch::Sender<bool>,
    /// The task that serves operators: also while clients drain, unless a successor has the sockets.
    operating: JoinHandle<()>,
    /// The task that serves KEDA; `None`: KEDA has no listener here.
    scaling: Option<JoinHandle<()>>,
    offering: Option<JoinHandle<()>>,
    background: Vec<JoinHandle<()>>,
    traces: Option<Traces>,
    ledger: Option<Arc<Ledger>>,
    live: Live,
}

/// Starts on these sockets; [`Gateway::open`] lets clients in. Without `config.workers` and a discovery that
/// is dynamic it can only refuse requests. `reader` is where a reload gets the configuration from;
/// `embedded`, the workers in this process; `cores`, where clients are served, if not on this runtime.
pub fn start(
    config: &Config,
    sockets: Sockets,
    reader: ConfigReader,
    embedded: Vec<WorkerConfig>,
    cores: Option<Arc<Cores>>,
) -> io::Result<Gateway> {
    let handles = sockets.handles()?;
    let Sockets { clients: listener, admin: admin_listener, scaler } = sockets;
    net::give_up_on_readers_after(&listener, config.timeouts.client_stall)?;
    let (addr, admin_addr) = (listener.local_addr()?, admin_listener.local_addr()?);

    let Assembly { parts, scale, history, memory, mut background, traces, ledger } = assemble(config)?;
    let caught_up = join_others(config, &parts.peers, &memory, &mut background);
    let (live, tls, upstream) = (parts.live.clone(), parts.tls.clone(), parts.upstream.clone());
    let shortages = upstream.shortages().clone();
    let (router, members, gateway_id) =
        (Arc::clone(&parts.router), Arc::clone(&parts.members), parts.peers.own);
    let (metrics, intake, leaving) = (Arc::clone(&parts.metrics), Arc::clone(&parts.intake), Leaving::new());
    hold_what_fits(&intake, config);
    let reloader = Reloader::new(reader, config.clone(), embedded, parts);

    let ((stop, stopped), (retire, retired)) = (watch::channel(false), watch::channel(false));
    let clients = Server {
        listener,
        tls,
        intake: Arc::clone(&intake),
        cores: cores.clone(),
        client_stall: config.timeouts.client_stall,
        connections: metrics.connections.clone(),
        shortages: shortages.clone(),
        makes_room: Some(upstream),
    };
    let stack = stack::stack(live.clone(), Arc::clone(&intake), written(traces.as_ref(), ledger.as_ref()));
    let ((opened, open), (operated, operate)) = (watch::channel(false), watch::channel(false));
    let serving = serve_clients(clients, stack, (on(open), on(stopped)));
    let (scaler_addr, scaling) = external_scaler(scaler, &scale, &metrics)?.unzip();
    let admin = Admin {
        router: Arc::clone(&router),
        metrics,
        gateway_id,
        live: live.clone(),
        reloader: Arc::clone(&reloader),
        leaving: Arc::clone(&leaving),
        caught_up: caught_up.clone(),
        members: Arc::clone(&members),
        scale,
        history,
        ledger: ledger.clone(),
        cores,
    };
    let operating = serve_operators(config, (admin_listener, shortages), admin, (on(operate), on(retired)));
    Ok(Gateway {
        addr,
        admin_addr,
        scaler_addr,
        scheme: if config.tls.is_some() { "https" } else { "http" },
        router,
        members,
        reloader,
        intake,
        leaving,
        memory,
        handles: Some(handles),
        opened,
        operated,
        caught_up,
        stop,
        serving,
        retire,
        operating,
        scaling,
        offering: None,
        background,
        traces,
        ledger,
        live,
    })
}

/// Where requests are written beside the log.
fn written(traces: Option<&Traces>, ledger: Option<&Arc<Ledger>>) -> Written {
    Written { tracer: traces.map(|traces| Arc::clone(&traces.tracer)), ledger: ledger.cloned() }
}

/// Serves clients once that may begin; whether all were served when it ended.
fn serve_clients(
    clients: Server,
    stack: impl Stack,
    (may_begin, stopped): (
        impl Future<Output = ()> + Send + 'static,
        impl Future<Output = ()> + Send + 'static,
    ),
) -> JoinHandle<bool> {
    tokio::spawn(async move {
        may_begin.await;
        server::serve(clients, stack, stopped).await
    })
}

/// Takes another gateway's index, and then listens to what they say. What comes back says when the index is
/// there, or will not be.
fn join_others(
    config: &Config,
    peers: &Arc<Peers>,
    memory: &Memory,
    background: &mut Vec<JoinHandle<()>>,
) -> watch::Receiver<bool> {
    let Some(config) = config.peers.clone() else { return watch::channel(true).1 };
    let (done, caught_up) = watch::channel(false);
    let (peers, memory) = (Arc::clone(peers), memory.clone());
    background.push(tokio::spawn(async move {
        peers.catch_up(&config, &memory).await;
        done.send_replace(true);
        peers.follow_first(&config);
    }));
    caught_up
}

/// No more clients than there are descriptors for, with their requests' connections.
fn hold_what_fits(intake: &Intake, config: &Config) {
    let fit = descriptors::clients_that_fit(config.limits.max_in_flight);
    intake.hold_at_most(fit);
    let (limit, wanted) = (descriptors::limit(), config.limits.max_connections);
    if fit >= wanted {
        return;
    }
    // No operator asked for the default: that it does not fit is a warning only where little is left of it.
    if wanted == MAX_CONNECTIONS && fit >= FEW_CONNECTIONS {
        tracing::info!(limit, "the limit of open files lets at most {fit} clients in at once");
        return;
    }
    tracing::warn!(
        limit,
        "the limit of open files (LimitNOFILE=, `ulimit -n`) is too low for limits.max_connections = {wanted}: at most {fit} \
         clients are let in at once"
    );
}

/// The admin listener outlives the drain, so that it can be watched; it ends with the process, or when a
/// successor has it.
fn serve_operators(
    config: &Config,
    (listener, shortages): (net::TcpListener, Shortages),
    admin: Admin,
    (may_begin, retired): (
        impl Future<Output = ()> + Send + 'static,
        impl Future<Output = ()> + Send + 'static,
    ),
) -> JoinHandle<()> {
    let connections = admin.metrics.connections.clone();
    let intake = Intake::new(config.limits.max_connections, config.timeouts.header_read, OPERATORS_DRAIN);
    let client_stall = config.timeouts.client_stall;
    let operators = Server {
        listener,
        tls: None,
        intake,
        cores: None,
        client_stall,
        connections,
        shortages,
        makes_room: None,
    };
    let admin = admin_guard::guarded(admin.live.clone(), admin::admin(admin));
    tokio::spawn(async move {
        may_begin.await;
        server::serve(operators, admin, retired).await;
    })
}

/// KEDA's way to the sum, where one is configured.
fn external_scaler(
    listener: Option<net::TcpListener>,
    scale: &Arc<Autoscale>,
    metrics: &Metrics,
) -> io::Result<Option<(SocketAddr, JoinHandle<()>)>> {
    let Some(listener) = listener else { return Ok(None) };
    let addr = listener.local_addr()?;
    let calls = metrics.scale.external_calls.clone();
    tracing::info!("external scaler on {addr}");
    let scaler = ExternalScaler { scale: Arc::clone(scale), calls };
    Ok(Some((addr, tokio::spawn(scaler.serve(listener)))))
}

async fn on(mut stopped: watch::Receiver<bool>) {
    // An error means that the gateway was dropped without a shutdown: serve on.
    if stopped.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Gateway {
    /// Lets clients and operators in.
    pub fn open(&self) {
        self.open_to_operators();
        self.opened.send_replace(true);
    }

    /// Lets operators in, other gateways among them.
    pub fn open_to_operators(&self) {
        self.operated.send_replace(true);
    }

    /// Opens the usage file, if there is one, and learns what was used of budgets. A successor waits until
    /// the process before it is gone.
    fn open_ledger(&self, is_successor: bool) -> io::Result<()> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        ledger.open(is_successor).map_err(io::Error::other)?;
        if let Some(tenants) = &self.live.now().tenants {
            tenants.sum_budgets();
        }
        Ok(())
    }

    /// Waits until another gateway's index was taken, or none is to be had; seconds at most.
    pub async fn caught_up(&self) {
        // An error: the task that says so has ended.
        let _ = self.caught_up.clone().wait_for(|done| *done).await;
    }

    /// Lets a successor take the sockets over; completes when one has.
    pub fn offer(&mut self, path: PathBuf) -> Option<oneshot::Receiver<()>> {
        let handles = self.handles.take()?;
        let memory = self.memory.clone();
        let (done, taken) = oneshot::channel();
        self.offering = Some(tokio::spawn(async move {
            let legacy = move || {
                // The successor reads it as it starts.
                memory.write();
                let was_ready = memory.router.fleet().all().iter().any(|worker| worker.routable());
                Legacy { hash_key: memory.keyer.key, was_ready }
            };
            match handover::offer(path, handles, legacy).await {
                Ok(()) => drop(done.send(())),
                Err(error) => tracing::error!(%error, "no successor can take over"),
            }
        }));
        Some(taken)
    }

    /// Waits until a worker is ready, at most `patience`.
    pub async fn ready(&self, patience: Duration) -> bool {
        probe::first_ready(&self.router, patience).await
    }

    /// Ends in order: `/readyz` turns to 503 and answers over HTTP/1.1 close their connections, for
    /// `drain_delay`; the listener closes; open requests finish; then all stops. Where a successor has the
    /// sockets, at once. Returns whether all finished in time.
    pub async fn shutdown(mut self, succeeded: bool) -> bool {
        self.leaving.begin(succeeded);
        self.intake.leave();
        if let Some(offering) = &self.offering {
            offering.abort();
        }
        drop(self.handles);
        if succeeded {
            // New connections are the successor's, operators' too; what came here before is still answered.
            self.retire.send_replace(true);
            self.scaling.iter().for_each(JoinHandle::abort);
        } else {
            clock::sleep(self.reloader.current().await.limits.drain_delay).await;
        }
        self.stop.send_replace(true);
        let (open, patience) = (self.memory.router.metrics().in_flight.get(), self.intake.drain_timeout());
        if open > 0 {
            let seconds = patience.as_secs();
            tracing::info!(
                open,
                "waits at most {seconds} s for requests that are open; a second signal ends it at once"
            );
        }
        let drained = self.serving.await.unwrap_or(false);
        if !drained && self.ledger.is_some() {
            self.intake.cut().await;
        }
        if succeeded {
            let _ = (&mut self.operating).await; // its drain is bounded
        }
        self.memory.router.flush_log().await;
        if !succeeded {
            // A successor has it already, and knows more by now.
            self.memory.write();
        }
        self.operating.abort();
        self.scaling.iter().for_each(JoinHandle::abort);
        self.background.iter().for_each(JoinHandle::abort);
        self.reloader.stop();
        self.members.stop();
        if let Some(ledger) = self.ledger {
            ledger.close().await;
        }
        if let Some(traces) = self.traces {
            traces.finish().await;
        }
        drained
    }
}

/// Serves until told to end; what `keyway` without a subcommand does. `reader` gives the configuration again;
/// `cores` are where clients are served, if not on this runtime.
pub async fn run(
    mut config: Config,
    reader: ConfigReader,
    mut signals: Signals,
    cores: Option<Arc<Cores>>,
) -> io::Result<()> {
    let embedded = if config.workers.is_empty() && !config.discovery.is_dynamic() {
        Some(embedded(&mut config).await?)
    } else {
        None
    };
    let own = if embedded.is_some() { config.workers.clone() } else { Vec::new() };
    let (sockets, predecessor) = sockets(&mut config).await?;
    let mut gateway = start(&config, sockets, reader, own, cores)?;
    gateway.open_ledger(predecessor.is_some())?;
    if let Some(predecessor) = &predecessor
        && predecessor.legacy.was_ready
        && !gateway.ready(HANDOVER_WORKERS_TIMEOUT).await
    {
        let why = "no worker is ready for this process, so the one before it goes on";
        return Err(io::Error::other(why));
    }
    if predecessor.is_none() {
        // Those that start beside it need not wait for each other.
        gateway.open_to_operators();
    }
    gateway.caught_up().await;
    gateway.open();
    tracing::info!("admin on http://{}", gateway.admin_addr);
    if embedded.is_some() {
        gateway.ready(Duration::from_secs(10)).await;
    }
    if let Some(predecessor) = predecessor {
        match predecessor.succeed().await {
            Ok(()) => tracing::info!("took over from the process before"),
            Err(error) => tracing::warn!(%error, "the process before has ended already"),
        }
    }
    let mut taken = config.handover_socket.clone().and_then(|path| gateway.offer(path));
    systemd::ready();
    tracing::info!(policy = %config.policy, workers = config.workers.len(), "listening on {}://{}", gateway.scheme, gateway.addr);
    // Who reads lines as JSON reads no others.
    if embedded.is_some() && config.log_format == LogFormat::Text {
        let model = gateway.router.fleet().model_ids().first().cloned();
        welcome((gateway.addr, gateway.admin_addr), &config.workers, model.as_deref());
    }
    let succeeded = until_the_end(&gateway, &mut signals, &mut taken).await;
    if !succeeded {
        systemd::stopping();
    }
    if !gateway.shutdown(succeeded).await {
        tracing::warn!("some requests did not finish within the drain time and were cut");
    }
    Ok(())
}

/// The listening sockets, and the process that they are from, whose hash key is this one's too unless there
/// is a file for it.
async fn sockets(config: &mut Config) -> io::Result<(Sockets, Option<Predecessor>)> {
    let found = match config.handover_socket.clone() {
        Some(path) => Predecessor::find(path).await?,
        None => None,
    };
    let Some((predecessor, handles)) = found else { return Ok((Sockets::open(config).await?, None)) };
    if config.routing.hash_key_file.is_none() {
        config.routing.hash_key = predecessor.legacy.hash_key;
    }
    Ok((Sockets::inherit(handles, config).await?, Some(predecessor)))
}

/// Does what it is told meanwhile. Returns whether a successor has taken over.
async fn until_the_end(
    gateway: &Gateway,
    signals: &mut Signals,
    taken: &mut Option<oneshot::Receiver<()>>,
) -> bool {
    loop {
        let told = tokio::select! {
            told = signals.next() => told,
            () = gateway.leaving.asked() => Order::End,
            () = handover::taken_over(taken) => {
                tracing::info!("a successor has taken over");
                return true;
            }
        };
        match told {
            Order::End => return false,
            // What became of it is logged.
            Order::Reload => drop(gateway.reloader.reload().await),
            Order::Succeed if taken.is_some() => handover::start_successor(),
            Order::Succeed => tracing::error!("SIGUSR2 needs handover_socket in the configuration"),
        }
    }
}

#[cfg(feature = "embedded-worker")]
async fn embedded(config: &mut Config) -> io::Result<crate::process::embedded::Embedded> {
    let workers = crate::process::embedded::start().await?;
    config.workers = workers.configs();
    config.routing.block_bytes = config.routing.block_bytes.or(Some(crate::process::embedded::BLOCK_BYTES));
    Ok(workers)
}

#[cfg(not(feature = "embedded-worker"))]
async fn embedded(_: &mut Config) -> io::Result<std::convert::Infallible> {
    let message =
        "no worker is configured and this build has no embedded ones; add --worker http://HOST:PORT";
    std::future::ready(Err(io::Error::new(io::ErrorKind::InvalidInput, message))).await
}
