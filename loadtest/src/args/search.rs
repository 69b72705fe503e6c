//! The options of `search` and `sweep`: those of a measurement, and what changes from one to the next.

use clap::{Args as ClapArgs, ValueEnum};

use super::run::RunArgs;
use crate::{units, workload::dist::Tokens};

/// Shown under `search --help`.
pub const SEARCH_EXAMPLES: &str = "\
Examples:
  # Most requests a second of which 99 % get a first token within half a second
  keyway-loadtest search --url http://127.0.0.1:8080 --isl 1024 --osl 128 --slo 'ttft.p99<500ms' --requests 1000
  # Most requests at a time with tokens every 50 ms for 9 of 10 requests
  keyway-loadtest search --url http://127.0.0.1:8080 --over concurrency --slo 'tpot.p90<50ms' --duration 30s

Each probe is a whole measurement with a seed of its own; --requests or --duration is the length of one. The load
doubles until the objective is lost, then the edge is bisected in steps of equal ratio, then both sides are
repeated. A probe that has lost the objective beyond doubt ends early.
Exit code: 0 found (or kept at --to), 3 a probe was sent too late four times, 4 the objective is kept at no load.";

/// Shown under `sweep --help`.
pub const SWEEP_EXAMPLES: &str = "\
Examples:
  keyway-loadtest sweep --url http://127.0.0.1:8080 --rates 1,2,4,8 --duration 30s -o out
  keyway-loadtest sweep --url http://127.0.0.1:8080 --concurrencies 1,8,64 --isl-osl 128/128,2048/256 --requests 200
  # Where agents' sessions push each other out of the caches: throughput, hits and times over sessions at once
  keyway-loadtest sweep --url http://127.0.0.1:8080 --trace agents.jsonl --live --concurrencies 14,29,58,116 -o out

One measurement for each combination, in order; DIR/sweep.json has the table, DIR/1/run.json the first run.";

/// What a search raises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Over {
    /// Requests a second.
    Rate,
    /// Requests under way.
    Concurrency,
}

/// Options of `search`.
#[derive(Debug, Clone, ClapArgs)]
#[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
pub struct SearchArgs {
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten, next_help_heading = "Search")]
    pub range: RangeArgs,
}

/// Where to search and how closely.
#[derive(Debug, Clone, ClapArgs)]
pub struct RangeArgs {
    /// What to raise
    #[arg(long, value_enum, default_value_t = Over::Rate)]
    pub over: Over,
    /// First load to try
    #[arg(long, value_name = "LOAD", default_value = "1", value_parser = units::positive)]
    pub from: f64,
    /// Highest load to try
    #[arg(long, value_name = "LOAD", default_value = "10000", value_parser = units::positive)]
    pub to: f64,
    /// Share of requests that must keep bounds without a percentile (`ttft<500ms`)
    #[arg(long, value_name = "SHARE", default_value = "0.99", value_parser = units::share)]
    pub attain: f64,
    /// How close the sides of the edge come
    #[arg(long, value_name = "SHARE", default_value = "0.05", value_parser = units::share)]
    pub tolerance: f64,
    /// Probes on each side of the edge
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    pub repeats: u16,
}

/// Options of `sweep`.
#[derive(Debug, Clone, ClapArgs)]
#[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
pub struct SweepArgs {
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten, next_help_heading = "Sweep")]
    pub grid: GridArgs,
}

/// What to combine.
#[derive(Debug, Clone, ClapArgs)]
#[group(required = true, multiple = true)]
pub struct GridArgs {
    /// Rates, in requests a second
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = units::positive,
          conflicts_with = "concurrencies")]
    pub rates: Vec<f64>,
    /// Numbers of requests under way; of conversations and of a trace with --live, numbers of sessions
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=crate::limits::USERS_MAX as i64))]
    pub concurrencies: Vec<u32>,
    /// Lengths of prompt and answer, each as --isl takes it, such as 128/128,2048/256
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = lengths)]
    pub isl_osl: Vec<(Tokens, Tokens)>,
}

fn lengths(text: &str) -> Result<(Tokens, Tokens), String> {
    let (isl, osl) =
        text.split_once('/').ok_or_else(|| format!("`{text}`: write ISL/OSL, such as 128/128"))?;
    Ok((isl.parse()?, osl.parse()?))
}
