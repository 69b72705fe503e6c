//! The command line of `keyway-worker`. Options only; what they mean is `worker.rs`'s business.

use std::net::SocketAddr;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::model::ModelSource;
use crate::worker::WorkerOptions;

/// An OpenAI-compatible inference worker with a paged KV cache and automatic prefix caching.
///
/// Without options it serves its small built-in model on http://127.0.0.1:8000. Every option is also an environment
/// variable, named in brackets.
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
}

#[derive(Debug, clap::Args)]
struct Options {
    /// A Hugging Face checkpoint directory (config.json, tokenizer.json, *.safetensors), or `builtin`.
    #[arg(long, value_name = "DIR|builtin", default_value = "builtin", env = "KEYWAY_WORKER_MODEL")]
    model: ModelSource,

    /// The model's name for clients [default: the directory's name, or keyway-builtin].
    #[arg(long, value_name = "NAME", env = "KEYWAY_WORKER_SERVED_MODEL_NAME")]
    served_model_name: Option<String>,

    /// Address to listen on; port 0 takes a free one, which the log names.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", env = "KEYWAY_WORKER_LISTEN")]
    listen: SocketAddr,

    /// What computes.
    #[arg(long, value_enum, default_value_t = Device::Cpu, env = "KEYWAY_WORKER_DEVICE")]
    device: Device,

    /// Tokens per KV block, a multiple of 16: the grain at which prefixes are shared.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, env = "KEYWAY_WORKER_BLOCK_SIZE")]
    block_size: usize,

    /// KV blocks [default: as many as 256 MiB hold].
    #[arg(long, value_name = "N", env = "KEYWAY_WORKER_NUM_KV_BLOCKS")]
    num_kv_blocks: Option<usize>,

    /// Longest prompt and answer together [default: what the model and the KV cache allow].
    #[arg(long, value_name = "TOKENS", env = "KEYWAY_WORKER_MAX_MODEL_LEN")]
    max_model_len: Option<usize>,

    /// Tokens computed in one step: more finish prompts sooner, fewer let running answers flow more evenly.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, env = "KEYWAY_WORKER_MAX_BATCHED_TOKENS")]
    max_batched_tokens: usize,

    /// Sequences that run at the same time; further ones wait.
    #[arg(long, value_name = "N", default_value_t = 64, env = "KEYWAY_WORKER_MAX_RUNNING")]
    max_running: usize,

    /// Processor threads that compute; answers do not depend on them [default: one for each core]..
    #[arg(long, value_name = "N", env = "KEYWAY_WORKER_THREADS")]
    threads: Option<usize>,

    /// Format of the log on stderr; RUST_LOG sets its level.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "KEYWAY_WORKER_LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// SIMD on this machine's processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// Serve until told to stop.
    Serve(WorkerOptions, LogFormat),
    /// Print a shell's completion script.
    Completions(Shell),
}

impl Cli {
    /// Checks what clap cannot. The error is one line for the user.
    pub fn into_task(self) -> Result<Task, String> {
        if let Some(Command::Completions { shell }) = self.command {
            return Ok(Task::Completions(shell));
        }
        let options = self.options;
        if options.device == Device::Cuda {
            return Err("this build has the CPU backend only: leave out --device cuda".to_owned());
        }
        let worker = WorkerOptions {
            model: options.model,
            served_model_name: options.served_model_name,
            listen: options.listen,
            block_size: options.block_size,
            num_kv_blocks: options.num_kv_blocks,
            max_model_len: options.max_model_len,
            max_batched_tokens: options.max_batched_tokens,
            max_running: options.max_running,
            threads: options.threads,
        };
        Ok(Task::Serve(worker, options.log_format))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn task(args: &[&str]) -> Result<Task, String> {
        Cli::try_parse_from([&["keyway-worker"], args].concat()).unwrap().into_task()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_arguments_the_options_are_the_librarys_defaults() {
        let Ok(Task::Serve(options, LogFormat::Text)) = task(&[]) else { panic!("must serve") };
        assert_eq!(format!("{options:?}"), format!("{:?}", WorkerOptions::default()));
    }

    #[test]
    fn cuda_is_refused_and_completions_are_a_task() {
        assert!(task(&["--device", "cuda"]).unwrap_err().contains("CPU backend only"));
        assert!(matches!(task(&["completions", "bash"]), Ok(Task::Completions(Shell::Bash))));
    }
}
