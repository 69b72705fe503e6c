//! `keyway-loadtest sweep`: one measurement for each combination of loads and lengths, and a table of all.

pub mod page;

use std::{fmt::Write as _, process::ExitCode};

use serde::{Deserialize, Serialize};

use crate::{
    args::{
        run::{RunArgs, WorkloadKind},
        search::SweepArgs,
    },
    error::{EXIT_FAILED, EXIT_GATE, EXIT_INVALID, Error},
    export, limits,
    output::{self, Output},
    report::{Report, Status},
    run::{self, Plan},
    stats::Summary,
    stdout,
};

/// Name and version of the result's shape.
pub const FORMAT: &str = "keyway-loadtest/sweep/1";

/// What a sweep measured, in the shape of `sweep.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct SweepReport {
    /// Name and version of this shape, [`FORMAT`].
    pub format: String,
    /// One for each run, in order.
    pub points: Vec<Point>,
}

/// One run of a sweep.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Point {
    /// Its number; its report is DIR/number/run.json.
    pub number: usize,
    /// Requests a second offered.
    pub rate: Option<f64>,
    /// Requests kept under way; `None` unless the loop is closed.
    pub concurrency: Option<u32>,
    /// Prompt tokens, written as for `--isl`; `None` for traces and files of prompts.
    pub isl: Option<String>,
    /// Tokens to generate, written as for `--osl`; `None` for traces and ShareGPT's files.
    pub osl: Option<String>,
    /// Whether to trust it.
    pub status: Status,
    /// Good answers and failed ones.
    pub ok: u64,
    /// Failed requests, without warm-ups and cancelled ones.
    pub failed: u64,
    /// Good answers a second.
    pub requests_per_s: f64,
    /// Generated tokens a second.
    pub output_tokens_per_s: f64,
    /// Prompt tokens a second. 0 in reports of older versions.
    #[serde(default)]
    pub prompt_tokens_per_s: f64,
    /// Time to the first token from when requests were due, in milliseconds.
    pub ttft: Option<Summary>,
    /// Time of a token after the first.
    pub tpot: Option<Summary>,
    /// Time to the end from when requests were due.
    pub e2e: Option<Summary>,
    /// Share of requests that kept the objective.
    pub goodput: Option<f64>,
    /// Share of prompt tokens that came from caches; none if the server does not say.
    #[serde(default)]
    pub cached: Option<f64>,
    /// The share with one unbounded cache.
    #[serde(default)]
    pub possible: Option<f64>,
    /// Job completion time of whole sessions, in milliseconds; none of a workload without sessions.
    #[serde(default)]
    pub completion: Option<Summary>,
}

/// Measures all, prints, writes `sweep.json`.
pub fn run(args: &SweepArgs) -> Result<ExitCode, Error> {
    let runs = combinations(args)?;
    let runtime = run::runtime(&args.run)?;
    // Mistakes in any of them show before the first is measured.
    runs.iter().try_for_each(|run| Plan::new(run).map(|_| ()))?;
    let (mut points, mut code, mut about) = (Vec::new(), 0, String::new());
    stdout::print(&head(args.run.server.endpoint().generates()))?;
    for (i, run) in runs.iter().enumerate() {
        let measured =
            runtime.block_on(run::measure(run, Plan::new(run)?, Output::open(&run.output)?, None))?;
        if let Some(dir) = &run.output.dir {
            output::write_json(dir, "run.json", &measured.report)?;
            output::write_text(&dir.join("report.html"), &export::html::render(&measured.report))?;
        }
        about = format!("sweep of {} at {}", measured.report.config.model, measured.report.config.url);
        let point = Point::new(i + 1, &measured.report);
        stdout::print(&point.line())?;
        points.push(point);
        code = worse(code, measured.report.exit_code(measured.text));
        if measured.report.verdict.status == Status::Interrupted {
            break;
        }
    }
    if let Some(dir) = &args.run.output.dir {
        let report = SweepReport { format: FORMAT.into(), points };
        output::write_json(dir, "sweep.json", &report)?;
        output::write_text(&dir.join("report.html"), &page::render(&report, &about))?;
    }
    Ok(ExitCode::from(code))
}

