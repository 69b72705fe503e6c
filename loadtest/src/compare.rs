//! `keyway-loadtest compare`: two runs of the same workload, figure by figure, with what chance alone could
//! do. Refuses runs of different workloads. Measures nothing.

pub mod bootstrap;
pub mod page;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde::Serialize;

use crate::{
    args::{compare::CompareArgs, gate::Gate},
    compare::bootstrap::{Runs, Stat},
    error::{EXIT_GATE, EXIT_INVALID, Error},
    limits, output,
    report::{FORMAT, Report, Status},
    stats::{
        hdr,
        samples::{ITL_HALF_MAGNITUDE, Sample},
    },
    stdout,
};

/// Chance of calling any figure of a comparison different by accident.
const ALPHA: f64 = 0.05;

const STATS: [(&str, Stat); 5] = [
    ("mean", Stat::Mean),
    ("p50", Stat::Percentile(50.0)),
    ("p90", Stat::Percentile(90.0)),
    ("p95", Stat::Percentile(95.0)),
    ("p99", Stat::Percentile(99.0)),
];

/// What became of a figure. Times: less is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeVerdict {
    /// Smaller in the new runs, and chance does not explain it.
    Better,
    /// Larger in the new runs, and chance does not explain it.
    Worse,
    /// Chance explains the difference.
    Same,
    /// The runs are too short to say.
    TooFew,
}

/// One figure in both runs.
#[derive(Debug, Clone, Serialize)]
pub struct ComparedFigure {
    /// Metric and statistic, such as `ttft.p99`: its name in `--fail-on`.
    pub figure: String,
    /// Its value in the base runs, in milliseconds; NaN if they are too short for it.
    pub base_ms: f64,
    /// Its value in the new runs, in milliseconds; NaN if the runs are too short for it.
    pub new_ms: f64,
    /// new / base - 1.
    pub change: f64,
    /// 95 % interval of `change`.
    pub interval: Option<(f64, f64)>,
    /// Chance of a difference as large if there were none.
    pub p: Option<f64>,
    /// With all figures of the comparison in view.
    pub verdict: ChangeVerdict,
}

/// A figure without an interval.
#[derive(Debug, Clone, Serialize)]
pub struct Plain {
    /// Its name, such as `requests_per_s`, as `--fail-on` names it too.
    pub figure: &'static str,
    /// In the first run.
    pub base: Option<f64>,
    /// In the second; of several runs the mean, `None` if any of them lacks it.
    pub new: Option<f64>,
}

/// The whole comparison, in the shape that `compare --json` prints.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Whether each request of one run was compared with the same request of the other.
    pub paired: bool,
    /// Runs of each side.
    pub runs: (usize, usize),
    /// Requests compared, of each side.
    pub requests: (usize, usize),
    /// Why the runs should not be trusted, if so.
    pub warnings: Vec<String>,
    /// Times: mean and percentiles of each metric that all the runs have.
    pub rows: Vec<ComparedFigure>,
    /// Figures without an interval, such as rates and shares, that at least one side has.
    pub plain: Vec<Plain>,
    /// Gates of `--fail-on` that failed, each with the change found; any of them makes the exit code 4.
    pub failed: Vec<String>,
    #[serde(skip)]
    untrusted: bool,
}

/// Compares, prints, and gives the exit code: 4 when a gate fails.
pub fn run(args: &CompareArgs) -> Result<ExitCode, Error> {
    let (base, new) = (Side::load(&args.base, &args.more_base)?, Side::load(&args.new, &args.more_new)?);
    let comparison = Comparison::new(&base, &new, args)?;
    if let Some(path) = &args.html {
        output::write_text(path, &page::render(&comparison, &base.reports[0], &new.reports[0]))?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&comparison).unwrap_or_default() + "\n"
    } else {
        comparison.render(args.md)
    };
    stdout::print(&text)?;
    Ok(ExitCode::from(match (comparison.failed.is_empty(), comparison.untrusted) {
        (false, _) => EXIT_GATE,
        (true, true) if !args.fail_on.is_empty() => EXIT_INVALID,
        _ => 0,
    }))
}

