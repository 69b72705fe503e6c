//! `--scrape`: a server's own metrics beside the run. Reads Prometheus' text format before, during and after,
//! and keeps what counters added and between which values gauges moved. Knows no metric by name; buckets are
//! left out.
//!
//! Format: prometheus.io/docs/instrumenting/exposition_formats.

use std::{collections::BTreeMap, time::Duration};

use http::{
    Method,
    uri::{InvalidUri, PathAndQuery},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, task::JoinHandle, time::MissedTickBehavior};

use crate::{
    client::{self, ClientError, PreparedRequest, Server, exchange::Clock},
    limits,
};

/// One server's metrics over the run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Scraped {
    /// URL of the metrics, as `--scrape` gives it.
    pub url: String,
    /// Answers read, the one before the run among them.
    pub scrapes: u64,
    /// Attempts that failed, and the last reason.
    pub failed: u64,
    /// Why the last attempt that failed did; `None` if none failed.
    pub error: Option<String>,
    /// When each kept point was read, in seconds after the run's zero.
    pub times_s: Vec<f64>,
    /// Metrics that moved, and gauges; at most `limits::SCRAPED_SERIES_MAX`.
    pub series: Vec<ScrapedSeries>,
    /// Metrics left out because there were more.
    pub left_out: usize,
}

/// One metric with its labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScrapedSeries {
    /// As the server writes it: `name{label="value"}`.
    pub name: String,
    /// Whether it only grows.
    pub counter: bool,
    /// At the first scrape.
    pub first: f64,
    /// At the last scrape that had it.
    pub last: f64,
    /// Of a counter what it added, resets allowed for.
    pub added: Option<f64>,
    /// The smallest value of any scrape.
    pub min: f64,
    /// Its mean over the scrapes.
    pub mean: f64,
    /// The largest value of any scrape, of a counter too.
    pub max: f64,
    /// At `times_s`; null where it was not there.
    pub points: Vec<Option<f64>>,
}

/// Collects one server's metrics.
#[derive(Debug)]
struct Collector {
    scraped: Scraped,
    series: BTreeMap<String, Watched>,
    /// Scrapes so far, and of how many one is kept as a point.
    seen: u64,
    every: u64,
}

#[derive(Debug)]
struct Watched {
    counter: bool,
    first: f64,
    last: f64,
    added: f64,
    min: f64,
    max: f64,
    sum: f64,
    n: u64,
    points: Vec<Option<f64>>,
}

/// Scrapers, one for each URL.
#[derive(Debug)]
pub struct Scrapers {
    interval: Duration,
    ready: Vec<(Collector, Server, String)>,
    tasks: Vec<JoinHandle<Scraped>>,
    done: watch::Sender<bool>,
}

// === impl Scrapers ===

impl Scrapers {
    /// Reads every URL's metrics once, so that a mistake shows before the run.
    pub async fn new(urls: &[String], interval: Duration) -> Result<Self, ClientError> {
        let mut ready = Vec::new();
        for url in urls {
            let (server, path) = target(url)?;
            let mut collector = Collector::new(url);
            collector.add(0.0, &fetch(&server, &path, interval).await?);
            ready.push((collector, server, path));
        }
        Ok(Self { interval, ready, tasks: Vec::new(), done: watch::Sender::new(false) })
    }

    /// Reads them every interval from the run's zero on.
    pub fn begin(&mut self, clock: Clock) {
        for (collector, server, path) in self.ready.drain(..) {
            let ended = self.done.subscribe();
            self.tasks.push(tokio::spawn(collect(collector, server, path, clock, self.interval, ended)));
        }
    }

    /// Reads all a last time and gives the results.
    pub async fn finish(self) -> Vec<Scraped> {
        self.done.send_replace(true);
        let mut all = Vec::new();
        for task in self.tasks {
            // A task that panicked has nothing to tell.
            all.extend(task.await.ok());
        }
        all
    }
}

/// The server and the path of a URL; `/metrics` where it has none.
fn target(url: &str) -> Result<(Server, String), ClientError> {
    let after = url.find("://").map_or(0, |at| at + 3);
    let cut = url[after..].find('/').map_or(url.len(), |at| after + at);
    let (base, path) = url.split_at(cut);
    let path = if path.len() > 1 { path } else { "/metrics" };
    let refuse = |error: InvalidUri| ClientError::Url { url: url.into(), reason: format!("{error}") };
    path.parse::<PathAndQuery>().map_err(refuse)?;
    Ok((Server::new(base, None)?, path.to_owned()))
}

