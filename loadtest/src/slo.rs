//! Service-level objectives: bounds on the time a request takes (`ttft<500ms`) or on a figure of the whole
//! run (`ttft.p99<500ms`, `tpot.mean<50ms`), and the count of requests that keep them. All times count from
//! when a request was due. Runs, searches and the simulator read and judge by it.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{client::record::Record, stats::Samples, units};

/// A time that a bound can be set on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// To the first token.
    Ttft,
    /// From the first to the second event with text.
    Ttst,
    /// Of a token after the first, on average.
    Tpot,
    /// From when the request was due to the end of its answer.
    E2e,
}

/// What of a run's times must stay below a bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    /// Each request's by itself: it decides about that request, not about the run.
    Each,
    /// A percentile, above 0 and below 100: that share of requests must keep the bound.
    Percentile(f64),
    /// The arithmetic mean of the times; a run with failed requests does not keep it.
    Mean,
    /// The largest time: every request must keep the bound.
    Max,
}

/// One bound of an objective, such as `ttft.p99<500ms`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Which time of a request the bound is on.
    pub metric: Metric,
    /// On which figure of it.
    pub figure: Figure,
    /// What the time or figure must stay below; never 0 as parsed.
    pub below: Duration,
}

/// Bounds that hold together.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Slo {
    /// The bounds in the order written; as parsed, at least one.
    pub bounds: Vec<Bound>,
}

/// How a run kept its bounds. Requests that failed keep none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Goodput {
    /// The bounds as written.
    pub slo: String,
    /// Requests that keep every bound, and all that ended.
    pub met: u64,
    /// Requests that ended, well or badly; cancelled ones are not counted.
    pub of: u64,
    /// `met` over `of`, 0 to 1; 0 if no request ended.
    pub share: f64,
    /// Requests a second that keep every bound.
    pub requests_per_s: f64,
    /// Their generated tokens a second.
    pub output_tokens_per_s: f64,
    /// Each bound by itself.
    pub bounds: Vec<BoundReport>,
}

/// One bound and how it was kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BoundReport {
    /// The bound in its own notation, such as `ttft.p99<500ms`; times are in milliseconds.
    pub bound: String,
    /// Share of requests that keep it.
    pub share: f64,
    /// For a bound on a figure of the run: whether the run keeps it.
    pub holds: Option<bool>,
}

/// Counts requests that keep the bounds.
#[derive(Debug, Clone, Default)]
pub struct Keeper {
    slo: Slo,
    /// Requests that ended, well or badly: one for each call of [`Keeper::add`].
    pub of: u64,
    /// Of those, kept every bound.
    pub met: u64,
    tokens: u64,
    each: Vec<Kept>,
}

/// How one bound was kept.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    met: u64,
    /// Of the requests that have the time.
    sum_ns: u128,
    timed: u64,
    /// Requests that failed: no mean stays below anything.
    failed: u64,
}

// === impl Metric ===

impl Metric {
    const ALL: [(&str, Self); 5] = [
        ("ttft", Self::Ttft),
        ("ttst", Self::Ttst),
        ("tpot", Self::Tpot),
        ("e2e", Self::E2e),
        // vLLM's name.
        ("e2el", Self::E2e),
    ];

    /// The time that `record`, a good answer, took; `None` if it has no such time (one token has no time per
    /// token).
    fn ns(self, record: &Record) -> Option<u64> {
        match self {
            Self::Ttft => record.ttft_ns(),
            Self::Ttst => record.ttst_ns(),
            Self::Tpot => record.tpot_ns(),
            Self::E2e => Some(record.e2e_ns()),
        }
    }
}

impl FromStr for Metric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, metric)| *metric).ok_or_else(|| match text {
            "itl" => "a request has many times between tokens: bound tpot, their mean".into(),
            _ => format!("`{text}` is none of ttft, ttst, tpot, e2e"),
        })
    }
}

// === impl Bound ===

