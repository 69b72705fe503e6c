//! The configuration: what the file may say ([`File`]), and what the gateway runs with ([`Config`]), validated. Where a
//! value comes from (flag, environment, file, default) is decided in `args.rs`.

mod discovery;
mod scale;

use std::{fs, net::SocketAddr, num::NonZeroUsize, path::PathBuf, str::FromStr, time::Duration};

use http::{HeaderValue, Uri};
use keyway_core::{pick::Policy, waiting_room::RoomRules};
use keyway_wire::block_hash::HashKey;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::{
    discovery::{DiscoveryConfig, DiscoveryFile, DnsName, HostRule},
    scale::{ModelScale, ScaleConfig, ScaleFile},
};
use crate::limits;

/// One line that says what is wrong with the configuration and where.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// The TOML file. Every key is optional; an unknown one is an error.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    /// Address that clients use.
    pub listen: Option<SocketAddr>,
    /// Address for operators: metrics, readiness, the fleet.
    pub admin_listen: Option<SocketAddr>,
    /// How workers are chosen: prefix, least-loaded, round-robin, random, power-of-two or chwbl.
    pub policy: Option<String>,
    /// Log format.
    pub log_format: Option<LogFormat>,
    /// The workers: URLs, or tables.
    pub worker: Vec<WorkerEntry>,
    /// What is known of models beforehand.
    pub model: Vec<ModelTable>,
    /// How prompts are identified and the index is sized.
    pub routing: RoutingFile,
    /// Bounds.
    pub limits: LimitsFile,
    /// Workers that come and go.
    pub discovery: DiscoveryFile,
    /// How many workers each model is to have.
    pub scale: ScaleFile,
}

/// `[routing]`
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoutingFile {
    /// Bytes of prompt text in one hashed block: a worker's KV block size times the bytes of a token.
    pub block_bytes: Option<NonZeroUsize>,
    /// Memory for the prefix index.
    pub index_bytes: Option<usize>,
    /// File whose bytes key the hashes; random at start if absent.
    pub hash_key_file: Option<PathBuf>,
    /// Whether answers carry `x-keyway-worker` and its siblings; by default only on loopback.
    pub expose: Option<bool>,
    /// Whether requests wait in the gateway, short prefills first, until a worker can begin on them (true); only with the
    /// policy `prefix`.
    pub hold: Option<bool>,
    /// Milliseconds of prefill at a worker up to which it is sent more (500).
    pub hold_horizon_ms: Option<f64>,
    /// Requests that may wait; those beyond are sent at once (256).
    pub hold_max: Option<usize>,
    /// File to which choices are appended as JSON lines: hashes and counts, never text.
    pub decision_log: Option<PathBuf>,
    /// Share of the choices that are logged there (1.0).
    pub decision_log_share: Option<f64>,
}

/// `[limits]`
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsFile {
    /// Largest request body.
    pub max_body_bytes: Option<usize>,
    /// Requests in flight at once.
    pub max_in_flight: Option<usize>,
    /// Client connections at once.
    pub max_connections: Option<usize>,
    /// Seconds that open requests get after SIGTERM.
    pub drain_seconds: Option<u64>,
    /// Milliseconds to open a connection to a worker.
    pub connect_timeout_ms: Option<u64>,
}

/// A worker in the file.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum WorkerEntry {
    /// Its URL alone.
    Url(String),
    /// With options.
    Table(WorkerTable),
}

/// `[[worker]]`
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkerTable {
    /// Such as `http://10.0.0.7:8000`.
    pub url: String,
    /// Serve only this model from it; by default all that its `/v1/models` lists.
    pub model: Option<String>,
    /// Share of new work relative to its peers (1.0).
    pub weight: Option<f64>,
    /// File that holds the key sent to it as a bearer token, instead of the client's.
    pub api_key_file: Option<PathBuf>,
    /// Where it publishes its KV events: `tcp://HOST:PORT` (vLLM's and SGLang's `endpoint`, keyway-worker's
    /// `--kv-events`).
    pub kv_events: Option<String>,
    /// Where it repeats those that were missed (`replay_endpoint`, `--kv-replay`).
    pub kv_replay: Option<String>,
    /// Tokens in one of its KV blocks, until its events or metrics tell (16).
    pub block_size: Option<u32>,
}

