//! A fleet for one test: a real gateway process in front of fake workers (in the test) or real ones
//! (processes), all on free ports, which the gateway chooses and announces. Everything ends with the
//! [`Cluster`].

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::bins::bin;
use crate::chaos_proxy::{ChaosProxy, Countdown};
use crate::client::{Response, get, post};
use crate::eventually::patience;
use crate::fake_worker::FakeWorker;
use crate::metrics::Metrics;
use crate::ports::free_addr;
use crate::process::Process;
use crate::{canary, eventually, openai};

/// A gateway and its workers.
#[derive(Debug)]
pub struct Cluster {
    /// The gateway.
    pub gateway: Gateway,
    /// Scripted workers, in the order in which they were started.
    pub fakes: Vec<FakeWorker>,
    /// Real workers (`keyway-worker`), in the order in which they were started.
    pub workers: Vec<RealWorker>,
    /// What stands in front of them, if it was asked for.
    pub proxies: Vec<ChaosProxy>,
}

/// What to start.
#[derive(Debug, Default)]
pub struct ClusterBuilder {
    fakes: Vec<Vec<String>>,
    real: usize,
    /// Arguments of the real workers; with events they publish KV events that the gateway follows.
    worker_args: Vec<String>,
    events: bool,
    breakable: bool,
    http2: bool,
    gateway: GatewayBuilder,
}

impl Cluster {
    /// A cluster without workers, to be described.
    pub fn builder() -> ClusterBuilder {
        ClusterBuilder::default()
    }

    /// Fake workers behind a gateway with this policy, all ready.
    pub async fn of_fakes(n: usize, policy: &str) -> Self {
        Self::builder().fakes(n).policy(policy).start().await
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.gateway.addr
    }

    /// The worker named by a response's `x-keyway-worker`: its index among the fakes.
    ///
    /// # Panics
    /// When the response names none of them.
    pub fn served_by(&self, response: &Response) -> usize {
        let name = response.header("x-keyway-worker").expect("x-keyway-worker");
        let index = self.fakes.iter().position(|f| f.addr().to_string() == name);
        index.unwrap_or_else(|| panic!("{name} is none of the workers"))
    }

    /// Sends a chat request and wants 200.
    pub async fn chat(&self, prompt: &str) -> Response {
        let response = post(self.addr(), openai::CHAT, &openai::chat(prompt)).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        response
    }
}

impl ClusterBuilder {
    /// Adds `n` fake workers that serve the fake model.
    #[must_use]
    pub fn fakes(mut self, n: usize) -> Self {
        self.fakes.extend(std::iter::repeat_n(vec![openai::FAKE_MODEL.to_owned()], n));
        self
    }

    /// Adds a fake worker that serves these models.
    #[must_use]
    pub fn fake_with(mut self, models: &[&str]) -> Self {
        self.fakes.push(models.iter().map(|&m| m.to_owned()).collect());
        self
    }

    /// Adds `n` real workers with the random model.
    #[must_use]
    pub fn workers(mut self, n: usize) -> Self {
        self.real += n;
        self
    }

    /// Adds arguments of every real worker.
    #[must_use]
    pub fn worker_args(mut self, args: &[&str]) -> Self {
        self.worker_args.extend(args.iter().map(|&a| a.to_owned()));
        self
    }

    /// Lets the real workers publish KV events, with replays, and the gateway follow them by the built-in
    /// tokenizer.
    #[must_use]
    pub fn kv_events(mut self) -> Self {
        self.events = true;
        let any = "tcp://127.0.0.1:0";
        self.gateway = self.gateway.args(&["--tokenizer", "keyway-random=random"]);
        self.worker_args(&["--kv-events", any, "--kv-replay", any])
    }

    /// Sets the routing policy.
    #[must_use]
    pub fn policy(mut self, policy: &str) -> Self {
        self.gateway = self.gateway.args(&["--policy", policy]);
        self
    }

    /// Sets the text of the gateway's configuration file.
    #[must_use]
    pub fn config(mut self, toml: &str) -> Self {
        self.gateway = self.gateway.config(toml);
        self
    }

    /// Puts a proxy in front of each real worker; see [`ChaosProxy::cut_after_events`].
    #[must_use]
    pub fn breakable(mut self) -> Self {
        self.breakable = true;
        self
    }

    /// Lets the gateway speak HTTP/2 with the real workers.
    #[must_use]
    pub fn http2(mut self) -> Self {
        self.http2 = true;
        self
    }