impl Bound {
    /// Whether `record` keeps it. A time that does not exist breaks no bound, except that every answer has a
    /// first token and an end.
    fn is_met(&self, record: &Record) -> bool {
        let ns = self.metric.ns(record).map(u128::from);
        record.is_ok() && ns.map_or(self.metric != Metric::Ttft, |ns| ns < self.below.as_nanos())
    }

    /// The share of requests that must keep it, if a share decides.
    pub fn share(&self) -> Option<f64> {
        match self.figure {
            Figure::Percentile(percent) => Some(percent / 100.0),
            Figure::Max => Some(1.0),
            Figure::Each | Figure::Mean => None,
        }
    }

    /// Whether a run with these times keeps it, as far as it is set on a run; no times break no bound.
    pub fn holds(&self, times: &Samples) -> bool {
        let Some(summary) = times.summary() else { return true };
        let ms = match self.figure {
            Figure::Each => return true,
            Figure::Percentile(percent) => times.percentile_ms(percent),
            Figure::Mean => summary.mean,
            Figure::Max => summary.max,
        };
        ms < self.below.as_secs_f64() * 1e3
    }

    /// How well the requests counted in `kept`, of `of`, keep it: at least 1 if they do; `None` if it is set
    /// on each by itself.
    fn attainment(&self, kept: &Kept, of: u64) -> Option<f64> {
        if self.figure == Figure::Mean {
            let mean_ns = kept.sum_ns as f64 / kept.timed.max(1) as f64;
            let ratio = self.below.as_nanos() as f64 / mean_ns.max(1.0);
            // The mean must stay below the bound: at the bound it is not kept.
            let ratio = if ratio > 1.0 { ratio } else { ratio.min(1.0 - f64::EPSILON) };
            return Some(if kept.failed > 0 { 0.0 } else { ratio });
        }
        Some(kept.met as f64 / of.max(1) as f64 / self.share()?)
    }
}

impl FromStr for Bound {
    type Err = String;

    /// `ttft<500ms`, `ttft.p99<500ms`, and as vLLM writes it, in milliseconds, `ttft:500`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("`{text}` is no bound: write METRIC<TIME or METRIC.FIGURE<TIME, such as ttft.p99<500ms")
        };
        let (left, right, bare) = match (text.split_once('<'), text.split_once(':')) {
            (Some((left, right)), _) => (left, right, false),
            (None, Some((left, right))) => (left, right, true),
            _ => return Err(wrong()),
        };
        let (name, stat) = match left.trim().split_once(['.', ':']) {
            Some((name, stat)) => (name, Some(stat)),
            None => (left.trim(), None),
        };
        let figure = |stat: &str| match stat {
            "mean" | "avg" => Ok(Figure::Mean),
            "max" => Ok(Figure::Max),
            _ => {
                let percent = stat.strip_prefix('p').and_then(|digits| digits.parse::<f64>().ok());
                let percent = percent.filter(|percent| *percent > 0.0 && *percent < 100.0);
                percent.map(Figure::Percentile).ok_or_else(wrong)
            }
        };
        let below = match right.trim().parse::<f64>() {
            Ok(ms) if bare => Duration::try_from_secs_f64(ms / 1e3).map_err(|_| wrong())?,
            _ => units::duration(right)?,
        };
        let figure = stat.map_or(Ok(Figure::Each), figure)?;
        let bound = Self { metric: name.parse()?, figure, below };
        if below.is_zero() { Err(format!("`{text}`: no request can keep a bound of 0")) } else { Ok(bound) }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Metric::ALL.iter().find(|(_, metric)| *metric == self.metric).map_or("", |(name, _)| name);
        f.write_str(name)?;
        match self.figure {
            Figure::Each => {}
            Figure::Percentile(percent) => write!(f, ".p{percent}")?,
            Figure::Mean => f.write_str(".mean")?,
            Figure::Max => f.write_str(".max")?,
        }
        write!(f, "<{}ms", self.below.as_secs_f64() * 1e3)
    }
}

// === impl Slo ===

