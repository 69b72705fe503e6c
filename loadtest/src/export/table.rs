//! The report as text for a person: what a terminal shows when a run ends. Computes nothing.

use std::fmt::Write as _;

use crate::{
    report::{Report, Status},
    stats::{self, Summary},
    tally::sessions::SessionsReport,
};

/// Renders `report` as lines of plain text; times are in milliseconds.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &Report, out: &mut String) -> std::fmt::Result {
    let (config, requests) = (&report.config, &report.requests);
    writeln!(out, "{} at {}, model {}", config.describe(), config.url, config.model)?;
    writeln!(
        out,
        "requests   {} scheduled, {} sent, {} ok, {} failed, {} cancelled in {:.1} s",
        requests.scheduled, requests.sent, requests.ok, requests.failed, requests.cancelled, report.elapsed_s
    )?;
    if requests.warmup > 0 {
        writeln!(out, "           {} more warmed up and count in no figure", requests.warmup)?;
    }
    for error in &report.errors {
        writeln!(out, "  error    {} x {}: {}", error.count, error.class, error.samples.join(" | "))?;
    }
    if !report.merged.is_empty() {
        let runs: Vec<&str> = report.merged.iter().map(|run| run.run.as_str()).collect();
        writeln!(out, "merged     {} runs: {}", runs.len(), runs.join(", "))?;
    }
    tokens(report, out)?;
    latencies(report, out)?;
    goodput(report, out)?;
    cache(report, out)?;
    sessions(report, out)?;
    workers(report, out)?;
    let word = match report.verdict.status {
        Status::Valid => "valid",
        Status::Invalid => "INVALID",
        Status::Warm => "WARM",
        Status::Failed => "FAILED",
        Status::Interrupted => "interrupted",
    };
    writeln!(out, "\nverdict    {word}: {}", report.verdict.reason)
}

/// How many there were, and how many a second; of embeddings nothing is generated.
fn tokens(report: &Report, out: &mut String) -> std::fmt::Result {
    let (tokens, calibration, rates) = (&report.tokens, &report.calibration, &report.throughput);
    write!(
        out,
        "tokens     {} prompt ({} wanted; {:.3} bytes a token, template {})",
        tokens.prompt, tokens.prompt_wanted, calibration.bytes_per_token, calibration.overhead_tokens
    )?;
    let generates = report.config.endpoint.generates();
    if generates {
        write!(out, ", {} generated", tokens.completion)?;
    }
    write!(
        out,
        "\nrates      {:.2} requests/s, {:.0} prompt tokens/s",
        rates.requests_per_s, rates.prompt_tokens_per_s
    )?;
    if generates {
        write!(out, ", {:.0} generated tokens/s", rates.output_tokens_per_s)?;
    }
    writeln!(out)
}

fn latencies(report: &Report, out: &mut String) -> std::fmt::Result {
    let columns = ["mean", "p50", "p90", "p95", "p99", "max"];
    write!(out, "\n{:<24}", "milliseconds")?;
    columns.iter().try_for_each(|name| write!(out, "{name:>10}"))?;
    writeln!(out)?;
    let generates = report.config.endpoint.generates();
    for (name, summary, of_tokens) in [
        ("TTFT response", report.response.ttft, true),
        ("TTFT service", report.service.ttft, true),
        ("end to end response", report.response.e2e, false),
        ("end to end service", report.service.e2e, false),
        ("first to second", report.ttst, true),
        ("between text events", report.itl, true),
        ("per output token", report.tpot, true),
        ("schedule lag", report.schedule_lag.lag, false),
    ] {
        if of_tokens && !generates {
            continue;
        }
        write!(out, "{name:<24}")?;
        match summary {
            Some(Summary { mean, p50, p90, p95, p99, max, .. }) => {
                [mean, p50, p90, p95, p99, max].iter().try_for_each(|ms| write!(out, "{ms:>10.2}"))?;
            }
            None => write!(out, "{:>10}", "-")?,
        }
        writeln!(out)?;
    }
    writeln!(out, "(response: from when a request was due; service: from when it was sent)")?;
    let answers = report.response.e2e.map_or(0, |e2e| e2e.n);
    let needed = stats::values_min(99.0) as u64;
    if answers < needed {
        writeln!(
            out,
            "(p99 of {answers} answers is little more than the slowest: it takes {needed} to compare it)"
        )?;
    }
    Ok(())
}

