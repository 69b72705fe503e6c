//! What must hold of a run's latencies: `ttft.p90<2s,tpot.p50<50ms`. Reads and judges; measures nothing.

use std::{fmt, str::FromStr, time::Duration};

use crate::{stats::Summary, units};

/// A latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Time to the first token.
    Ttft,
    /// Mean time per generated token after the first.
    Tpot,
    /// Time to the last token.
    E2e,
}

/// A figure of a latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Arithmetic mean.
    Mean,
    /// Median.
    P50,
    /// 90th percentile.
    P90,
    /// 99th percentile.
    P99,
    /// Largest sample.
    Max,
}

/// One bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Of what.
    pub metric: Metric,
    /// Which figure of it.
    pub figure: Figure,
    /// Must stay below this.
    pub below: Duration,
}

/// All of these must hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Slo(pub Vec<Bound>);

const METRICS: [(&str, Metric); 3] = [("ttft", Metric::Ttft), ("tpot", Metric::Tpot), ("e2e", Metric::E2e)];
const FIGURES: [(&str, Figure); 5] = [
    ("mean", Figure::Mean),
    ("p50", Figure::P50),
    ("p90", Figure::P90),
    ("p99", Figure::P99),
    ("max", Figure::Max),
];

// === impl Slo ===

impl Slo {
    /// Whether one request with these latencies meets every bound by itself.
    pub fn met_by(&self, latency: impl Fn(Metric) -> Option<Duration>) -> bool {
        self.0.iter().all(|bound| latency(bound.metric).is_none_or(|time| time < bound.below))
    }

    /// Whether a run with these figures meets every bound; a latency without samples meets any.
    pub fn met_by_run(&self, summary: impl Fn(Metric) -> Option<Summary>) -> bool {
        self.0.iter().all(|bound| {
            summary(bound.metric).is_none_or(|summary| {
                let ms = match bound.figure {
                    Figure::Mean => summary.mean,
                    Figure::P50 => summary.p50,
                    Figure::P90 => summary.p90,
                    Figure::P99 => summary.p99,
                    Figure::Max => summary.max,
                };
                ms < bound.below.as_secs_f64() * 1e3
            })
        })
    }
}

impl FromStr for Slo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(|bound| bound.trim().parse()).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |what: &str| {
            format!(
                "`{text}`: {what}; write METRIC.FIGURE<TIME with ttft, tpot or e2e and mean, p50, p90, p99 or max, such as ttft.p90<2s"
            )
        };
        let (name, time) = text.split_once('<').ok_or_else(|| bad("there is no `<`"))?;
        let (metric, figure) = name.trim().split_once('.').ok_or_else(|| bad("there is no figure"))?;
        let metric =
            METRICS.iter().find(|(name, _)| *name == metric).ok_or_else(|| bad("no such latency"))?;
        let figure = FIGURES.iter().find(|(name, _)| *name == figure).ok_or_else(|| bad("no such figure"))?;
        let below = units::duration(time).map_err(|reason| bad(&reason))?;
        Ok(Self { metric: metric.1, figure: figure.1, below })
    }
}

impl fmt::Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, bound) in self.0.iter().enumerate() {
            let name = |metric| METRICS.iter().find(|(_, m)| *m == metric).map_or("", |(name, _)| name);
            let figure = |figure| FIGURES.iter().find(|(_, m)| *m == figure).map_or("", |(name, _)| name);
            let comma = if i > 0 { "," } else { "" };
            let below = bound.below.as_secs_f64() * 1e3;
            write!(f, "{comma}{}.{}<{below}ms", name(bound.metric), figure(bound.figure))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_reads_back() {
        let slo: Slo = "ttft.p90<2s, tpot.p50<50ms".parse().unwrap();
        assert_eq!(slo.to_string(), "ttft.p90<2000ms,tpot.p50<50ms");
        assert_eq!(slo.to_string().parse(), Ok(slo));
        for bad in ["", "ttft<2s", "ttft.p95<2s", "itl.p50<1s", "ttft.p90>2s", "ttft.p90<2"] {
            assert!(bad.parse::<Slo>().unwrap_err().contains("such as ttft.p90<2s"), "{bad}");
        }
    }

    #[test]
    fn the_named_figure_decides() {
        let summary =
            Summary { n: 9, mean: 5.0, std: 1.0, p50: 1.0, p90: 9.0, p95: 50.0, p99: 90.0, max: 100.0 };
        let run = |text: &str| text.parse::<Slo>().unwrap().met_by_run(|_| Some(summary));
        assert!(run("ttft.p90<10ms") && !run("ttft.p90<9ms") && !run("ttft.p90<10ms,ttft.p99<90ms"));
        let slo: Slo = "ttft.p90<2s,tpot.p50<50ms".parse().unwrap();
        assert!(slo.met_by(|metric| (metric == Metric::Ttft).then_some(Duration::from_secs(1))));
        assert!(!slo.met_by(|_| Some(Duration::from_secs(1))));
    }
}
