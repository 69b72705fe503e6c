//! The command line of `keyway-worker`. Options only; what they mean is `worker.rs`'s business.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use keyway_wire::kv_event::WireFormat;

use crate::answer::answer_format::{CallFormat, ReasoningFormat};
use crate::device::DeviceChoice;
use crate::engine::kv_events::{KvEventOptions, ZmqAddr};
use crate::kv_transfer::KvTransferOptions;
use crate::limits::ClientBounds;
use crate::log::LogFormat;
use crate::memory::ByteSize;
use crate::model::{ModelSource, Quantize};
use crate::worker::{self, WorkerOptions};
use crate::{
    model::ExpertParallelOptions,
    parallel::expert_parallel::{RankGroup, RankOptions},
};

/// An OpenAI-compatible inference worker with a paged KV cache and automatic prefix caching.
///
/// Without options it serves its small built-in model on http://127.0.0.1:8000. Every option is also an
/// environment variable, named in brackets.
#[derive(Debug, Parser)]
#[command(name = "keyway-worker", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Hold a part of a model's experts for a worker: started by itself, or with its --expert-parallel-hosts
    /// by you.
    ExpertRank(RankArgs),
}

#[derive(Debug, clap::Args)]
struct RankArgs {
    /// Its number in the group.
    #[arg(long)]
    rank: usize,
    /// The group's memory.
    #[arg(long, conflicts_with = "hosts", required_unless_present = "hosts")]
    memory: Option<PathBuf>,
    /// Addresses of all ranks, the worker's first: this one listens at its own.
    #[arg(long, value_name = "ADDR,…", value_delimiter = ',')]
    hosts: Vec<SocketAddr>,
    /// As the worker's.
    #[arg(long)]
    model: ModelSource,
    /// As the worker's.
    #[arg(long, value_enum, default_value_t = Bits::None)]
    quantize: Bits,
    /// As the worker's, where it runs attention on a GPU.
    #[arg(long, value_enum, default_value_t = KvDtype::Auto)]
    kv_cache_dtype: KvDtype,
    /// Where its experts are: cpu, cuda or cuda:N.
    #[arg(long, default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// As the worker's, where its experts are on a GPU.
    #[arg(long, default_value_t = 512)]
    max_batched_tokens: usize,
    /// As the worker's, where it runs attention on a GPU.
    #[arg(long, default_value_t = 64)]
    max_running: usize,
    /// Threads that compute [default: one for each core].
    #[arg(long)]
    threads: Option<usize>,
    /// Seconds that another rank may take for its part of an exchange.
    #[arg(long, default_value = "10", value_parser = seconds)]
    deadline: Duration,
    /// Format of the log on stderr.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "KEYWAY_WORKER_LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Debug, clap::Args)]
struct Options {
    /// A Hugging Face checkpoint directory (config.json, tokenizer.json, *.safetensors), `builtin` (answers
    /// about Keyway), or `random` (seeded weights, for benchmarks).
    #[arg(long, value_name = "DIR|builtin|random", default_value = "builtin", env = "KEYWAY_WORKER_MODEL")]
    model: ModelSource,

    /// The model's names for clients, set off by commas or given several times; answers to requests without
    /// one bear the first [default: the directory's name, keyway-builtin or keyway-random].
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', env = "KEYWAY_WORKER_SERVED_MODEL_NAME")]
    served_model_name: Vec<String>,

    /// How the model writes its thoughts: none, qwen3 or deepseek_r1 [default: as its chat template tells].
    #[arg(long, value_name = "FORMAT", env = "KEYWAY_WORKER_REASONING_PARSER")]
    reasoning_parser: Option<ReasoningFormat>,

    /// How the model writes calls of functions: none, hermes, llama3_json or qwen3_coder [default: as its
    /// chat template tells].
    #[arg(long, value_name = "FORMAT", env = "KEYWAY_WORKER_TOOL_CALL_PARSER")]
    tool_call_parser: Option<CallFormat>,

    /// Address to listen on; port 0 takes a free one, which the log names.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", env = "KEYWAY_WORKER_LISTEN")]
    listen: SocketAddr,

    /// What computes: this machine's processor, an NVIDIA GPU (the first, or that of a number), or what there
    /// is: `auto` takes a GPU that computes the model, else the processor, and says which. GPUs are those of
    /// compute capability 8.0 to 12.x (A100, RTX 30 and newer); they need NVIDIA's driver 580 or newer, for
    /// CUDA 13.0, and nothing else.
    #[arg(long, value_name = "auto|cpu|cuda[:N]", default_value_t = DeviceChoice::Cpu, env = "KEYWAY_WORKER_DEVICE")]
    device: DeviceChoice,