/// The options of each run: lengths in the outer loop, loads in the inner.
fn combinations(args: &SweepArgs) -> Result<Vec<RunArgs>, Error> {
    let (grid, schedule) = (&args.grid, &args.run.schedule);
    let load_is_swept = !grid.rates.is_empty() || !grid.concurrencies.is_empty();
    let usage = |text: &str| Err(Error::Usage(text.into()));
    if load_is_swept
        && (schedule.rate.is_some() || schedule.concurrency.is_some() || schedule.users.is_some())
    {
        return usage(
            "--rates and --concurrencies choose the load: leave out --rate, --concurrency and --users",
        );
    }
    if !grid.isl_osl.is_empty()
        && (args.run.workload.trace.is_some() || args.run.workload.workload == Some(WorkloadKind::Trace))
    {
        return usage("--isl-osl is for synthetic workloads: a trace has its own lengths");
    }
    let mut runs = vec![args.run.clone()];
    let mut multiply = |count: usize, set: &dyn Fn(&mut RunArgs, usize)| {
        if count > 0 {
            runs = (runs.iter())
                .flat_map(|run| (0..count).map(move |i| (run.clone(), i)))
                .map(|(mut run, i)| {
                    set(&mut run, i);
                    run
                })
                .collect();
        }
    };
    multiply(grid.isl_osl.len(), &|run, i| run.workload.set_lengths(grid.isl_osl[i]));
    multiply(grid.rates.len(), &|run, i| run.schedule.rate = Some(grid.rates[i]));
    multiply(grid.concurrencies.len(), &|run, i| run.schedule.concurrency = Some(grid.concurrencies[i]));
    if runs.len() > limits::SWEEP_RUNS_MAX {
        return Err(Error::Usage(format!("{} runs: at most {}", runs.len(), limits::SWEEP_RUNS_MAX)));
    }
    for (i, run) in runs.iter_mut().enumerate() {
        run.output.dir = run.output.dir.as_ref().map(|dir| dir.join((i + 1).to_string()));
        run.workload = run.workload.clone().nth(i as u64);
    }
    Ok(runs)
}

/// The exit code that says more: interrupted, failed, invalid, objective lost.
fn worse(a: u8, b: u8) -> u8 {
    let rank = |code: u8| match code {
        0 => 0,
        EXIT_GATE => 1,
        EXIT_INVALID => 2,
        EXIT_FAILED => 3,
        _ => 4,
    };
    if rank(b) > rank(a) { b } else { a }
}

// === impl Point ===

impl Point {
    fn new(number: usize, report: &Report) -> Self {
        Self {
            number,
            rate: report.config.rate,
            concurrency: report.config.concurrency,
            isl: report.config.isl.clone(),
            osl: report.config.osl.clone(),
            status: report.verdict.status,
            ok: report.requests.ok,
            failed: report.requests.failed,
            requests_per_s: report.throughput.requests_per_s,
            output_tokens_per_s: report.throughput.output_tokens_per_s,
            prompt_tokens_per_s: report.throughput.prompt_tokens_per_s,
            ttft: report.response.ttft,
            tpot: report.tpot,
            e2e: report.response.e2e,
            goodput: report.goodput.as_ref().map(|goodput| goodput.share),
            cached: report.cache.achieved,
            possible: report.cache.possible,
            completion: report.sessions.as_ref().and_then(|sessions| sessions.completion),
        }
    }

    /// Time to the first token, or of answers without one to their end.
    fn first(&self) -> Option<Summary> {
        self.ttft.or(self.e2e)
    }

