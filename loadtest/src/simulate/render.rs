//! Simulated runs as a table for people. Computes nothing.

use std::fmt::Write as _;

use super::{outcome::Figures, report::SimulationReport};

/// Renders `report` as a table with a line for each fleet.
pub(super) fn render(report: &SimulationReport) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &SimulationReport, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "{}: {} requests at {:.2}/s, {} prompt and {} output tokens",
        report.trace, report.requests, report.rate_per_s, report.prompt_tokens, report.output_tokens
    )?;
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