    /// Quantise matrices while loading: less memory, faster answers, a little less exact. What is stored in
    /// FP8 or MXFP4 stays so.
    #[arg(long, value_enum, default_value_t = Bits::None, env = "KEYWAY_WORKER_QUANTIZE")]
    quantize: Bits,

    /// Number type of the KV cache. On a GPU fp8 halves its memory, for a little less exact answers; the CPU
    /// has `auto` alone.
    #[arg(long, value_enum, default_value_t = KvDtype::Auto, env = "KEYWAY_WORKER_KV_CACHE_DTYPE")]
    kv_cache_dtype: KvDtype,

    /// Tokens per KV block, a multiple of 16: the grain at which prefixes are shared.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, env = "KEYWAY_WORKER_BLOCK_SIZE")]
    block_size: usize,

    /// KV blocks [default: as many as the KV cache's memory holds].
    #[arg(long, value_name = "N", env = "KEYWAY_WORKER_NUM_KV_BLOCKS")]
    num_kv_blocks: Option<usize>,

    /// Memory of the KV cache, such as 2GiB; reserved at the start, taken as it is used [default: 256MiB; on
    /// a GPU 0.9 of what is free].
    #[arg(long, value_name = "SIZE", alias = "kv-cache-memory-bytes", conflicts_with = "num_kv_blocks")]
    #[arg(env = "KEYWAY_WORKER_KV_CACHE_MEMORY")]
    kv_cache_memory: Option<ByteSize>,

    /// Instead: the share of the memory, a GPU's if one computes, that is free once the weights are loaded,
    /// such as 0.5.
    #[arg(long, value_name = "SHARE", alias = "gpu-memory-utilization")]
    #[arg(conflicts_with_all = ["num_kv_blocks", "kv_cache_memory"], env = "KEYWAY_WORKER_MEMORY_UTILIZATION")]
    memory_utilization: Option<f64>,

    /// Longest prompt and answer together [default: what the model and the KV cache allow].
    #[arg(long, value_name = "TOKENS", env = "KEYWAY_WORKER_MAX_MODEL_LEN")]
    max_model_len: Option<usize>,

    /// Tokens computed in one step: more finish prompts sooner, fewer let running answers flow more evenly
    /// [default: 512; on a GPU 4096].
    #[arg(long, value_name = "TOKENS", env = "KEYWAY_WORKER_MAX_BATCHED_TOKENS")]
    max_batched_tokens: Option<usize>,

    /// Sequences that run at the same time; further ones wait [default: 64; on a GPU 256].
    #[arg(long, value_name = "N", env = "KEYWAY_WORKER_MAX_RUNNING")]
    max_running: Option<usize>,

    /// On a GPU, plan each step only once the tokens of the one before are known, instead of while it runs:
    /// slower, with the same answers.
    #[arg(long, env = "KEYWAY_WORKER_NO_STEP_AHEAD")]
    no_step_ahead: bool,

    /// On a GPU, compute both products of few tokens' experts in one launch instead of two, with the same
    /// answers. No GPU has timed it yet.
    #[arg(long, env = "KEYWAY_WORKER_PAIRED_EXPERTS")]
    paired_experts: bool,

    /// Processor threads that compute; answers do not depend on them [default: one for each core].
    #[arg(long, value_name = "N", env = "KEYWAY_WORKER_THREADS")]
    threads: Option<usize>,

    /// Memory for requests: their bodies, and what parsing, rendering and tokenising them takes. Who finds
    /// none waits or is told to come back [default: 1GiB; for contexts of more than 200,000 tokens what the
    /// longest prompts need].
    #[arg(long, value_name = "SIZE", env = "KEYWAY_WORKER_REQUEST_MEMORY")]
    request_memory: Option<ByteSize>,

    /// Publish KV events (ZMQ PUB, vLLM's format) on this address, such as tcp://*:5557; port 0 takes a free
    /// one, which the log names. The address is bound. Subscribers can read prompts: keep it on a network of
    /// your own.
    #[arg(long, value_name = "ADDR", env = "KEYWAY_WORKER_KV_EVENTS")]
    kv_events: Option<ZmqAddr>,

    /// Replay missed KV events, or all of the state, to those who ask on this address (ZMQ ROUTER).
    #[arg(long, value_name = "ADDR", requires = "kv_events", env = "KEYWAY_WORKER_KV_REPLAY")]
    kv_replay: Option<ZmqAddr>,

