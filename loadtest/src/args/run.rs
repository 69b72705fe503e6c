//! The options of one measurement, shared by `run`, `sweep` and `search`. Names that people know from `vllm
//! bench serve` and AIPerf are aliases. Decides nothing; `load.rs` says what the options mean together.

use std::{path::PathBuf, time::Duration};

use clap::{ArgAction, Args as ClapArgs, ValueEnum, ValueHint};
use http::HeaderName;

use super::{SliceArgs, other_tools};
use crate::{
    client::sender::Warmup,
    limits,
    progress::Ui,
    schedule::{arrivals::Arrival, rate::RateShape},
    slo::Slo,
    units,
    workload::{
        body::Endpoint,
        dist::{Seconds, Tokens},
        live::Answers,
        prompt::TextSeed,
    },
};

/// Shown under `run --help`.
pub const EXAMPLES: &str = "\
Examples:
  # Nothing but the server: 8 requests at a time for 30 seconds
  keyway-loadtest run --url http://127.0.0.1:8080

  # Poisson arrivals, 10 a second, for one minute; who gets a first token within half a second?
  keyway-loadtest run --url http://127.0.0.1:8080 --isl 1024 --osl 128 --rate 10 --duration 60s \\
      --slo 'ttft<500ms' -o out

  # 64 system prompts of 2,048 tokens, the popular ones far more often, 32 requests at a time
  keyway-loadtest run --url http://127.0.0.1:8080 --workload shared-prefix --prefix-groups 64 \\
      --prefix-len 2048 --zipf 1.1 --isl 'lognormal(200,100)' --concurrency 32 --requests 2000

  # 200 conversations, 4 beginning a second, with a person's pauses
  keyway-loadtest run --url http://127.0.0.1:8080 --workload multi-turn --turns 'uniform(2,8)' --isl 200 \\
      --prefix-len 1000 --think-time 'exp(3s)' --rate 4 --conversations 200

  # Twenty minutes of a trace in two, prompts shrunk 32 times, arrivals spread evenly
  keyway-loadtest run --url http://127.0.0.1:8080 --trace trace.jsonl --slice 0s..20m \\
      --scale-len 0.03125 --time-scale 10 --spread-bursts --oracle-blocks 36000 -o out

  # Embeddings, 20 requests a second of 32 texts each
  keyway-loadtest run --url http://127.0.0.1:8080 --endpoint embeddings --texts 32 --isl 200 --rate 20 \\
      --duration 60s --slo 'e2e.p99<200ms'

  # Sessions of coding agents, 16 at a time: tools take their time, sub-agents are waited for, and the history
  # holds the server's own answers
  keyway-loadtest run --url http://127.0.0.1:8080 --trace agents.jsonl --live --concurrency 16 --answers live \\
      --session-header x-session-id --parent-header x-parent-session-id -o out

Open loop (--rate, --rate-shape, --trace without --live): the schedule is computed from the seed before the run and nothing moves
it. `response` times count from when a request was due, `service` times from when it was sent.";

/// Kinds of workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkloadKind {
    /// Replay of a recorded trace.
    Trace,
    /// Random lengths, nothing shared.
    Random,
    /// Random lengths behind prefixes that groups of requests share.
    #[value(aliases = ["generated-shared-prefix", "prefix_repetition"])]
    SharedPrefix,
    /// Conversations: each turn carries the ones before it and the server's own answers.
    MultiTurn,
    /// Conversations from a file in ShareGPT's JSON.
    Sharegpt,
    /// Requests from a file of JSON lines.
    Custom,
}

/// What to do with a request that finds `--max-concurrency` others under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Overload {
    /// It waits; `response` times count the wait.
    Queue,
    /// It fails, as `dropped`.
    Drop,
}

/// Options of `run`.
#[derive(Debug, Clone, ClapArgs)]
#[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
pub struct RunArgs {
    #[command(flatten, next_help_heading = "Server")]
    pub server: ServerArgs,
    #[command(flatten, next_help_heading = "Workload")]
    pub workload: WorkloadArgs,
    #[command(flatten, next_help_heading = "Schedule")]
    pub schedule: ScheduleArgs,
    #[command(flatten, next_help_heading = "Objective and output")]
    pub output: OutputArgs,
}

