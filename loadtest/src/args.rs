//! The command line: every option, its default and its help. Reads no file and starts nothing.

use std::{path::PathBuf, time::Duration};

use clap::{ArgAction, Args as ClapArgs, Parser, Subcommand, ValueEnum, ValueHint};

use crate::{
    body::Endpoint,
    mock::{self, args::MockArgs},
    progress::Ui,
    simulate::{self, args::SimulateArgs},
    units::{self, Span},
};

const EXIT_CODES: &str = "\
Exit codes:
  0    measured; single requests may have failed, see the report
  1    the server could not be reached, or no request succeeded
  2    bad arguments or input
  3    invalid measurement: requests were sent too late to be trusted
  130  interrupted; the report covers what was done";

const RUN_EXAMPLES: &str = "\
Examples:
  # Twenty minutes of a trace in two, prompts shrunk 32 times, arrivals spread evenly
  keyway-loadtest run --url http://127.0.0.1:8080 --trace trace.jsonl --slice 0s..20m \\
      --scale-len 0.03125 --time-scale 10 --spread-bursts -o out

  # The same requests at 5 a second, for one minute
  keyway-loadtest run --url http://127.0.0.1:8080 --trace trace.jsonl --rate 5 --duration 60s

  # How close routing comes to one cache of 36,000 blocks (16 tokens each at this scale)
  keyway-loadtest run --url http://127.0.0.1:8080 --trace trace.jsonl --scale-len 0.03125 \\
      --time-scale 10 --spread-bursts --oracle-blocks 36000

Open loop: the schedule is computed from the seed before the run and nothing moves it. `response` times count
from when a request was due, `service` times from when it was sent.";

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
    /// Measure a server once: replay a trace against it and report times, caches and errors
    #[command(after_help = RUN_EXAMPLES, after_long_help = format!("{RUN_EXAMPLES}\n\n{EXIT_CODES}"))]
    Run(Box<RunArgs>),
    /// Serve a fleet of simulated engines, each on its own port, for tests that need no GPU
    #[command(after_help = mock::args::EXAMPLES)]
    Mock(Box<MockArgs>),
    /// Replay a trace on a simulated fleet in virtual time: compare policies, find how many workers an SLO needs
    #[command(after_help = simulate::args::EXAMPLES)]
    Simulate(Box<SimulateArgs>),
    /// Look at traces
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

/// The commands for traces.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Say what a trace holds: requests, tokens, distinct blocks, and what caches could reuse
    Info(InfoArgs),
}

/// Kinds of workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkloadKind {
    /// Replay of a recorded trace.
    Trace,
}

/// Which part of which trace.
#[derive(Debug, ClapArgs)]
pub struct SliceArgs {
    /// Stretch of the trace's own time, such as `0s..20m`; either end may be left out
    #[arg(long, value_name = "START..END", default_value = "0s..")]
    pub slice: Span,
    /// Shrink prompts and answers: tokens sent for one token of the trace
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = units::positive)]
    pub scale_len: f64,
}

/// Options of `trace info`.
#[derive(Debug, ClapArgs)]
pub struct InfoArgs {
    /// Trace in Mooncake's JSON lines
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `run`.
#[derive(Debug, ClapArgs)]
#[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
pub struct RunArgs {
    #[command(flatten, next_help_heading = "Server")]
    pub server: ServerArgs,
    #[command(flatten, next_help_heading = "Workload")]
    pub workload: WorkloadArgs,
    #[command(flatten, next_help_heading = "Schedule")]
    pub schedule: ScheduleArgs,
    #[command(flatten, next_help_heading = "Output")]
    pub output: OutputArgs,
}

/// Who is measured.
#[derive(Debug, ClapArgs)]
pub struct ServerArgs {
    /// Base URL of the server, with or without /v1
    #[arg(long, value_hint = ValueHint::Url)]
    pub url: String,
    /// Model to ask for [default: the first that /v1/models lists]
    #[arg(long)]
    pub model: Option<String>,
    /// API to use
    #[arg(long, value_enum, default_value_t = Endpoint::Chat)]
    pub endpoint: Endpoint,
    /// File whose content is sent as the bearer token
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
    /// Most time from sending a request to the end of its answer
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = units::duration)]
    pub timeout: Duration,
}

/// What is sent.
#[derive(Debug, ClapArgs)]
pub struct WorkloadArgs {
    /// Where requests come from
    #[arg(long, value_enum, default_value_t = WorkloadKind::Trace)]
    pub workload: WorkloadKind,
    /// Trace in Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids of 512 tokens)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Seed of prompts and jitter: equal seeds send equal bytes
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Generate exactly the trace's output lengths (`ignore_eos`, an extension of vLLM, SGLang and keyway-worker);
    /// write `--ignore-eos=false` for servers that refuse it
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = ArgAction::Set)]
    pub ignore_eos: bool,
    /// Bytes of prompt text for one token [default: measured with two one-token requests]
    #[arg(long, value_name = "RATIO", value_parser = units::positive)]
    pub bytes_per_token: Option<f64>,
    /// Size, in scaled blocks, of the LRU cache that results are compared with
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub oracle_blocks: Option<u32>,
}

/// When it is sent.
#[derive(Debug, ClapArgs)]
pub struct ScheduleArgs {
    /// Seconds of trace time in one second
    #[arg(long, value_name = "SPEED", default_value = "1", value_parser = units::positive)]
    pub time_scale: f64,
    /// Mean requests a second over the slice, in place of --time-scale
    #[arg(long, value_parser = units::positive, conflicts_with = "time_scale")]
    pub rate: Option<f64>,
    /// Spread requests with equal timestamps over the gap to the next timestamp
    #[arg(long)]
    pub spread_bursts: bool,
    /// Cut the schedule at this run time; answers under way are waited for
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub duration: Option<Duration>,
    /// Cut the schedule after N requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,
}

/// What comes out.
#[derive(Debug, ClapArgs)]
pub struct OutputArgs {
    /// Folder for run.json; made if absent
    #[arg(short = 'o', long = "output", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Also write DIR/requests.jsonl, one line a request, in the order they end
    #[arg(long, requires = "dir")]
    pub records: bool,
    /// Progress on stderr
    #[arg(long, value_enum, default_value_t = Ui::Auto)]
    pub ui: Ui,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn run(extra: &[&str]) -> Result<RunArgs, clap::Error> {
        let base = ["keyway-loadtest", "run", "--url", "http://h", "--trace", "t"];
        let Command::Run(args) = Args::try_parse_from(base.iter().chain(extra))?.command else {
            unreachable!()
        };
        Ok(*args)
    }

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn ignore_eos_is_on_and_can_be_turned_off() {
        assert!(run(&[]).unwrap().workload.ignore_eos);
        assert!(run(&["--ignore-eos"]).unwrap().workload.ignore_eos);
        assert!(!run(&["--ignore-eos=false"]).unwrap().workload.ignore_eos);
    }

    #[test]
    fn contradictions_are_refused() {
        for bad in [
            &["--rate", "2", "--time-scale", "3"] as &[&str],
            &["--records"],
            &["--requests", "0"],
            &["--scale-len", "0"],
            &["--slice", "5s"],
            &["--duration", "60"],
            &["--workload", "noise"],
        ] {
            assert!(run(bad).is_err(), "{bad:?}");
        }
        assert!(run(&["--rate", "2"]).is_ok());
    }
}
