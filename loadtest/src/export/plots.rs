//! Which plots a report has, and their lines. Draws nothing itself.

use crate::{
    draw::svg::{Axis, AxisScale, Line, Plot, escape},
    report::Report,
    scrape::{Scraped, ScrapedSeries},
    stats::{
        hdr,
        samples::{ITL_HALF_MAGNITUDE, Sample},
    },
};

/// Points of a percentile curve: where its values are read, in per cent.
const PERCENTS: [f64; 24] = [
    0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 75.0, 80.0, 85.0, 90.0, 92.5, 95.0, 96.0, 97.0, 98.0,
    99.0, 99.3, 99.5, 99.7, 99.9, 99.95, 99.99,
];

/// The distributions: each time by percentile.
pub fn distributions(report: &Report) -> Vec<(&'static str, Plot)> {
    let samples = report.samples.read().unwrap_or_default();
    let one = |of: fn(&Sample) -> Option<u64>| {
        samples.iter().filter_map(|s| Some((of(s)? as f64 / 1e3, 1))).collect::<Vec<_>>()
    };
    let gaps = samples.iter().flat_map(|sample| &sample.itl);
    let gaps = gaps.map(|&(bucket, n)| (hdr::middle(bucket, ITL_HALF_MAGNITUDE) / 1e3, n)).collect();
    let curves: [(&str, Vec<(f64, u64)>); 4] = [
        ("Time to first token", one(|s| s.ttft)),
        ("Time per output token", one(|s| s.tpot)),
        ("Between text events", gaps),
        ("End to end", one(|s| Some(s.e2e))),
    ];
    curves.into_iter().map(|(title, values)| (title, percentiles(title, values))).collect()
}

fn percentiles(title: &str, mut values: Vec<(f64, u64)>) -> Plot {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: u64 = values.iter().map(|(_, count)| count).sum();
    let mut points = Vec::new();
    for percent in PERCENTS {
        // Beyond the last sample but one there is nothing to read.
        if total as f64 * (100.0 - percent) / 100.0 < 1.0 {
            break;
        }
        let rank = (total as f64 * percent / 100.0 - 1e-6).ceil().max(1.0) as u64;
        let mut below = 0;
        let value = values.iter().find(|(_, count)| {
            below += count;
            below >= rank
        });
        points.extend(value.map(|(ms, _)| (percent, *ms)));
    }
    Plot {
        title: format!("{title} by percentile"),
        x: Axis { label: "percentile".into(), scale: AxisScale::Tail },
        y: Axis { label: "ms".into(), scale: AxisScale::Log },
        lines: vec![Line { name: title.into(), points, dots: false }],
    }
}

/// The run over time.
pub fn timelines(report: &Report) -> Vec<(&'static str, Plot)> {
    let series = &report.series;
    let point = |i: usize, y: f64| ((i as f64 + 0.5) * series.point_s, y);
    let times = |list: &[Option<f64>]| -> Vec<(f64, f64)> {
        list.iter().enumerate().map(|(i, ms)| point(i, ms.unwrap_or(f64::NAN))).collect()
    };
    let rates = |list: &[u64]| -> Vec<(f64, f64)> {
        list.iter().enumerate().map(|(i, &n)| point(i, n as f64 / series.point_s)).collect()
    };
    let counts = |list: &[u64]| list.iter().enumerate().map(|(i, &n)| point(i, n as f64)).collect();
    let line = |name: &str, points: Vec<(f64, f64)>| Line { name: name.into(), points, dots: false };
    let plot = |title: &str, y: &str, scale: AxisScale, lines: Vec<Line>| Plot {
        title: title.into(),
        x: Axis { label: "seconds".into(), scale: AxisScale::Linear },
        y: Axis { label: y.into(), scale },
        lines,
    };
    let generates = report.config.endpoint.generates();
    let (first, p50, p99) = if generates {
        (
            ("Time to first token, by when requests were due", "Time to first token"),
            &series.ttft_p50,
            &series.ttft_p99,
        )
    } else {
        (("End to end, by when requests were due", "End to end"), &series.e2e_p50, &series.e2e_p99)
    };
    let first_lines = vec![line("median", times(p50)), line("99th percentile", times(p99))];
    let mut flow = vec![line("due", rates(&series.due)), line("answered", rates(&series.ok))];
    if series.failed.iter().any(|&n| n > 0) {
        flow.push(line("failed", rates(&series.failed)));
    }
    let mut plots = vec![
        (first.0, plot(first.1, "ms", AxisScale::Log, first_lines)),
        ("Requests a second", plot("Requests a second", "requests/s", AxisScale::Linear, flow)),
        (
            "Requests under way",
            plot(
                "Requests under way",
                "requests",
                AxisScale::Linear,
                vec![line("under way", counts(&series.in_flight))],
            ),
        ),
    ];
    if generates {
        let lines = vec![line("generated", rates(&series.output_tokens))];
        let title = "Generated tokens a second";
        plots.push((title, plot(title, "tokens/s", AxisScale::Linear, lines)));
    }
    plots
}

/// Plots of a server's gauges: the ones that moved most, for their size.
const GAUGES_MAX: usize = 8;

/// The gauges that moved, over time.
pub fn gauges(server: &Scraped) -> Vec<(String, Plot)> {
    let moved = |metric: &&ScrapedSeries| !metric.counter && metric.max > metric.min;
    let mut gauges: Vec<&ScrapedSeries> = server.series.iter().filter(moved).collect();
    let spread = |metric: &ScrapedSeries| (metric.max - metric.min) / metric.max.abs().max(metric.min.abs());
    gauges.sort_by(|a, b| spread(b).total_cmp(&spread(a)).then_with(|| a.name.cmp(&b.name)));
    gauges.truncate(GAUGES_MAX);
    let plot = |metric: &ScrapedSeries| {
        let points =
            server.times_s.iter().zip(&metric.points).map(|(&s, y)| (s, y.unwrap_or(f64::NAN))).collect();
        let name = metric.name.clone();
        let plot = Plot {
            title: format!("{name} over time"),
            x: Axis { label: "seconds".into(), scale: AxisScale::Linear },
            y: Axis { label: "value".into(), scale: AxisScale::Linear },
            lines: vec![Line { name, points, dots: false }],
        };
        (escape(&metric.name), plot)
    };
    gauges.into_iter().map(plot).collect()
}
