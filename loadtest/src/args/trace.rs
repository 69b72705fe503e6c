//! The options of `trace`. Decides nothing.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum, ValueHint};

use super::{
    SliceArgs,
    run::{ScheduleArgs, WorkloadArgs},
};
use crate::units;

/// Formats that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// Mooncake's JSON lines: milliseconds, ids of 512 tokens.
    Mooncake,
    /// Bailian's JSON lines: seconds, ids of 16 tokens.
    Bailian,
    /// JSON lines for `vllm bench serve --dataset-name timed_trace`: seconds, ids of 16 tokens.
    VllmTimed,
}

/// The commands for traces.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Say what a trace holds: requests, tokens, distinct blocks, and what caches could reuse
    Info(InfoArgs),
    /// Say everything that is wrong with a trace; exit code 2 if a line cannot be replayed
    Validate(ValidateArgs),
    /// Write a trace in another format, its blocks cut anew
    Convert(ConvertArgs),
    /// Write a stretch of a trace, its times counted from 0
    Slice(ConvertArgs),
    /// Write a synthetic workload and its schedule, or a trace with its lengths multiplied, as a trace
    Synth(Box<SynthArgs>),
    /// Say what caches of given sizes could reuse of a trace
    Oracle(OracleArgs),
}

/// Options of `trace info`.
#[derive(Debug, ClapArgs)]
pub struct InfoArgs {
    /// Trace: Mooncake's, Bailian's or vLLM's JSON lines, Azure's or BurstGPT's CSV, sessions of agents
    /// (docs/traces.md), WEKA's sessions (a file or a folder)
    #[arg(value_hint = ValueHint::AnyPath)]
    pub file: PathBuf,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `trace validate`.
#[derive(Debug, ClapArgs)]
pub struct ValidateArgs {
    /// Trace, in any format that `trace info` reads
    #[arg(value_hint = ValueHint::AnyPath)]
    pub file: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `trace convert` and `trace slice`.
#[derive(Debug, ClapArgs)]
pub struct ConvertArgs {
    /// Trace, in any format that `trace info` reads
    #[arg(value_hint = ValueHint::AnyPath)]
    pub file: PathBuf,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Format to write [default: the one whose blocks have the size of the trace's]
    #[arg(long, value_enum)]
    pub to: Option<Target>,
    /// Write the first N rows only
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,
    /// File to write
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
}

/// Options of `trace synth`: those of `run` that say what is sent and when.
#[derive(Debug, ClapArgs)]
pub struct SynthArgs {
    #[command(flatten, next_help_heading = "Workload")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub workload: WorkloadArgs,
    #[command(flatten, next_help_heading = "Schedule")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub schedule: ScheduleArgs,
    #[command(flatten, next_help_heading = "Multipliers of --trace")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub multipliers: Multipliers,
    /// Format to write
    #[arg(long, value_enum, default_value_t = Target::VllmTimed, help_heading = "Output")]
    pub to: Target,
    /// File to write
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Output")]
    pub output: PathBuf,
}

/// By how much a trace grows.
#[derive(Debug, Clone, Copy, PartialEq, ClapArgs)]
pub struct Multipliers {
    /// Tokens for one token of what several prompts of the trace share
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, alias = "synthesis-prefix-len-multiplier",
          value_parser = units::positive)]
    pub prefix_len_multiplier: f64,
    /// Tokens for one token of what no other prompt of the trace has
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, alias = "synthesis-prompt-len-multiplier",
          value_parser = units::positive)]
    pub prompt_len_multiplier: f64,
    /// Equal trees of prefixes that share nothing; each prompt belongs to one of them
    #[arg(long, value_name = "N", default_value_t = 1, alias = "synthesis-prefix-root-multiplier",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prefix_copies: u32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { prefix_len_multiplier: 1.0, prompt_len_multiplier: 1.0, prefix_copies: 1 }
    }
}

/// Options of `trace oracle`.
#[derive(Debug, ClapArgs)]
pub struct OracleArgs {
    /// Trace, in any format that `trace info` reads
    #[arg(value_hint = ValueHint::AnyPath)]
    pub file: PathBuf,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Sizes of the LRU caches, in scaled blocks
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1000,3000,10000,30000,100000")]
    pub blocks: Vec<usize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
