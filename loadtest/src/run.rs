//! `keyway-loadtest run`: one measurement from its arguments to its report. The steps only; each is a module.
//!
//! Next: `load.rs`.

use std::{
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    signal::unix::{Signal, SignalKind, signal},
    sync::{Semaphore, mpsc, watch},
};

use crate::{
    args::run::{Overload, RunArgs},
    client::{
        self, Server,
        calibrate::{Calibration, calibrate},
        exchange::{Clock, Session},
        names::SessionNames,
        record::Record,
        sender::{Control, Places, Sender, SentSums},
    },
    config::Config,
    error::Error,
    export::{self, table},
    limits,
    load::{Load, embeddings},
    oracle::Oracle,
    output::{self, Output},
    progress::{Progress, RunStatus},
    report::{Facts, Report, SentWorkload},
    scrape::Scrapers,
    slo::Keeper,
    stdout,
    tally::Tally,
    workload::{
        self,
        body::{Bodies, Fields},
        prompt::TextSeed,
    },
};

/// Measures, prints the table, writes the files; gives the verdict's exit code.
pub fn run(args: &RunArgs) -> Result<ExitCode, Error> {
    let plan = Plan::new(args)?;
    let output = Output::open(&args.output)?;
    let Measured { report, text, .. } = runtime(args)?.block_on(measure(args, plan, output, None))?;
    stdout::print(&table::render(&report))?;
    if let Some(dir) = &args.output.dir {
        output::write_json(dir, "run.json", &report)?;
        output::write_text(&dir.join("report.html"), &export::html::render(&report))?;
    }
    Ok(ExitCode::from(report.exit_code(text)))
}

/// The runtime that measurements run in.
pub fn runtime(args: &RunArgs) -> Result<Runtime, Error> {
    let cores = || thread::available_parallelism().map_or(1, usize::from).min(limits::RUNTIME_THREADS_MAX);
    let threads = args.server.threads.map_or_else(cores, usize::from);
    Ok(Builder::new_multi_thread().worker_threads(threads).enable_all().build()?)
}

/// What is known before the server is asked anything.
#[derive(Debug)]
pub struct Plan {
    load: Load,
    server: Server,
}

/// What one measurement came to: its report, and what a search asks besides.
#[derive(Debug)]
pub struct Measured {
    /// All figures of the measurement, in the shape of `run.json`.
    pub report: Report,
    /// The words of its prompts.
    pub text: TextSeed,
    /// Who kept the objective, if there is one.
    pub slo: Option<Keeper>,
    /// Whether it ended early because of [`Patience`].
    pub gave_up: bool,
}

/// When a measurement has seen enough.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Requests that may miss the objective before the rest is not sent.
    pub misses_max: u64,
}

/// How the sending went.
struct Sent {
    tally: Tally,
    requests: u64,
    sums: SentSums,
    elapsed: Duration,
    interrupted: bool,
    gave_up: bool,
}

// === impl Plan ===

impl Plan {
    /// Reads the inputs that `args` name.
    pub fn new(args: &RunArgs) -> Result<Self, Error> {
        let key = args.server.api_key_file.as_deref().map(client::read_api_key).transpose()?;
        let server = Server::new(&args.server.url(), key.as_deref())?.with_headers(&args.server.header)?;
        extra_body(args)?;
        embeddings::check(args)?;
        Ok(Self { load: Load::new(&args.workload, &args.schedule, args.server.endpoint())?, server })
    }

    /// How many requests there will be, if that is known.
    pub fn requests(&self) -> Option<u64> {
        self.load.requests
    }
}