/// Reads a run's report; `path` is the file or its folder.
pub fn load(path: &Path) -> Result<Report, Error> {
    let file = if path.is_dir() { path.join("run.json") } else { path.to_owned() };
    let refuse = |reason: String| Error::Report { path: file.clone(), reason };
    let text = fs::read(&file).map_err(|error| refuse(format!("cannot read it: {error}")))?;
    let report: Report = serde_json::from_slice(&text)
        .map_err(|error| refuse(format!("not a run.json of this program: {error}")))?;
    if report.format != FORMAT {
        return Err(refuse(format!("its format is `{}`, not `{FORMAT}`", report.format)));
    }
    Ok(report)
}

/// The runs of one side.
struct Side {
    /// The report of each run, in the order of the command line; at least one.
    reports: Vec<Report>,
    /// The good answers that each report kept, in the order of `reports`.
    samples: Vec<Vec<Sample>>,
}

// === impl Side ===

impl Side {
    fn load(first: &Path, more: &[PathBuf]) -> Result<Self, Error> {
        let (mut reports, mut samples) = (Vec::new(), Vec::new());
        for path in std::iter::once(first).chain(more.iter().map(PathBuf::as_path)) {
            let report = load(path)?;
            let read = report.samples.read();
            samples.push(read.map_err(|source| Error::Samples { path: path.into(), source })?);
            reports.push(report);
        }
        Ok(Self { reports, samples })
    }
}

// === impl Comparison ===

impl Comparison {
    fn new(base: &Side, new: &Side, args: &CompareArgs) -> Result<Self, Error> {
        let first = &base.reports[0];
        if !args.force {
            base.reports.iter().chain(&new.reports).try_for_each(|report| same_workload(first, report))?;
        }
        let (mut a, mut b) = (base.samples.clone(), new.samples.clone());
        let paired = match (&mut a[..], &mut b[..]) {
            ([a], [b]) => are_the_same_requests(first, &new.reports[0]) && pair(a, b),
            _ => false,
        };
        let mut rows = rows(&a, &b, paired, args.seed);
        judge(&mut rows, args.min_change / 100.0);
        let plain = plain(base, new);
        let failed = failed(&args.fail_on, &rows, &plain)?;
        let mut warnings = [doubts("the base run", base), doubts("the new run", new)].concat();
        let untrusted = !warnings.is_empty();
        warnings.extend(sent_before(base, new));
        let count = |side: &[Vec<Sample>]| side.iter().map(Vec::len).sum();
        let (runs, requests) = ((a.len(), b.len()), (count(&a), count(&b)));
        Ok(Self { paired, runs, requests, warnings, rows, plain, failed, untrusted })
    }

    fn render(&self, md: bool) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = if md { self.markdown(&mut out) } else { self.text(&mut out) };
        out
    }

    fn text(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "{}", self.describe())?;
        for warning in &self.warnings {
            writeln!(out, "WARNING    {warning}")?;
        }
        let heads = ["base ms", "new ms", "change", "95 % interval", "p", "verdict"];
        let [base, new, change, interval, p, verdict] = heads;
        writeln!(out, "\n{:<14}{base:>11}{new:>11}{change:>10}{interval:>20}{p:>9}  {verdict}", "")?;
        for row in &self.rows {
            let [figure, base, new, change, interval, p, verdict] = row.cells();
            writeln!(out, "{figure:<14}{base:>11}{new:>11}{change:>10}{interval:>20}{p:>9}  {verdict}")?;
        }
        writeln!(out)?;
        for plain in &self.plain {
            let [figure, base, new] = plain.cells();
            writeln!(out, "{figure:<22}{base:>12} -> {new}")?;
        }
        writeln!(
            out,
            "(better, worse: by more than --min-change and more than chance, with all figures in view: 5 %)"
        )?;
        self.failed.iter().try_for_each(|gate| writeln!(out, "FAILED     {gate}"))
    }

    /// What was compared, in words.
    pub fn describe(&self) -> String {
        let how = if self.paired { "request by request" } else { "as two samples" };
        let of = |runs: usize| if runs > 1 { format!(" of {runs} runs") } else { String::new() };
        let ((a, b), (n, m)) = (self.runs, self.requests);
        format!("{n}{} and {m}{} good answers, compared {how}", of(a), of(b))
    }

    fn markdown(&self, out: &mut String) -> std::fmt::Result {
        for warning in &self.warnings {
            writeln!(out, "> **Warning:** {warning}\n")?;
        }
        writeln!(out, "| figure | base ms | new ms | change | 95 % interval | p | verdict |")?;
        writeln!(out, "|---|--:|--:|--:|--:|--:|---|")?;
        for row in &self.rows {
            writeln!(out, "| {} |", row.cells().join(" | "))?;
        }
        writeln!(out, "\n| figure | base | new |\n|---|--:|--:|")?;
        for plain in &self.plain {
            writeln!(out, "| {} |", plain.cells().join(" | "))?;
        }
        self.failed.iter().try_for_each(|gate| writeln!(out, "\n**Failed:** {gate}"))
    }
}