/// Who is measured.
#[derive(Debug, Clone, ClapArgs)]
pub struct ServerArgs {
    /// Base URL of the server, with or without http:// and /v1
    #[arg(long, alias = "base-url", value_hint = ValueHint::Url, required_unless_present_any = ["host", "port"])]
    url: Option<String>,
    /// Model to ask for [default: the first that /v1/models lists]
    #[arg(long, short = 'm', alias = "served-model-name")]
    pub model: Option<String>,
    /// API to use, by its name or its path [default: chat]
    #[arg(long, alias = "endpoint-type", value_enum)]
    endpoint: Option<Endpoint>,
    /// File whose content is sent as the bearer token
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
    /// Most time from sending a request to the end of its answer
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = units::duration)]
    pub timeout: Duration,
    /// Header to send with every request, as `Name: value`; repeatable
    #[arg(long, short = 'H', value_name = "HEADER")]
    pub header: Vec<String>,
    /// Header that names the session of each turn, as agents send one: x-session-id, x-dynamo-session-id, …
    /// A sub-agent has a name of its own
    #[arg(long, value_name = "NAME")]
    pub session_header: Option<HeaderName>,
    /// Header that names the session of the agent that started a sub-agent: x-dynamo-parent-session-id,
    /// x-parent-session-affinity, …
    #[arg(long, value_name = "NAME")]
    pub parent_header: Option<HeaderName>,
    /// Fields to add to every body, as a JSON object, such as '{"top_p": 0.9}'
    #[arg(long, value_name = "JSON", alias = "extra-inputs")]
    pub extra_body: Option<String>,
    /// Threads that read answers [default: the machine's cores, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub other: other_tools::OtherToolsServer,
}

impl ServerArgs {
    /// The base URL: that of `--url`, else one made of `--host` and `--port`.
    pub fn url(&self) -> String {
        match &self.url {
            Some(url) if url.contains("://") => url.clone(),
            Some(host) => format!("http://{host}"),
            None => self.other.url(),
        }
    }

    /// The API: that of `--endpoint`, else what `--backend` stands for, else chat.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint.or(self.other.backend).unwrap_or(Endpoint::Chat)
    }
}

