//! The command line: every option, its default and its help. Reads no file and starts nothing.

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::{
    args::simulate::SimulateArgs,
    mock::{self, args::MockArgs},
    units::{self, Span},
};

pub mod calibrate;
pub mod compare;
pub mod contender;
pub mod gate;
pub mod legs;
pub mod merge;
pub mod other_tools;
pub mod report;
pub mod run;
pub mod search;
pub mod sessions;
pub mod simulate;
pub mod trace;

use calibrate::CalibrateArgs;
use compare::CompareArgs;
use merge::MergeArgs;
use report::ReportArgs;
use run::{RunArgs, ServerArgs};
use search::{SearchArgs, SweepArgs};
use trace::TraceCommand;

const EXIT_CODES: &str = "\
Exit codes:
  0    measured; single requests may have failed, see the report
  1    the server could not be reached, or no request succeeded
  2    bad arguments or input
  3    invalid measurement: requests were sent too late to be trusted, or caches held them from an earlier run
  4    the run does not keep its objective (--slo with a percentile), or a comparison fails --fail-on
  130  interrupted; the report covers what was done";

/// Load tester for OpenAI-compatible LLM servers and gateways.
#[derive(Debug, Parser)]
#[command(name = "keyway-loadtest", version, after_help = EXIT_CODES)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure a server once: send a workload on schedule and report times, caches and errors
    #[command(after_help = run::EXAMPLES, after_long_help = format!("{}\n\n{EXIT_CODES}", run::EXAMPLES))]
    Run(Box<RunArgs>),
    /// Measure at several rates, concurrencies or lengths
    #[command(after_help = search::SWEEP_EXAMPLES)]
    Sweep(Box<SweepArgs>),
    /// Find the most load that keeps an objective
    #[command(after_help = search::SEARCH_EXAMPLES)]
    Search(Box<SearchArgs>),
    /// Compare two runs of one workload, with intervals; can fail a CI job
    #[command(after_help = compare::EXAMPLES)]
    Compare(CompareArgs),
    /// Add up runs that went on at the same time, from several processes or hosts
    #[command(after_help = merge::EXAMPLES)]
    Merge(MergeArgs),
    /// Show a run as HTML with plots, Markdown, CSV, or the JSON of `vllm bench serve` or AIPerf
    Report(ReportArgs),
    /// Say whether a server can be measured, and what it tells of tokens, caches and workers
    Check(Box<ServerArgs>),
    /// Measure an idle server's speed: time to a first token by prompt length, with and without cache, and by
    /// token
    Calibrate(Box<CalibrateArgs>),
    /// Serve a fleet of simulated engines, each on its own port, for tests that need no GPU
    #[command(after_help = mock::args::EXAMPLES)]
    Mock(Box<MockArgs>),
    /// Replay a trace on a simulated fleet in virtual time: compare policies, find how many workers an SLO
    /// needs
    #[command(after_help = simulate::EXAMPLES)]
    Simulate(Box<SimulateArgs>),
    /// Look at traces, convert them, make them
    Trace {
        /// What to do with it.
        #[command(subcommand)]
        command: TraceCommand,
    },
    /// Print a shell's completion script
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Which part of which trace.
#[derive(Debug, Clone, ClapArgs)]
pub struct SliceArgs {
    /// Stretch of the trace's own time, such as `0s..20m`; either end may be left out
    #[arg(long, value_name = "START..END", default_value = "0s..")]
    pub slice: Span,
    /// Shrink prompts and answers: tokens sent for one token of the trace
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = units::positive)]
    pub scale_len: f64,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }
}
