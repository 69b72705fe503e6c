//! `keyway-loadtest run`: one measurement from its arguments to its report. The steps only; each is a module.
//!
//! Next: `schedule.rs`.

use std::{
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{
    runtime::{Builder, Handle},
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
};

use crate::{
    args::RunArgs,
    body::Bodies,
    calibrate::{Calibration, calibrate},
    client::{self, Server},
    error::Error,
    exchange::{Clock, Session},
    limits,
    oracle::Oracle,
    progress::{Progress, Status},
    record::Record,
    report::{Config, Facts, Report, Workload},
    scale::Scale,
    schedule::{self, Due, Pace, Timing},
    sender::{Control, Sender},
    stdout, table,
    tally::Tally,
    trace::Trace,
    trace_info,
};

/// Measures, prints the table, writes the files; gives the verdict's exit code.
pub fn run(args: &RunArgs) -> Result<ExitCode, Error> {
    let plan = Plan::new(args)?;
    let output = Output::open(args)?;
    let threads = thread::available_parallelism().map_or(1, usize::from).min(limits::RUNTIME_THREADS_MAX);
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let report = runtime.block_on(measure(args, plan, output))?;
    stdout::print(&table::render(&report))?;
    if let Some(dir) = &args.output.dir {
        write_report(dir, &report)?;
    }
    Ok(ExitCode::from(report.verdict.exit_code()))
}

/// What is known before the server is asked anything.
struct Plan {
    trace: Trace,
    schedule: Vec<Due>,
    scale: Scale,
    server: Server,
}

/// How the sending went.
struct Sent {
    tally: Tally,
    requests: u64,
    body_hash: u64,
    elapsed: Duration,
    interrupted: bool,
}

// === impl Plan ===

impl Plan {
    fn new(args: &RunArgs) -> Result<Self, Error> {
        let key = args
            .server
            .api_key_file
            .as_deref()
            .map(client::read_api_key)
            .transpose()
            .map_err(Error::Usage)?;
        let server = Server::new(&args.server.url, key.as_deref())?;
        let trace = Trace::load(&args.workload.trace)?;
        let schedule = schedule::plan(&trace, &timing(args)).map_err(Error::Usage)?;
        Ok(Self { trace, schedule, scale: Scale::new(args.workload.slice.scale_len), server })
    }
}

fn timing(args: &RunArgs) -> Timing {
    Timing {
        slice: args.workload.slice.slice,
        pace: args.schedule.rate.map_or(Pace::TimeScale(args.schedule.time_scale), Pace::Rate),
        spread_bursts: args.schedule.spread_bursts,
        seed: args.workload.seed,
        duration: args.schedule.duration,
        requests: args.schedule.requests.map(|n| n as usize),
    }
}

/// The folder's files, opened before the run so that a mistake costs no measurement.
struct Output {
    records: Option<(PathBuf, BufWriter<File>)>,
}

impl Output {
    fn open(args: &RunArgs) -> Result<Self, Error> {
        let Some(dir) = &args.output.dir else { return Ok(Self { records: None }) };
        fs::create_dir_all(dir).map_err(|source| Error::Write { path: dir.clone(), source })?;
        let path = dir.join("requests.jsonl");
        let open = || File::create(&path).map_err(|source| Error::Write { path: path.clone(), source });
        let file = args.output.records.then(open).transpose()?;
        Ok(Self { records: file.map(|file| (path, BufWriter::new(file))) })
    }

    fn record(&mut self, record: &Record) -> Result<(), Error> {
        let Some((path, file)) = &mut self.records else { return Ok(()) };
        let line = serde_json::to_string(&record.line()).unwrap_or_default();
        writeln!(file, "{line}").map_err(|source| Error::Write { path: path.clone(), source })
    }

    fn close(mut self) -> Result<(), Error> {
        let Some((path, file)) = &mut self.records else { return Ok(()) };
        file.flush().map_err(|source| Error::Write { path: path.clone(), source })
    }
}

/// Written beside and renamed: a reader never sees half a report.
fn write_report(dir: &Path, report: &Report) -> Result<(), Error> {
    let (path, partial) = (dir.join("run.json"), dir.join("run.json.partial"));
    let json = serde_json::to_string_pretty(report).unwrap_or_default();
    fs::write(&partial, json + "\n")
        .and_then(|()| fs::rename(&partial, &path))
        .map_err(|source| Error::Write { path, source })
}

async fn measure(args: &RunArgs, plan: Plan, mut output: Output) -> Result<Report, Error> {
    let Plan { trace, schedule, scale, server } = plan;
    let model = match &args.server.model {
        Some(model) => model.clone(),
        None => server.first_model(args.server.timeout).await?,
    };
    let calibration = calibration(args, &server, &model, scale).await?;
    let (endpoint, workload) = (args.server.endpoint, &args.workload);
    let bodies =
        Bodies::new(endpoint, &model, workload.ignore_eos, workload.seed, scale, calibration.bytes_per_token);
    if bodies.block_bytes() < limits::BLOCK_BYTES_MIN {
        return Err(Error::Usage(format!(
            "a block would be {} bytes of text, too few to tell blocks apart ({} needed): raise --scale-len",
            bodies.block_bytes(),
            limits::BLOCK_BYTES_MIN
        )));
    }
    let mut workload = planned(&trace, &schedule, &bodies);
    let started_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());

    let (stop, stopped) = watch::channel(false);
    let (records, received) = mpsc::unbounded_channel();
    let clock = Clock { zero: Instant::now() + Duration::from_millis(limits::LEAD_MS) };
    let session =
        Session { server, path: endpoint.path(), timeout: args.server.timeout, clock, stop: stopped };
    let oracle = Oracle::new(scale.block_tokens(), args.workload.oracle_blocks.map(|n| n as usize));
    let overhead_tokens = calibration.overhead_tokens;
    let control = Arc::new(Control::default());
    let sender = Sender {
        trace,
        schedule,
        bodies,
        oracle,
        overhead_tokens,
        session,
        records,
        control: control.clone(),
    };
    let sent = send(sender, received, &stop, &mut output, Progress::new(args.output.ui)).await?;
    output.close()?;

    workload.body_hash = format!("{:016x}", sent.body_hash);
    let facts = Facts {
        config: config(args, model),
        workload,
        calibration,
        started_unix_s,
        elapsed_s: sent.elapsed.as_secs_f64(),
        sent: sent.requests,
        interrupted: sent.interrupted,
    };
    Ok(Report::new(facts, &sent.tally))
}

