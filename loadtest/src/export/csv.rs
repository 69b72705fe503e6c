//! A report as lines of `metric,statistic,unit,value`, for spreadsheets and scripts.

use std::fmt::Write as _;

use crate::{report::Report, stats::Summary};

/// Renders `report` as CSV with a header line; times are in milliseconds.
pub fn render(report: &Report) -> String {
    let mut out = String::from("metric,statistic,unit,value\n");
    let mut add = |metric: &str, statistic: &str, unit: &str, value: f64| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{metric},{statistic},{unit},{value}");
    };
    for (metric, summary) in times(report) {
        let Some(Summary { n, mean, std, p50, p90, p95, p99, max }) = summary else { continue };
        add(metric, "count", "1", n as f64);
        for (statistic, ms) in [
            ("mean", mean),
            ("std", std),
            ("p50", p50),
            ("p90", p90),
            ("p95", p95),
            ("p99", p99),
            ("max", max),
        ] {
            add(metric, statistic, "ms", ms);
        }
    }
    let requests = report.requests;
    for (metric, count) in [
        ("requests_sent", requests.sent),
        ("requests_ok", requests.ok),
        ("requests_failed", requests.failed),
        ("prompt_tokens", report.tokens.prompt),
        ("output_tokens", report.tokens.completion),
    ] {
        add(metric, "sum", "1", count as f64);
    }
    if let Some(sessions) = &report.sessions {
        for (metric, count) in [
            ("sessions_begun", sessions.begun),
            ("sessions_ended", sessions.ended),
            ("sessions_failed", sessions.failed),
            ("turns_not_sent", sessions.turns_not_sent),
        ] {
            add(metric, "sum", "1", count as f64);
        }
    }
    let rates = report.throughput;
    add("requests", "rate", "1/s", rates.requests_per_s);
    add("prompt_tokens", "rate", "1/s", rates.prompt_tokens_per_s);
    add("output_tokens", "rate", "1/s", rates.output_tokens_per_s);
    for (metric, share) in [
        ("cached", report.cache.achieved),
        ("cached_possible", report.cache.possible),
        ("goodput", report.goodput.as_ref().map(|goodput| goodput.share)),
    ] {
        if let Some(share) = share {
            add(metric, "share", "1", share);
        }
    }
    out
}

/// Every time of a report by its name.
pub fn times(report: &Report) -> [(&'static str, Option<Summary>); 10] {
    let sessions = report.sessions.as_ref();
    [
        ("response_ttft", report.response.ttft),
        ("service_ttft", report.service.ttft),
        ("response_e2e", report.response.e2e),
        ("service_e2e", report.service.e2e),
        ("ttst", report.ttst),
        ("itl", report.itl),
        ("tpot", report.tpot),
        ("schedule_lag", report.schedule_lag.lag),
        ("session_completion", sessions.and_then(|sessions| sessions.completion)),
        ("session_tools", sessions.and_then(|sessions| sessions.tools)),
    ]
}
