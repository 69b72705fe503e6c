//! The cluster in one thread: a gateway as its process assembles it, workers, and hosts with clients, in a
//! network with latency; time and what is random come from the seed. Left to chance are the states of hash
//! maps and the order in which tokio polls the arms of a `select!`; neither shows in the log, which `main.rs`
//! asserts.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use futures_util::future::join_all;
use keyway::{
    config::{Config, File},
    process::{run, sockets::Sockets},
};
use turmoil::{Builder, Sim};

use crate::{
    client,
    log::{Event, Log},
    schedule::{Act, CLIENTS, Plan, Schedule, WORKERS},
    worker::{self, Worker},
};

/// How finely messages and the log are timed.
pub(crate) const STEP: Duration = Duration::from_millis(2);
/// Longest run: whatever is wrong with it, it ends.
const RUN_MAX: Duration = Duration::from_secs(180);
/// Longest time of a request; also how long a client can be left without any word.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a host of clients goes on after the last of them.
const LINGER: Duration = Duration::from_millis(100);
/// Requests that the gateway takes at once.
pub(crate) const PLACES: usize = 50;

/// A cluster that runs.
pub(crate) struct World {
    sim: Sim<'static>,
    log: Log,
    workers: Vec<Worker>,
    hosts: usize,
}

/// A worker's host.
pub(crate) fn worker_host(worker: usize) -> String {
    format!("worker-{worker}")
}

fn client_host(host: usize) -> String {
    format!("clients-{host}")
}

