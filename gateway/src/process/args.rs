//! The command line. A flag wins over its `KEYWAY_…` variable, that over the file, that over the default; all
//! meet in a [`File`], so that one validation serves all.

use std::{fs, net::SocketAddr, num::NonZeroUsize, path::PathBuf};

use clap::{Args, Parser, Subcommand};

use crate::{
    config::{Config, ConfigError, File, ModelTable, WorkerEntry, listen_address},
    machine::log::LogFormat,
    ops::check,
    process::otel,
};

const AFTER: &str = "\
Examples:
  keyway                                              two embedded CPU workers, for a first try
  keyway --worker http://10.0.0.7:8000 --worker http://10.0.0.8:8000
  keyway --config keyway.toml --listen 0.0.0.0:8080
  keyway --worker 'http://10.0.0.7:8000;kv-events=tcp://10.0.0.7:5557;kv-replay=tcp://10.0.0.7:5558' \\
         --tokenizer Qwen/Qwen3-0.6B=/models/qwen3   route by what the worker says it holds, token by token
  keyway config check --probe --config keyway.toml    is it valid, and does each worker answer?

Point any OpenAI-compatible client at the listening address; every path under /v1/ is passed on.

A request takes two open files, a waiting client one. The soft limit (ulimit -n) is raised to the hard one at the start; where that
is too low for limits.max_connections, fewer clients are let in, and a warning says how many.";

/// Prefix-aware gateway for LLM inference fleets: sends each prompt to the worker that holds its KV cache.
#[derive(Debug, Parser)]
#[command(name = "keyway", version, after_help = AFTER, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Without a subcommand: serve.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// What to serve, and how.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// What else the binary does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Look at the configuration instead of serving.
    Config {
        /// What to do with it.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Print a new API key, its hash, and a tenant's table with it for the file of tenants.
    NewKey {
        /// The tenant's name: only its table goes to stdout, to be appended to the file, and the key to
        /// stderr
        #[arg(long)]
        name: Option<String>,
    },
    /// Print completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// `keyway config …`
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check the configuration and print, as TOML, what would be in force and is not the default.
    Check(Box<CheckArgs>),
    /// Print the file's JSON Schema, for editors.
    Schema,
}

/// `keyway config check …`
#[derive(Debug, Clone, Default, Args)]
pub struct CheckArgs {
    /// Also ask each listed worker once whether it can be used; the exit code is 1 where one cannot
    #[arg(long)]
    pub probe: bool,
    /// What would be in force.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Flags of `serve`, each also an environment variable and a key of the file.
#[derive(Debug, Clone, Default, Args)]
pub struct ServeArgs {
    /// Configuration file (TOML)
    #[arg(long, env = "KEYWAY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address that clients use [default: 127.0.0.1:8080]
    #[arg(long, env = "KEYWAY_LISTEN", value_name = "ADDR", value_parser = listen_address)]
    pub listen: Option<SocketAddr>,
    /// Address for operators: /metrics, /readyz, /workers [default: 127.0.0.1:9090]
    #[arg(long, env = "KEYWAY_ADMIN_LISTEN", value_name = "ADDR", value_parser = listen_address)]
    pub admin_listen: Option<SocketAddr>,
    /// Unix socket over which a new process takes the listening sockets from the old one, which then drains;
    /// SIGUSR2 starts the new one
    #[arg(long, env = "KEYWAY_HANDOVER_SOCKET", value_name = "PATH")]
    pub handover_socket: Option<PathBuf>,
    /// An inference server's URL, with where it publishes KV events and whether it speaks HTTP/2; repeat it
    /// for each. Replaces the file's workers [default: two embedded ones]
    #[arg(
        long,
        env = "KEYWAY_WORKER",
        value_name = "URL[;kv-events=tcp://H:P][;kv-replay=tcp://H:P][;http2=true][;role=prefill][;kv-transfer=mooncake]",
        value_delimiter = ','
    )]
    pub worker: Vec<String>,
    /// Admin listener of another gateway in front of the same workers, http://HOST:PORT, which then tells
    /// what it has at each; every address of a name is one, this gateway itself may be among them; repeat it
    /// for each. Replaces the file's
    #[arg(long, env = "KEYWAY_PEER", value_name = "URL", value_delimiter = ',')]
    pub peer: Vec<String>,
    /// Folder with a model's tokenizer and chat template (`builtin` or `random` for the worker's own models),
    /// to route its prompts by their tokens, as KV events name them; repeat it for each model. Replaces the
    /// file's
    #[arg(long, env = "KEYWAY_TOKENIZER", value_name = "MODEL=DIR", value_delimiter = ',')]
    pub tokenizer: Vec<String>,
    /// prefix, least-loaded, round-robin, random, power-of-two or chwbl [default: prefix]
    #[arg(long, env = "KEYWAY_POLICY", value_name = "POLICY")]
    pub policy: Option<String>,
    /// Bytes of prompt text in one hashed block: the workers' KV block size times the bytes of a token
    /// [default: 64]
    #[arg(long, env = "KEYWAY_BLOCK_BYTES", value_name = "BYTES")]
    pub block_bytes: Option<NonZeroUsize>,
    /// Memory for the prefix index [default: 268435456]
    #[arg(long, env = "KEYWAY_INDEX_BYTES", value_name = "BYTES")]
    pub index_bytes: Option<usize>,
    /// Answers say in x-keyway-worker, x-keyway-reason, x-keyway-matched-tokens and x-keyway-model who served
    /// them and why. To try Keyway: they tell a client what others have asked
    #[arg(long, env = "KEYWAY_EXPOSE")]
    pub expose: bool,
    /// Append choices to this file as JSON lines: what each worker held and how busy it was; hashes, never
    /// text
    #[arg(long, env = "KEYWAY_DECISION_LOG", value_name = "FILE")]
    pub decision_log: Option<PathBuf>,
    /// Send traces to the OpenTelemetry collector at this URL (OTLP over HTTP) [default: no traces]
    #[arg(long, env = "KEYWAY_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// How log lines look; RUST_LOG chooses which [default: text]
    #[arg(long, env = "KEYWAY_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