/// What is sent.
#[derive(Debug, Clone, ClapArgs)]
pub struct WorkloadArgs {
    /// Where requests come from [default: trace with --trace, else random]
    #[arg(long, alias = "dataset-name", value_enum)]
    pub workload: Option<WorkloadKind>,
    /// Tokens of a prompt, of shared-prefix the part behind the prefix: a number, uniform(LOW,HIGH),
    /// normal(MEAN,SD), lognormal(MEAN,SD) or exp(MEAN)
    #[arg(long, value_name = "TOKENS", default_value = "1024",
          aliases = ["random-input-len", "prompt-tokens", "gsp-question-len", "synthetic-input-tokens-mean",
                     "prefix-repetition-suffix-len"])]
    pub(super) isl: Tokens,
    /// Tokens to generate, written like --isl
    #[arg(long, value_name = "TOKENS", default_value = "128",
          aliases = ["random-output-len", "output-tokens", "gsp-output-len", "output-tokens-mean",
                     "prefix-repetition-output-len"])]
    pub(super) osl: Tokens,
    /// Turns of a conversation, written like --isl [default: 5; of sharegpt as in the file]
    #[arg(long, value_name = "TURNS", alias = "session-turns-mean")]
    pub turns: Option<Tokens>,
    /// Time between an answer's end and the next turn: a time, or exp(3s), lognormal(3s,2s), …
    #[arg(long, value_name = "TIME", default_value = "0s")]
    pub think_time: Seconds,
    /// Texts in each request of embeddings, each as long as --isl says
    #[arg(long, value_name = "N", default_value_t = 1,
          aliases = ["random-batch-size", "prompt-batch-size", "batch-size-text"],
          value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::TEXTS_MAX)))]
    pub texts: u32,
    /// Conversations to hold, or sessions of a trace with --live; --rate is how many begin a second,
    /// --concurrency how many are under way
    #[arg(long, value_name = "N", aliases = ["num-conversations", "num-sessions"],
          value_parser = clap::value_parser!(u32).range(1..))]
    pub conversations: Option<u32>,
    /// Prompts of sharegpt (its JSON) or custom (lines of {"prompt": …} or {"messages": […]}, with
    /// "max_tokens")
    #[arg(long, value_name = "FILE", aliases = ["dataset-path", "input-file"], value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// Prefixes of shared-prefix, and of multi-turn with --prefix-len
    #[arg(long, value_name = "N", default_value_t = 8, aliases = ["gsp-num-groups", "num-prefix-prompts", "prefix-repetition-num-prefixes"])]
    pub prefix_groups: usize,
    /// Tokens of each prefix [default: 2048; multi-turn: none]
    #[arg(long, value_name = "TOKENS",
          aliases = ["gsp-system-prompt-len", "prefix-prompt-length", "prefix-repetition-prefix-len"],
          value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::LENGTH_TOKENS_MAX)))]
    pub prefix_len: Option<u32>,
    /// Levels of the tree of prefixes: groups of one branch share all levels above it
    #[arg(long, value_name = "LEVELS", default_value_t = 1)]
    pub prefix_depth: usize,
    /// Popularity of prefixes: the k-th is asked for with weight 1/k^S; 0 is even
    #[arg(long, value_name = "S", default_value_t = 0.0, alias = "gsp-zipf-alpha", value_parser = units::not_negative)]
    pub zipf: f64,
    /// Trace to replay: Mooncake's, Bailian's or vLLM's JSON lines, Azure's or BurstGPT's CSV, sessions of
    /// agents (docs/traces.md), WEKA's sessions (a file or a folder)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::AnyPath)]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub slice: SliceArgs,
    /// Whose answers the later turns of a trace carry with --live: those of the trace, as text of its blocks,
    /// or the server's own, in messages of the assistant
    #[arg(long, value_enum, default_value_t = Answers::Recorded, requires = "live")]
    pub answers: Answers,
    /// Seed of lengths, prefixes, arrivals and jitter: runs of equal seeds differ in the words of their
    /// prompts alone
    #[arg(long, alias = "random-seed", default_value_t = 42)]
    pub seed: u64,
    /// Seed of the words: with it, and equal --seed, runs send equal bytes, which caches may still hold from
    /// an earlier one; 0 leaves a file's prompts as they are [default: drawn anew for each run, so that none
    /// finds its prompts in a cache]
    #[arg(long, value_name = "SEED")]
    pub text_seed: Option<u64>,
    /// Generate exactly the wanted output lengths (`ignore_eos`, an extension of vLLM, SGLang and
    /// keyway-worker); write `--ignore-eos=false` for servers that refuse it
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = ArgAction::Set)]
    pub ignore_eos: bool,
    /// Bytes of prompt text for one token [default: measured with two one-token requests]
    #[arg(long, value_name = "RATIO", value_parser = units::positive)]
    pub bytes_per_token: Option<f64>,
    /// Size, in scaled blocks, of the LRU cache that results are compared with
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub oracle_blocks: Option<u32>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub other: other_tools::Lengths,
}

impl WorkloadArgs {
    /// The words of one run's prompts: as chosen, else such as no other run has.
    pub fn text(&self) -> TextSeed {
        self.text_seed.map_or_else(TextSeed::drawn, TextSeed::chosen)
    }

    /// The same options with the words that the `nth` of several runs has: those of each are its own.
    #[must_use]
    pub fn nth(mut self, nth: u64) -> Self {
        self.text_seed = self.text_seed.map(|seed| if seed == 0 { 0 } else { seed.wrapping_add(nth).max(1) });
        self
    }

    /// Tokens of a prompt.
    pub fn isl(&self) -> Tokens {
        self.other.spread(self.isl)
    }

    /// Tokens to generate: `--osl`, spread as `--random-range-ratio` says.
    pub fn osl(&self) -> Tokens {
        self.other.spread(self.osl)
    }

    /// Replaces the lengths of `--isl` and `--osl`, as each run of a sweep does.
    pub fn set_lengths(&mut self, (isl, osl): (Tokens, Tokens)) {
        (self.isl, self.osl) = (isl, osl);
    }
}