impl Slo {
    /// Whether one request with these times keeps every bound by itself; a time that it does not have breaks
    /// none.
    pub fn met_by(&self, time: impl Fn(Metric) -> Option<Duration>) -> bool {
        self.bounds.iter().all(|bound| time(bound.metric).is_none_or(|time| time < bound.below))
    }
}

impl FromStr for Slo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split([',', ' ']).filter(|part| !part.trim().is_empty());
        let bounds = parts.map(|part| part.trim().parse()).collect::<Result<Vec<Bound>, _>>()?;
        if bounds.is_empty() {
            Err("an objective needs a bound, such as ttft<500ms".into())
        } else {
            Ok(Self { bounds })
        }
    }
}

impl fmt::Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, bound) in self.bounds.iter().enumerate() {
            write!(f, "{}{bound}", if i > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

// === impl Keeper ===

impl Keeper {
    /// A count for `slo` to which no request was added yet.
    pub fn new(slo: Slo) -> Self {
        Self { each: vec![Kept::default(); slo.bounds.len()], slo, ..Self::default() }
    }

    /// Adds a request that ended, well or badly.
    pub fn add(&mut self, record: &Record) {
        self.of += 1;
        let mut all = true;
        for (bound, kept) in self.slo.bounds.iter().zip(&mut self.each) {
            let is_met = bound.is_met(record);
            kept.met += u64::from(is_met);
            kept.failed += u64::from(!record.is_ok());
            if let Some(ns) = bound.metric.ns(record).filter(|_| record.is_ok()) {
                kept.sum_ns += u128::from(ns);
                kept.timed += 1;
            }
            all &= is_met;
        }
        if all {
            self.met += 1;
            self.tokens += record.exchange.usage.as_ref().map_or(0, |usage| usage.completion_tokens);
        }
    }

    /// The smallest, over the objective's parts, of (share that keeps it) / (share that must): at least 1
    /// when the objective holds; of a mean, bound / mean. Bounds on each request are one part, which `attain`
    /// of requests must keep together.
    pub fn attainment(&self, attain: f64) -> f64 {
        let share = |met: u64| met as f64 / self.of.max(1) as f64;
        let each = self.slo.bounds.iter().zip(&self.each);
        let parts = each.filter_map(|(bound, kept)| bound.attainment(kept, self.of));
        let together = self.slo.bounds.iter().any(|bound| bound.figure == Figure::Each);
        parts.chain(together.then(|| share(self.met) / attain)).fold(f64::INFINITY, f64::min)
    }

    /// The figures of a run of `elapsed_s`.
    pub fn report(&self, elapsed_s: f64) -> Goodput {
        let share = |met: u64| met as f64 / self.of.max(1) as f64;
        let per_s = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
        let bounds = self.slo.bounds.iter().zip(&self.each).map(|(bound, kept)| BoundReport {
            bound: bound.to_string(),
            share: share(kept.met),
            holds: bound.attainment(kept, self.of).map(|attained| attained >= 1.0),
        });
        Goodput {
            slo: self.slo.to_string(),
            met: self.met,
            of: self.of,
            share: share(self.met),
            requests_per_s: per_s(self.met),
            output_tokens_per_s: per_s(self.tokens),
            bounds: bounds.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::{Outcome, tests::good};

    #[test]
    fn what_people_write() {
        let slo: Slo = "ttft.p99<500ms, tpot<50ms".parse().unwrap();
        assert_eq!(slo.to_string(), "ttft.p99<500ms,tpot<50ms");
        assert_eq!("ttft:p99<0.5s".parse::<Bound>().unwrap(), slo.bounds[0]);
        assert_eq!("ttft:500 e2el:2000".parse::<Slo>().unwrap().to_string(), "ttft<500ms,e2e<2000ms");
        assert_eq!(
            "ttft.mean<2s,tpot:max<50ms".parse::<Slo>().unwrap().to_string(),
            "ttft.mean<2000ms,tpot.max<50ms"
        );
        for bad in
            ["", "ttft", "ttft<5", "ttft.p0<1s", "ttft.p100<1s", "ttft.q9<1s", "itl<5ms", "ttft<0s", "x:5"]
        {
            assert!(bad.parse::<Slo>().is_err(), "{bad}");
        }
    }

    #[test]
    fn goodput_counts_from_when_a_request_was_due_and_failures_keep_nothing() {
        // Due at 0, sent at 4 ms, first token at 10 ms, three tokens 5 ms apart, ends at 20 ms.
        let record = good(0, 4, 10, 20);
        for (slo, met) in [
            ("ttft<11ms", 1),
            ("ttft<10ms", 0),
            ("tpot<6ms,ttft<11ms", 1),
            ("tpot<5ms,ttft<11ms", 0),
            ("e2e<17ms", 0),
        ] {
            let mut keeper = Keeper::new(slo.parse().unwrap());
            keeper.add(&record);
            let mut failed = record.clone();
            failed.exchange.outcome = Outcome::Cancelled;
            keeper.add(&failed);
            let report = keeper.report(2.0);
            assert_eq!((report.met, report.of, report.requests_per_s), (met, 2, met as f64 / 2.0), "{slo}");
        }
    }

    #[test]
    fn means_and_maxima() {
        let of = |slo: &str, firsts: &[u64]| {
            let mut keeper = Keeper::new(slo.parse().unwrap());
            for &first in firsts {
                keeper.add(&good(0, 0, first, 40));
            }
            keeper
        };
        let mean = of("ttft.mean<20ms", &[5, 11]);
        assert_eq!((mean.attainment(0.5), mean.report(1.0).bounds[0].holds), (20.0 / 8.0, Some(true)));
        assert_eq!(of("ttft.mean<8ms", &[5, 11]).report(1.0).bounds[0].holds, Some(false));
        assert_eq!(of("ttft.max<11ms", &[5, 11]).attainment(0.5), 0.5);
        assert_eq!(of("ttft.max<12ms", &[5, 11]).report(1.0).bounds[0].holds, Some(true));
        // A failed request has no time, and keeps no mean.
        let mut failed = good(0, 0, 1, 2);
        failed.exchange.outcome = Outcome::Cancelled;
        let mut mean = of("ttft.mean<20ms", &[5]);
        mean.add(&failed);
        assert_eq!(mean.report(1.0).bounds[0].holds, Some(false));
    }

    #[test]
    fn the_named_figure_of_a_run_decides() {
        let mut times = Samples::default();
        for ms in [1, 1, 1, 9, 100] {
            times.add_us(ms * 1000);
        }
        for (slo, holds) in [
            ("ttft.p60<2ms", true),
            ("ttft.p70<2ms", false),
            ("ttft.mean<23ms", true),
            ("ttft.mean<22ms", false),
            ("ttft.max<100ms", false),
            ("ttft<1ms", true),
        ] {
            assert_eq!(slo.parse::<Bound>().unwrap().holds(&times), holds, "{slo}");
            assert!(slo.parse::<Bound>().unwrap().holds(&Samples::default()));
        }
        let slo: Slo = "ttft.p90<2s,tpot.p50<50ms".parse().unwrap();
        assert!(slo.met_by(|metric| (metric == Metric::Ttft).then_some(Duration::from_secs(1))));
        assert!(!slo.met_by(|_| Some(Duration::from_secs(1))));
    }

    #[test]
    fn attainment_is_of_the_worst_part() {
        let mut keeper = Keeper::new("ttft.p90<11ms,e2e<30ms".parse().unwrap());
        for i in 0..10 {
            keeper.add(&good(0, 0, if i < 3 { 12 } else { 10 }, 20));
        }
        assert!((keeper.attainment(0.5) - 0.7 / 0.9).abs() < 1e-12);
        assert_eq!(keeper.report(1.0).bounds[0].holds, Some(false));
        assert_eq!(keeper.report(1.0).bounds[1].holds, None);
    }
}
