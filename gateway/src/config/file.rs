//! The TOML file as it is written: every key optional, an unknown one an error. What the values must satisfy
//! is checked where they become a [`super::Config`].

use std::{net::SocketAddr, num::NonZeroUsize, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ConfigError, CorsFile, DiscoveryFile, ModelTable, OidcFile, PeersFile, ResumeFile, ScaleFile, SplitFile,
    StoreFile, StoredStateFile, TracesFile, UsageFile, WorkerEntry, address, hint,
    worker_url::without_secret,
};
use crate::{machine::log::LogFormat, net::tls::TlsFiles};

/// The TOML file. Every key is optional; an unknown one is an error.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    /// Address that clients use.
    #[serde(deserialize_with = "address::read")]
    pub listen: Option<SocketAddr>,
    /// Address for operators: metrics, readiness, the fleet.
    #[serde(deserialize_with = "address::read")]
    pub admin_listen: Option<SocketAddr>,
    /// Unix socket over which a new process takes the listening sockets from the old one, so that a restart
    /// refuses nobody.
    pub handover_socket: Option<PathBuf>,
    /// How workers are chosen: prefix, least-loaded, round-robin, random, power-of-two or chwbl.
    pub policy: Option<String>,
    /// How log lines look, `text` (the default) or `json`; `RUST_LOG` chooses which lines.
    pub log_format: Option<LogFormat>,
    /// The workers: URLs, or tables.
    pub worker: Vec<WorkerEntry>,
    /// What is known of models beforehand, and by which names they are served.
    pub model: Vec<ModelTable>,
    /// How prompts are identified and the index is sized.
    pub routing: RoutingFile,
    /// Who may come in.
    pub auth: AuthFile,
    /// Which pages in browsers may use the API.
    pub cors: CorsFile,
    /// Certificate and key with which the listener speaks TLS; without them it speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Bounds of bodies, connections, cores and time; each has a default.
    pub limits: LimitsFile,
    /// Whether streams outlive their worker.
    pub resume: ResumeFile,
    /// Whether requests go to the worker that stores what they name.
    pub stored_state: StoredStateFile,
    /// Workers that come and go.
    pub discovery: DiscoveryFile,
    /// The other gateways in front of the same workers.
    pub peers: PeersFile,
    /// By what tenants' limits hold over several gateways.
    pub store: StoreFile,
    /// How many workers each model is to have.
    pub scale: ScaleFile,
    /// Where traces of requests go.
    pub traces: TracesFile,
    /// Where it is kept who has used how much.
    pub usage: UsageFile,
}