/// Runs the sender's thread and takes in records until the last request has ended.
async fn send(
    sender: Sender,
    mut records: mpsc::UnboundedReceiver<Record>,
    stop: &watch::Sender<bool>,
    output: &mut Output,
    mut progress: Progress,
) -> Result<Sent, Error> {
    let (clock, control, scheduled) =
        (sender.session.clock, sender.control.clone(), sender.schedule.len() as u64);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut ticks = tokio::time::interval_at(clock.zero.into(), Duration::from_secs(1));
    let runtime = Handle::current();
    let thread = thread::Builder::new().name("sender".into()).spawn(move || sender.run(&runtime))?;

    let (mut tally, mut interrupted) = (Tally::default(), false);
    // The channel ends when the sender and every request have dropped their ends.
    loop {
        tokio::select! {
            record = records.recv() => match record {
                Some(record) => { output.record(&record)?; tally.add(&record); }
                None => break,
            },
            _ = ticks.tick() => {
                let (elapsed, sent) = (clock.zero.elapsed(), control.sent.load(Ordering::Relaxed));
                progress.tick(Status { elapsed, scheduled, sent, done: tally.done(), failed: tally.failed });
            }
            () = either(&mut interrupt, &mut terminate), if !interrupted => {
                interrupted = true;
                control.stop.store(true, Ordering::Release);
                thread.thread().unpark();
                stop.send_replace(true);
            }
        }
    }
    let elapsed = clock.zero.elapsed();
    progress.finish();
    let body_hash = thread.join().map_err(|_| std::io::Error::other("the sender's thread failed"))?;
    Ok(Sent { tally, requests: control.sent.load(Ordering::Relaxed), body_hash, elapsed, interrupted })
}

async fn either(a: &mut Signal, b: &mut Signal) {
    tokio::select! { _ = a.recv() => (), _ = b.recv() => () }
}

async fn calibration(
    args: &RunArgs,
    server: &Server,
    model: &str,
    scale: Scale,
) -> Result<Calibration, Error> {
    if let Some(bytes_per_token) = args.workload.bytes_per_token {
        return Ok(Calibration { bytes_per_token, overhead_tokens: 0, measured: false });
    }
    let (endpoint, seed, timeout) = (args.server.endpoint, args.workload.seed, args.server.timeout);
    Ok(calibrate(server, endpoint, model, seed, scale.block_tokens(), timeout).await?)
}

fn planned(trace: &Trace, schedule: &[Due], bodies: &Bodies) -> Workload {
    let sums = trace_info::sums(trace, schedule, bodies.scale);
    Workload {
        requests: schedule.len() as u64,
        last_due_s: schedule.last().map_or(0.0, |due| due.intended_ns as f64 / 1e9),
        block_tokens: bodies.scale.block_tokens(),
        block_bytes: bodies.block_bytes(),
        distinct_blocks: sums.distinct_blocks,
        prompt_tokens: sums.prompt_tokens,
        output_tokens: sums.output_tokens,
        body_hash: String::new(),
    }
}

fn config(args: &RunArgs, model: String) -> Config {
    let (workload, schedule) = (&args.workload, &args.schedule);
    Config {
        url: args.server.url.clone(),
        model,
        endpoint: args.server.endpoint,
        workload: "trace",
        trace: workload.trace.display().to_string(),
        slice: workload.slice.slice.to_string(),
        scale_len: workload.slice.scale_len,
        time_scale: schedule.rate.is_none().then_some(schedule.time_scale),
        rate: schedule.rate,
        spread_bursts: schedule.spread_bursts,
        duration_s: schedule.duration.map(|d| d.as_secs_f64()),
        requests: schedule.requests.map(|n| n as usize),
        seed: workload.seed,
        ignore_eos: workload.ignore_eos,
        timeout_s: args.server.timeout.as_secs_f64(),
        oracle_blocks: workload.oracle_blocks.map(|n| n as usize),
    }
}
