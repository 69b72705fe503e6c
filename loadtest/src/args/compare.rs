//! The options of `compare`. Decides nothing.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueHint};

use crate::{args::gate::Gate, units};

/// Shown under `compare --help`.
pub const EXAMPLES: &str = "\
Examples:
  keyway-loadtest compare before/run.json after/run.json
  # In CI: exit code 4 when the 99th percentile of TTFT got more than 5 % worse, by more than chance
  keyway-loadtest compare baseline.json out/run.json --fail-on 'ttft.p99>+5%' --fail-on 'failed>+0%' --md

  # Three runs of each side: what differs from run to run is not taken for a change
  keyway-loadtest compare a1 b1 --base a2 --base a3 --new b2 --new b3 --html out/compare.html

Figures: ttft, ttst, tpot, itl, e2e with .mean .p50 .p90 .p95 .p99, counted from when requests were due; and
requests_per_s, output_tokens_per_s, failed, cached, goodput, which have no interval.
Runs of one --seed are compared request by request, others as two samples. Intervals are
from a bootstrap of whole requests in blocks; a figure is better or worse only if it differs by more than chance
with all figures in view (Holm, 5 %), and its interval lies beyond --min-change. A gate fails when a figure is
better or worse so, and changed by more than its bound.";

/// Options of `compare`.
#[derive(Debug, ClapArgs)]
pub struct CompareArgs {
    /// run.json of the first run, or its folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub base: PathBuf,
    /// run.json of the second
    #[arg(value_hint = ValueHint::AnyPath)]
    pub new: PathBuf,
    /// A further run of the first side; repeatable
    #[arg(long = "base", value_name = "RUN", value_hint = ValueHint::AnyPath)]
    pub more_base: Vec<PathBuf>,
    /// A further run of the second side; repeatable
    #[arg(long = "new", value_name = "RUN", value_hint = ValueHint::AnyPath)]
    pub more_new: Vec<PathBuf>,
    /// Exit with 4 when a figure changes by more than this and more than chance, such as `ttft.p99>+5%`;
    /// repeatable
    #[arg(long, value_name = "GATE")]
    pub fail_on: Vec<Gate>,
    /// Compare runs of different workloads
    #[arg(long)]
    pub force: bool,
    /// Print Markdown
    #[arg(long, conflicts_with = "json")]
    pub md: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Also write one HTML page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Changes up to so many per cent are none, for --fail-on too: a machine does as much from one run to the
    /// next
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = units::not_negative)]
    pub min_change: f64,
    /// Seed of the bootstrap
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
}