/// `[routing]`: how prompts are identified, how the index is sized and when requests wait.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoutingFile {
    /// Bytes of prompt text in one hashed block: a worker's KV block size times the bytes of a token.
    pub block_bytes: Option<NonZeroUsize>,
    /// Memory for the prefix index.
    pub index_bytes: Option<usize>,
    /// File whose bytes key the hashes. If absent, random at start; with `[peers]` it follows from their
    /// token, if there is one.
    pub hash_key_file: Option<PathBuf>,
    /// File to which the index is written when the gateway ends, and from which it is read at the start;
    /// needs hash_key_file, or a hand-over, so that names are the same.
    pub snapshot_file: Option<PathBuf>,
    /// Whether answers carry `x-keyway-worker`, `x-keyway-reason`, `x-keyway-matched-tokens` and, where it is
    /// not the one asked for, `x-keyway-model` (false): they tell a client what others have asked.
    pub expose: bool,
    /// Whether workers are asked for the usage of streams whose clients do not ask, which then is not shown
    /// (true).
    pub ask_usage: Option<bool>,
    /// Which prompts a worker whose role is `prefill` computes for one whose role is `decode`: `auto`, those
    /// for which that costs less (the default), `always`, all that may, or `never`.
    pub split: Option<SplitFile>,
    /// Whether a worker fetches what another one has cached of a prompt, where both can
    /// (`kv_source_port`): `auto`, where that costs less than to compute it (the default), `always`,
    /// whatever it costs, or `never`.
    pub pull: Option<SplitFile>,
    /// Uncached prompt tokens below which none is computed for another (256).
    pub prefill_from_tokens: Option<u64>,
    /// Whether a request must name its model where workers serve different ones (true); without, it goes to
    /// any of them.
    pub require_model: Option<bool>,
    /// Whether requests wait in the gateway, short prefills first, until a worker can begin on them (true);
    /// only with the policy `prefix`.
    pub hold: Option<bool>,
    /// Milliseconds of prefill at a worker up to which it is sent more (500).
    pub hold_horizon_ms: Option<f64>,
    /// Requests that may wait; those beyond are sent at once (4096).
    pub hold_max: Option<usize>,
    /// Milliseconds to the first token that are wanted: of those who wait, who would miss it anyway lets the
    /// others go first, but for every 32nd place (`scale.ttft_slo_seconds`, where that is set); 0: nobody
    /// does.
    pub ttft_objective_ms: Option<u64>,
    /// Milliseconds after which a request that would still wait is refused with 503 and Retry-After, at once
    /// where that is foreseen; without it, requests wait for up to 5 minutes and are then sent in any case.
    pub shed_after_ms: Option<u64>,
    /// Milliseconds that a session waits between two turns at most, where all sessions together need more KV
    /// cache than the workers have (60000), and half of `shed_after_ms` at most; 0: none waits for that.
    pub session_pause_ms: Option<u64>,
    /// Milliseconds between two looks at the load of a worker that other gateways send to as well (1000); 0:
    /// never.
    pub load_scrape_ms: Option<u64>,
    /// Milliseconds over which a worker that came up joins gradually (30000); 0: at once.
    pub slow_start_ms: Option<u64>,
    /// Whether a session that a client names (a header, `prompt_cache_key`, `user`) decides among workers
    /// that cost about the same (true); only with the policy `prefix`.
    pub session_hints: Option<bool>,
    /// Whether a worker that has no `kv_events` is asked where they are, where a model's tokenizer is given;
    /// and one that has no `data_parallel_size` how many engines it has (true).
    pub find_kv_events: Option<bool>,
    /// Prompt tokens that a worker fetches in a second from its host's memory or a disk, where its KV events
    /// tell of those tiers (100000); 0: what they hold does not count.
    pub fetch_tokens_per_second: Option<f64>,
    /// What changes in a prompt's text and is seen by no engine: left out where prompts are known by their
    /// text.
    pub ignore: Vec<IgnoreTable>,
    /// File to which choices are appended as JSON lines: hashes and counts, never text.
    pub decision_log: Option<PathBuf>,
    /// Share of the choices that are logged there (1.0).
    pub decision_log_share: Option<f64>,
}

/// `[[routing.ignore]]`: what of a prompt's text is left out of its hashes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IgnoreTable {
    /// Where it stands: `system`, `tools`, `prompt`, or `messages.FIELD` such as `messages.content`.
    pub field: String,
    /// A regular expression, in the syntax of Rust's regex crate; all that matches in such a field is left
    /// out.
    pub pattern: String,
}

/// `[auth]`: the tenants that may use the API, and the operators' token.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AuthFile {
    /// File of tenants, their keys' hashes and their limits; without it everybody may come in.
    pub tenants_file: Option<PathBuf>,
    /// Whether tenants' prompts share no cache (true): each gets a `cache_salt` of its own.
    pub isolate: Option<bool>,
    /// Fields and headers by which tenants may steer engines, such as `priority` and `x-vllm-priority`;
    /// others are taken out (none).
    pub steering: Vec<String>,
    /// Whose signed tokens are believed in place of keys.
    pub oidc: Option<OidcFile>,
    /// File with the token that operators show to the admin listener; /livez and /readyz need none,
    /// and the page at / asks for it.
    pub admin_token_file: Option<PathBuf>,
}

