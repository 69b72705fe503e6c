//! Simulated runs as a table for people. Computes nothing.

use std::fmt::Write as _;

use super::{outcome::Figures, report::SimulationReport};
use crate::stats::Summary;

/// Renders `report` as a table with a line for each fleet.
pub(super) fn render(report: &SimulationReport) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &SimulationReport, out: &mut String) -> std::fmt::Result {
    write!(out, "{}: {} requests", report.trace, report.requests)?;
    if report.rate_per_s > 0.0 {
        write!(out, " at {:.2}/s", report.rate_per_s)?;
    }
    writeln!(out, ", {} prompt and {} output tokens", report.prompt_tokens, report.output_tokens)?;
    writeln!(
        out,
        "workers    {}, {} KV blocks of {} tokens each",
        report.profile, report.kv_blocks, report.block_tokens
    )?;
    writeln!(out, "possible   {:.1} % of prompt tokens with one unbounded cache", report.possible * 100.0)?;
    writeln!(out, "SLO        {}\n", report.slo)?;
    writeln!(
        out,
        "{:<14}{:>8}{:>9}{:>12}{:>9}{:>9}{:>9}{:>11}{:>8}{:>8}{:>10}{:>7}",
        "policy",
        "workers",
        "cached",
        "TTFT mean",
        "p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "good",
        "max/mean",
        "SLO"
    )?;
    report.runs.iter().try_for_each(|figures| line(figures, out))?;
    writeln!(
        out,
        "\nTimes in ms of virtual time, from arrival; good: requests that meet the SLO's bounds by themselves;"
    )?;
    writeln!(out, "max/mean: prompt tokens of the busiest worker over the mean")?;
    for run in &report.runs {
        if let Some(off) = run.ttft_off {
            let (policy, workers, off) = (&run.policy, run.workers, off * 100.0);
            writeln!(
                out,
                "{policy}, {workers} workers: predicted times to first token were off by {off:.1} %"
            )?;
        }
    }
    sessions(report, out)?;
    moves(report, out)?;
    for found in &report.found {
        match found.workers {
            Some(workers) => writeln!(out, "\n{} needs {workers} workers for {}", found.policy, report.slo)?,
            None => writeln!(
                out,
                "\n{} does not meet {} even with {} workers",
                found.policy, report.slo, found.workers_max
            )?,
        }
    }
    Ok(())
}

/// What came of sessions, where there are any.
fn sessions(report: &SimulationReport, out: &mut String) -> std::fmt::Result {
    let told = report.runs.iter().filter_map(|run| Some((run, run.sessions.as_ref()?)));
    for (n, (run, figures)) in told.enumerate() {
        if n == 0 {
            writeln!(
                out,
                "\n{:<14}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>10}{:>9}{:>9}{:>9}{:>8}{:>9}{:>9}",
                "sessions",
                "ended",
                "a s",
                "req/s",
                "cached",
                "possible",
                "optimum",
                "hindsight",
                "job p50",
                "p90",
                "p99",
                "paused",
                "longest",
                "preempt"
            )?;
        }
        let percent =
            |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.1} %", share * 100.0));
        let seconds = |ms: f64| format!("{:.1}", ms / 1e3);
        let job = |of: fn(&Summary) -> f64| figures.job.as_ref().map_or("-".into(), |job| seconds(of(job)));
        writeln!(
            out,
            "{:<14}{:>8}{:>8.2}{:>8.1}{:>9}{:>9}{:>9}{:>10}{:>9}{:>9}{:>9}{:>8}{:>9}{:>9}",
            run.policy,
            figures.ended,
            figures.sessions_per_s,
            figures.requests_per_s,
            percent(Some(figures.cached)),
            percent(Some(figures.possible)),
            percent(figures.optimum),
            percent(figures.hindsight),
            job(|job| job.p50),
            job(|job| job.p90),
            job(|job| job.p99),
            figures.paused.map_or(0, |paused| paused.n),
            figures.paused.map_or("-".into(), |paused| seconds(paused.max)),
            run.preemptions
        )?;
    }
    later_turns(report, out)
}

/// What became of turns that go on from an answer, where there are any.
fn later_turns(report: &SimulationReport, out: &mut String) -> std::fmt::Result {
    let told = report.runs.iter().filter_map(|run| Some((run, run.sessions.as_ref()?.later_turns?)));
    for (n, (run, later)) in told.enumerate() {
        if n == 0 {
            writeln!(
                out,
                "\n{:<14}{:>10}{:>9}{:>10}{:>13}",
                "later turns", "requests", "cached", "possible", "same worker"
            )?;
        }
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        writeln!(
            out,
            "{:<14}{:>10}{:>9}{:>10}{:>13}",
            run.policy,
            later.requests,
            percent(later.cached),
            percent(later.possible),
            percent(later.same_worker)
        )?;
    }
    Ok(())
}

/// What went from one worker to another, and how long clients waited between tokens, where any was asked for.
fn moves(report: &SimulationReport, out: &mut String) -> std::fmt::Result {
    let moved = report.runs.iter().filter(|run| run.itl.is_some() || run.split + run.pulled > 0);
    for (n, run) in moved.enumerate() {
        if n == 0 {
            writeln!(
                out,
                "\n{:<14}{:>9}{:>9}{:>14}{:>10}{:>9}{:>9}",
                "KV moved", "split", "pulled", "tokens", "ITL p50", "p99", "max"
            )?;
        }
        let itl =
            |of: fn(&Summary) -> f64| run.itl.as_ref().map_or("-".into(), |itl| format!("{:.1}", of(itl)));
        let share = |count: u64| format!("{:.1} %", count as f64 / run.requests.max(1) as f64 * 100.0);
        writeln!(
            out,
            "{:<14}{:>9}{:>9}{:>14}{:>10}{:>9}{:>9}",
            run.policy,
            share(run.split),
            share(run.pulled),
            run.moved_tokens,
            itl(|itl| itl.p50),
            itl(|itl| itl.p99),
            itl(|itl| itl.max)
        )?;
    }
    Ok(())
}

fn line(figures: &Figures, out: &mut String) -> std::fmt::Result {
    let cell = |value: Option<f64>| value.map_or_else(|| "-".into(), |ms| format!("{ms:.1}"));
    let (ttft, tpot) = (figures.ttft, figures.tpot);
    writeln!(
        out,
        "{:<14}{:>8}{:>7.1} %{:>12}{:>9}{:>9}{:>9}{:>11}{:>8}{:>6.1} %{:>10.2}{:>7}",
        figures.policy,
        figures.workers,
        figures.cached * 100.0,
        cell(ttft.map(|s| s.mean)),
        cell(ttft.map(|s| s.p50)),
        cell(ttft.map(|s| s.p90)),
        cell(ttft.map(|s| s.p99)),
        cell(tpot.map(|s| s.p50)),
        cell(tpot.map(|s| s.p90)),
        figures.good * 100.0,
        figures.max_over_mean,
        if figures.slo_met { "met" } else { "missed" }
    )
}