    /// Tokens a second: generated ones, or of answers without any those of the prompts.
    fn tokens_per_s(&self) -> f64 {
        if self.ttft.is_some() { self.output_tokens_per_s } else { self.prompt_tokens_per_s }
    }

    /// Tokens of a prompt, and of an answer that has some, as `--isl-osl` writes them.
    fn lengths(&self) -> Option<String> {
        let isl = self.isl.as_ref()?;
        Some(self.osl.as_ref().map_or_else(|| isl.clone(), |osl| format!("{isl}/{osl}")))
    }

    fn line(&self) -> String {
        let load = self.rate.map(|rate| rate.to_string()).or(self.concurrency.map(|n| n.to_string()));
        let ms = |summary: Option<Summary>, of: fn(&Summary) -> f64| {
            summary.map_or_else(|| "-".into(), |summary| format!("{:.1}", of(&summary)))
        };
        let mut line = format!(
            "{:>4}{:>10}{:>16}{:>8}{:>8}{:>10.2}{:>12.0}{:>10}{:>10}{:>9}{:>11}",
            self.number,
            load.unwrap_or_else(|| "-".into()),
            self.lengths().unwrap_or_else(|| "-".into()),
            self.ok,
            self.failed,
            self.requests_per_s,
            self.tokens_per_s(),
            ms(self.first(), |s| s.p50),
            ms(self.first(), |s| s.p99),
            ms(self.tpot, |s| s.p50),
            ms(self.e2e, |s| s.p99),
        );
        let share = |share: Option<f64>| share.map_or_else(|| "-".into(), |s| format!("{:.1} %", s * 100.0));
        // Writing to a string cannot fail.
        let _ = writeln!(line, "{:>10}{:>9}{}", share(self.goodput), share(self.cached), self.remark());
        line
    }

    /// What is to be said of a run that is not valid, behind its figures.
    pub fn remark(&self) -> &'static str {
        match self.status {
            Status::Valid => "",
            Status::Warm => "  warm",
            Status::Invalid | Status::Failed | Status::Interrupted => "  not valid",
        }
    }
}

/// The names of the columns, of answers that are generated or of such as are not.
fn head(generates: bool) -> String {
    let (tokens, first) = if generates { ("tokens/s", "TTFT p50") } else { ("prompt t/s", "E2E p50") };
    format!(
        "{:>4}{:>10}{:>16}{:>8}{:>8}{:>10}{:>12}{:>10}{:>10}{:>9}{:>11}{:>10}{:>9}\n",
        "run",
        "load",
        "lengths",
        "ok",
        "failed",
        "req/s",
        tokens,
        first,
        "p99",
        "TPOT p50",
        "E2E p99",
        "goodput",
        "cached"
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn runs(line: &str) -> Result<Vec<RunArgs>, Error> {
        let line = format!("keyway-loadtest sweep --url http://h --requests 5 {line}");
        let Command::Sweep(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        combinations(&args)
    }

    #[test]
    fn lengths_are_outer_and_loads_inner() {
        let runs = runs("--concurrencies 1,4 --isl-osl 128/16,64/8 -o out").unwrap();
        let shown = runs.iter().map(|run| {
            let dir = run.output.dir.as_ref().unwrap().display().to_string();
            (run.workload.isl().to_string(), run.schedule.concurrency.unwrap(), dir)
        });
        let want = [("128", 1, "out/1"), ("128", 4, "out/2"), ("64", 1, "out/3"), ("64", 4, "out/4")];
        assert_eq!(shown.collect::<Vec<_>>(), want.map(|(isl, n, dir)| (isl.to_owned(), n, dir.to_owned())));
    }

    #[test]
    fn contradictions_are_refused() {
        for line in ["--rates 1,2 --concurrency 3", "--isl-osl 1/1 --trace t"] {
            assert!(runs(line).is_err(), "{line}");
        }
        assert_eq!([worse(0, 4), worse(4, 3), worse(3, 4), worse(1, 130)], [4, 3, 3, 130]);
    }
}
