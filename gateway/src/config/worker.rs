//! A worker in the configuration: as the file or a flag names it ([`WorkerEntry`]), and validated
//! ([`WorkerConfig`]).

use std::{fs, net::IpAddr, num::NonZeroU16, path::PathBuf, str::FromStr, sync::Arc};

use http::{HeaderValue, Uri};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ConfigError, KvTransfer,
    worker_url::{WorkerUrl, without_secret},
};
use crate::{
    limits,
    net::tls::{ClientTls, WorkerTls},
};

/// Which part of requests a worker is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// All of them.
    #[default]
    Both,
    /// It computes prompts, whose KV another worker fetches.
    Prefill,
    /// It answers, with the KV of prompts that other workers computed; short ones it computes itself.
    Decode,
}

impl Role {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl FromStr for Role {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Both, Self::Prefill, Self::Decode].into_iter().find(|role| role.as_str() == text).ok_or(())
    }
}

/// A worker in the file.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum WorkerEntry {
    /// Its URL alone; all else is as by default.
    Url(String),
    /// A `[[worker]]` table: its URL, and options of its own.
    Table(Box<WorkerTable>),
}

/// `[[worker]]`: a worker's URL, and what is true of it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkerTable {
    /// Such as `http://10.0.0.7:8000`, perhaps with a path before `/v1`; `user:password@` is sent as
    /// `Authorization: Basic`.
    pub url: String,
    /// Serve only this model from it; by default all that its `/v1/models` lists.
    pub model: Option<String>,
    /// Share of new work relative to its peers (1.0).
    pub weight: Option<f64>,
    /// File that holds the key sent to it as a bearer token, instead of the client's.
    pub api_key_file: Option<PathBuf>,
    /// For an `https` URL: who is believed, and who the gateway is.
    pub tls: Option<WorkerTls>,
    /// Where it publishes its KV events: `tcp://HOST:PORT` (vLLM's and SGLang's `endpoint`, keyway-worker's
    /// `--kv-events`).
    pub kv_events: Option<String>,
    /// Where it repeats those that were missed (`replay_endpoint`, `--kv-replay`).
    pub kv_replay: Option<String>,
    /// Tokens in one of its KV blocks, until its events or metrics tell (16).
    pub block_size: Option<u32>,
    /// Data-parallel engines behind its address, each with a cache of its own: requests are sent to one of
    /// them by `X-data-parallel-rank`, and rank r's events come at the ports of kv_events and kv_replay plus
    /// r (as many as vLLM's metrics or SGLang's `/server_info` tell of; else 1).
    pub data_parallel_size: Option<u32>,
    /// Speak HTTP/2 with it, many streams on a connection: without TLS it must expect that (h2c with prior
    /// knowledge), with TLS it may choose HTTP/1.1 (false).
    pub http2: Option<bool>,
    /// Which part of requests it is for: `prefill`, `decode` or `both` (both). Where a worker of a model is
    /// for decode, long prompts are computed by one that is for prefill, and fetched from there. An SGLang
    /// says it itself (`--disaggregation-mode`).
    pub role: Option<Role>,
    /// How its KV is moved, if it is for a part of requests: `nixl` or `mooncake` (vLLM's connectors), or
    /// `sglang`, which an SGLang is known by (nixl).
    pub kv_transfer: Option<KvTransfer>,
    /// Port at which others learn where its KV is: SGLang's `--disaggregation-bootstrap-port`, which it says
    /// itself, vLLM's `VLLM_MOONCAKE_BOOTSTRAP_PORT` (8998).
    pub bootstrap_port: Option<NonZeroU16>,
    /// Port at which other workers fetch what it has cached of a prompt, as it does from theirs: the
    /// `port` of vLLM's `p2p` tier (5710 there). A keyway-worker with `--kv-transfer-listen` says it
    /// itself.
    pub kv_source_port: Option<NonZeroU16>,
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
                    .map(|table| WorkerEntry::Table(Box::new(table)))
            }
        }
        deserializer.deserialize_any(UrlOrTable)
    }
}

