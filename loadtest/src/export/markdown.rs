//! A report as Markdown tables.

use std::fmt::Write as _;

use super::csv::times;
use crate::{report::Report, stats::Summary};

/// Renders `report` as Markdown: a heading, the verdict, and tables.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &Report, out: &mut String) -> std::fmt::Result {
    let requests = report.requests;
    let status = format!("{:?}", report.verdict.status).to_lowercase();
    writeln!(out, "# {}\n", cell(&report.config.describe()))?;
    writeln!(
        out,
        "Model {} at {}. **{status}**: {}.\n",
        cell(&report.config.model),
        cell(&report.config.url),
        cell(&report.verdict.reason)
    )?;
    writeln!(
        out,
        "| milliseconds | n | mean | p50 | p90 | p95 | p99 | max |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )?;
    for (name, summary) in times(report) {
        let Some(Summary { n, mean, p50, p90, p95, p99, max, .. }) = summary else { continue };
        writeln!(out, "| {name} | {n} | {mean:.2} | {p50:.2} | {p90:.2} | {p95:.2} | {p99:.2} | {max:.2} |")?;
    }
    writeln!(out, "\n`response` counts from when a request was due, `service` from when it was sent.\n")?;
    writeln!(out, "| | |\n|---|--:|")?;
    writeln!(out, "| requests sent, ok, failed | {}, {}, {} |", requests.sent, requests.ok, requests.failed)?;
    writeln!(out, "| requests/s | {:.2} |", report.throughput.requests_per_s)?;
    writeln!(out, "| generated tokens/s | {:.1} |", report.throughput.output_tokens_per_s)?;
    writeln!(out, "| prompt tokens/s | {:.1} |", report.throughput.prompt_tokens_per_s)?;
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    if let Some(goodput) = &report.goodput {
        let text = format!("{} ({:.2} requests/s)", percent(goodput.share), goodput.requests_per_s);
        writeln!(out, "| keep {} | {text} |", cell(&goodput.slo))?;
    }
    for (name, share) in [("cached", report.cache.achieved), ("cached, best possible", report.cache.possible)]
    {
        if let Some(share) = share {
            writeln!(out, "| {name} | {} |", percent(share))?;
        }
    }
    if !report.errors.is_empty() {
        writeln!(out, "\n| failures | count | sample |\n|---|--:|---|")?;
        for error in &report.errors {
            let sample = error.samples.first().map_or("", String::as_str);
            writeln!(out, "| {} | {} | {} |", cell(&error.class), error.count, cell(sample))?;
        }
    }
    Ok(())
}

/// Text that cannot end its cell or become markup.
fn cell(text: &str) -> String {
    text.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_cannot_leave_its_cell() {
        let text = render(&crate::export::tests::report());
        assert!(text.contains("&lt;script>") && !text.contains("<script"));
        assert_eq!(cell("a|b\nc\\"), "a\\|b c\\\\");
    }
}
