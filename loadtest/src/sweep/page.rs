//! A sweep as one HTML page: what more load costs, and what it gives. Measures nothing.

use std::fmt::Write as _;

use super::{Point, SweepReport};
use crate::{
    draw::{
        page,
        svg::{Axis, AxisScale, Line, Plot, escape, short},
    },
    stats::Summary,
};

/// Lines of one plot: as many as the style sheet has colours.
const LINES_MAX: usize = 4;

/// Renders `report`; `about` says what was swept, in words.
pub fn render(report: &SweepReport, about: &str) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(report, about, &mut out);
    out
}

fn write(report: &SweepReport, about: &str, out: &mut String) -> std::fmt::Result {
    let title = escape(about);
    page::begin(&title, out)?;
    writeln!(out, "<h1>{title}</h1>\n<p class=\"sub\">{} measurements</p>", report.points.len())?;
    for group in groups(&report.points).chunks(LINES_MAX) {
        page::plots("What load costs and gives", plots(group), out)?;
    }
    writeln!(out, "<h2>Measurements</h2>")?;
    let generates = generates(report.points.iter());
    let (tokens, first) = if generates { ("tokens/s", "TTFT p50") } else { ("prompt tokens/s", "E2E p50") };
    let heads = [
        "run",
        "load",
        "lengths",
        "ok",
        "failed",
        "requests/s",
        tokens,
        first,
        "p90",
        "p99",
        "TPOT p50",
        "p99",
        "E2E p99",
        "goodput",
        "cached",
        "possible",
        "session p50",
        "",
    ];
    page::table(&heads, report.points.iter().map(cells), out)?;
    writeln!(out, r#"<p class="sub">Times in milliseconds, from when requests were due</p>"#)?;
    page::end(out)
}

/// The points of equal lengths, each list in order of load.
fn groups(points: &[Point]) -> Vec<(String, Vec<&Point>)> {
    let mut groups: Vec<(String, Vec<&Point>)> = Vec::new();
    for point in points {
        let name = lengths(point);
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, list)) => list.push(point),
            None => groups.push((name, vec![point])),
        }
    }
    for (_, list) in &mut groups {
        list.sort_by(|a, b| load(a).unwrap_or(0.0).total_cmp(&load(b).unwrap_or(0.0)));
    }
    groups
}

/// Whether the answers of some point have tokens.
fn generates<'a>(mut points: impl Iterator<Item = &'a Point>) -> bool {
    points.any(|point| point.ttft.is_some())
}

fn load(point: &Point) -> Option<f64> {
    point.rate.or(point.concurrency.map(f64::from))
}

fn lengths(point: &Point) -> String {
    point.lengths().unwrap_or_else(|| "all".into())
}

fn plots(groups: &[(String, Vec<&Point>)]) -> Vec<(&'static str, Plot)> {
    type Value = fn(&Point) -> Option<f64>;
    let any = |of: fn(&Point) -> bool| groups.iter().any(|(_, list)| list.iter().any(|point| of(point)));
    let unit = match (any(|p| p.completion.is_some()), any(|p| p.concurrency.is_some())) {
        (true, true) => "sessions under way",
        (true, false) => "sessions/s offered",
        (false, true) => "requests under way",
        (false, false) => "requests/s offered",
    };
    let plot = |title: &'static str, x: &str, of_x: Value, y: &str, scale: AxisScale, of_y: Value| {
        let line = |(name, list): &(String, Vec<&Point>)| Line {
            name: name.clone(),
            points: list.iter().filter_map(|p| Some((of_x(p)?, of_y(p)?))).collect(),
            dots: false,
        };
        let lines: Vec<Line> = groups.iter().map(line).collect();
        let axis = |label: &str, scale| Axis { label: label.into(), scale };
        (title, Plot { title: title.into(), x: axis(x, AxisScale::Linear), y: axis(y, scale), lines })
    };
    let first = |p: &Point| Some(p.first()?.p50);
    let tail = |p: &Point| Some(p.first()?.p99);
    let tpot = |p: &Point| Some(p.tpot?.p50);
    let [tokens, median, slowest] = if generates(groups.iter().flat_map(|(_, list)| list.iter().copied())) {
        ["Generated tokens a second", "Time to first token, median", "Time to first token, 99th percentile"]
    } else {
        ["Prompt tokens a second", "End to end, median", "End to end, 99th percentile"]
    };
    vec![
        plot(tokens, unit, load, "tokens/s", AxisScale::Linear, |p| Some(p.tokens_per_s())),
        ("Prompt tokens from caches", hits(groups, unit)),
        plot("Sessions from first turn to last answer, median", unit, load, "ms", AxisScale::Log, |p| {
            Some(p.completion?.p50)
        }),
        plot(median, unit, load, "ms", AxisScale::Log, first),
        plot(slowest, unit, load, "ms", AxisScale::Log, tail),
        plot("Time per output token, median", unit, load, "ms", AxisScale::Linear, tpot),
        plot("Answers a second", unit, load, "requests/s", AxisScale::Linear, |p| Some(p.requests_per_s)),
        plot(
            "Generated tokens a second against each user's wait per token",
            "ms per output token",
            tpot,
            "tokens/s",
            AxisScale::Linear,
            |p| Some(p.output_tokens_per_s),
        ),
        plot("Requests that keep the objective", unit, load, "%", AxisScale::Linear, |p| {
            Some(p.goodput? * 100.0)
        }),
    ]
}

