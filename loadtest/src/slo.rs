//! Service-level objectives: bounds on the time a request takes (`ttft<500ms`) or on a figure of the whole run
//! (`ttft.p99<500ms`), and the count of requests that keep them. All times count from when a request was due.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{record::Record, units};

/// A time that a bound can be set on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// To the first token.
    Ttft,
    /// From the first to the second event with text.
    Ttst,
    /// Of a token after the first, on average.
    Tpot,
    /// To the end.
    E2e,
}

/// One bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// On what.
    pub metric: Metric,
    /// The share of requests, in per cent, that must keep it; `None`: every request by itself decides.
    pub percentile: Option<f64>,
    /// The bound.
    pub below: Duration,
}

/// Bounds that hold together.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Slo {
    /// At least one.
    pub bounds: Vec<Bound>,
}

/// How a run kept its bounds. Requests that failed keep none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Goodput {
    /// The bounds as written.
    pub slo: String,
    /// Requests that keep every bound, and all that ended.
    pub met: u64,
    /// See `met`.
    pub of: u64,
    /// met / of.
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
    /// As written.
    pub bound: String,
    /// Share of requests that keep it.
    pub share: f64,
    /// For a bound on a percentile: whether the run keeps it.
    pub holds: Option<bool>,
}

/// Counts requests that keep the bounds.
#[derive(Debug, Clone, Default)]
pub struct Keeper {
    slo: Slo,
    /// Requests that ended.
    pub of: u64,
    /// Of those, kept every bound.
    pub met: u64,
    tokens: u64,
    met_each: Vec<u64>,
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

    /// The time that `record`, a good answer, took; `None` if it has no such time (one token has no time per token).
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
    /// Whether `record` keeps it. A time that does not exist breaks no bound, except that every answer has a first
    /// token and an end.
    fn is_met(&self, record: &Record) -> bool {
        let ns = self.metric.ns(record).map(u128::from);
        record.is_ok() && ns.map_or(self.metric != Metric::Ttft, |ns| ns < self.below.as_nanos())
    }

    /// The share of requests that must keep it, if it is set on a percentile.
    fn share(&self) -> Option<f64> {
        self.percentile.map(|percent| percent / 100.0)
    }
}

impl FromStr for Bound {
    type Err = String;

    /// `ttft<500ms`, `ttft.p99<500ms`, and as vLLM writes it, in milliseconds, `ttft:500`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is no bound: write METRIC<TIME or METRIC.pNN<TIME, such as ttft.p99<500ms");
        let (left, right, bare) = match (text.split_once('<'), text.split_once(':')) {
            (Some((left, right)), _) => (left, right, false),
            (None, Some((left, right))) => (left, right, true),
            _ => return Err(wrong()),
        };
        let (name, stat) = match left.trim().split_once(['.', ':']) {
            Some((name, stat)) => (name, Some(stat)),
            None => (left.trim(), None),
        };
        let percentile = |stat: &str| {
            let percent = stat.strip_prefix('p').and_then(|digits| digits.parse::<f64>().ok());
            percent.filter(|percent| *percent > 0.0 && *percent < 100.0).ok_or_else(wrong)
        };
        let below = match right.trim().parse::<f64>() {
            Ok(ms) if bare => Duration::try_from_secs_f64(ms / 1e3).map_err(|_| wrong())?,
            _ => units::duration(right)?,
        };
        let bound = Self { metric: name.parse()?, percentile: stat.map(percentile).transpose()?, below };
        if below.is_zero() { Err(format!("`{text}`: no request can keep a bound of 0")) } else { Ok(bound) }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Metric::ALL.iter().find(|(_, metric)| *metric == self.metric).map_or("", |(name, _)| name);
        f.write_str(name)?;
        if let Some(percent) = self.percentile {
            write!(f, ".p{percent}")?;
        }
        write!(f, "<{}ms", self.below.as_secs_f64() * 1e3)
    }
}

// === impl Slo ===

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
    /// Counts for `slo`.
    pub fn new(slo: Slo) -> Self {
        Self { met_each: vec![0; slo.bounds.len()], slo, ..Self::default() }
    }

    /// Adds a request that ended, well or badly.
    pub fn add(&mut self, record: &Record) {
        self.of += 1;
        let mut all = true;
        for (bound, met) in self.slo.bounds.iter().zip(&mut self.met_each) {
            let is_met = bound.is_met(record);
            *met += u64::from(is_met);
            all &= is_met;
        }
        if all {
            self.met += 1;
            self.tokens += record.exchange.usage.as_ref().map_or(0, |usage| usage.completion_tokens);
        }
    }

    /// The smallest, over the objective's parts, of (share that keeps it) / (share that must): at least 1 when the
    /// objective holds. Bounds without a percentile are one part, which `attain` of requests must keep together.
    pub fn attainment(&self, attain: f64) -> f64 {
        let share = |met: u64| met as f64 / self.of.max(1) as f64;
        let each = self.slo.bounds.iter().zip(&self.met_each);
        let parts = each.filter_map(|(bound, &met)| Some(share(met) / bound.share()?));
        let together = self.slo.bounds.iter().any(|bound| bound.percentile.is_none());
        parts.chain(together.then(|| share(self.met) / attain)).fold(f64::INFINITY, f64::min)
    }

    /// The figures of a run of `elapsed_s`.
    pub fn report(&self, elapsed_s: f64) -> Goodput {
        let share = |met: u64| met as f64 / self.of.max(1) as f64;
        let per_s = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
        let bounds = self.slo.bounds.iter().zip(&self.met_each).map(|(bound, &met)| BoundReport {
            bound: bound.to_string(),
            share: share(met),
            holds: bound.share().map(|must| share(met) >= must),
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
    use crate::record::{Outcome, tests::good};

    #[test]
    fn what_people_write() {
        let slo: Slo = "ttft.p99<500ms, tpot<50ms".parse().unwrap();
        assert_eq!(slo.to_string(), "ttft.p99<500ms,tpot<50ms");
        assert_eq!("ttft:p99<0.5s".parse::<Bound>().unwrap(), slo.bounds[0]);
        assert_eq!("ttft:500 e2el:2000".parse::<Slo>().unwrap().to_string(), "ttft<500ms,e2e<2000ms");
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