impl ServeArgs {
    /// The configuration in force: file, then environment and flags over it.
    pub fn resolve(self) -> Result<Config, ConfigError> {
        Self::validated(self.merged()?)
    }

    /// What a file means, once all that it names can be used.
    pub fn validated(file: File) -> Result<Config, ConfigError> {
        let config = Config::try_from(file)?;
        check::can_be_used(&config)?;
        Ok(config)
    }

    /// The file, with environment and flags over it.
    pub fn merged(self) -> Result<File, ConfigError> {
        let mut file = match &self.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        file.listen = self.listen.or(file.listen);
        file.admin_listen = self.admin_listen.or(file.admin_listen);
        file.handover_socket = self.handover_socket.or(file.handover_socket);
        file.policy = self.policy.or(file.policy);
        file.log_format = self.log_format.or(file.log_format);
        file.routing.block_bytes = self.block_bytes.or(file.routing.block_bytes);
        file.routing.index_bytes = self.index_bytes.or(file.routing.index_bytes);
        file.routing.expose |= self.expose;
        file.routing.decision_log = self.decision_log.or(file.routing.decision_log);
        file.traces.otlp_endpoint = self.otlp_endpoint.or(file.traces.otlp_endpoint);
        otel::fill(&mut file.traces, |name| std::env::var(name).ok())?;
        if !self.worker.is_empty() {
            file.worker = self.worker.into_iter().map(WorkerEntry::Url).collect();
        }
        if !self.peer.is_empty() {
            file.peers.urls = self.peer;
        }
        if !self.tokenizer.is_empty() {
            tokenizers_only(&mut file.model, &self.tokenizer)?;
        }
        Ok(file)
    }
}

/// The flags' tokenizers in place of the file's; what else the file says of models stays.
fn tokenizers_only(models: &mut Vec<ModelTable>, flags: &[String]) -> Result<(), ConfigError> {
    for model in models.iter_mut() {
        model.tokenizer = None;
    }
    for text in flags {
        // A model's name may hold anything but this.
        let said = text.split_once('=').filter(|(name, dir)| !name.is_empty() && !dir.is_empty());
        let (name, dir) = said.ok_or_else(|| {
            ConfigError(format!(
                "--tokenizer {text:?}: expected MODEL=DIR, such as Qwen/Qwen3-0.6B=/models/qwen3"
            ))
        })?;
        let tokenizer = Some(dir.into());
        match models.iter_mut().find(|model| model.name == name) {
            Some(twice) if twice.tokenizer.is_some() => {
                return Err(ConfigError(format!("--tokenizer: model {name} has two tokenizers; name one")));
            }
            Some(model) => model.tokenizer = tokenizer,
            None => models.push(ModelTable { name: name.to_owned(), tokenizer, ..ModelTable::default() }),
        }
    }
    Ok(())
}

fn read(path: &PathBuf) -> Result<File, ConfigError> {
    let wrong = |error: &dyn std::fmt::Display| ConfigError(format!("{}: {error}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    File::parse(&text).map_err(|error| wrong(&error))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_win_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keyway.toml");
        fs::write(
            &path,
            "listen = \"127.0.0.1:1\"\nadmin_listen = \"127.0.0.1:2\"\nworker = [\"http://a:1\"]",
        )
        .unwrap();
        let flags = ["keyway", "--listen", "127.0.0.1:3", "--worker", "http://b:1", "--config"];
        let cli = Cli::parse_from(flags.into_iter().map(Into::into).chain([path.into_os_string()]));
        let config = cli.serve.resolve().unwrap();
        assert_eq!((config.listen.port(), config.admin_listen.port()), (3, 2));
        assert_eq!(config.workers[0].name(), "b:1");
    }

    #[test]
    fn a_tokenizer_s_flag_replaces_the_file_s_tokenizers_and_leaves_names_as_they_are() {
        let file = "[[model]]\nname = \"a\"\ntokenizer = \"old\"\naliases = [\"x\"]\n\
            [[model]]\nname = \"b\"\ntokenizer = \"old\"\n";
        let models = |flags: &[&str]| {
            let mut models = File::parse(file).unwrap().model;
            let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
            tokenizers_only(&mut models, &flags).map(|()| models)
        };
        let found = models(&["a=new", "c=more"]).unwrap();
        let of = |at: usize| {
            (found[at].name.as_str(), found[at].tokenizer.as_deref().and_then(|dir| dir.to_str()))
        };
        assert_eq!([of(0), of(1), of(2)], [("a", Some("new")), ("b", None), ("c", Some("more"))]);
        assert_eq!(found[0].aliases, ["x"]);
        for (flags, word) in
            [(&["a=1", "a=2"][..], "two tokenizers"), (&["c=1", "c=2"], "two"), (&["a"], "MODEL=DIR")]
        {
            let error = models(flags).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