/// `[[model]]`
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelTable {
    /// As requests name it.
    pub name: String,
    /// Folder with its `tokenizer.json`, `tokenizer_config.json` and chat template; `builtin` or `random` for the
    /// worker's own models.
    pub tokenizer: PathBuf,
}

impl<'de> Deserialize<'de> for WorkerEntry {
    // By hand, because an untagged enum would answer a misspelt key with "did not match any variant".
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct UrlOrTable;
        impl<'de> serde::de::Visitor<'de> for UrlOrTable {
            type Value = WorkerEntry;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a worker's URL or a [[worker]] table")
            }

            fn visit_str<E>(self, url: &str) -> Result<WorkerEntry, E> {
                Ok(WorkerEntry::Url(url.to_owned()))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<WorkerEntry, A::Error> {
                WorkerTable::deserialize(serde::de::value::MapAccessDeserializer::new(map))
                    .map(WorkerEntry::Table)
            }
        }
        deserializer.deserialize_any(UrlOrTable)
    }
}

/// A worker, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerConfig {
    /// Scheme, authority and perhaps a path before `/v1`.
    pub url: Uri,
    /// The only model to serve from it.
    pub model: Option<String>,
    /// Relative share of new work, above 0.
    pub weight: f64,
    /// `Bearer …`, marked sensitive so that it is never printed.
    pub api_key: Option<HeaderValue>,
    /// Where it says what it caches.
    pub kv_events: Option<KvSource>,
    /// Tokens in one of its KV blocks, until it says so itself.
    pub block_size: u32,
}

/// Where a worker says what it caches; both as `tcp://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvSource {
    /// The live stream.
    pub events: String,
    /// Batches that were missed.
    pub replay: Option<String>,
}

impl WorkerConfig {
    /// `host:port`.
    pub fn name(&self) -> String {
        format!("{}:{}", self.url.host().unwrap_or_default(), self.url.port_u16().unwrap_or(80))
    }
}

impl FromStr for WorkerConfig {
    type Err = ConfigError;

    /// `URL[;kv-events=tcp://HOST:PORT][;kv-replay=tcp://HOST:PORT]`
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut parts = text.split(';');
        let mut table = WorkerTable::of(parts.next().unwrap_or_default());
        for part in parts {
            let wrong = || {
                let known = "kv-events=tcp://HOST:PORT or kv-replay=tcp://HOST:PORT";
                ConfigError(format!("worker {text:?}: {part:?} is not known; expected {known}"))
            };
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let field = match name.trim() {
                "kv-events" => &mut table.kv_events,
                "kv-replay" => &mut table.kv_replay,
                _ => return Err(wrong()),
            };
            *field = Some(value.trim().to_owned());
        }
        Self::try_from(&table)
    }
}

impl WorkerTable {
    /// A worker of which nothing but its URL is known.
    pub fn of(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            model: None,
            weight: None,
            api_key_file: None,
            kv_events: None,
            kv_replay: None,
            block_size: None,
        }
    }

    fn kv_source(&self) -> Result<Option<KvSource>, String> {
        for address in self.kv_events.iter().chain(&self.kv_replay) {
            let place = address.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':'));
            let good = place.is_some_and(|(host, port)| {
                !host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port > 0)
            });
            if !good {
                return Err(format!(
                    "{address:?} is no place to connect to for KV events; expected tcp://HOST:PORT"
                ));
            }
        }
        match (&self.kv_events, &self.kv_replay) {
            (None, Some(_)) => Err("kv_replay needs kv_events, the live stream that it completes".to_owned()),
            (None, None) => Ok(None),
            (Some(events), replay) => Ok(Some(KvSource { events: events.clone(), replay: replay.clone() })),
        }
    }
}

impl TryFrom<&WorkerTable> for WorkerConfig {
    type Error = ConfigError;