fn goodput(report: &Report, out: &mut String) -> std::fmt::Result {
    let Some(goodput) = &report.goodput else { return Ok(()) };
    write!(
        out,
        "\ngoodput    {:.1} % of {} requests keep {}: {:.2} requests/s",
        goodput.share * 100.0,
        goodput.of,
        goodput.slo,
        goodput.requests_per_s
    )?;
    if report.config.endpoint.generates() {
        write!(out, ", {:.0} generated tokens/s", goodput.output_tokens_per_s)?;
    }
    writeln!(out)?;
    for bound in &goodput.bounds {
        let verdict = bound.holds.map_or("", |holds| if holds { ", holds" } else { ", BROKEN" });
        writeln!(out, "           {:.2} % keep {}{verdict}", bound.share * 100.0, bound.bound)?;
    }
    Ok(())
}

fn cache(report: &Report, out: &mut String) -> std::fmt::Result {
    let cache = &report.cache;
    if cache.achieved.is_none() && !report.config.endpoint.generates() {
        return Ok(());
    }
    let percent =
        |share: Option<f64>| share.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0));
    writeln!(out, "\ncached     {} of prompt tokens", percent(cache.achieved))?;
    writeln!(out, "possible   {}; achieved {} of it", percent(cache.possible), percent(cache.of_possible))?;
    if let Some(blocks) = cache.pooled_lru_blocks {
        let (share, of) = (percent(cache.pooled_lru), percent(cache.of_pooled_lru));
        writeln!(out, "pooled LRU {share} with {blocks} blocks; achieved {of} of it")?;
    }
    Ok(())
}

fn sessions(report: &Report, out: &mut String) -> std::fmt::Result {
    let Some(sessions) = &report.sessions else { return Ok(()) };
    let SessionsReport { begun, ended, failed, unfinished, turns, turns_not_sent, .. } = sessions;
    writeln!(out, "\nsessions   {begun} begun, {ended} ended, {failed} failed, {unfinished} unfinished")?;
    writeln!(out, "           {turns} turns sent, {turns_not_sent} not sent behind a failed one")?;
    let seconds = |ms: f64| ms / 1e3;
    for (name, summary) in [("completion", sessions.completion), ("in tools", sessions.tools)] {
        let Some(Summary { p50, p90, p99, .. }) = summary else { continue };
        let [p50, p90, p99] = [p50, p90, p99].map(seconds);
        writeln!(out, "{name:<11}p50 {p50:.2} s, p90 {p90:.2} s, p99 {p99:.2} s a session")?;
    }
    writeln!(
        out,
        "{:<10}{:>8}{:>12}{:>10}{:>10}{:>10}{:>10}",
        "turn", "n", "TTFT p50", "p90", "p99", "cached", "possible"
    )?;
    for row in &sessions.by_turn {
        let Some(Summary { n, p50, p90, p99, .. }) = row.ttft else { continue };
        let share =
            |share: Option<f64>| share.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0));
        let (cached, possible) = (share(row.cached()), share(row.possible()));
        writeln!(
            out,
            "{:<10}{n:>8}{p50:>12.2}{p90:>10.2}{p99:>10.2}{cached:>10}{possible:>10}",
            row.numbers()
        )?;
    }
    Ok(())
}

fn workers(report: &Report, out: &mut String) -> std::fmt::Result {
    let workers = &report.workers;
    if workers.list.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:<24}{:>10}{:>16}{:>10}", "worker", "requests", "prompt tokens", "cached")?;
    for row in &workers.list {
        let cached = row.cached_tokens as f64 * 100.0 / row.prompt_tokens.max(1) as f64;
        writeln!(out, "{:<24}{:>10}{:>16}{:>8.1} %", row.worker, row.requests, row.prompt_tokens, cached)?;
    }
    workers.max_over_mean.map_or(Ok(()), |ratio| writeln!(out, "busiest / mean {ratio:.2} (prompt tokens)"))
}