impl World {
    /// A cluster of which nothing has happened yet.
    pub(crate) fn new(seed: u64, latency: Duration, toml: &str, request_timeout: Duration) -> Self {
        // Ids, keys and ties: the gateway's chance is this thread's.
        fastrand::seed(seed);
        let mut sim = Builder::new()
            .rng_seed(seed)
            .epoch(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000))
            .tick_duration(STEP)
            .simulation_duration(RUN_MAX)
            .min_message_latency(Duration::from_millis(1))
            .max_message_latency(latency)
            // Backpressure is not what is tried here, and a full buffer of this network forgets the
            // connection's end.
            .tcp_capacity(1 << 12)
            .build();
        let log = Log::default();
        let workers: Vec<_> = (0..WORKERS).map(|number| Worker::new(number, log.clone())).collect();
        for (number, worker) in workers.iter().enumerate() {
            let worker = worker.clone();
            sim.host(worker_host(number), move || worker.clone().run());
        }
        let config = config(toml, request_timeout);
        sim.host("gateway", move || gateway(config.clone()));
        Self { sim, log, workers, hosts: 0 }
    }

    /// What has happened.
    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    /// Answers that workers are giving.
    pub(crate) fn open(&self) -> Vec<usize> {
        self.workers.iter().map(Worker::open).collect()
    }

    /// Connections that fickle workers closed.
    pub(crate) fn dropped(&self) -> usize {
        self.workers.iter().map(Worker::dropped).sum()
    }

    /// Time since the beginning.
    pub(crate) fn now(&self) -> Duration {
        self.sim.elapsed()
    }

    /// One step; whether all clients have what they asked for.
    pub(crate) fn step(&mut self) -> bool {
        self.log.at(self.sim.elapsed());
        self.sim.step().unwrap()
    }

    /// Goes on until then.
    pub(crate) fn run_until(&mut self, at: Duration) {
        while self.now() < at {
            self.step();
        }
    }

    /// Goes on until all clients have what they asked for.
    pub(crate) fn run_to_the_end(&mut self) {
        while !self.step() {}
    }

    /// Goes on until something holds, at most for so long. Whether it does.
    pub(crate) fn run_while_not(
        &mut self,
        patience: Duration,
        mut holds: impl FnMut(&mut Self) -> bool,
    ) -> bool {
        let deadline = self.now() + patience;
        while !holds(self) {
            if self.now() > deadline {
                return false;
            }
            self.step();
        }
        true
    }

    /// Plays a schedule until all clients have what they asked for.
    pub(crate) fn play(&mut self, schedule: &Schedule) {
        for host in 0..CLIENTS {
            let plans = schedule.plans.iter().filter(|plan| plan.host == host).cloned().collect();
            self.clients(&client_host(host), plans);
        }
        for (at, act) in &schedule.acts {
            self.run_until(*at);
            self.act(*act);
        }
        self.run_to_the_end();
    }

    /// Clients on a host of their own.
    pub(crate) fn clients(&mut self, host: &str, plans: Vec<Plan>) {
        let log = self.log.clone();
        self.sim.client(host, async move {
            let asks = plans.into_iter().map(|plan| {
                let log = log.clone();
                tokio::task::spawn_local(async move {
                    client::until(plan.at).await;
                    client::ask(plan, log).await;
                })
            });
            for done in join_all(asks).await {
                done?;
            }
            // A host whose clients are gone says nothing more; what they said last may wait to be written.
            tokio::time::sleep(LINGER).await;
            Ok(())
        });
    }

    /// A page of the gateway's for operators, as it is now.
    pub(crate) fn page(&mut self, path: &'static str) -> String {
        let page = Arc::new(Mutex::new(String::new()));
        let read = Arc::clone(&page);
        self.hosts += 1;
        self.sim.client(format!("operator-{}", self.hosts), async move {
            let text = client::page(path).await.map_err(|error| error.to_string())?;
            *read.lock().unwrap_or_else(PoisonError::into_inner) = text;
            Ok(())
        });
        // Other clients may go on for as long as they like.
        while page.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            self.step();
        }
        page.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Does something to the cluster.
    pub(crate) fn act(&mut self, act: Act) {
        self.log.at(self.sim.elapsed());
        self.log.note(Event::Did(act));
        let (sim, gateway) = (&mut self.sim, "gateway");
        match act {
            Act::Crash(worker) => sim.crash(worker_host(worker)),
            Act::Restart(worker) => sim.bounce(worker_host(worker)),
            Act::Mood(worker, mood) => self.workers[worker].mood(mood),
            Act::SlowHealth(worker, slow) => self.workers[worker].slow_health(slow),
            Act::Partition(worker) => sim.partition(gateway, worker_host(worker)),
            Act::Repair(worker) => sim.repair(gateway, worker_host(worker)),
            Act::Hold(worker) => sim.hold(gateway, worker_host(worker)),
            Act::Release(worker) => sim.release(gateway, worker_host(worker)),
            Act::HoldClients(host) => sim.hold(gateway, client_host(host)),
            Act::ReleaseClients(host) => sim.release(gateway, client_host(host)),
        }
    }
}

fn config(toml: &str, request_timeout: Duration) -> Config {
    let workers: Vec<_> =
        (0..WORKERS).map(|worker| format!("\"http://{}:{}\"", worker_host(worker), worker::PORT)).collect();
    let text = format!(
        "listen = \"0.0.0.0:{}\"\nadmin_listen = \"0.0.0.0:{}\"\nworker = [{}]\n\
         [routing]\nexpose = true\n\
         [limits]\nmax_in_flight = {PLACES}\nconnect_timeout_ms = 500\nanswer_idle_ms = {}\n\
         request_timeout_ms = {}\n{toml}",
        client::PORT,
        client::ADMIN_PORT,
        workers.join(", "),
        // Where a request may take long, it may be silent for long.
        if request_timeout > REQUEST_TIMEOUT { request_timeout.as_millis() } else { 1_500 },
        request_timeout.as_millis(),
    );
    Config::try_from(File::parse(&text).unwrap()).unwrap()
}

/// The gateway, as its process makes it, but for signals and the handover.
async fn gateway(config: Config) -> turmoil::Result {
    let sockets = Sockets::open(&config).await?;
    let again = config.clone();
    let gateway = run::start(&config, sockets, Box::new(move || Ok(again.clone())), Vec::new(), None)?;
    gateway.open();
    std::future::pending().await
}