/// A worker, validated; of several data-parallel engines behind a URL each is one.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerConfig {
    /// Scheme, authority and perhaps a path before `/v1`.
    pub url: Uri,
    /// The only model to serve from it.
    pub model: Option<String>,
    /// Relative share of new work, above 0.
    pub weight: f64,
    /// `Bearer …` or, where its URL had a user, `Basic …`; marked sensitive so that it is never printed.
    pub api_key: Option<HeaderValue>,
    /// How TLS is spoken with it, where its URL begins with `https`.
    pub tls: Option<Arc<ClientTls>>,
    /// Where it says what it caches.
    pub kv_events: Option<KvSource>,
    /// Tokens in one of its KV blocks, until it says so itself.
    pub block_size: u32,
    /// What tells it from another worker that had its address before, where its source knows: a pod's UID.
    pub identity: Option<String>,
    /// Which of several data-parallel engines behind the URL it is.
    pub rank: Option<u32>,
    /// Whether the worker itself is asked how many engines are behind the URL: no operator has said it.
    pub finds_ranks: bool,
    /// Whether HTTP/2 is spoken with it, or over TLS offered.
    pub http2: bool,
    /// Which part of requests it is for; `None`: what it says itself, or else all of them.
    pub role: Option<Role>,
    /// How its KV is moved; `None`: as its engine does.
    pub kv_transfer: Option<KvTransfer>,
    /// Port at which others learn where its KV is; `None`: what it says itself, or else the usual one.
    pub bootstrap_port: Option<NonZeroU16>,
    /// Port at which other workers fetch what it has cached; `None`: what it says itself.
    pub kv_source_port: Option<NonZeroU16>,
    /// Whether its URL ended in `/v1`, which is left out.
    pub had_v1: bool,
}

/// Where a worker says what it caches; both as `tcp://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvSource {
    /// Where batches of events are published as they happen.
    pub events: String,
    /// Batches that were missed.
    pub replay: Option<String>,
}

/// Why a worker cannot be taken for several data-parallel engines.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// There are none of them, or too many.
    #[error("data_parallel_size must be from 1 to {}", limits::MAX_DATA_PARALLEL_RANKS)]
    Count,
    /// The port of an engine's KV events would be no port.
    #[error("{address:?} has no port for rank {rank}")]
    NoPort {
        /// Where the first engine's KV events are.
        address: String,
        /// Which of the engines it is.
        rank: u32,
    },
}

/// Why a table does not say well where KV events are.
#[derive(Debug, thiserror::Error)]
enum KvSourceError {
    #[error("{0:?} is no place to connect to for KV events; expected tcp://HOST:PORT")]
    NoPlace(String),
    #[error("kv_replay needs kv_events, the live stream that it completes")]
    ReplayAlone,
}

impl KvSource {
    /// The ports of one of several data-parallel engines, as vLLM and SGLang count them.
    fn of_rank(&self, rank: u32) -> Result<Self, RankError> {
        let shifted = |address: &String| {
            let (place, port) = address.rsplit_once(':').unwrap_or_default();
            let port = port.parse::<u16>().ok().and_then(|port| port.checked_add(u16::try_from(rank).ok()?));
            port.map(|port| format!("{place}:{port}"))
                .ok_or_else(|| RankError::NoPort { address: address.clone(), rank })
        };
        Ok(Self { events: shifted(&self.events)?, replay: self.replay.as_ref().map(shifted).transpose()? })
    }
}

impl WorkerConfig {
    /// Whether it computes prompts for others and answers nobody.
    pub(super) fn is_for_prefill(&self) -> bool {
        self.role == Some(Role::Prefill)
    }

    /// Its address, and `@rank` of one of several data-parallel engines.
    pub fn name(&self) -> String {
        let rank = self.rank.map(|rank| format!("@{rank}")).unwrap_or_default();
        format!("{}{rank}", self.address())
    }