/// When it is sent.
#[derive(Debug, Clone, ClapArgs)]
pub struct ScheduleArgs {
    /// Replay a trace live: a turn is due when the answers that it goes on from have ended and its tools are
    /// done, however long the answers took. --rate begins so many sessions a second, --concurrency keeps so
    /// many under way; else they begin at the trace's times
    #[arg(long, requires = "trace")]
    pub live: bool,
    /// Mean requests a second, open loop; of a trace in place of --time-scale. `inf`: all at once, or as many
    /// as --max-concurrency says
    #[arg(long, alias = "request-rate", value_parser = units::rate)]
    pub rate: Option<f64>,
    /// Requests a second over time, open loop: pieces that hold or ramp, such as `1..20@60s,20@30s`
    #[arg(long, value_name = "PIECES", conflicts_with = "rate")]
    pub rate_shape: Option<RateShape>,
    /// How arrivals vary around the rate [default: poisson; of a trace its own timestamps]
    #[arg(long, alias = "arrival-pattern", value_enum)]
    pub arrival: Option<Arrival>,
    /// Shape of gamma arrivals: below 1 burstier than Poisson, above 1 more even
    #[arg(long, value_name = "SHAPE", aliases = ["arrival-smoothness", "vllm-burstiness"],
          value_parser = units::positive)]
    pub burstiness: Option<f64>,
    /// Closed loop: keep N requests under way
    #[arg(long, value_name = "N", conflicts_with_all = ["rate", "rate_shape", "arrival", "burstiness"],
          value_parser = clap::value_parser!(u32).range(1..=limits::USERS_MAX as i64))]
    pub concurrency: Option<u32>,
    /// N users, each at an even pace and never two requests at once; needs --user-rate. With conversations
    /// each request is the next turn of the user's own
    #[arg(long, value_name = "N", alias = "num-users", requires = "user_rate",
          conflicts_with_all = ["rate", "rate_shape", "arrival", "burstiness", "concurrency"],
          value_parser = clap::value_parser!(u32).range(1..=limits::USERS_MAX as i64))]
    pub users: Option<u32>,
    /// Requests a second of all users together: each asks every users/rate seconds
    #[arg(long, value_name = "RATE", alias = "user-centric-rate", requires = "users", value_parser = units::positive)]
    pub user_rate: Option<f64>,
    /// Seconds of trace time in one second [default: 1]; with --live the time of tools passes so fast, too
    #[arg(long, value_name = "SPEED", value_parser = units::positive)]
    pub time_scale: Option<f64>,
    /// Spread requests with equal timestamps over the gap to the next timestamp
    #[arg(long)]
    pub spread_bursts: bool,
    /// Cut the schedule at this run time; answers under way are waited for
    #[arg(long, value_name = "TIME", alias = "benchmark-duration", value_parser = seconds)]
    pub duration: Option<Duration>,
    /// Cut the schedule after N requests
    #[arg(long, value_name = "N", aliases = ["num-prompts", "request-count", "num-requests"],
          value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,
    /// Leave the first requests out of every figure: a number of them, or a time such as 10s
    #[arg(long, value_name = "N|TIME", aliases = ["num-warmups", "warmup-request-count"], value_parser = warmup)]
    pub warmup: Option<Warmup>,
    /// Most requests under way; what happens to the others is --overload
    #[arg(long, value_name = "N", conflicts_with = "concurrency",
          value_parser = clap::value_parser!(u32).range(1..=limits::USERS_MAX as i64))]
    pub max_concurrency: Option<u32>,
    /// What becomes of a request over --max-concurrency
    #[arg(long, value_enum, default_value_t = Overload::Queue, requires = "max_concurrency")]
    pub overload: Overload,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub other: other_tools::Rates,
}

/// Shapes of the file of single requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RecordFormat {
    /// A JSON object in each line.
    Jsonl,
    /// Names of the columns, then a line each; empty where a request has no such figure.
    Csv,
}

/// What comes out.
#[derive(Debug, Clone, ClapArgs)]
pub struct OutputArgs {
    /// Objective: bounds on each request (`ttft<500ms,tpot<50ms`: its goodput is reported) or on a figure of
    /// the run (`ttft.p99<500ms`, also .mean and .max: exit code 4 if it is not kept), counted from when
    /// requests were due
    #[arg(long, value_name = "BOUNDS", alias = "goodput")]
    pub slo: Option<Slo>,
    /// Folder for run.json; made if absent
    #[arg(short = 'o', long = "output", value_name = "DIR", aliases = ["result-dir", "artifact-dir"],
          value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Also write DIR/requests.jsonl, or with `=csv` DIR/requests.csv: one line a request, in the order they
    /// end
    #[arg(long, alias = "save-detailed", requires = "dir", value_enum, value_name = "FORMAT",
          num_args = 0..=1, require_equals = true, default_missing_value = "jsonl")]
    pub records: Option<RecordFormat>,
    /// Progress on stderr
    #[arg(long, value_enum, default_value_t = Ui::Auto)]
    pub ui: Ui,
    /// Prometheus metrics to read before, during and after the run, such as http://127.0.0.1:9090/metrics;
    /// repeatable
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub scrape: Vec<String>,
    /// Time from one reading of --scrape to the next
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = units::duration)]
    pub scrape_interval: Duration,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub other: other_tools::OtherToolsOutput,
}