/// Measures once. With `patience`, stops early when the objective is lost.
pub async fn measure(
    args: &RunArgs,
    plan: Plan,
    mut output: Output,
    patience: Option<Patience>,
) -> Result<Measured, Error> {
    let Plan { load: Load { workload, pacer, requests }, server } = plan;
    let (text, mut workload) = marked(args, workload);
    let model = match &args.server.model {
        Some(model) => model.clone(),
        None => server.first_model(args.server.timeout).await?,
    };
    let block_tokens = workload.block_tokens();
    let calibration = calibration(args, &server, &model, block_tokens).await?;
    workload.calibrate(calibration.bytes_per_token);
    let bodies = bodies(args, &model, text, &calibration, block_tokens)?;
    let config = Config::new(args, model, text.seed);
    let mut planned = planned(&config, &workload, &bodies);

    let mut scrapers = Scrapers::new(&args.output.scrape, args.output.scrape_interval).await?;
    let (stop, stopped) = watch::channel(false);
    let (records, received) = mpsc::unbounded_channel();
    let (clock, started_unix_ms) = zero();
    let session = Session {
        server,
        endpoint: args.server.endpoint(),
        texts: args.workload.texts,
        timeout: args.server.timeout,
        clock,
        keep_text: workload.carries_answers(),
        stop: stopped,
    };
    let sender = Sender {
        oracle: Oracle::new(block_tokens, args.workload.oracle_blocks.map(|n| n as usize)),
        workload,
        pacer,
        bodies,
        overhead_tokens: calibration.overhead_tokens,
        session: Arc::new(session),
        names: names(args, text),
        places: places(args),
        warmup: args.schedule.warmup.unwrap_or_default(),
        records,
        control: Arc::new(Control::default()),
    };
    scrapers.begin(clock);
    let mut run = Running {
        scheduled: requests,
        tally: Tally::new(args.output.slo.clone()),
        progress: Progress::new(args.output.ui),
        output: &mut output,
        stop: &stop,
        patience,
    };
    let sent = run.send(sender, received).await?;
    let scraped = scrapers.finish().await;
    output.close()?;

    fill(&mut planned, &sent);
    let facts = Facts {
        config,
        text,
        scheduled: requests.unwrap_or(sent.requests),
        workload: planned,
        calibration,
        started_unix_ms,
        elapsed_s: sent.elapsed.as_secs_f64(),
        sent: sent.requests,
        interrupted: sent.interrupted,
        scraped,
    };
    let report = Report::new(facts, &sent.tally);
    if sent.interrupted && patience.is_some() {
        return Err(Error::Interrupted);
    }
    Ok(Measured { report, text, slo: sent.tally.slo, gave_up: sent.gave_up })
}

/// The schedule's zero, and when that is, in milliseconds since 1970.
fn zero() -> (Clock, u64) {
    let lead = Duration::from_millis(limits::LEAD_MS);
    let since_1970 = (SystemTime::now() + lead).duration_since(UNIX_EPOCH);
    (Clock { zero: Instant::now() + lead }, since_1970.map_or(0, |since| since.as_millis() as u64))
}

/// The headers that name sessions.
fn names(args: &RunArgs, text: TextSeed) -> SessionNames {
    let (session, parent) = (args.server.session_header.clone(), args.server.parent_header.clone());
    SessionNames { session, parent, text_seed: text.seed }
}

/// The words of this run's prompts, and the workload in them.
fn marked(args: &RunArgs, workload: workload::Workload) -> (TextSeed, workload::Workload) {
    let text = args.workload.text();
    let marked = workload.marked(&text.mark());
    (text, marked)
}

/// What takes in records while the sender's thread runs.
struct Running<'a> {
    scheduled: Option<u64>,
    tally: Tally,
    progress: Progress,
    output: &'a mut Output,
    stop: &'a watch::Sender<bool>,
    patience: Option<Patience>,
}

impl Running<'_> {
    /// Runs the sender's thread and takes in records until the last request has ended.
    async fn send(
        &mut self,
        sender: Sender,
        mut records: mpsc::UnboundedReceiver<Record>,
    ) -> Result<Sent, Error> {
        let (clock, control) = (sender.session.clock, sender.control.clone());
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut ticks = tokio::time::interval_at(clock.zero.into(), Duration::from_secs(1));
        let runtime = Handle::current();
        let thread = thread::Builder::new().name("sender".into()).spawn(move || sender.run(&runtime))?;

        let (mut interrupted, mut gave_up, mut batch) = (false, false, Vec::new());
        // The channel ends when the sender and every request have dropped their ends.
        loop {
            let mut end = false;
            tokio::select! {
                received = records.recv_many(&mut batch, limits::RECORDS_AT_ONCE) => {
                    if received == 0 {
                        break;
                    }
                    for record in batch.drain(..) {
                        self.output.record(&record)?;
                        self.tally.add(&record);
                    }
                    if !gave_up && self.has_lost() {
                        (gave_up, end) = (true, true);
                    }
                    // A wake-up for each answer would take a tenth of a core that the answers need. Who may
                    // stop early looks at each.
                    if self.patience.is_none() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
                _ = ticks.tick() => self.tick(clock, &control),
                () = either(&mut interrupt, &mut terminate), if !interrupted => {
                    (interrupted, end) = (true, true);
                }
            }
            if end {
                control.stop.store(true, Ordering::Release);
                thread.thread().unpark();
                self.stop.send_replace(true);
            }
        }
        let elapsed = clock.zero.elapsed();
        self.progress.finish();
        let sums = thread.join().map_err(|_| std::io::Error::other("the sender's thread failed"))?;
        let requests = control.sent.load(Ordering::Relaxed);
        Ok(Sent { tally: std::mem::take(&mut self.tally), requests, sums, elapsed, interrupted, gave_up })
    }

    fn has_lost(&self) -> bool {
        let misses = self.tally.slo.as_ref().map_or(0, |slo| slo.of - slo.met);
        self.patience.is_some_and(|patience| misses > patience.misses_max)
    }

    fn tick(&mut self, clock: Clock, control: &Control) {
        let sent = control.sent.load(Ordering::Relaxed);
        let status = RunStatus {
            elapsed: clock.zero.elapsed(),
            scheduled: self.scheduled,
            sent,
            done: self.tally.done(),
            failed: self.tally.failed,
        };
        self.progress.tick(status, &self.tally);
    }
}