    fn try_from(table: &WorkerTable) -> Result<Self, ConfigError> {
        let text = &table.url;
        let wrong = |why: &str| ConfigError(format!("worker {text:?}: {why}"));
        let url: Uri = text.parse().map_err(|_| wrong("not a URL; expected such as http://10.0.0.7:8000"))?;
        match url.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(wrong("https to workers is not supported yet; use http")),
            _ => return Err(wrong("the URL must begin with http://")),
        }
        if url.host().is_none_or(str::is_empty) || url.query().is_some() {
            return Err(wrong("expected http://HOST:PORT, without a query"));
        }
        let weight = table.weight.unwrap_or(1.0);
        if !weight.is_finite() || weight <= 0.0 {
            return Err(wrong("weight must be a number above 0"));
        }
        let block_size = table.block_size.unwrap_or(limits::BLOCK_TOKENS);
        if block_size == 0 {
            return Err(wrong("block_size must be above 0"));
        }
        let kv_events = table.kv_source().map_err(|why| wrong(&why))?;
        let api_key = table.api_key_file.as_ref().map(read_key).transpose()?;
        Ok(Self { url, model: table.model.clone(), weight, api_key, kv_events, block_size })
    }
}

fn read_key(path: &PathBuf) -> Result<HeaderValue, ConfigError> {
    let wrong = |why: &dyn std::fmt::Display| ConfigError(format!("api_key_file {}: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let mut value = HeaderValue::from_str(&format!("Bearer {}", text.trim()))
        .map_err(|_| wrong(&"holds characters that a header cannot carry"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// What the gateway runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address that clients use.
    pub listen: SocketAddr,
    /// Address for operators.
    pub admin_listen: SocketAddr,
    /// How workers are chosen.
    pub policy: Policy,
    /// Log format.
    pub log_format: LogFormat,
    /// The workers; none means embedded ones.
    pub workers: Vec<WorkerConfig>,
    /// Models whose prompts are routed by their tokens, with the folder of each one's tokenizer.
    pub tokenizers: Vec<(String, PathBuf)>,
    /// Bytes of prompt text in one block.
    pub block_bytes: Option<NonZeroUsize>,
    /// Memory for the prefix index.
    pub index_bytes: usize,
    /// Secret of the hash chain.
    pub hash_key: HashKey,
    /// Whether answers name the worker.
    pub expose_routing: bool,
    /// When requests wait in the gateway; `None`: never.
    pub room: Option<RoomRules>,
    /// File for choices, and the share of them that go there.
    pub decision_log: Option<(PathBuf, f64)>,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Requests in flight at once.
    pub max_in_flight: usize,
    /// Client connections at once.
    pub max_connections: usize,
    /// Time for open requests after SIGTERM.
    pub drain_timeout: Duration,
    /// Time to open a connection to a worker.
    pub connect_timeout: Duration,
    /// Where workers that come and go are learned of.
    pub discovery: DiscoveryConfig,
    /// What is wanted of each model's fleet.
    pub scale: ScaleConfig,
}

impl File {
    /// Parses TOML; the error names the line and key, in one line.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            // The parser's own text shows the line over several ones; here it is one.
            let at = error.span().map_or(0, |span| span.start);
            let number = text[..at].matches('\n').count() + 1;
            let line = text.lines().nth(number - 1).unwrap_or_default().trim();
            ConfigError(format!("line {number}, `{line}`: {}", error.message().replace('\n', "; ")))
        })
    }
}

impl TryFrom<File> for Config {
    type Error = ConfigError;

    fn try_from(file: File) -> Result<Self, ConfigError> {
        let listen = file.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8080)));
        let policy = file.policy.as_deref().map(str::parse::<Policy>).transpose();
        let workers = workers(&file.worker)?;
        let tokenizers: Vec<_> = file.model.into_iter().map(|model| (model.name, model.tokenizer)).collect();
        if let Some(twice) = first_duplicate(tokenizers.iter().map(|(name, _)| name.clone())) {
            return Err(ConfigError(format!("model {twice} has two tokenizers")));
        }
        let hash_key = match &file.routing.hash_key_file {
            Some(path) => HashKey::from_bytes(
                &fs::read(path)
                    .map_err(|error| ConfigError(format!("hash_key_file {}: {error}", path.display())))?,
            ),
            None => HashKey::new(fastrand::u64(..)),
        };
        let share = file.routing.decision_log_share.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&share) {
            return Err(ConfigError("routing.decision_log_share must be between 0 and 1".to_owned()));
        }
        let room = room_rules(&file.routing)?;
        let limits = &file.limits;
        let config = Self {
            listen,
            admin_listen: file.admin_listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 9090))),
            policy: policy
                .map_err(|error| ConfigError(format!("policy: {error}")))?
                .unwrap_or(Policy::Prefix),
            log_format: file.log_format.unwrap_or_default(),
            workers,
            tokenizers,
            block_bytes: file.routing.block_bytes,
            index_bytes: file.routing.index_bytes.unwrap_or(limits::INDEX_BYTES),
            hash_key,
            expose_routing: file.routing.expose.unwrap_or_else(|| listen.ip().is_loopback()),
            room,
            decision_log: file.routing.decision_log.map(|path| (path, share)),
            max_body_bytes: limits.max_body_bytes.unwrap_or(limits::MAX_BODY_BYTES),
            max_in_flight: limits.max_in_flight.unwrap_or(limits::MAX_IN_FLIGHT),
            max_connections: limits.max_connections.unwrap_or(limits::MAX_CONNECTIONS),
            drain_timeout: limits.drain_seconds.map_or(limits::DRAIN_TIMEOUT, Duration::from_secs),
            connect_timeout: limits.connect_timeout_ms.map_or(limits::CONNECT_TIMEOUT, Duration::from_millis),
            discovery: DiscoveryConfig::try_from(&file.discovery)?,
            scale: ScaleConfig::try_from(&file.scale)?,
        };
        for (name, value) in [
            ("limits.max_body_bytes", config.max_body_bytes),
            ("limits.max_in_flight", config.max_in_flight),
            ("limits.max_connections", config.max_connections),
        ] {
            if value == 0 {
                return Err(ConfigError(format!("{name} must be above 0")));
            }
        }
        Ok(config)
    }
}