/// Why the runs of a side should not be trusted.
fn doubts(name: &str, side: &Side) -> Vec<String> {
    let doubt = |run: &Report| match (run.verdict.status, run.found_in_caches()) {
        (Status::Valid | Status::Warm, Some(found)) => Some(format!(
            "{name} is warm: {:.1} % of its prompts' tokens came from caches that an earlier run of the same bytes \
             had filled, so its times are no cold server's; measure again without --text-seed, or with empty caches",
            found * 100.0
        )),
        (Status::Valid, None) => None,
        _ => Some(format!("{name} is not valid: {}", run.verdict.reason)),
    };
    side.reports.iter().filter_map(doubt).collect()
}

/// A remark if the second side may have profited from the first: both sent the same bytes to one server, and
/// more of the second's came from caches.
fn sent_before(base: &Side, new: &Side) -> Option<String> {
    let (a, b) = (&base.reports[0], &new.reports[0]);
    let are_equal = !a.workload.body_hash.is_empty() && a.workload.body_hash == b.workload.body_hash;
    let more = b.cache.achieved? - a.cache.achieved?;
    let is_doubtful = are_equal
        && a.config.url == b.config.url
        && a.started_unix_s < b.started_unix_s
        && b.found_in_caches().is_none()
        && more > limits::CACHE_BEYOND_POSSIBLE_MAX;
    is_doubtful.then(|| {
        format!(
            "both runs sent the same bytes to {}, and {:.1} % more of the new one's came from caches: were they \
             emptied in between?",
            a.config.url,
            more * 100.0
        )
    })
}

/// Whether request n of one run is request n of the other but for its words: one seed and one workload.
fn are_the_same_requests(a: &Report, b: &Report) -> bool {
    !a.workload.fingerprint.is_empty()
        && a.workload.fingerprint == b.workload.fingerprint
        && a.config.seed == b.config.seed
}

fn same_workload(base: &Report, new: &Report) -> Result<(), Error> {
    let (a, b) = (&base.workload.fingerprint, &new.workload.fingerprint);
    if !a.is_empty() && a == b {
        return Ok(());
    }
    let mut different = Vec::new();
    let object = |report: &Report| serde_json::to_value(&report.config).unwrap_or_default();
    if let (Some(a), Some(b)) = (object(base).as_object(), object(new).as_object()) {
        let told = ["url", "model", "seed", "text_seed", "timeout_s", "oracle_blocks"];
        let keys = a.keys().filter(|key| !told.contains(&key.as_str()) && a.get(*key) != b.get(*key));
        different.extend(keys.map(|key| format!("{key}: {} and {}", a[key], b[key])));
    }
    let what = if different.is_empty() { "no record of the workload".into() } else { different.join(", ") };
    Err(Error::Usage(format!(
        "these runs had different workloads ({what}); --force compares them all the same"
    )))
}

/// Keeps the requests that both runs answered; `false`, and nothing dropped, if there are none.
fn pair(a: &mut Vec<Sample>, b: &mut Vec<Sample>) -> bool {
    let rows = |samples: &[Sample]| samples.iter().map(|s| s.row).collect::<std::collections::HashSet<_>>();
    let (in_a, in_b) = (rows(a), rows(b));
    if in_a.is_disjoint(&in_b) {
        return false;
    }
    a.retain(|sample| in_b.contains(&sample.row));
    b.retain(|sample| in_a.contains(&sample.row));
    // Slots of a closed loop may have taken turns.
    a.sort_by_key(|sample| sample.row);
    b.sort_by_key(|sample| sample.row);
    true
}