    /// `host:port`, and the path of its URL if that has one: one port may have several workers behind it.
    pub fn address(&self) -> String {
        let path = self.url.path().trim_end_matches('/');
        format!("{}:{}{path}", self.url.host().unwrap_or_default(), port_of(&self.url))
    }

    /// The workers that an entry of the configuration stands for: one for each data-parallel rank.
    pub fn all_of(table: &WorkerTable) -> Result<Vec<Self>, ConfigError> {
        let whole = Self::try_from(table)?;
        let wrong = |why: RankError| ConfigError(format!("worker {:?}: {why}", without_secret(&table.url)));
        whole.by_rank(table.data_parallel_size).map_err(wrong)
    }

    /// The workers that it is, where there are several data-parallel engines behind its URL.
    pub(super) fn by_rank(self, data_parallel_size: Option<u32>) -> Result<Vec<Self>, RankError> {
        let whole = Self { finds_ranks: data_parallel_size.is_none(), ..self };
        whole.split(data_parallel_size.unwrap_or(1))
    }

    /// The workers that it is with so many data-parallel engines behind its URL: itself, if there is one.
    ///
    /// # Errors
    /// Too many engines or none, and KV events at ports that there are not.
    pub fn split(&self, engines: u32) -> Result<Vec<Self>, RankError> {
        if engines == 0 || engines > limits::MAX_DATA_PARALLEL_RANKS {
            return Err(RankError::Count);
        }
        if engines == 1 {
            return Ok(vec![self.clone()]);
        }
        let of_rank = |rank: u32| {
            let kv_events = self.kv_events.as_ref().map(|source| source.of_rank(rank)).transpose()?;
            let port = |first: NonZeroU16| u16::try_from(rank).ok().and_then(|rank| first.checked_add(rank));
            let kv_source_port = self.kv_source_port.and_then(port);
            Ok(Self { rank: Some(rank), kv_events, kv_source_port, ..self.clone() })
        };
        (0..engines).map(of_rank).collect()
    }
}

impl FromStr for WorkerConfig {
    type Err = ConfigError;

    /// As a flag names it; see [`WorkerTable`].
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::try_from(&text.parse::<WorkerTable>()?)
    }
}

impl FromStr for WorkerTable {
    type Err = ConfigError;

    /// As a flag writes it:
    /// `URL[;kv-events=tcp://HOST:PORT][;kv-replay=tcp://HOST:PORT][;http2=true][;role=prefill]` and
    /// `[;kv-transfer=sglang][;bootstrap-port=8998][;kv-source-port=5710]`; another option is an error.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut parts = text.split(';');
        let mut table = WorkerTable::of(parts.next().unwrap_or_default());
        for part in parts {
            let wrong = || {
                let known = "kv-events=tcp://HOST:PORT, kv-replay=tcp://HOST:PORT, http2=true, role=prefill|decode|both, \
                             kv-transfer=nixl|mooncake|sglang, bootstrap-port=PORT or kv-source-port=PORT";
                let (worker, part) = (without_secret(text), without_secret(part));
                ConfigError(format!("worker {worker:?}: {part:?} is not known; expected {known}"))
            };
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let field = match name.trim() {
                "kv-events" => &mut table.kv_events,
                "kv-replay" => &mut table.kv_replay,
                "http2" => {
                    table.http2 = Some(value.trim().parse().map_err(|_| wrong())?);
                    continue;
                }
                "role" => {
                    table.role = Some(value.trim().parse().map_err(|()| wrong())?);
                    continue;
                }
                "kv-transfer" => {
                    table.kv_transfer = Some(value.trim().parse().map_err(|()| wrong())?);
                    continue;
                }
                "bootstrap-port" => {
                    table.bootstrap_port = Some(value.trim().parse().map_err(|_| wrong())?);
                    continue;
                }
                "kv-source-port" => {
                    table.kv_source_port = Some(value.trim().parse().map_err(|_| wrong())?);
                    continue;
                }
                _ => return Err(wrong()),
            };
            *field = Some(value.trim().to_owned());
        }
        Ok(table)
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
            tls: None,
            kv_events: None,
            kv_replay: None,
            block_size: None,
            data_parallel_size: None,
            http2: None,
            role: None,
            kv_transfer: None,
            bootstrap_port: None,
            kv_source_port: None,
        }
    }

    /// A worker at an address, with the ports of its KV events there.
    pub(super) fn at(address: IpAddr, port: u16, kv_events: Option<u16>, kv_replay: Option<u16>) -> Self {
        let host = match address {
            IpAddr::V4(v4) => v4.to_string(),
            IpAddr::V6(v6) => format!("[{v6}]"),
        };
        let tcp = |port: u16| format!("tcp://{host}:{port}");
        Self {
            kv_events: kv_events.map(tcp),
            kv_replay: kv_replay.map(tcp),
            ..Self::of(&format!("http://{host}:{port}"))
        }
    }

    fn kv_source(&self) -> Result<Option<KvSource>, KvSourceError> {
        for address in self.kv_events.iter().chain(&self.kv_replay) {
            let place = address.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':'));
            let good = place.is_some_and(|(host, port)| {
                !host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port > 0)
            });
            if !good {
                return Err(KvSourceError::NoPlace(address.clone()));
            }
        }
        match (&self.kv_events, &self.kv_replay) {
            (None, Some(_)) => Err(KvSourceError::ReplayAlone),
            (None, None) => Ok(None),
            (Some(events), replay) => Ok(Some(KvSource { events: events.clone(), replay: replay.clone() })),
        }
    }
}