/// The workers of a list, each once.
pub fn workers(entries: &[WorkerEntry]) -> Result<Vec<WorkerConfig>, ConfigError> {
    let workers = entries.iter().map(|entry| match entry {
        WorkerEntry::Url(url) => url.parse(),
        WorkerEntry::Table(table) => WorkerConfig::try_from(table),
    });
    let workers = workers.collect::<Result<Vec<WorkerConfig>, _>>()?;
    match first_duplicate(workers.iter().map(WorkerConfig::name)) {
        Some(twice) => Err(ConfigError(format!("worker {twice} is listed twice"))),
        None => Ok(workers),
    }
}

fn room_rules(file: &RoutingFile) -> Result<Option<RoomRules>, ConfigError> {
    let default = RoomRules::default();
    let horizon_ms = file.hold_horizon_ms.unwrap_or(default.horizon_ms);
    if !horizon_ms.is_finite() || horizon_ms < 0.0 {
        return Err(ConfigError("routing.hold_horizon_ms must be 0 or more".to_owned()));
    }
    let max_waiting = file.hold_max.unwrap_or(default.max_waiting);
    Ok(file.hold.unwrap_or(true).then_some(RoomRules { horizon_ms, max_waiting, ..default }))
}

fn first_duplicate(names: impl Iterator<Item = String>) -> Option<String> {
    let mut seen = std::collections::HashSet::new();
    names.into_iter().find(|name| !seen.insert(name.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<Config, ConfigError> {
        Config::try_from(File::parse(text)?)
    }

    #[test]
    fn a_worker_is_a_url_or_a_table() {
        let urls = config(r#"worker = ["http://a:1", "http://b:2/base"]"#).unwrap();
        assert_eq!(urls.workers[1].name(), "b:2");
        let tables = config("[[worker]]\nurl = \"http://a:1\"\nmodel = \"m\"\nweight = 2.0").unwrap();
        assert_eq!(tables.workers[0].weight, 2.0);
    }

    #[test]
    fn a_worker_s_events_are_named_behind_its_url_or_in_its_table() {
        let flag: WorkerConfig = "http://a:1;kv-events=tcp://a:2;kv-replay=tcp://[::1]:3".parse().unwrap();
        let table =
            "[[worker]]\nurl = \"http://a:1\"\nkv_events = \"tcp://a:2\"\nkv_replay = \"tcp://[::1]:3\"";
        assert_eq!(flag.kv_events, config(table).unwrap().workers[0].kv_events);
        assert_eq!(flag.kv_events.unwrap().replay.as_deref(), Some("tcp://[::1]:3"));
        assert_eq!((flag.url.host(), flag.block_size), (Some("a"), 16));
    }

    #[test]
    fn the_example_file_is_valid_and_shows_every_key() {
        let example = include_str!("../../deploy/keyway.toml");
        let config = config(example).unwrap();
        assert_eq!(config.workers.len(), 2);
        let schema = serde_json::to_value(schemars::schema_for!(File)).unwrap();
        let mut keys = Vec::new();
        collect_keys(&schema, &mut keys);
        assert!(keys.len() >= 15, "{keys:?}");
        for key in keys {
            assert!(example.contains(&key), "deploy/keyway.toml does not show {key}");
        }
    }

    fn collect_keys(value: &serde_json::Value, keys: &mut Vec<String>) {
        let serde_json::Value::Object(map) = value else { return };
        for (name, inner) in map {
            if let (true, Some(properties)) = (name == "properties", inner.as_object()) {
                keys.extend(properties.keys().cloned());
            }
            collect_keys(inner, keys);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            ("lisen = \"127.0.0.1:1\"", "lisen"),
            ("[[worker]]\nurl = \"http://a:1\"\nwait = 2", "wait"),
            ("[routing]\nblock_bytes = 0", "block_bytes"),
            ("policy = \"best\"", "best"),
            ("worker = [\"a:1\"]", "http://"),
            ("worker = [\"https://a\"]", "https"),
            ("worker = [\"http://a:1\", \"http://a:1/\"]", "twice"),
            ("[[worker]]\nurl = \"http://a:1\"\nweight = 0.0", "weight"),
            ("[[worker]]\nurl = \"http://a:1\"\napi_key_file = \"/nowhere\"", "/nowhere"),
            ("[limits]\nmax_in_flight = 0", "max_in_flight"),
            ("[routing]\ndecision_log_share = 2.0", "decision_log_share"),
            ("worker = [\"http://a:1;kv-event=tcp://a:2\"]", "kv-events="),
            ("worker = [\"http://a:1;kv-events=a:2\"]", "tcp://HOST:PORT"),
            ("worker = [\"http://a:1;kv-replay=tcp://a:2\"]", "kv_events"),
            ("[[worker]]\nurl = \"http://a:1\"\nkv_events = \"tcp://*:5557\"", "tcp://HOST:PORT"),
            ("[[worker]]\nurl = \"http://a:1\"\nblock_size = 0", "block_size"),
            ("[[model]]\nname = \"m\"\ntokenizer = \"a\"\n[[model]]\nname = \"m\"\ntokenizer = \"b\"", "two"),
        ] {
            let error = config(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn routing_is_exposed_only_on_loopback() {
        assert!(config("").unwrap().expose_routing);
        assert!(!config("listen = \"0.0.0.0:80\"").unwrap().expose_routing);
        assert!(config("listen = \"0.0.0.0:80\"\n[routing]\nexpose = true").unwrap().expose_routing);
    }

    #[test]
    fn a_workers_key_is_not_printable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "canary-key\n").unwrap();
        let text = format!("[[worker]]\nurl = \"http://a:1\"\napi_key_file = {path:?}");
        let config = config(&text).unwrap();
        assert_eq!(config.workers[0].api_key.as_ref().unwrap(), "Bearer canary-key");
        assert!(!format!("{config:?}").contains("canary-key"));
    }
}
