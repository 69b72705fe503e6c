//! `keyway-loadtest search`: measures at one load after another until it has the most that keeps the
//! objective. The choice of loads is `knee.rs`'s.

pub mod knee;
pub mod page;

use std::{fmt::Write as _, process::ExitCode};

use serde::{Deserialize, Serialize};

use crate::{
    args::{
        run::RunArgs,
        search::{Over, SearchArgs},
    },
    error::{EXIT_GATE, Error},
    limits,
    output::{self, Output},
    report::Status,
    run::{self, Measured, Patience, Plan},
    search::knee::{Knee, Probe, Search, Settings, Step},
    stdout,
};

/// Name and version of the result's shape.
pub const FORMAT: &str = "keyway-loadtest/search/1";

/// What a search found, in the shape of `search.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct SearchReport {
    /// Name and version of this shape, [`FORMAT`].
    pub format: String,
    /// What was raised: `rate` or `concurrency`.
    pub over: String,
    /// The objective, its bounds with commas between, such as `ttft.p99<500ms`.
    pub slo: String,
    /// Share of requests that must keep bounds without a percentile.
    pub attain: f64,
    /// `knee`, `above-all` or `below-all`.
    pub result: String,
    /// The most load that keeps the objective; of `below-all`, the lowest that loses it.
    pub load: f64,
    /// Highest load that kept it, and lowest that lost it.
    pub bracket: Option<(f64, f64)>,
    /// Every load tried, in order.
    pub probes: Vec<ProbeReport>,
}

/// One load that was tried, and how it kept the objective.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProbeReport {
    /// The load: requests a second, or requests under way, as [`SearchReport::over`] says.
    pub load: f64,
    /// Seed of its workload: each attempt at a probe takes the next.
    pub seed: u64,
    /// Share that kept the objective over the share that must.
    pub attainment: f64,
    /// Requests that kept every bound.
    pub met: u64,
    /// Requests that ended well or badly, without warm-ups and cancelled ones.
    pub of: u64,
    /// Whether it ended early, the objective lost.
    pub ended_early: bool,
    /// Median time to the first token, in milliseconds.
    pub ttft_p50: Option<f64>,
    /// 99th percentile of the same.
    pub ttft_p99: Option<f64>,
    /// Median time to the answer's end, in milliseconds. `None` in reports of older versions.
    #[serde(default)]
    pub e2e_p50: Option<f64>,
    /// 99th percentile of the same.
    #[serde(default)]
    pub e2e_p99: Option<f64>,
    /// Good answers a second.
    pub requests_per_s: f64,
}

/// Searches, prints, writes `search.json`.
pub fn run(args: &SearchArgs) -> Result<ExitCode, Error> {
    check(args)?;
    let range = &args.range;
    let mut search = Search::new(Settings {
        from: range.from,
        to: range.to,
        tolerance: range.tolerance,
        repeats: range.repeats.into(),
        whole: range.over == Over::Concurrency,
    });
    let runtime = run::runtime(&args.run)?;
    let mut probes: Vec<ProbeReport> = Vec::new();
    let mut seeds = (0..).map(|i| args.run.workload.seed.wrapping_add(i));
    let found = loop {
        let load = match search.next() {
            Step::Done(found) => break found,
            Step::Try(load) => load,
        };
        let probe = runtime.block_on(valid_probe(args, load, &mut seeds))?;
        search.add(Probe { load, attainment: probe.attainment, requests: probe.of });
        stdout::print(&line(&probe))?;
        probes.push(probe);
    };
    let report = report(args, found, probes);
    stdout::print(&render(&report))?;
    if let Some(dir) = &args.run.output.dir {
        output::make_dir(dir)?;
        output::write_json(dir, "search.json", &report)?;
        output::write_text(&dir.join("report.html"), &page::render(&report))?;
    }
    Ok(ExitCode::from(if matches!(found, Knee::BelowAll(_)) { EXIT_GATE } else { 0 }))
}

fn check(args: &SearchArgs) -> Result<(), Error> {
    let schedule = &args.run.schedule;
    let chosen = schedule.rate.is_some()
        || schedule.rate_shape.is_some()
        || schedule.concurrency.is_some()
        || schedule.users.is_some();
    let usage = |text: &str| Err(Error::Usage(text.into()));
    if args.run.output.slo.is_none() {
        return usage("say what must hold: --slo 'ttft.p99<500ms'");
    }
    if chosen {
        return usage(
            "search chooses the load: write --over, --from and --to in place of a rate or concurrency",
        );
    }
    if args.run.output.records.is_some() {
        return usage("--records is for run: a search has many runs");
    }
    if args.range.from > args.range.to {
        return usage("--from must not be above --to");
    }
    if schedule.requests.is_none() && schedule.duration.is_none() {
        return usage("say how long one probe is: --requests N or --duration TIME");
    }
    Ok(())
}