impl TryFrom<&WorkerTable> for WorkerConfig {
    type Error = ConfigError;

    fn try_from(table: &WorkerTable) -> Result<Self, ConfigError> {
        let wrong = |why: &str| ConfigError(format!("worker {:?}: {why}", without_secret(&table.url)));
        let WorkerUrl { url, basic, had_v1 } = table.url.parse().map_err(|why: String| wrong(&why))?;
        let tls = match (url.scheme_str(), &table.tls) {
            (Some("https"), tls) => {
                let files = tls.clone().unwrap_or_default();
                Some(ClientTls::load(files).map_err(|error| wrong(&error.to_string()))?)
            }
            (_, Some(_)) => return Err(wrong("tls needs a URL that begins with https://")),
            (_, None) => None,
        };
        let weight = table.weight.unwrap_or(1.0);
        if !weight.is_finite() || weight <= 0.0 {
            return Err(wrong("weight must be a number above 0"));
        }
        let block_size = table.block_size.unwrap_or(limits::BLOCK_TOKENS);
        if block_size == 0 {
            return Err(wrong("block_size must be above 0"));
        }
        let kv_events = table.kv_source().map_err(|why| wrong(&why.to_string()))?;
        let api_key = match (&table.api_key_file, basic) {
            (Some(_), Some(_)) => {
                return Err(wrong("a user in the URL and an api_key_file exclude each other"));
            }
            (Some(file), None) => Some(read_key(file)?),
            (None, basic) => basic,
        };
        let (model, identity, rank) = (table.model.clone(), None, None);
        let http2 = table.http2.unwrap_or(false);
        let finds_ranks = table.data_parallel_size.is_none();
        Ok(Self {
            url,
            model,
            weight,
            api_key,
            tls,
            kv_events,
            block_size,
            identity,
            rank,
            finds_ranks,
            http2,
            role: table.role,
            kv_transfer: table.kv_transfer,
            bootstrap_port: table.bootstrap_port,
            kv_source_port: table.kv_source_port,
            had_v1,
        })
    }
}

/// The port that a URL means.
pub fn port_of(url: &Uri) -> u16 {
    url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 })
}

/// `Bearer …` with the key in a file.
pub(super) fn read_key(path: &PathBuf) -> Result<HeaderValue, ConfigError> {
    let wrong = |why: &dyn std::fmt::Display| ConfigError(format!("key file {}: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let mut value = HeaderValue::from_str(&format!("Bearer {}", text.trim()))
        .map_err(|_| wrong(&"holds characters that a header cannot carry"))?;
    value.set_sensitive(true);
    Ok(value)
}