async fn fetch(server: &Server, path: &str, timeout: Duration) -> Result<String, ClientError> {
    let request = format!("GET {path} (--scrape)");
    let fail = |reason: String| ClientError::NoAnswer { request: request.clone(), reason };
    let exchange = async {
        let answer = server.send(Method::GET, path, &PreparedRequest::default()).await;
        let answer = answer.map_err(|error| fail(client::chain(&error)))?;
        let status = answer.head.status;
        let body = server.read(answer).await.map_err(|error| fail(error.to_string()))?;
        if !client::is_success(status) {
            let message = client::event::error_message(&body);
            return Err(ClientError::Status { request: request.clone(), status, message });
        }
        std::str::from_utf8(&body).map(str::to_owned).map_err(|_| fail("the answer is no text".into()))
    };
    let timeout = timeout.max(Duration::from_secs(5));
    let late = || Err(fail(format!("no answer within {timeout:?}")));
    tokio::time::timeout(timeout, exchange).await.unwrap_or_else(|_| late())
}

async fn collect(
    mut collector: Collector,
    server: Server,
    path: String,
    clock: Clock,
    interval: Duration,
    mut done: watch::Receiver<bool>,
) -> Scraped {
    let mut ticks = tokio::time::interval_at((clock.zero + interval).into(), interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut ended = false;
    while !ended {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = done.wait_for(|done| *done) => ended = true,
        }
        match fetch(&server, &path, interval).await {
            Ok(text) => collector.add(clock.now_ns() as f64 / 1e9, &text),
            Err(error) => collector.fail(&error),
        }
    }
    collector.finish()
}

// === impl Collector ===

impl Collector {
    fn new(url: &str) -> Self {
        let scraped = Scraped { url: url.to_owned(), ..Scraped::default() };
        Self { scraped, series: BTreeMap::new(), seen: 0, every: 1 }
    }

    fn fail(&mut self, error: &ClientError) {
        self.scraped.failed += 1;
        self.scraped.error = Some(error.to_string());
    }

    fn add(&mut self, at_s: f64, text: &str) {
        let is_kept = self.seen.is_multiple_of(self.every);
        self.seen += 1;
        self.scraped.scrapes += 1;
        let before = self.scraped.times_s.len();
        if is_kept {
            self.scraped.times_s.push(at_s);
        }
        for (name, counter, value) in samples(text) {
            if !self.series.contains_key(name) {
                if self.series.len() == limits::SCRAPED_NAMES_MAX {
                    continue;
                }
                self.series.insert(name.to_owned(), Watched::new(counter, value, before));
            }
            let Some(watched) = self.series.get_mut(name) else { continue };
            watched.add(value);
            if is_kept {
                watched.points.resize(before, None);
                watched.points.push(Some(value));
            }
        }
        if self.scraped.times_s.len() > limits::SCRAPED_POINTS_MAX {
            self.thin();
        }
    }

    /// Drops every second point.
    fn thin(&mut self) {
        self.every *= 2;
        halve(&mut self.scraped.times_s);
        for watched in self.series.values_mut() {
            halve(&mut watched.points);
        }
    }

    fn finish(self) -> Scraped {
        let Self { mut scraped, series, .. } = self;
        let points = scraped.times_s.len();
        let mut all: Vec<ScrapedSeries> =
            series.into_iter().map(|(name, watched)| watched.metric(name, points)).collect();
        // What never moved says nothing of the run, unless it is a gauge above 0.
        all.retain(|metric| metric.added.unwrap_or(metric.max) != 0.0);
        scraped.left_out = all.len().saturating_sub(limits::SCRAPED_SERIES_MAX);
        all.truncate(limits::SCRAPED_SERIES_MAX);
        scraped.series = all;
        scraped
    }
}

fn halve<T>(list: &mut Vec<T>) {
    let mut i = 0;
    list.retain(|_| {
        i += 1;
        i % 2 == 1
    });
}

// === impl Watched ===

impl Watched {
    fn new(counter: bool, value: f64, missed: usize) -> Self {
        let points = vec![None; missed];
        Self {
            counter,
            first: value,
            last: value,
            added: 0.0,
            min: value,
            max: value,
            sum: 0.0,
            n: 0,
            points,
        }
    }

    fn add(&mut self, value: f64) {
        // A counter that fell began anew at 0.
        self.added += if value < self.last { value } else { value - self.last };
        self.last = value;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        self.sum += value;
        self.n += 1;
    }