/// A probe that can be trusted: one that was sent too late is repeated with another seed, a few times.
async fn valid_probe(
    args: &SearchArgs,
    load: f64,
    seeds: &mut impl Iterator<Item = u64>,
) -> Result<ProbeReport, Error> {
    let mut attempt = 1;
    loop {
        match probe(args, load, seeds.next().unwrap_or_default()).await {
            Err(Error::Invalid(_)) if attempt < limits::SEARCH_ATTEMPTS_MAX => attempt += 1,
            result => return result,
        }
    }
}

async fn probe(args: &SearchArgs, load: f64, seed: u64) -> Result<ProbeReport, Error> {
    let mut run = args.run.clone();
    match args.range.over {
        Over::Rate => run.schedule.rate = Some(load),
        Over::Concurrency => run.schedule.concurrency = Some(load as u32),
    }
    run.workload = run.workload.nth(seed.wrapping_sub(args.run.workload.seed));
    run.workload.seed = seed;
    run.output.dir = None;
    let plan = Plan::new(&run)?;
    let planned = plan.requests().unwrap_or(u64::MAX / 4);
    let patience = Patience { misses_max: misses_max(&run, args.range.attain, planned) };
    let output = Output::open(&run.output)?;
    let Measured { report, text, slo, gave_up } = run::measure(&run, plan, output, Some(patience)).await?;
    let is_trusted = match report.verdict.status {
        Status::Invalid => false,
        Status::Warm => text.chosen,
        Status::Valid | Status::Failed | Status::Interrupted => true,
    };
    if !is_trusted {
        return Err(Error::Invalid(format!("at {load}: {}", report.verdict.reason)));
    }
    let slo = slo.unwrap_or_default();
    Ok(ProbeReport {
        load,
        seed,
        attainment: if slo.of == 0 { 0.0 } else { slo.attainment(args.range.attain) },
        met: slo.met,
        of: slo.of,
        ended_early: gave_up,
        ttft_p50: report.response.ttft.map(|ttft| ttft.p50),
        ttft_p99: report.response.ttft.map(|ttft| ttft.p99),
        e2e_p50: report.response.e2e.map(|e2e| e2e.p50),
        e2e_p99: report.response.e2e.map(|e2e| e2e.p99),
        requests_per_s: report.throughput.requests_per_s,
    })
}

/// Twice the misses that every bound together may have, and some more: a probe near the edge is measured to
/// its end.
fn misses_max(run: &RunArgs, attain: f64, planned: u64) -> u64 {
    let bounds = run.output.slo.iter().flat_map(|slo| &slo.bounds);
    let may_miss = bounds.map(|bound| 1.0 - bound.share().unwrap_or(attain));
    (may_miss.sum::<f64>() * planned as f64 * 2.0) as u64 + 20
}

fn report(args: &SearchArgs, found: Knee, probes: Vec<ProbeReport>) -> SearchReport {
    let (result, load, bracket) = match found {
        Knee::Knee { load, low, high } => ("knee", load, Some((low, high))),
        Knee::AboveAll(load) => ("above-all", load, None),
        Knee::BelowAll(load) => ("below-all", load, None),
    };
    SearchReport {
        format: FORMAT.into(),
        over: over(args.range.over).into(),
        slo: args.run.output.slo.as_ref().map(ToString::to_string).unwrap_or_default(),
        attain: args.range.attain,
        result: result.into(),
        load,
        bracket,
        probes,
    }
}

fn over(over: Over) -> &'static str {
    match over {
        Over::Rate => "rate",
        Over::Concurrency => "concurrency",
    }
}

impl ProbeReport {
    /// The time to the first token, median and 99th percentile, or of answers without one to their end;
    /// behind its name.
    fn first(&self) -> (&'static str, Option<f64>, Option<f64>) {
        match self.ttft_p50 {
            Some(_) => ("TTFT", self.ttft_p50, self.ttft_p99),
            None => ("E2E", self.e2e_p50, self.e2e_p99),
        }
    }
}

fn line(probe: &ProbeReport) -> String {
    let ms = |value: Option<f64>| value.map_or_else(|| "-".into(), |ms| format!("{ms:.1}"));
    let (name, p50, p99) = probe.first();
    let mut line = format!(
        "{:>10.3}  attainment {:.4}  {}/{} kept  {name} p50 {} p99 {} ms  {:.2} answers/s",
        probe.load,
        probe.attainment,
        probe.met,
        probe.of,
        ms(p50),
        ms(p99),
        probe.requests_per_s
    );
    let _ = writeln!(line, "{}", if probe.ended_early { "  (ended early)" } else { "" });
    line
}

fn render(report: &SearchReport) -> String {
    let SearchReport { over, slo, load, .. } = report;
    match (report.result.as_str(), report.bracket) {
        ("knee", Some((low, high))) => {
            format!("\nmost {over} that keeps {slo}: {load:.3} (kept at {low:.3}, lost at {high:.3})\n")
        }
        ("above-all", _) => format!("\n{slo} is kept at {over} {load:.3}, the highest allowed: raise --to\n"),
        _ => format!("\n{slo} is kept at no {over}: lost at {load:.3} already\n"),
    }
}