/// A time; AIPerf's bare numbers are seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    units::duration(text).or_else(|reason| units::duration(&format!("{}s", text.trim())).map_err(|_| reason))
}

/// `20` or `20req`: so many requests; `10s`: those due in that time.
fn warmup(text: &str) -> Result<Warmup, String> {
    if let Ok(requests) = text.trim().trim_end_matches("req").parse() {
        return Ok(Warmup { requests, ..Warmup::default() });
    }
    units::duration(text).map(|until| Warmup { until, ..Warmup::default() })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn run(extra: &[&str]) -> Result<RunArgs, clap::Error> {
        let base = ["keyway-loadtest", "run", "--url", "http://h", "--trace", "t"];
        let Command::Run(args) = Args::try_parse_from(base.iter().chain(extra))?.command else {
            unreachable!()
        };
        Ok(*args)
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
            &["--rate", "2", "--concurrency", "3"] as &[&str],
            &["--answers", "live"],
            &["--rate", "2", "--rate-shape", "1@5s"],
            &["--users", "2"],
            &["--user-rate", "2"],
            &["--users", "2", "--user-rate", "1", "--concurrency", "3"],
            &["--concurrency", "3", "--max-concurrency", "3"],
            &["--overload", "drop"],
            &["--records"],
            &["--requests", "0"],
            &["--scale-len", "0"],
            &["--slice", "5s"],
            &["--duration", "soon"],
            &["--warmup", "many"],
            &["--slo", "ttft"],
            &["--workload", "noise"],
        ] {
            assert!(run(bad).is_err(), "{bad:?}");
        }
        assert!(run(&["--rate", "2"]).is_ok());
    }

    #[test]
    fn the_names_that_other_tools_use() {
        let args = "keyway-loadtest run --base-url http://h --dataset-name random --random-input-len 100 \
                    --random-output-len 10 --request-rate 4 --burstiness 0.5 --num-prompts 50 --max-concurrency 8 \
                    --num-warmups 5 --result-dir out --save-detailed --save-result --ignore-eos --seed 1 --model m";
        let Command::Run(args) = Args::try_parse_from(args.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        assert_eq!((args.workload.isl.to_string(), args.schedule.requests), ("100".into(), Some(50)));
        assert_eq!(args.schedule.warmup, Some(Warmup { requests: 5, ..Warmup::default() }));
        let args = "keyway-loadtest run --base-url http://h --dataset-name prefix_repetition --request-rate 4 \
                    --prefix-repetition-prefix-len 512 --prefix-repetition-suffix-len 64 \
                    --prefix-repetition-num-prefixes 3 --prefix-repetition-output-len 9 --num-prompts 50";
        let Command::Run(args) = Args::try_parse_from(args.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        let workload = &args.workload;
        assert_eq!((workload.workload, workload.prefix_groups), (Some(WorkloadKind::SharedPrefix), 3));
        assert_eq!(
            (workload.prefix_len, workload.isl.to_string(), workload.osl.to_string()),
            (Some(512), "64".into(), "9".into())
        );
        let args = "keyway-loadtest run --url http://h --synthetic-input-tokens-mean 100 --output-tokens-mean 10 \
                    --benchmark-duration 30 --concurrency 4";
        let Command::Run(args) = Args::try_parse_from(args.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        assert_eq!(args.schedule.duration, Some(Duration::from_secs(30)));
        let args = "keyway-loadtest run --url http://h --isl 100 --osl 10 --arrival-pattern gamma \
                    --arrival-smoothness 2 --request-rate 4 --request-count 9 --random-seed 3 --streaming \
                    --endpoint-type chat --artifact-dir out";
        assert!(Args::try_parse_from(args.split_whitespace()).is_ok());
    }
}
