//! A run over time, in points of equal width: what was due, what ended how, how long the first token and the
//! whole answer took. A long run gets wider points, so the size is bounded. Draws nothing.

use serde::{Deserialize, Serialize};

use crate::{
    client::record::{Outcome, Record},
    limits,
    stats::{Samples, samples::Sample},
};

/// Width of a point until the run is too long for it, in milliseconds.
const POINT_MS_MIN: u64 = 250;

/// Collects the points of a run; they get wider as it gets longer.
#[derive(Debug, Clone)]
pub struct Series {
    point_ms: u64,
    points: Vec<Point>,
}

#[derive(Debug, Clone, Default)]
struct Point {
    due: u64,
    started: u64,
    ended: u64,
    ok: u64,
    failed: u64,
    output_tokens: u64,
    ttft: Samples,
    e2e: Samples,
}

/// The series in the shape of run.json: a list for each figure.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SeriesReport {
    /// Width of a point, in seconds.
    pub point_s: f64,
    /// Requests due in each point.
    pub due: Vec<u64>,
    /// Answers that ended well in it.
    pub ok: Vec<u64>,
    /// Requests that failed in it.
    pub failed: Vec<u64>,
    /// Requests under way at its end.
    pub in_flight: Vec<u64>,
    /// Tokens of the answers that ended in it.
    pub output_tokens: Vec<u64>,
    /// Median time to the first token of the requests due in it, from when they were due, in milliseconds.
    pub ttft_p50: Vec<Option<f64>>,
    /// 99th percentile of the same.
    pub ttft_p99: Vec<Option<f64>>,
    /// Median time to the end of their answers. Empty in reports of older versions.
    #[serde(default)]
    pub e2e_p50: Vec<Option<f64>>,
    /// 99th percentile of the same.
    #[serde(default)]
    pub e2e_p99: Vec<Option<f64>>,
}

impl Default for Series {
    fn default() -> Self {
        Self { point_ms: POINT_MS_MIN, points: Vec::new() }
    }
}

impl Series {
    /// Adds a request that ended.
    pub fn add(&mut self, record: &Record) {
        let exchange = &record.exchange;
        self.at(record.intended_ns).due += 1;
        self.at(exchange.sent_ns).started += 1;
        let tokens = exchange.usage.as_ref().map_or(0, |usage| usage.completion_tokens);
        let end = self.at(exchange.end_ns);
        end.ended += 1;
        match exchange.outcome {
            Outcome::Ok => {
                end.ok += 1;
                end.output_tokens += tokens;
                let due = self.at(record.intended_ns);
                due.e2e.add_ns(record.e2e_ns());
                if let Some(ttft_ns) = record.ttft_ns() {
                    due.ttft.add_ns(ttft_ns);
                }
            }
            Outcome::Failed(_) => end.failed += 1,
            Outcome::Cancelled => {}
        }
    }

    /// The point that `ns` lies in.
    fn at(&mut self, ns: u64) -> &mut Point {
        while ns / 1_000_000 / self.point_ms >= limits::SERIES_POINTS_MAX as u64 {
            self.widen();
        }
        let index = (ns / 1_000_000 / self.point_ms) as usize;
        if index >= self.points.len() {
            self.points.resize_with(index + 1, Point::default);
        }
        &mut self.points[index]
    }

    fn widen(&mut self) {
        self.point_ms *= 2;
        let old = std::mem::take(&mut self.points);
        for (i, point) in old.into_iter().enumerate() {
            if i % 2 == 0 {
                self.points.push(point);
            } else if let Some(wide) = self.points.last_mut() {
                wide.merge(&point);
            }
        }
    }

    /// The points so far as lists, one for each figure.
    pub fn report(&self) -> SeriesReport {
        let list = |figure: fn(&Point) -> u64| self.points.iter().map(figure).collect();
        let times = |of: fn(&Point) -> &Samples, percent: f64| {
            let figure = |p: &Point| (!of(p).is_empty()).then(|| of(p).percentile_ms(percent));
            self.points.iter().map(figure).collect()
        };
        let mut in_flight = 0;
        SeriesReport {
            point_s: self.point_ms as f64 / 1e3,
            due: list(|p| p.due),
            ok: list(|p| p.ok),
            failed: list(|p| p.failed),
            in_flight: (self.points.iter())
                .map(|p| {
                    in_flight += p.started;
                    in_flight -= p.ended;
                    in_flight
                })
                .collect(),
            output_tokens: list(|p| p.output_tokens),
            ttft_p50: times(|p| &p.ttft, 50.0),
            ttft_p99: times(|p| &p.ttft, 99.0),
            e2e_p50: times(|p| &p.e2e, 50.0),
            e2e_p99: times(|p| &p.e2e, 99.0),
        }
    }
}