    /// Adds arguments of the gateway.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.gateway = self.gateway.args(args);
        self
    }

    /// Describes the gateway further.
    #[must_use]
    pub fn gateway(mut self, describe: impl FnOnce(GatewayBuilder) -> GatewayBuilder) -> Self {
        self.gateway = describe(self.gateway);
        self
    }

    /// Starts everything and waits until every worker is ready.
    pub async fn start(self) -> Cluster {
        let mut gateway = self.gateway;
        let (mut fakes, mut workers) = (Vec::new(), Vec::new());
        for models in &self.fakes {
            let models: Vec<&str> = models.iter().map(String::as_str).collect();
            let fake = FakeWorker::with_models(&models).await;
            gateway = gateway.worker(fake.addr());
            fakes.push(fake);
        }
        for _ in 0..self.real {
            let args: Vec<&str> = self.worker_args.iter().map(String::as_str).collect();
            workers.push(RealWorker::spawn(&args));
        }
        let (mut proxies, countdown) = (Vec::new(), Countdown::default());
        for worker in &mut workers {
            worker.ready().await;
            gateway = if self.breakable {
                let proxy = ChaosProxy::sharing(worker.addr(), countdown.clone()).await;
                let addr = proxy.addr();
                proxies.push(proxy);
                if self.http2 {
                    gateway.args(&["--worker", &format!("http://{addr};http2=true")])
                } else {
                    gateway.worker(addr)
                }
            } else if self.events {
                gateway.args(&["--worker", &worker.with_events().await])
            } else {
                gateway.worker(worker.addr())
            };
        }
        let gateway = gateway.start().await;
        gateway.wait_ready(fakes.len() + workers.len()).await;
        if self.events {
            gateway.wait_trusted(workers.len()).await;
        }
        Cluster { gateway, fakes, workers, proxies }
    }
}

/// A gateway process.
#[derive(Debug)]
pub struct Gateway {
    /// The process.
    pub process: Process,
    /// Where clients connect.
    pub addr: SocketAddr,
    /// Where the operator looks.
    pub admin: SocketAddr,
    config: Option<NamedTempFile>,
}

/// How to start a gateway.
#[derive(Debug, Default)]
pub struct GatewayBuilder {
    args: Vec<String>,
    config: Option<String>,
    listen: Option<String>,
    log: Option<String>,
    open_files: Option<u64>,
    env: Vec<(String, std::path::PathBuf)>,
    unexposed: bool,
}

impl Gateway {
    /// A gateway without workers, to be described.
    pub fn builder() -> GatewayBuilder {
        GatewayBuilder::default()
    }

    /// Replaces the text of the configuration file it was started with.
    ///
    /// # Panics
    /// When there is none.
    pub fn rewrite(&self, toml: &str) {
        let file = self.config.as_ref().expect("started with a file");
        std::fs::write(file.path(), toml).expect("write");
    }

    /// Waits until `n` workers are ready.
    pub async fn wait_ready(&self, n: usize) {
        eventually!(
            self.ready_workers().await == n,
            "{n} ready workers; /workers says {}",
            self.workers().await
        );
    }

    /// The operator's view of the workers.
    pub async fn workers(&self) -> Value {
        get(self.admin, "/workers").await.json()
    }

    /// Number of workers in state `ready`.
    pub async fn ready_workers(&self) -> usize {
        let workers = self.workers().await;
        let list = workers.as_array().cloned().unwrap_or_default();
        list.iter().filter(|w| w["state"] == "ready").count()
    }

    /// Waits until the gateway relies on the KV events of `n` workers.
    pub async fn wait_trusted(&self, n: usize) {
        eventually!(
            self.metrics().await.sum("keyway_kv_events_trusted", &[]) == n as f64,
            "{n} trusted workers; /workers says {}",
            self.workers().await
        );
    }

    /// Status of `/readyz`.
    pub async fn readyz(&self) -> u16 {
        get(self.admin, "/readyz").await.status()
    }

    /// Scrapes the metrics.
    pub async fn metrics(&self) -> Metrics {
        Metrics::fetch(self.admin).await
    }

    /// Waits until every in-flight gauge reads 0.
    pub async fn idle(&self) {
        eventually!(self.metrics().await.busy().is_empty(), "idle; busy: {:?}", self.metrics().await.busy());
    }
}

/// What it shows its operator at the end may hold nothing of what it was sent. One that is gone shows
/// nothing.
impl Drop for Gateway {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            for path in ["/metrics", "/workers"] {
                canary::assert_none(path, &shown(self.admin, path).unwrap_or_default());
            }
        }
    }
}

/// What `path` answers; without a runtime, which a handle that is dropped may not have.
fn shown(addr: SocketAddr, path: &str) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(patience()))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