fn rows(a: &[Vec<Sample>], b: &[Vec<Sample>], paired: bool, seed: u64) -> Vec<ComparedFigure> {
    type Values = fn(&Sample) -> Vec<(f64, u32)>;
    let metrics: [(&str, Values); 5] = [
        ("ttft", |s| single(s.ttft)),
        ("ttst", |s| single(s.ttst)),
        ("tpot", |s| single(s.tpot)),
        ("itl", |s| {
            let ms = |bucket: usize| hdr::middle(bucket, ITL_HALF_MAGNITUDE) / 1e3;
            s.itl.iter().map(|&(bucket, count)| (ms(bucket), count as u32)).collect()
        }),
        ("e2e", |s| single(Some(s.e2e))),
    ];
    let stats = STATS.map(|(_, stat)| stat);
    let mut rows = Vec::new();
    for (metric, values) in metrics {
        let of = |side: &[Vec<Sample>]| -> Vec<Runs> {
            side.iter().map(|samples| Runs { requests: samples.iter().map(values).collect() }).collect()
        };
        let (a, b) = (of(a), of(b));
        if a.iter().chain(&b).any(|run| run.requests.iter().all(Vec::is_empty)) {
            continue;
        }
        let differences = bootstrap::compare(&a, &b, paired, &stats, bootstrap::RESAMPLES, seed);
        for ((name, _), difference) in STATS.iter().zip(differences) {
            let figure = format!("{metric}.{name}");
            rows.push(match difference {
                Some(d) => ComparedFigure {
                    figure,
                    base_ms: d.base,
                    new_ms: d.new,
                    change: d.change(),
                    interval: Some(d.interval),
                    p: Some(d.p),
                    verdict: ChangeVerdict::Same,
                },
                None => ComparedFigure {
                    figure,
                    base_ms: f64::NAN,
                    new_ms: f64::NAN,
                    change: f64::NAN,
                    interval: None,
                    p: None,
                    verdict: ChangeVerdict::TooFew,
                },
            });
        }
    }
    rows
}

fn single(us: Option<u64>) -> Vec<(f64, u32)> {
    us.map(|us| (us as f64 / 1e3, 1)).into_iter().collect()
}

/// A change counts that chance does not explain, and that is not so small that a machine does the same from
/// one run to the next: its whole interval lies beyond `min_change`.
fn judge(rows: &mut [ComparedFigure], min_change: f64) {
    let p: Vec<f64> = rows.iter().filter_map(|row| row.p).collect();
    let significant = bootstrap::holm(&p, ALPHA);
    for (row, significant) in rows.iter_mut().filter(|row| row.p.is_some()).zip(significant) {
        row.verdict = match row.interval {
            Some((low, _)) if significant && low > min_change => ChangeVerdict::Worse,
            Some((_, high)) if significant && high < -min_change => ChangeVerdict::Better,
            _ => ChangeVerdict::Same,
        };
    }
}

