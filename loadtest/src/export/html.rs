//! A report as one HTML page: figures, plots and tables, light or dark as the reader's system is. It loads
//! nothing and runs no script, and everything a server said is escaped.

use std::fmt::Write as _;

use super::{csv::times, plots};
use crate::{
    draw::{
        page,
        svg::{escape, short},
    },
    report::{Report, Status},
    stats::Summary,
};

/// Renders `report` as one HTML page that needs no other file.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &Report, out: &mut String) -> std::fmt::Result {
    let title = escape(&report.config.describe());
    page::begin(&title, out)?;
    head(report, &title, out)?;
    cards(report, out)?;
    page::plots("Distributions", plots::distributions(report), out)?;
    page::plots("Over time", plots::timelines(report), out)?;
    figures(report, out)?;
    objective(report, out)?;
    sessions(report, out)?;
    workers(report, out)?;
    scraped(report, out)?;
    errors(report, out)?;
    options(report, out)?;
    page::end(out)
}

fn head(report: &Report, title: &str, out: &mut String) -> std::fmt::Result {
    let (class, word) = match report.verdict.status {
        Status::Valid => ("good", "valid"),
        Status::Invalid => ("bad", "invalid"),
        Status::Warm => ("warn", "warm"),
        Status::Failed => ("bad", "failed"),
        Status::Interrupted => ("warn", "interrupted"),
    };
    let (model, url) = (escape(&report.config.model), escape(&report.config.url));
    writeln!(out, "<h1>{title}</h1>\n<p class=\"sub\">{model} at {url}</p>")?;
    writeln!(out, r#"<p class="verdict {class}"><b>{word}</b> {}</p>"#, escape(&report.verdict.reason))
}

fn cards(report: &Report, out: &mut String) -> std::fmt::Result {
    let ms = |summary: Option<Summary>, of: fn(&Summary) -> f64| {
        summary.map_or_else(|| "-".into(), |summary| format!("{:.1} ms", of(&summary)))
    };
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let requests = report.requests;
    let rates = report.throughput;
    let mut cards = if report.config.endpoint.generates() {
        vec![
            ("TTFT median", ms(report.response.ttft, |s| s.p50)),
            ("TTFT 99th percentile", ms(report.response.ttft, |s| s.p99)),
            ("per output token, median", ms(report.tpot, |s| s.p50)),
            ("generated tokens/s", short(rates.output_tokens_per_s)),
        ]
    } else {
        vec![
            ("end to end, median", ms(report.response.e2e, |s| s.p50)),
            ("end to end, 99th percentile", ms(report.response.e2e, |s| s.p99)),
            ("prompt tokens/s", short(rates.prompt_tokens_per_s)),
        ]
    };
    cards.push(("requests/s", short(rates.requests_per_s)));
    let all = requests.ok + requests.failed + requests.cancelled;
    cards.push(("answered", format!("{} of {all}", requests.ok)));
    if let Some(goodput) = &report.goodput {
        cards.push(("keep the objective", percent(goodput.share)));
    }
    if let Some(sessions) = &report.sessions {
        cards.push(("sessions ended", format!("{} of {}", sessions.ended, sessions.begun)));
        cards.push(("session, median", ms(sessions.completion, |s| s.p50)));
    }
    if let Some(achieved) = report.cache.achieved {
        let of =
            report.cache.possible.map_or_else(String::new, |possible| format!(" of {}", percent(possible)));
        cards.push(("cached, of possible", percent(achieved) + &of));
    }
    writeln!(out, r#"<div class="cards">"#)?;
    for (name, value) in cards {
        writeln!(out, r#"<div class="card"><span>{name}</span><b>{value}</b></div>"#)?;
    }
    writeln!(out, "</div>")
}

fn figures(report: &Report, out: &mut String) -> std::fmt::Result {
    writeln!(out, "<h2>Times in milliseconds</h2>\n<div class=\"scroll\"><table>")?;
    writeln!(
        out,
        "<tr><th></th><th>n</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th><th>max</th></tr>"
    )?;
    for (name, summary) in times(report) {
        let Some(Summary { n, mean, p50, p90, p95, p99, max, .. }) = summary else { continue };
        write!(out, "<tr><td>{}</td><td>{n}</td>", name.replace('_', " "))?;
        [mean, p50, p90, p95, p99, max].iter().try_for_each(|ms| write!(out, "<td>{ms:.2}</td>"))?;
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table></div>")?;
    writeln!(
        out,
        r#"<p class="sub">response: from when a request was due; service: from when it was sent</p>"#
    )
}

fn objective(report: &Report, out: &mut String) -> std::fmt::Result {
    let Some(goodput) = &report.goodput else { return Ok(()) };
    writeln!(
        out,
        "<h2>Objective</h2>\n<div class=\"scroll\"><table>\n<tr><th>bound</th><th>kept by</th><th></th></tr>"
    )?;
    for bound in &goodput.bounds {
        let holds = bound.holds.map_or("", |holds| if holds { "holds" } else { "broken" });
        let share = bound.share * 100.0;
        writeln!(out, "<tr><td>{}</td><td>{share:.2} %</td><td>{holds}</td></tr>", escape(&bound.bound))?;
    }
    writeln!(out, "</table></div>")
}

fn sessions(report: &Report, out: &mut String) -> std::fmt::Result {
    let Some(sessions) = &report.sessions else { return Ok(()) };
    writeln!(out, "<h2>Sessions</h2>")?;
    writeln!(
        out,
        r#"<p class="sub">{} begun, {} ended, {} failed, {} unfinished; {} turns sent, {} not sent behind a failed one</p>"#,
        sessions.begun,
        sessions.ended,
        sessions.failed,
        sessions.unfinished,
        sessions.turns,
        sessions.turns_not_sent
    )?;
    let heads = ["turn", "n", "TTFT p50", "p90", "p99", "cached", "possible"];
    let percent =
        |share: Option<f64>| share.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0));
    let rows = sessions.by_turn.iter().filter_map(|row| {
        let Summary { n, p50, p90, p99, .. } = row.ttft?;
        let times = [p50, p90, p99].map(|ms| format!("{ms:.2}"));
        let shares = [percent(row.cached()), percent(row.possible())];
        Some([row.numbers(), n.to_string()].into_iter().chain(times).chain(shares).collect())
    });
    page::table(&heads, rows, out)?;
    writeln!(
        out,
        r#"<p class="sub">By the number of the turn in its agent; times in milliseconds, from when turns were due</p>"#
    )
}

fn workers(report: &Report, out: &mut String) -> std::fmt::Result {
    let list = &report.workers.list;
    let Some(most) = list.iter().map(|row| row.prompt_tokens).max().filter(|&most| most > 0) else {
        return Ok(());
    };
    writeln!(out, "<h2>Workers</h2>\n<div class=\"scroll\"><table>")?;
    writeln!(
        out,
        "<tr><th>worker</th><th>requests</th><th>prompt tokens</th><th>cached</th><th>share</th></tr>"
    )?;
    for row in list {
        let cached = row.cached_tokens as f64 * 100.0 / row.prompt_tokens.max(1) as f64;
        let width = row.prompt_tokens as f64 * 100.0 / most as f64;
        let (name, requests, tokens) = (escape(&row.worker), row.requests, row.prompt_tokens);
        writeln!(
            out,
            "<tr><td>{name}</td><td>{requests}</td><td>{tokens}</td><td>{cached:.1} %</td>\
             <td class=\"bar\"><i style=\"width:{width:.1}%\"></i></td></tr>"
        )?;
    }
    writeln!(out, "</table></div>")
}

/// What servers told of themselves.
fn scraped(report: &Report, out: &mut String) -> std::fmt::Result {
    for server in &report.scraped {
        writeln!(out, "<h2>Metrics of {}</h2>", escape(&server.url))?;
        let reason =
            server.error.as_deref().map_or_else(String::new, |error| format!(" ({})", escape(error)));
        writeln!(
            out,
            "<p class=\"sub\">read {} times, {} times in vain{reason}; {} more metrics moved</p>",
            server.scrapes, server.failed, server.left_out
        )?;
        page::plots("Gauges", plots::gauges(server), out)?;
        writeln!(out, "<details><summary>All that moved</summary><div class=\"scroll\"><table>")?;
        writeln!(
            out,
            "<tr><th>metric</th><th>added</th><th>min</th><th>mean</th><th>max</th><th>last</th></tr>"
        )?;
        for metric in &server.series {
            let added = metric.added.map_or_else(|| "-".into(), short);
            let [min, mean, max, last] = [metric.min, metric.mean, metric.max, metric.last].map(short);
            let name = escape(&metric.name);
            writeln!(
                out,
                "<tr><td>{name}</td><td>{added}</td><td>{min}</td><td>{mean}</td><td>{max}</td><td>{last}</td></tr>"
            )?;
        }
        writeln!(out, "</table></div></details>")?;
    }
    Ok(())
}

fn errors(report: &Report, out: &mut String) -> std::fmt::Result {
    if report.errors.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>Failures</h2>\n<div class=\"scroll\"><table>")?;
    writeln!(out, "<tr><th>class</th><th>count</th><th>samples</th></tr>")?;
    for error in &report.errors {
        let samples: Vec<_> = error.samples.iter().map(|sample| escape(sample)).collect();
        let (class, count) = (escape(&error.class), error.count);
        writeln!(
            out,
            "<tr><td>{class}</td><td>{count}</td><td class=\"text\">{}</td></tr>",
            samples.join("<br>")
        )?;
    }
    writeln!(out, "</table></div>")
}

fn options(report: &Report, out: &mut String) -> std::fmt::Result {
    writeln!(out, "<details><summary>Options and identity</summary>\n<div class=\"scroll\"><table>")?;
    let config = serde_json::to_value(&report.config).unwrap_or_default();
    let given = config.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    for (name, value) in given {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        writeln!(out, "<tr><td>{name}</td><td class=\"text\">{}</td></tr>", escape(&value))?;
    }
    let workload = &report.workload;
    for (name, value) in [("body hash", &workload.body_hash), ("fingerprint", &workload.fingerprint)] {
        writeln!(out, "<tr><td>{name}</td><td class=\"text\">{}</td></tr>", escape(value))?;
    }
    writeln!(out, "<tr><td>version</td><td class=\"text\">{}</td></tr>", escape(&report.version))?;
    writeln!(out, "</table></div></details>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_stands_alone_and_runs_nothing() {
        let page = render(&crate::export::tests::report());
        for forbidden in ["<script", "http://", "https://", "@import", "url("] {
            let found = page.find(forbidden).map(|at| &page[at..(at + 60).min(page.len())]);
            assert_eq!(found, None, "{forbidden}");
        }
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && page.contains("m&lt;1&gt;"));
        assert_eq!(page.matches("<svg").count(), 8);
        for tag in ["svg", "table", "figure", "div", "tr", "td", "details", "main", "body", "html"] {
            let (open, close) =
                (page.matches(&format!("<{tag}")).count(), page.matches(&format!("</{tag}>")).count());
            // `<tr` and `<td` begin no other tag here, `<html` and `<head` differ.
            assert_eq!(open, close, "{tag}");
        }
    }
}