impl GatewayBuilder {
    /// Adds a worker.
    #[must_use]
    pub fn worker(self, addr: SocketAddr) -> Self {
        let url = format!("http://{addr}");
        self.args(&["--worker", &url])
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&a| a.to_owned()));
        self
    }

    /// Sets the configuration file's text.
    #[must_use]
    pub fn config(mut self, toml: &str) -> Self {
        self.config = Some(toml.to_owned());
        self
    }

    /// Starts it without `--expose`, by which a test reads who served it.
    #[must_use]
    pub fn as_it_comes(mut self) -> Self {
        self.unexposed = true;
        self
    }

    /// Sets the address to listen on instead of loopback; port 0.
    #[must_use]
    pub fn listen(mut self, addr: &str) -> Self {
        self.listen = Some(addr.to_owned());
        self
    }

    /// Sets what it logs, in `RUST_LOG`'s syntax; `info` must be among it.
    #[must_use]
    pub fn log(mut self, filter: &str) -> Self {
        self.log = Some(filter.to_owned());
        self
    }

    /// Lets it have at most so many open files.
    #[must_use]
    pub fn open_files(mut self, most: u64) -> Self {
        self.open_files = Some(most);
        self
    }

    /// Sets a variable of its environment to a path.
    #[must_use]
    pub fn env(mut self, name: &str, path: &std::path::Path) -> Self {
        self.env.push((name.to_owned(), path.to_owned()));
        self
    }

    /// Starts it on free ports and waits until it listens.
    pub async fn start(self) -> Gateway {
        let mut command = Command::new(bin("keyway"));
        if let Some(most) = self.open_files {
            command = Command::new("sh");
            let script = format!("ulimit -n {most}; exec \"$0\" \"$@\"");
            command.args(["-c", &script]).arg(bin("keyway"));
        }
        command.envs(self.env.iter().map(|(name, path)| (name, path)));
        let listen = self.listen.as_deref().unwrap_or("127.0.0.1:0");
        command.args(["--listen", listen, "--admin-listen", "127.0.0.1:0"]).args(&self.args);
        if !self.unexposed {
            command.arg("--expose");
        }
        if let Some(filter) = &self.log {
            command.env("RUST_LOG", filter);
        }
        let config = self.config.map(|toml| config_file(&toml));
        if let Some(file) = &config {
            command.arg("--config").arg(file.path());
        }
        let process = Process::spawn("keyway", &mut command);
        let admin = addr(&process.announced("admin on http://").await);
        let url = process.announced("listening on http").await;
        let addr = addr(url.trim_start_matches("s://").trim_start_matches("://"));
        Gateway { process, addr, admin, config }
    }
}

/// A `keyway-worker` process.
#[derive(Debug)]
pub struct RealWorker {
    /// The process.
    pub process: Process,
    addr: Option<SocketAddr>,
}

impl RealWorker {
    /// Starts one without waiting for it, with the random model unless `args` name one: most tests need an
    /// engine, no sense. Its port is none that other tests' connections are given while it is restarted.
    pub fn spawn(args: &[&str]) -> Self {
        Self::spawn_at(free_addr(), args)
    }

    /// The same, at an address: that of one that is gone.
    pub fn spawn_at(addr: SocketAddr, args: &[&str]) -> Self {
        let mut command = Command::new(bin("keyway-worker"));
        command.args(["--listen", &addr.to_string()]).args(args);
        if !args.contains(&"--model") {
            command.args(["--model", "random"]);
        }
        Self { process: Process::spawn("keyway-worker", &mut command), addr: None }
    }

    /// Waits until it serves.
    pub async fn ready(&mut self) {
        self.addr = Some(addr(&self.process.announced("ready on http://").await));
    }

    /// How a gateway is told of it and of where it publishes KV events.
    pub async fn with_events(&self) -> String {
        let events = self.process.announced("KV events on ").await;
        let replay = self.process.announced("KV replay on ").await;
        format!("http://{};kv-events={events};kv-replay={replay}", self.addr())
    }

    /// Where it listens.
    ///
    /// # Panics
    /// Before [`RealWorker::ready`].
    pub fn addr(&self) -> SocketAddr {
        self.addr.expect("wait until the worker is ready")
    }
}

/// A configuration file that lives as long as its handle.
pub fn config_file(toml: &str) -> NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a temporary file");
    file.write_all(toml.as_bytes()).expect("write");
    file
}

fn addr(text: &str) -> SocketAddr {
    let text = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    text.parse().unwrap_or_else(|e| panic!("not an address: {text:?} ({e})"))
}
