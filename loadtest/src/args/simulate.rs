//! The options of `keyway-loadtest simulate`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueHint};

use crate::{
    args::{SliceArgs, contender::Contender, legs::LegArgs, sessions::SessionArgs},
    limits::MOCK_WORKERS_MAX,
    mock::args::EngineArgs,
    slo::{Figure, Metric, Slo},
    units,
};

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  # Which policy serves this trace best on 64 workers?
  keyway-loadtest simulate --trace trace.jsonl --spread-bursts --workers 64 --rate 60 \\
      --policy keyway,round-robin,least-loaded --profile h100-8b

  # How many workers does it need?
  keyway-loadtest simulate --trace trace.jsonl --spread-bursts --find-workers --slo 'ttft.p90<2s,tpot.p90<50ms'

  # A million requests on a thousand workers
  keyway-loadtest simulate --trace trace.jsonl --spread-bursts --repeat 84 --rate 300 --workers 1000

  # Agents, at twice what the caches hold: with pauses, and without
  keyway-loadtest simulate --agents 600 --sessions 58 --workers 4 --profile fcfs-6k --kv-blocks 4096 \\
      --index-knows-capacity --policy prefix            # and again with --no-pauses

Nothing is sent and nothing sleeps: time is virtual, and the same options give the same figures on any machine. Requests
are routed by the code that the gateway routes by; workers are the engines that `mock` serves.";

/// Options of `simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Trace, in any format that `trace info` reads
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Workload", required_unless_present = "drawn")]
    pub trace: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Sessions")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub sessions: SessionArgs,
    #[command(flatten, next_help_heading = "Workload")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Seconds of trace time in one second
    #[arg(long, value_name = "SPEED", default_value = "1", value_parser = units::positive)]
    pub time_scale: f64,
    /// Mean requests a second over the slice, in place of --time-scale
    #[arg(long, value_parser = units::positive, conflicts_with = "time_scale")]
    pub rate: Option<f64>,
    /// Spread requests with equal timestamps over the gap to the next timestamp
    #[arg(long)]
    pub spread_bursts: bool,
    /// Cut the schedule after N requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,
    /// Replay the schedule so many times, one copy after the other, each with prompts of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repeat: u32,
    /// Seed of jitter and of random choices
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    #[command(flatten, next_help_heading = "Fleet")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub fleet: FleetArgs,
    #[command(flatten, next_help_heading = "KV that moves between workers")]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub legs: LegArgs,
    /// What must hold, comma-separated: ttft, tpot or e2e, and mean, max or a percentile such as p90
    #[arg(long, value_name = "SLO", default_value = "ttft.p90<2s", help_heading = "Result", value_parser = objective)]
    pub slo: Slo,
    /// Find the fewest workers with which the SLO holds, for each policy
    #[arg(long, conflicts_with_all = ["workers", "prefill"], help_heading = "Result")]
    pub find_workers: bool,
    /// Most workers to try
    #[arg(long, value_name = "N", default_value_t = MOCK_WORKERS_MAX, requires = "find_workers", help_heading = "Result",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MOCK_WORKERS_MAX)))]
    pub max_workers: u16,
    /// Print JSON
    #[arg(long, help_heading = "Result")]
    pub json: bool,
}

/// Who serves the requests, and who routes them.
#[derive(Debug, Args)]
pub struct FleetArgs {
    /// Workers
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=i64::from(MOCK_WORKERS_MAX)))]
    pub workers: u16,
    /// Routing policies to compare: prefix (or keyway), least-loaded, round-robin, random, power-of-two,
    /// chwbl; and formulas of other routers: lmetric, dynamo, threshold (sglang-router's cache_aware)
    #[arg(long, value_name = "POLICY,…", default_value = "prefix,round-robin", value_delimiter = ',')]
    pub policy: Vec<Contender>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub engine: EngineArgs,
    /// Megabytes of the router's index (the gateway's default)
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub index_mib: u32,
    /// Tell the router how much each worker's cache holds; otherwise it takes them for endless, as the
    /// gateway does without KV events
    #[arg(long)]
    pub index_knows_capacity: bool,
    /// Send each request as it comes, to queue at its worker (the gateway's `hold = false`); otherwise
    /// requests wait in the router until a worker can begin
    #[arg(long)]
    pub no_hold: bool,
    /// Let no session wait between two turns (the gateway's `session_pause_ms = 0`); otherwise some do where
    /// caches cannot hold them all
    #[arg(long)]
    pub no_pauses: bool,
    /// Seconds of engine time in one second, as `mock --time-scale`
    #[arg(long, value_name = "SPEED", default_value = "1", value_parser = units::positive)]
    pub engine_speed: f64,
    /// Gateways in front of the fleet, each of which decides for itself; every request comes to any of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub gateways: u16,
    /// Let the workers say what their caches hold (KV events), in place of a model of each by what it was
    /// sent
    #[arg(long, conflicts_with = "index_knows_capacity")]
    pub events: bool,
    /// Let gateways look at the workers' gauges of running and waiting requests so often; otherwise each
    /// knows only what it sends itself
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub scrape: Option<Duration>,
    /// Let these gauges count the prompt tokens that wait too, as SGLang's can; otherwise requests alone, as
    /// vLLM's
    #[arg(long, requires = "scrape")]
    pub gauges_count_tokens: bool,
    /// Let gateways tell each other so often what they have at each worker; where they send a request they
    /// tell at once, but for a tenth of this time after they last did
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub peers: Option<Duration>,
    /// Let them not tell each other what they have placed; otherwise they do, of workers that do not say
    /// themselves what their caches hold
    #[arg(long, requires = "peers")]
    pub no_told_placements: bool,
    /// Share of the words on placements that is lost on the way
    #[arg(long, value_name = "SHARE", requires = "peers", value_parser = units::share)]
    pub peers_loss: Option<f64>,
    /// Let what was placed be heard so much later
    #[arg(long, value_name = "TIME", requires = "peers", value_parser = units::duration)]
    pub peers_lag: Option<Duration>,
    /// Stands for the key of the router's hashes, which a gateway draws at its start: another one breaks ties
    /// otherwise
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub hash_seed: u32,
    /// Prompt tokens in one block of the router's chain (the gateway's 64 bytes of text at 4 bytes a token)
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub index_block_tokens: u32,
    /// Let the router know prompts by their text: in long ones its names stand further apart, each for a span
    /// of blocks
    #[arg(long, conflicts_with = "events")]
    pub index_by_text: bool,
}

/// An objective that a simulated run can be held to: on figures of the run, and on times that are simulated.
fn objective(text: &str) -> Result<Slo, String> {
    let slo: Slo = text.parse()?;
    for bound in &slo.bounds {
        if bound.figure == Figure::Each {
            return Err(format!(
                "`{bound}` is on single requests: write METRIC.FIGURE<TIME, such as ttft.p90<2s"
            ));
        }
        if bound.metric == Metric::Ttst {
            return Err(format!("`{bound}`: events are not simulated; bound tpot"));
        }
    }
    Ok(slo)
}
