//! A search as one HTML page: every load tried and how well it kept the objective. Measures nothing.

use std::fmt::Write as _;

use super::{ProbeReport, SearchReport};
use crate::draw::{
    page,
    svg::{Axis, AxisScale, Line, Plot, escape},
};

/// Renders `report` as one HTML page: the load found, plots, and a row for each probe.
pub fn render(report: &SearchReport) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &SearchReport, out: &mut String) -> std::fmt::Result {
    let title = format!("most {} that keeps {}", report.over, escape(&report.slo));
    page::begin(&title, out)?;
    writeln!(out, "<h1>{title}</h1>")?;
    let (class, words) = match (report.result.as_str(), report.bracket) {
        ("knee", Some((low, high))) => ("good", format!("kept at {low:.3}, lost at {high:.3}")),
        ("above-all", _) => ("warn", "kept at the highest load allowed".into()),
        _ => ("bad", "lost at the lowest load tried".into()),
    };
    writeln!(out, r#"<p class="verdict {class}"><b>{:.3}</b> {words}</p>"#, report.load)?;
    page::plots("Probes", plots(report), out)?;
    writeln!(out, "<h2>Every load tried, in order</h2>")?;
    let first = format!("{} p50 ms", report.probes.first().map_or("TTFT", |probe| probe.first().0));
    let heads = ["load", "attainment", "kept", "of", &first, "p99 ms", "answers/s", "seed", ""];
    page::table(&heads, report.probes.iter().map(cells), out)?;
    writeln!(
        out,
        "<p class=\"sub\">attainment: share of requests that kept the objective over the share that must; 1 keeps it</p>"
    )?;
    page::end(out)
}

fn plots(report: &SearchReport) -> Vec<(&'static str, Plot)> {
    let mut probes: Vec<&ProbeReport> = report.probes.iter().collect();
    probes.sort_by(|a, b| a.load.total_cmp(&b.load));
    let points = |of: &dyn Fn(&ProbeReport) -> Option<f64>| -> Vec<(f64, f64)> {
        probes.iter().filter_map(|probe| Some((probe.load, of(probe)?))).collect()
    };
    let ends = [probes.first(), probes.last()];
    let target = ends.into_iter().flatten().map(|probe| (probe.load, 1.0)).collect();
    let axis = |label: &str, scale| Axis { label: label.into(), scale };
    let line = |name: &str, points, dots| Line { name: name.into(), points, dots };
    let plot = |title: &str, y: &str, scale, lines| Plot {
        title: title.into(),
        x: axis(&report.over, AxisScale::Log),
        y: axis(y, scale),
        lines,
    };
    let attainment = vec![
        line("attainment", points(&|probe| Some(probe.attainment)), true),
        line("the objective", target, false),
    ];
    let first = vec![
        line("median", points(&|probe| probe.first().1), true),
        line("99th percentile", points(&|probe| probe.first().2), true),
    ];
    let first_title = match probes.first().map(|probe| probe.first().0) {
        Some("E2E") => "End to end by load",
        _ => "Time to first token by load",
    };
    vec![
        ("Attainment by load", plot("Attainment by load", "attainment", AxisScale::Linear, attainment)),
        (first_title, plot(first_title, "ms", AxisScale::Log, first)),
    ]
}

fn cells(probe: &ProbeReport) -> Vec<String> {
    let ms = |value: Option<f64>| value.map_or_else(|| "-".into(), |ms| format!("{ms:.1}"));
    let (_, p50, p99) = probe.first();
    vec![
        format!("{:.3}", probe.load),
        format!("{:.4}", probe.attainment),
        probe.met.to_string(),
        probe.of.to_string(),
        ms(p50),
        ms(p99),
        format!("{:.2}", probe.requests_per_s),
        probe.seed.to_string(),
        if probe.ended_early { "ended early".into() } else { String::new() },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_is_a_dot_and_a_row() {
        let probe = |load: f64, attainment: f64| ProbeReport {
            load,
            seed: 1,
            attainment,
            met: 9,
            of: 10,
            ended_early: attainment < 0.5,
            ttft_p50: Some(load),
            ttft_p99: None,
            e2e_p50: Some(2.0 * load),
            e2e_p99: None,
            requests_per_s: load,
        };
        let report = SearchReport {
            format: super::super::FORMAT.into(),
            over: "rate".into(),
            slo: "ttft.p99<5ms".into(),
            attain: 0.99,
            result: "knee".into(),
            load: 3.2,
            bracket: Some((3.0, 4.0)),
            probes: vec![probe(2.0, 1.01), probe(8.0, 0.2), probe(4.0, 0.9)],
        };
        let page = render(&report);
        assert!(
            page.contains("<b>3.200</b> kept at 3.000, lost at 4.000") && page.contains("ttft.p99&lt;5ms")
        );
        assert_eq!((page.matches("class=\"dot c1\"").count(), page.matches("<tr>").count()), (6, 4));
        assert_eq!(page.matches("ended early").count(), 1);
        assert!(page.contains("Time to first token by load") && !page.contains("End to end"));
        let of_embeddings = |probe: ProbeReport| ProbeReport { ttft_p50: None, ..probe };
        let probes = report.probes.into_iter().map(of_embeddings).collect();
        let page = render(&SearchReport { probes, ..report });
        assert!(page.contains("End to end by load") && page.contains("E2E p50 ms") && !page.contains("TTFT"));
        assert_eq!(page.matches("class=\"dot c1\"").count(), 6);
    }
}