/// `[limits]`: bounds of bodies, connections, cores and time.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsFile {
    /// Bytes of the largest request body (67108864); a larger one is refused with 413.
    pub max_body_bytes: Option<usize>,
    /// Largest event of a stream: so much of one is held at most until it is whole.
    pub max_event_bytes: Option<usize>,
    /// Bytes of request bodies at once, those of answers under way included; what each has below 32 KiB is
    /// not counted. Prompts that are tokenised take at most half as much again.
    pub max_body_memory_bytes: Option<usize>,
    /// Requests in flight at once.
    pub max_in_flight: Option<usize>,
    /// Client connections at once.
    pub max_connections: Option<usize>,
    /// Cores that serve clients, each with a thread of its own: at most so many, and no more than there are.
    pub max_cores: Option<usize>,
    /// Seconds that open requests get after SIGTERM.
    pub drain_seconds: Option<u64>,
    /// Seconds after SIGTERM in which /readyz is 503 already and new connections are still taken, until
    /// balancers have noticed (0).
    pub drain_delay_seconds: Option<u64>,
    /// Milliseconds to open a connection to a worker.
    pub connect_timeout_ms: Option<u64>,
    /// Milliseconds for a request's head to come, and for a connection to wait for its next request (over
    /// HTTP/2 client_stall_ms, if that is longer).
    pub header_read_ms: Option<u64>,
    /// Milliseconds between two pieces of a request's body. After so long 1,024 bytes must have come for each
    /// further second too.
    pub body_idle_ms: Option<u64>,
    /// Milliseconds for a request's body to come whole.
    pub body_timeout_ms: Option<u64>,
    /// Milliseconds between two pieces of an answer, once it has begun.
    pub answer_idle_ms: Option<u64>,
    /// Milliseconds from a request's head to its answer's end.
    pub request_timeout_ms: Option<u64>,
    /// Milliseconds for which a client may take nothing of what is sent to it.
    pub client_stall_ms: Option<u64>,
}

impl File {
    /// Parses TOML; the error names the line and key, in one line.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            // The parser's own text shows the line over several ones; here it is one.
            let at = error.span().map_or(0, |span| span.start);
            let number = text[..at].matches('\n').count() + 1;
            let line = text.lines().nth(number - 1).unwrap_or_default().trim();
            let message = hint::with_hint(&error.message().replace('\n', "; "));
            ConfigError(format!("line {number}, `{line}`: {message}"))
        })
    }

    /// What of it differs from the defaults, as TOML; passwords in URLs are left out.
    pub fn shown(&self) -> Result<String, ConfigError> {
        // A path that is no text, and a number that TOML does not know, came by a flag.
        let table = |file: &Self| {
            toml::Table::try_from(file).map_err(|error| ConfigError(format!("it cannot be shown: {error}")))
        };
        let mut shown = table(self)?;
        leave_out(&mut shown, &table(&Self::default())?);
        shown.iter_mut().for_each(|(_, value)| hide_secrets(value));
        Ok(shown.to_string())
    }
}

/// Takes out of a table what the defaults say as well, and tables that are empty then.
fn leave_out(table: &mut toml::Table, defaults: &toml::Table) {
    table.retain(|key, value| match (value, defaults.get(key)) {
        (toml::Value::Table(inner), Some(toml::Value::Table(inner_defaults))) => {
            leave_out(inner, inner_defaults);
            !inner.is_empty()
        }
        (value, default) => default != Some(value),
    });
}

/// Takes passwords out of all URLs in a value.
fn hide_secrets(value: &mut toml::Value) {
    match value {
        toml::Value::String(text) if text.contains("://") => *text = without_secret(text),
        toml::Value::Array(items) => items.iter_mut().for_each(hide_secrets),
        toml::Value::Table(table) => table.iter_mut().for_each(|(_, value)| hide_secrets(value)),
        _ => {}
    }
}