/// Figures without an interval: each side's mean over its runs.
fn plain(base: &Side, new: &Side) -> Vec<Plain> {
    type Figure = fn(&Report) -> Option<f64>;
    let figures: [(&str, Figure); 5] = [
        ("requests_per_s", |r| Some(r.throughput.requests_per_s)),
        ("output_tokens_per_s", |r| Some(r.throughput.output_tokens_per_s)),
        ("failed", |r| Some(r.requests.failed as f64)),
        ("cached", |r| r.cache.achieved),
        ("goodput", |r| r.goodput.as_ref().map(|goodput| goodput.share)),
    ];
    let mean = |side: &Side, of: Figure| {
        let values: Option<Vec<f64>> = side.reports.iter().map(of).collect();
        values.map(|values| values.iter().sum::<f64>() / values.len() as f64)
    };
    let both =
        |(figure, of): (&'static str, Figure)| Plain { figure, base: mean(base, of), new: mean(new, of) };
    figures.map(both).into_iter().filter(|plain| plain.base.is_some() || plain.new.is_some()).collect()
}

fn failed(gates: &[Gate], rows: &[ComparedFigure], plain: &[Plain]) -> Result<Vec<String>, Error> {
    let mut failed = Vec::new();
    for gate in gates {
        let (change, significant) = if let Some(row) = rows.iter().find(|row| row.figure == gate.figure) {
            if row.verdict == ChangeVerdict::TooFew {
                let text = format!("{gate}: {} {}", row.figure, row.needs());
                return Err(Error::Usage(text));
            }
            (row.change, row.verdict != ChangeVerdict::Same)
        } else if let Some(plain) = plain.iter().find(|plain| plain.figure == gate.figure) {
            match (plain.base, plain.new) {
                (Some(base), Some(new)) if base == new => (0.0, true),
                (Some(base), Some(new)) => (new / base - 1.0, true),
                _ => return Err(Error::Usage(format!("{gate}: one of the runs has no {}", plain.figure))),
            }
        } else {
            let names: Vec<_> =
                rows.iter().map(|row| row.figure.as_str()).chain(plain.iter().map(|p| p.figure)).collect();
            return Err(Error::Usage(format!("{gate}: no such figure; there are {}", names.join(", "))));
        };
        if gate.fails(change, significant) {
            failed.push(format!("{gate}: it is {:+.1} %", change * 100.0));
        }
    }
    Ok(failed)
}

impl ComparedFigure {
    /// How many requests it takes to judge this figure, in words.
    fn needs(&self) -> String {
        let stat = STATS.iter().find(|(name, _)| self.figure.ends_with(&format!(".{name}")));
        format!("needs {} requests a side", stat.map_or(2, |(_, stat)| stat.requests_min()))
    }

    fn cells(&self) -> [String; 7] {
        let (Some((low, high)), Some(p)) = (self.interval, self.p) else {
            let dash = || "-".to_owned();
            return [self.figure.clone(), dash(), dash(), dash(), dash(), dash(), self.needs()];
        };
        let verdict = match self.verdict {
            ChangeVerdict::Better => "better",
            ChangeVerdict::Worse => "WORSE",
            ChangeVerdict::Same | ChangeVerdict::TooFew => "same",
        };
        [
            self.figure.clone(),
            format!("{:.2}", self.base_ms),
            format!("{:.2}", self.new_ms),
            format!("{:+.1} %", self.change * 100.0),
            format!("{:+.1} to {:+.1} %", low * 100.0, high * 100.0),
            format!("{p:.4}"),
            verdict.into(),
        ]
    }
}

impl Plain {
    fn cells(&self) -> [String; 3] {
        let text = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.3}"));
        [self.figure.into(), text(self.base), text(self.new)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_counts_beyond_chance_and_beyond_what_a_machine_does_from_run_to_run() {
        let row = |change: f64, spread: f64, p: f64| ComparedFigure {
            figure: "ttft.mean".into(),
            base_ms: 100.0,
            new_ms: 100.0 * (1.0 + change),
            change,
            interval: Some((change - spread, change + spread)),
            p: Some(p),
            verdict: ChangeVerdict::Same,
        };
        let judged = |row: ComparedFigure, min_change: f64| {
            let mut rows = [row];
            judge(&mut rows, min_change);
            rows[0].verdict
        };
        assert_eq!(judged(row(0.008, 0.002, 0.0), 0.01), ChangeVerdict::Same);
        assert_eq!(judged(row(0.008, 0.002, 0.0), 0.0), ChangeVerdict::Worse);
        assert_eq!(judged(row(0.05, 0.02, 0.0), 0.01), ChangeVerdict::Worse);
        assert_eq!(judged(row(-0.05, 0.02, 0.0), 0.01), ChangeVerdict::Better);
        assert_eq!(judged(row(0.05, 0.045, 0.0), 0.01), ChangeVerdict::Same);
        assert_eq!(judged(row(0.05, 0.02, 0.2), 0.01), ChangeVerdict::Same);
    }
}