impl SeriesReport {
    /// Several runs in one, in points as wide as the widest of theirs: each with the milliseconds from the
    /// first run's beginning to its own. Times are those of the single answers in `samples`.
    pub fn of_several<'a>(runs: &[(u64, &Self)], samples: impl IntoIterator<Item = &'a Sample>) -> Self {
        let width = |run: &Self| ((run.point_s * 1e3) as u64).max(POINT_MS_MIN);
        let end = |(after, run): &(u64, &Self)| after + width(run) * run.due.len() as u64;
        let mut point_ms = runs.iter().map(|(_, run)| width(run)).max().unwrap_or(POINT_MS_MIN);
        let end_ms = runs.iter().map(end).max().unwrap_or_default();
        while end_ms.div_ceil(point_ms) > limits::SERIES_POINTS_MAX as u64 {
            point_ms *= 2;
        }
        let mut series = Series { point_ms, points: Vec::new() };
        let mut in_flight = vec![0; end_ms.div_ceil(point_ms) as usize];
        for &(after, run) in runs {
            let width = width(run);
            for i in 0..run.due.len() {
                let point = series.at((after + i as u64 * width) * 1_000_000);
                let figure = |list: &[u64]| list.get(i).copied().unwrap_or_default();
                point.due += figure(&run.due);
                point.ok += figure(&run.ok);
                point.failed += figure(&run.failed);
                point.output_tokens += figure(&run.output_tokens);
            }
            for (at, sum) in in_flight.iter_mut().enumerate() {
                // Points of the run that have ended by the end of this one.
                let ended = ((at as u64 + 1) * point_ms).saturating_sub(after) / width;
                let last = (ended as usize).min(run.in_flight.len());
                *sum += last.checked_sub(1).map_or(0, |last| run.in_flight[last]);
            }
        }
        for sample in samples {
            let point = series.at(sample.due_us * 1000);
            point.e2e.add_us(sample.e2e);
            if let Some(ttft_us) = sample.ttft {
                point.ttft.add_us(ttft_us);
            }
        }
        in_flight.resize(series.points.len(), 0);
        Self { in_flight, ..series.report() }
    }
}

impl Point {
    fn merge(&mut self, other: &Self) {
        self.due += other.due;
        self.started += other.started;
        self.ended += other.ended;
        self.ok += other.ok;
        self.failed += other.failed;
        self.output_tokens += other.output_tokens;
        self.ttft.merge(&other.ttft);
        self.e2e.merge(&other.e2e);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::tests::good;

    #[test]
    fn points_of_a_short_run() {
        let mut series = Series::default();
        series.add(&good(0, 0, 100, 600));
        series.add(&good(240, 300, 310, 320));
        let report = series.report();
        assert_eq!((report.point_s, report.due, report.in_flight), (0.25, vec![2, 0, 0], vec![1, 1, 0]));
        assert_eq!((report.ok, report.output_tokens), (vec![0, 1, 1], vec![0, 3, 3]));
        assert_eq!(
            (report.ttft_p50[0], report.ttft_p99[0], report.ttft_p50[1]),
            (Some(70.0), Some(100.0), None)
        );
    }

    #[test]
    fn a_long_run_has_wider_points_and_loses_nothing() {
        let mut series = Series::default();
        for second in 0..5000 {
            series.add(&good(second * 1000, second * 1000, second * 1000 + 5, second * 1000 + 9));
        }
        let report = series.report();
        assert!(report.due.len() <= limits::SERIES_POINTS_MAX);
        assert_eq!(report.point_s, 16.0);
        assert_eq!((report.due.iter().sum::<u64>(), report.ok.iter().sum::<u64>()), (5000, 5000));
    }
}