async fn either(a: &mut Signal, b: &mut Signal) {
    tokio::select! { _ = a.recv() => (), _ = b.recv() => () }
}

async fn calibration(
    args: &RunArgs,
    server: &Server,
    model: &str,
    block_tokens: u32,
) -> Result<Calibration, Error> {
    if let Some(bytes_per_token) = args.workload.bytes_per_token {
        return Ok(Calibration { bytes_per_token, overhead_tokens: 0, measured: false });
    }
    let (endpoint, seed, timeout) = (args.server.endpoint(), args.workload.seed, args.server.timeout);
    Ok(calibrate(server, endpoint, model, seed, block_tokens, timeout).await?)
}

fn bodies(
    args: &RunArgs,
    model: &str,
    text: TextSeed,
    calibration: &Calibration,
    block_tokens: u32,
) -> Result<Bodies, Error> {
    let (endpoint, workload) = (args.server.endpoint(), &args.workload);
    let bodies = Bodies::new(endpoint, model, workload.ignore_eos, text.seed, calibration.bytes_per_token)
        .with_fields(&extra_body(args)?);
    let block_bytes = bodies.bytes(block_tokens);
    if block_bytes < limits::BLOCK_BYTES_MIN {
        return Err(Error::Usage(format!(
            "a block would be {block_bytes} bytes of text, too few to tell blocks apart ({} needed): raise --scale-len",
            limits::BLOCK_BYTES_MIN
        )));
    }
    Ok(bodies)
}

/// The fields of `--extra-body`, which may be none that the schedule or the measurement depends on.
fn extra_body(args: &RunArgs) -> Result<Fields, Error> {
    let Some(text) = &args.server.extra_body else { return Ok(Fields::new()) };
    let fields: Fields = serde_json::from_str(text)
        .map_err(|error| Error::Usage(format!("--extra-body must be a JSON object: {error}")))?;
    let ours = [
        "model",
        "messages",
        "prompt",
        "input",
        "stream",
        "stream_options",
        "max_tokens",
        "max_output_tokens",
        "n",
    ];
    match ours.into_iter().find(|name| fields.contains_key(*name)) {
        Some(name) => Err(Error::Usage(format!("--extra-body must not set `{name}`: the load tester does"))),
        None => Ok(fields),
    }
}

fn places(args: &RunArgs) -> Option<Places> {
    let count = args.schedule.max_concurrency?;
    let drop = args.schedule.overload == Overload::Drop;
    Some(Places { free: Arc::new(Semaphore::new(count as usize)), drop })
}

/// What is known of the workload before it is sent.
fn planned(config: &Config, workload: &workload::Workload, bodies: &Bodies) -> SentWorkload {
    SentWorkload {
        fingerprint: config.fingerprint(workload.file_hash()),
        block_tokens: workload.block_tokens(),
        block_bytes: bodies.bytes(workload.block_tokens()),
        ..SentWorkload::default()
    }
}

fn fill(workload: &mut SentWorkload, sent: &Sent) {
    let SentSums { sums, last_due_ns, body_hash } = sent.sums;
    workload.requests = sent.requests;
    workload.last_due_s = last_due_ns as f64 / 1e9;
    workload.distinct_blocks = sums.distinct_blocks;
    workload.prompt_tokens = sums.prompt_tokens;
    workload.output_tokens = sums.output_tokens;
    workload.body_hash = format!("{body_hash:016x}");
}