    fn metric(mut self, name: String, points: usize) -> ScrapedSeries {
        self.points.resize(points, None);
        ScrapedSeries {
            name,
            counter: self.counter,
            first: self.first,
            last: self.last,
            added: self.counter.then_some(self.added),
            min: self.min,
            mean: self.sum / self.n.max(1) as f64,
            max: self.max,
            points: self.points,
        }
    }
}

/// Each sample that is no bucket: its name with labels, whether it only grows, and its value.
fn samples(text: &str) -> impl Iterator<Item = (&str, bool, f64)> {
    let mut types: BTreeMap<&str, &str> = BTreeMap::new();
    text.lines().filter_map(move |line| {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ')?;
            types.insert(name, kind);
            return None;
        }
        if line.is_empty() || line.starts_with('#') {
            return None;
        }
        // Labels may hold spaces and braces, but only within quotes.
        let end =
            line.find('{').map_or_else(|| line.find(' '), |open| closing(line, open).map(|at| at + 1))?;
        let (name, rest) = line.split_at(end);
        let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
        let bare = name.split('{').next().unwrap_or(name);
        if bare.ends_with("_bucket")
            || bare.ends_with("_created")
            || name.contains("quantile=")
            || !value.is_finite()
        {
            return None;
        }
        let kind = types.get(bare).copied();
        let part_of_a_sum = ["_sum", "_count", "_total"].iter().any(|end| bare.ends_with(end));
        let counter = kind.map_or(part_of_a_sum, |kind| kind == "counter");
        Some((name, counter, value))
    })
}

/// Where the label set that opens at `open` closes.
fn closing(line: &str, open: usize) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in line.bytes().enumerate().skip(open) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collected(texts: &[&str]) -> Scraped {
        let mut collector = Collector::new("http://h/metrics");
        for (i, text) in texts.iter().enumerate() {
            collector.add(i as f64, text);
        }
        collector.finish()
    }

    #[test]
    fn counters_add_and_gauges_move() {
        let text = |sent: u32, running: u32| {
            format!(
                "# TYPE sent counter\nsent{{to=\"a }} b\"}} {sent}\n# TYPE running gauge\nrunning {running} 1700000000\n\
                 idle 0\ntime_seconds_sum {sent}.5\ntime_seconds_bucket{{le=\"1\"}} 3\nbroken\nodd NaN\n"
            )
        };
        // It restarts after the second.
        let scraped = collected(&[&text(10, 4), &text(25, 8), &text(3, 0)]);
        let names: Vec<_> = scraped.series.iter().map(|metric| metric.name.as_str()).collect();
        assert_eq!(names, ["running", "sent{to=\"a } b\"}", "time_seconds_sum"]);
        let (running, sent) = (&scraped.series[0], &scraped.series[1]);
        assert_eq!((running.min, running.mean, running.max, running.added), (0.0, 4.0, 8.0, None));
        assert_eq!((sent.first, sent.last, sent.added), (10.0, 3.0, Some(18.0)));
        assert_eq!(sent.points, [Some(10.0), Some(25.0), Some(3.0)]);
        assert_eq!(scraped.scrapes, 3);
    }

    #[test]
    fn a_long_run_keeps_a_bounded_number_of_points() {
        let mut collector = Collector::new("u");
        for i in 0..10_000 {
            // It appears late.
            collector.add(f64::from(i), if i < 5000 { "a 1" } else { "a 1\nb 2" });
        }
        let scraped = collector.finish();
        let points = scraped.times_s.len();
        assert!(
            points <= limits::SCRAPED_POINTS_MAX && points > limits::SCRAPED_POINTS_MAX / 2 - 1,
            "{points}"
        );
        assert!(scraped.series.iter().all(|metric| metric.points.len() == points));
        assert!(scraped.times_s.is_sorted());
        let first = scraped.series[1].points.iter().position(Option::is_some).unwrap();
        assert!(scraped.times_s[first] >= 5000.0, "{}", scraped.times_s[first]);
    }

    #[test]
    fn where_the_metrics_are() {
        for (url, want) in [
            ("http://h:1", "/metrics"),
            ("http://h:1/", "/metrics"),
            ("http://h:1/engine/metrics?x=1", "/engine/metrics?x=1"),
        ] {
            assert_eq!(target(url).unwrap().1, want);
        }
        assert!(target("h:1/metrics").is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,200}") {
            let _ = samples(&text).count();
        }
    }
}