    /// First frame of every message with KV events, which subscribers filter by.
    #[arg(long, value_name = "TEXT", default_value = "", env = "KEYWAY_WORKER_KV_EVENTS_TOPIC")]
    kv_events_topic: String,

    /// How KV events are written.
    #[arg(long, value_enum, default_value_t = EventFormat::Map, env = "KEYWAY_WORKER_KV_EVENTS_FORMAT")]
    kv_events_format: EventFormat,

    /// Let other workers fetch the KV of prompts from this address, and fetch from theirs, so that one
    /// computes a prompt and another answers; port 0 takes a free one, which the log names. On the CPU.
    /// Unencrypted: keep it on a network of your own.
    #[arg(long, value_name = "ADDR", env = "KEYWAY_WORKER_KV_TRANSFER_LISTEN")]
    kv_transfer_listen: Option<SocketAddr>,

    /// Host by which other workers reach that address [default: the address itself].
    #[arg(
        long,
        value_name = "HOST",
        requires = "kv_transfer_listen",
        env = "KEYWAY_WORKER_KV_TRANSFER_HOST"
    )]
    kv_transfer_host: Option<String>,

    /// File with a secret that all workers of the fleet share, 16 bytes at least. On loopback none is needed;
    /// KV is then fetched from this machine alone.
    #[arg(long, value_name = "FILE", requires = "kv_transfer_listen")]
    #[arg(env = "KEYWAY_WORKER_KV_TRANSFER_KEY_FILE")]
    kv_transfer_key_file: Option<PathBuf>,

    /// Seconds for which the KV of a prompt is kept for another worker.
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    #[arg(env = "KEYWAY_WORKER_KV_TRANSFER_KEEP")]
    kv_transfer_keep: Duration,

    /// Send KV to a worker of this machine as to any other, not through memory that both have.
    #[arg(long, env = "KEYWAY_WORKER_NO_KV_TRANSFER_SHARED_MEMORY")]
    no_kv_transfer_shared_memory: bool,

    /// Spread a mixture of experts over this many processes of this machine, each with its part of the
    /// weights, say one for each NUMA node or half of the cores. Answers have the same bits for every number.
    /// With --device cuda, over as many GPUs of this machine, from the given one on; where there are fewer,
    /// several share one.
    #[arg(long, value_name = "N", default_value_t = 1, env = "KEYWAY_WORKER_EXPERT_PARALLEL_SIZE")]
    expert_parallel_size: usize,

    /// Instead of processes of this machine: the addresses at which all ranks find each other, this worker's
    /// first. Start `keyway-worker expert-rank --rank N --hosts …` with the same addresses, model and
    /// --quantize for each further one. Unencrypted: keep it on a network of your own.
    #[arg(long, value_name = "ADDR,…", value_delimiter = ',', conflicts_with = "expert_parallel_size")]
    #[arg(env = "KEYWAY_WORKER_EXPERT_PARALLEL_HOSTS")]
    expert_parallel_hosts: Vec<SocketAddr>,

    /// Run attention in each expert-parallel process too, for requests of its own: as many engines as
    /// processes, each with a KV cache as large as this worker's options say. Requests go to the engine that
    /// the header X-data-parallel-rank names, else to the one with the fewest. KV events of rank R come R
    /// ports further.
    #[arg(long, env = "KEYWAY_WORKER_DATA_PARALLEL_ATTENTION")]
    data_parallel_attention: bool,

    /// Seconds after which an expert-parallel process that does not answer is taken for dead.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    #[arg(env = "KEYWAY_WORKER_EXPERT_PARALLEL_DEADLINE")]
    expert_parallel_deadline: Duration,

    /// How often a step is run again, by processes started again, before the requests in it fail.
    #[arg(long, value_name = "N", default_value_t = 2, env = "KEYWAY_WORKER_EXPERT_PARALLEL_RETRIES")]
    expert_parallel_retries: usize,

    /// Experts that each process holds beyond its share: second copies of those that serve the most tokens,
    /// chosen from the load as it is; 0 moves nothing.
    #[arg(long, value_name = "N", default_value_t = 0, env = "KEYWAY_WORKER_REDUNDANT_EXPERTS")]
    redundant_experts: usize,

    /// Format of the log on stderr; RUST_LOG sets its level.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "KEYWAY_WORKER_LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bits {
    /// As stored: F32, F16 (as f32), BF16, FP8 or MXFP4.
    None,
    /// 8.5 bits a weight; inputs of products in 8 bits.
    Int8,
    /// 4.5 bits a weight, 8.5 in the head; inputs of products in 8 bits.
    Int4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KvDtype {
    /// What the device computes with: f32 on the CPU, bf16 on a GPU.
    Auto,
    /// E4M3, 8 bits.
    Fp8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EventFormat {
    /// Events are maps, as in vLLM from v0.24 on.
    Map,
    /// Events are arrays, as in vLLM up to v0.23.
    Array,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// Serve until told to stop.
    Serve(Box<WorkerOptions>, LogFormat),
    /// Print a shell's completion script.
    Completions(Shell),
    /// Be a rank of an expert-parallel group.
    ExpertRank(Box<RankOptions>, LogFormat),
}

/// A number of seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

impl Bits {
    fn quantize(self) -> Quantize {
        match self {
            Self::None => Quantize::None,
            Self::Int8 => Quantize::Int8,
            Self::Int4 => Quantize::Int4,
        }
    }
}

impl Cli {
    /// What is to be done: the options that were read, as the library takes them.
    pub fn into_task(self) -> Task {
        match self.command {
            None => {}
            Some(Command::Completions { shell }) => return Task::Completions(shell),
            Some(Command::ExpertRank(args)) => return expert_rank(args),
        }
        let options = self.options;
        let mut names = options.served_model_name.into_iter().filter(|name| !name.is_empty());
        let worker = WorkerOptions {
            model: options.model,
            device: options.device,
            quantize: options.quantize.quantize(),
            fp8_kv: options.kv_cache_dtype == KvDtype::Fp8,
            served_model_name: names.next(),
            served_model_aliases: names.collect(),
            reasoning_format: options.reasoning_parser,
            call_format: options.tool_call_parser,
            listen: options.listen,
            block_size: options.block_size,
            num_kv_blocks: options.num_kv_blocks,
            kv_cache_memory: options.kv_cache_memory.map(|size| size.0),
            request_memory: options.request_memory.map(|size| size.0),
            clients: ClientBounds::default(),
            memory_utilization: options.memory_utilization,
            max_model_len: options.max_model_len,
            max_batched_tokens: options.max_batched_tokens,
            max_running: options.max_running,
            step_ahead: !options.no_step_ahead,
            paired_experts: options.paired_experts,
            threads: options.threads,
            kv_events: options.kv_events.map(|publish| KvEventOptions {
                publish,
                replay: options.kv_replay,
                topic: options.kv_events_topic,
                format: match options.kv_events_format {
                    EventFormat::Map => WireFormat::VllmMap,
                    EventFormat::Array => WireFormat::VllmArray,
                },
            }),
            kv_transfer: options.kv_transfer_listen.map(|listen| KvTransferOptions {
                listen,
                host: options.kv_transfer_host,
                key_file: options.kv_transfer_key_file,
                keep: options.kv_transfer_keep,
                shared_memory: !options.no_kv_transfer_shared_memory,
            }),
            expert_parallel: ExpertParallelOptions {
                size: match options.expert_parallel_hosts.len() {
                    0 => options.expert_parallel_size,
                    hosts => hosts,
                },
                hosts: options.expert_parallel_hosts,
                data_parallel_attention: options.data_parallel_attention,
                deadline: options.expert_parallel_deadline,
                retries: options.expert_parallel_retries,
                redundant_experts: options.redundant_experts,
                rank_command: rank_command(options.log_format),
            },
        };
        Task::Serve(Box::new(worker), options.log_format)
    }
}

/// One process of several that hold the experts.
fn expert_rank(args: RankArgs) -> Task {
    let log_format = args.log_format;
    let options = RankOptions {
        rank: args.rank,
        group: args.memory.map_or(RankGroup::Hosts(args.hosts), RankGroup::Memory),
        model: args.model,
        quantize: args.quantize.quantize(),
        fp8_kv: args.kv_cache_dtype == KvDtype::Fp8,
        device: args.device,
        max_batched_tokens: args.max_batched_tokens,
        max_running: args.max_running,
        threads: worker::threads(args.threads).get(),
        deadline: args.deadline,
    };
    Task::ExpertRank(Box::new(options), log_format)
}

/// What starts a rank that logs as this process does.
fn rank_command(format: LogFormat) -> Vec<OsString> {
    let mut command = ExpertParallelOptions::default().rank_command;
    if format == LogFormat::Json {
        command.extend(["--log-format".into(), "json".into()]);
    }
    command
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn task(args: &[&str]) -> Task {
        Cli::try_parse_from([&["keyway-worker"], args].concat()).unwrap().into_task()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_arguments_the_options_are_the_librarys_defaults() {
        let Task::Serve(options, LogFormat::Text) = task(&[]) else { panic!("must serve") };
        assert_eq!(format!("{options:?}"), format!("{:?}", WorkerOptions::default()));
    }

    #[test]
    fn kv_events_have_an_address_and_a_replay_needs_them() {
        let args = ["--kv-events", "tcp://*:5557", "--kv-replay", "tcp://[::1]:5558"];
        let Task::Serve(options, _) = task(&[&args[..], &["--kv-events-format", "array"]].concat()) else {
            panic!("must serve")
        };
        let kv_events = options.kv_events.unwrap();
        assert_eq!(kv_events.publish.to_string(), "tcp://*:5557");
        assert_eq!(kv_events.replay.unwrap().to_string(), "tcp://[::1]:5558");
        assert_eq!((kv_events.format, kv_events.topic.as_str()), (WireFormat::VllmArray, ""));
        let refused = |args: &[&str]| Cli::try_parse_from([&["keyway-worker"], args].concat()).unwrap_err();
        assert!(refused(&["--kv-replay", "tcp://*:1"]).to_string().contains("--kv-events"));
        assert!(refused(&["--kv-events", "5557"]).to_string().contains("tcp://HOST:PORT"));
    }

    #[test]
    fn kv_transfers_have_an_address_and_the_rest_needs_it() {
        let transfer = |args: &[&str]| {
            let Task::Serve(options, _) = task(args) else { panic!("must serve") };
            options.kv_transfer
        };
        assert_eq!(transfer(&["--kv-transfer-keep", "3"]), None);
        let args = [
            "--kv-transfer-listen",
            "10.0.0.1:7000",
            "--kv-transfer-key-file",
            "key",
            "--kv-transfer-host",
            "a",
        ];
        let options = transfer(&args).unwrap();
        assert_eq!((options.listen.port(), options.keep.as_secs()), (7000, 120));
        assert_eq!((options.host.as_deref(), options.key_file), (Some("a"), Some("key".into())));
        assert!(options.shared_memory);
        let args = ["--kv-transfer-listen", "127.0.0.1:0", "--no-kv-transfer-shared-memory"];
        assert!(!transfer(&args).unwrap().shared_memory);
        for alone in [["--kv-transfer-host", "a"], ["--kv-transfer-key-file", "a"]] {
            assert!(Cli::try_parse_from([&["keyway-worker"], &alone[..]].concat()).is_err());
        }
    }

    #[test]
    fn the_kv_cache_is_sized_in_one_way_under_vllms_names_too() {
        let sized = |args: &[&str]| {
            let Task::Serve(options, _) = task(args) else { panic!("must serve") };
            (options.num_kv_blocks, options.kv_cache_memory, options.memory_utilization)
        };
        assert_eq!(sized(&["--kv-cache-memory", "2GiB"]), (None, Some(2 << 30), None));
        assert_eq!(sized(&["--kv-cache-memory-bytes", "512M"]), (None, Some(512 << 20), None));
        assert_eq!(sized(&["--gpu-memory-utilization", "0.5"]), (None, None, Some(0.5)));
        let refused = |args: &[&str]| Cli::try_parse_from([&["keyway-worker"], args].concat()).unwrap_err();
        let twice = ["--num-kv-blocks", "1", "--memory-utilization", "0.5"];
        assert!(refused(&twice).to_string().contains("cannot be used with"));
        assert!(refused(&["--kv-cache-memory", "much"]).to_string().contains("is not a size"));
    }

    #[test]
    fn a_step_on_a_gpu_is_larger_unless_it_is_said_how_large() {
        let limits = |args: &[&str], is_on_gpu| {
            let Task::Serve(options, _) = task(args) else { panic!("must serve") };
            let limits = options.limits(is_on_gpu);
            (limits.max_batched_tokens, limits.max_running)
        };
        assert_eq!((limits(&[], false), limits(&[], true)), ((512, 64), (4096, 256)));
        let both = ["--max-batched-tokens", "512", "--max-running", "64"];
        assert_eq!(limits(&both, true), (512, 64));
        assert_eq!(limits(&["--max-batched-tokens", "100"], true), (100, 100));
        assert_eq!(limits(&["--max-running", "5000"], true), (5000, 5000));
        assert_eq!(limits(&["--max-running", "8"], false), (512, 8));
    }

    #[test]
    fn a_device_may_have_a_number_and_completions_are_a_task() {
        let Task::Serve(options, _) = task(&["--device", "cuda:2"]) else { panic!("must serve") };
        assert_eq!(options.device, DeviceChoice::Cuda(2));
        assert!(matches!(task(&["completions", "bash"]), Task::Completions(Shell::Bash)));
    }
}