/// What caches gave at each load; of equal lengths also what they could have given.
fn hits(groups: &[(String, Vec<&Point>)], unit: &str) -> Plot {
    let line = |name: &str, list: &[&Point], of: fn(&Point) -> Option<f64>| Line {
        name: name.into(),
        points: list.iter().filter_map(|point| Some((load(point)?, of(point)? * 100.0))).collect(),
        dots: false,
    };
    let lines = match groups {
        [(_, list)] => vec![line("cached", list, |p| p.cached), line("possible", list, |p| p.possible)],
        _ => groups.iter().map(|(name, list)| line(name, list, |p| p.cached)).collect(),
    };
    let axis = |label: &str| Axis { label: label.into(), scale: AxisScale::Linear };
    Plot { title: "Prompt tokens from caches".into(), x: axis(unit), y: axis("%"), lines }
}

fn cells(point: &Point) -> Vec<String> {
    let ms = |summary: Option<Summary>, of: fn(&Summary) -> f64| {
        summary.map_or_else(|| "-".into(), |summary| format!("{:.1}", of(&summary)))
    };
    vec![
        point.number.to_string(),
        load(point).map_or_else(|| "-".into(), short),
        escape(&lengths(point)),
        point.ok.to_string(),
        point.failed.to_string(),
        format!("{:.2}", point.requests_per_s),
        format!("{:.0}", point.tokens_per_s()),
        ms(point.first(), |s| s.p50),
        ms(point.first(), |s| s.p90),
        ms(point.first(), |s| s.p99),
        ms(point.tpot, |s| s.p50),
        ms(point.tpot, |s| s.p99),
        ms(point.e2e, |s| s.p99),
        point.goodput.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0)),
        point.cached.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0)),
        point.possible.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0)),
        ms(point.completion, |s| s.p50),
        point.remark().trim().into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Status;

    const SUMMARY: Summary =
        Summary { n: 9, mean: 5.0, std: 1.0, p50: 4.0, p90: 9.0, p95: 9.5, p99: 10.0, max: 11.0 };

    fn point(number: usize, rate: f64, isl: &str) -> Point {
        Point {
            number,
            rate: Some(rate),
            concurrency: None,
            isl: Some(isl.into()),
            osl: Some("8".into()),
            status: Status::Valid,
            ok: 9,
            failed: 0,
            requests_per_s: rate,
            output_tokens_per_s: rate * 8.0,
            prompt_tokens_per_s: rate * 64.0,
            ttft: Some(SUMMARY),
            tpot: Some(SUMMARY),
            e2e: Some(SUMMARY),
            goodput: None,
            cached: Some(0.25),
            possible: Some(0.5),
            completion: None,
        }
    }

    #[test]
    fn a_line_for_each_length_and_a_row_for_each_run() {
        let points = vec![point(1, 2.0, "64"), point(2, 1.0, "64"), point(3, 1.0, "<b>")];
        let page = render(&SweepReport { format: String::new(), points }, "a & b");
        assert!(page.contains("a &amp; b") && page.contains("&lt;b&gt;/8") && !page.contains("<script"));
        // No objective and no sessions, no plots of them.
        assert_eq!((page.matches("<svg").count(), page.matches("<tr>").count()), (7, 4));
        assert_eq!(page.matches("class=\"line c1\"").count(), 7);
    }

    #[test]
    fn embeddings_have_one_time_and_the_prompts_tokens() {
        let of = |number, rate| Point { ttft: None, tpot: None, osl: None, ..point(number, rate, "64") };
        let page = render(&SweepReport { format: String::new(), points: vec![of(1, 1.0), of(2, 2.0)] }, "m");
        assert!(page.contains("End to end, 99th percentile") && page.contains("<td>128</td>"));
        assert!(!page.contains("first token") && !page.contains("Generated"));
    }

    #[test]
    fn a_cliff_shows_beside_what_caches_could_have_given() {
        let of = |number: usize, concurrency: u32, cached: f64| Point {
            concurrency: Some(concurrency),
            rate: None,
            cached: Some(cached),
            ..point(number, 1.0, "all")
        };
        let point = |number, concurrency, cached| Point {
            completion: Some(SUMMARY),
            ..of(number, concurrency, cached)
        };
        let points = vec![point(1, 14, 0.9), point(2, 29, 0.88), point(3, 58, 0.2)];
        let page = render(&SweepReport { format: String::new(), points }, "agents");
        assert_eq!(page.matches("<svg").count(), 8);
        assert!(page.contains("sessions under way") && page.contains("possible"));
        // Only the plot of hits has a second line.
        assert_eq!(page.matches("class=\"line c2\"").count(), 1);
    }
}
