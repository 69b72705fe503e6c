//! `[discovery]`: where workers that come and go are learned of, besides those that the file lists.

use std::{net::IpAddr, num::NonZeroU16, path::PathBuf, str::FromStr, time::Duration};

use http::HeaderValue;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ConfigError, KubernetesFleet, KubernetesTable, KvTransfer, RankError, Role, WorkerConfig, WorkerTable,
    worker_url::{WorkerUrl, without_secret},
};
use crate::limits;

/// `[discovery]`: where workers that come and go are learned of.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoveryFile {
    /// File with `[[worker]]` tables, read again when it changes; what is no longer in it drains.
    pub file: Option<PathBuf>,
    /// Names each of whose addresses is a worker: a headless Service in Kubernetes.
    pub dns: Vec<DnsTable>,
    /// Services of a Kubernetes cluster each of whose ready endpoints is a worker.
    pub kubernetes: Vec<KubernetesTable>,
    /// How the cluster is reached: a kubeconfig; by default as a pod in it, else as `kubectl` would.
    pub kubeconfig: Option<PathBuf>,
    /// Seconds between two looks at the file and the names (5).
    pub interval_seconds: Option<f64>,
    /// Hosts that the admin listener may add as workers: addresses, networks (10.0.0.0/8), names, or names
    /// below one (*.example). None by default.
    pub admin_allow: Vec<String>,
}

/// `[[discovery.dns]]`: a name each of whose addresses is a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DnsTable {
    /// Name and port of the workers, such as `http://vllm.models.svc.cluster.local:8000`.
    pub url: String,
    /// Serve only this model from them.
    pub model: Option<String>,
    /// Share of new work of each relative to other workers (1.0).
    pub weight: Option<f64>,
    /// File that holds the key sent to them.
    pub api_key_file: Option<PathBuf>,
    /// Port on which each publishes its KV events.
    pub kv_events_port: Option<u16>,
    /// Port on which each repeats those that were missed.
    pub kv_replay_port: Option<u16>,
    /// Data-parallel engines behind each's address; see `[[worker]]`.
    pub data_parallel_size: Option<u32>,
    /// Speak HTTP/2 with them, without TLS (false).
    pub http2: Option<bool>,
    /// Which part of requests they are for: `prefill`, `decode` or `both` (both); see `[[worker]]`.
    pub role: Option<Role>,
    /// How their KV is moved, `nixl`, `mooncake` or `sglang`; see `[[worker]]`.
    pub kv_transfer: Option<KvTransfer>,
    /// Port at which others learn where KV is; see `[[worker]]`.
    pub bootstrap_port: Option<NonZeroU16>,
    /// Port at which other workers fetch what each has cached; see `[[worker]]`.
    pub kv_source_port: Option<NonZeroU16>,
}

/// `[discovery]`, validated: where workers that come and go are learned of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DiscoveryConfig {
    /// File with `[[worker]]` tables, read again when it changes; `None`: there is none.
    pub file: Option<PathBuf>,
    /// Names that are looked up again and again: each of their addresses is a worker.
    pub dns: Vec<DnsName>,
    /// Services of a Kubernetes cluster: each of their ready endpoints is a worker.
    pub kubernetes: Vec<KubernetesFleet>,
    /// How their cluster is reached, unless as a pod in it.
    pub kubeconfig: Option<PathBuf>,
    /// Time between two looks.
    pub interval: Duration,
    /// Who may be added by operators.
    pub admin_allow: Vec<HostRule>,
}

impl DiscoveryConfig {
    /// Whether workers may come that are not listed.
    pub(super) fn finds_workers(&self) -> bool {
        let Self { file, dns, kubernetes, admin_allow, .. } = self;
        file.is_some() || !dns.is_empty() || !kubernetes.is_empty() || !admin_allow.is_empty()
    }
}

/// A name whose addresses are workers.
#[derive(Debug, Clone, PartialEq)]
pub struct DnsName {
    /// What to look up.
    pub host: String,
    /// Port at which each of its workers listens, from the table's URL.
    pub port: u16,
    /// The path before `/v1` at each.
    path: String,
    /// `Basic …`, marked sensitive so that it is never printed.
    basic: Option<HeaderValue>,
    had_v1: bool,
    table: DnsTable,
}

impl DiscoveryConfig {
    /// Whether workers can come later.
    pub fn is_dynamic(&self) -> bool {
        let lists = self.file.is_some() || !self.dns.is_empty() || !self.kubernetes.is_empty();
        lists || !self.admin_allow.is_empty()
    }
}

impl TryFrom<&DiscoveryFile> for DiscoveryConfig {
    type Error = ConfigError;

    fn try_from(file: &DiscoveryFile) -> Result<Self, ConfigError> {
        let interval = match file.interval_seconds {
            None => limits::DISCOVERY_INTERVAL,
            Some(seconds) if seconds >= 0.05 => Duration::try_from_secs_f64(seconds)
                .map_err(|_| ConfigError("discovery.interval_seconds is too large".to_owned()))?,
            Some(_) => {
                return Err(ConfigError("discovery.interval_seconds must be at least 0.05".to_owned()));
            }
        };
        let dns = file.dns.iter().map(DnsName::try_from).collect::<Result<_, _>>()?;
        let kubernetes = file.kubernetes.iter().map(KubernetesFleet::try_from).collect::<Result<_, _>>()?;
        let admin_allow = file.admin_allow.iter().map(|rule| rule.parse()).collect::<Result<_, _>>()?;
        let (file, kubeconfig) = (file.file.clone(), file.kubeconfig.clone());
        Ok(Self { file, dns, kubernetes, kubeconfig, interval, admin_allow })
    }
}

impl TryFrom<&DnsTable> for DnsName {
    type Error = ConfigError;

    fn try_from(table: &DnsTable) -> Result<Self, ConfigError> {
        let shown = without_secret(&table.url);
        let wrong = |why: &str| ConfigError(format!("discovery.dns {shown:?}: {why}"));
        let WorkerUrl { url, basic, had_v1 } = table.url.parse().map_err(|why: String| wrong(&why))?;
        let (Some("http"), Some(host), Some(port)) = (url.scheme_str(), url.host(), url.port_u16()) else {
            return Err(wrong("expected http://NAME:PORT"));
        };
        if basic.is_some() && table.api_key_file.is_some() {
            return Err(wrong("a user in the URL and an api_key_file exclude each other"));
        }
        let path = url.path().trim_end_matches('/').to_owned();
        // What is kept has no password.
        let table = DnsTable { url: url.to_string(), ..table.clone() };
        let name = Self { host: host.to_owned(), port, path, basic, had_v1, table };
        // All but the address is checked now, not at the first answer.
        name.workers(IpAddr::from([127, 0, 0, 1]))?;
        Ok(name)
    }
}

impl DnsName {
    /// The workers at one of its addresses: one, or one for each of its ranks.
    pub fn workers(&self, address: IpAddr) -> Result<Vec<WorkerConfig>, ConfigError> {
        let at = WorkerTable::at(address, self.port, self.table.kv_events_port, self.table.kv_replay_port);
        let worker = WorkerConfig::try_from(&WorkerTable {
            url: format!("{}{}", at.url, self.path),
            model: self.table.model.clone(),
            weight: self.table.weight,
            api_key_file: self.table.api_key_file.clone(),
            http2: self.table.http2,
            role: self.table.role,
            kv_transfer: self.table.kv_transfer,
            bootstrap_port: self.table.bootstrap_port,
            kv_source_port: self.table.kv_source_port,
            ..at
        })?;
        let api_key = self.basic.clone().or(worker.api_key);
        let worker = WorkerConfig { api_key, had_v1: self.had_v1, ..worker };
        let wrong = |why: RankError| ConfigError(format!("discovery.dns {:?}: {why}", self.table.url));
        worker.by_rank(self.table.data_parallel_size).map_err(wrong)
    }
}

/// Hosts that may be added as workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostRule {
    /// The first bits of an address.
    Network(IpAddr, u8),
    /// This name alone, kept in lower case; names below it are not meant.
    Name(String),
    /// Any name that ends so, the dot included.
    Below(String),
}

impl FromStr for HostRule {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = || {
            ConfigError(format!(
                "discovery.admin_allow {text:?}: expected an address, a network such as 10.0.0.0/8, a name or *.name"
            ))
        };
        if let Some(rest) = text.strip_prefix("*.").filter(|rest| !rest.is_empty()) {
            return Ok(Self::Below(format!(".{}", rest.to_ascii_lowercase())));
        }
        let (address, bits) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        match (address.parse::<IpAddr>(), bits) {
            (Ok(address), bits) => {
                let widest = if address.is_ipv4() { 32 } else { 128 };
                let bits = bits.map_or(Ok(widest), str::parse).map_err(|_| wrong())?;
                if bits <= widest { Ok(Self::Network(address, bits)) } else { Err(wrong()) }
            }
            (Err(_), None) if !text.is_empty() && !text.contains(['*', ':', ' ']) => {
                Ok(Self::Name(text.to_ascii_lowercase()))
            }
            _ => Err(wrong()),
        }
    }
}

impl HostRule {
    /// Whether a URL's host is meant.
    pub fn allows(&self, host: &str) -> bool {
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        match (self, address) {
            (Self::Network(IpAddr::V4(net), bits), Ok(IpAddr::V4(host))) => {
                same_bits(u32::from(*net).into(), u32::from(host).into(), 32 - bits)
            }
            (Self::Network(IpAddr::V6(net), bits), Ok(IpAddr::V6(host))) => {
                same_bits((*net).into(), host.into(), 128 - bits)
            }
            (Self::Name(name), Err(_)) => host.eq_ignore_ascii_case(name),
            (Self::Below(end), Err(_)) => host.to_ascii_lowercase().ends_with(end),
            _ => false,
        }
    }
}

/// Whether two numbers agree but for their lowest bits.
fn same_bits(a: u128, b: u128, lowest: u8) -> bool {
    (a ^ b).checked_shr(lowest.into()).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> HostRule {
        text.parse().unwrap()
    }

    #[test]
    fn only_the_hosts_of_the_list_are_allowed() {
        for (text, yes, no) in [
            ("10.0.0.0/8", "10.200.3.4", "11.0.0.1"),
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("192.168.4.0/23", "192.168.5.9", "192.168.6.1"),
            ("fd00::/8", "[fd12::1]", "[fe80::1]"),
            ("0.0.0.0/0", "1.2.3.4", "a.example"),
            ("worker.example", "Worker.example", "x.worker.example"),
            ("*.pods.example", "a.pods.example", "pods.example"),
        ] {
            assert!(rule(text).allows(yes), "{text} {yes}");
            assert!(!rule(text).allows(no), "{text} {no}");
        }
        for wrong in ["", "10.0.0.0/33", "*", "http://a", "*.", "a*b"] {
            assert!(wrong.parse::<HostRule>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn each_address_of_a_name_is_a_worker_with_its_ports() {
        let table: DnsTable =
            toml::from_str("url = \"http://vllm:8000\"\nkv_events_port = 5557\nweight = 2.0").unwrap();
        let name = DnsName::try_from(&table).unwrap();
        let worker = name.workers("fd00::7".parse().unwrap()).unwrap().remove(0);
        assert_eq!((worker.name().as_str(), worker.weight), ("[fd00::7]:8000", 2.0));
        assert_eq!(worker.kv_events.unwrap().events, "tcp://[fd00::7]:5557");
        let ranks = DnsTable { data_parallel_size: Some(2), ..name.table };
        let ranks = DnsName::try_from(&ranks).unwrap().workers([10, 0, 0, 7].into()).unwrap();
        let shown: Vec<_> =
            ranks.iter().map(|rank| (rank.name(), rank.kv_events.as_ref().unwrap().events.clone())).collect();
        let rank = |rank: u16| (format!("10.0.0.7:8000@{rank}"), format!("tcp://10.0.0.7:{}", 5557 + rank));
        assert_eq!(shown, [rank(0), rank(1)]);
        let none: DnsTable = toml::from_str("url = \"http://vllm:8000\"\ndata_parallel_size = 0").unwrap();
        assert!(DnsName::try_from(&none).unwrap_err().0.contains("data_parallel_size"));
        let bad: DnsTable = toml::from_str("url = \"http://vllm:8000\"\nweight = -1.0").unwrap();
        assert!(DnsName::try_from(&bad).unwrap_err().0.contains("weight"));
        let no_port: DnsTable = toml::from_str("url = \"http://vllm\"").unwrap();
        assert!(DnsName::try_from(&no_port).unwrap_err().0.contains("PORT"));
    }

    #[test]
    fn a_name_s_path_and_user_are_those_of_each_worker_and_its_password_is_not_printed() {
        let table: DnsTable = toml::from_str("url = \"http://u:canary@vllm:8000/a/v1\"").unwrap();
        let name = DnsName::try_from(&table).unwrap();
        let worker = name.workers("10.0.0.7".parse().unwrap()).unwrap().remove(0);
        assert_eq!((worker.name().as_str(), worker.had_v1), ("10.0.0.7:8000/a", true));
        assert_eq!(worker.api_key.as_ref().unwrap(), "Basic dTpjYW5hcnk=");
        assert!(!format!("{name:?} {worker:?}").contains("canary"));
        for (url, says) in [
            ("http://u:canary@vllm:8000/?x", "query"),
            ("https://vllm:8000", "http://NAME:PORT"),
            ("vllm:8000", "write http://vllm:8000"),
        ] {
            let error = DnsName::try_from(&DnsTable { url: url.to_owned(), ..table.clone() }).unwrap_err().0;
            assert!(error.contains(says) && !error.contains("canary"), "{url}: {error}");
        }
        let both = DnsTable { api_key_file: Some("/nowhere".into()), ..table };
        assert!(DnsName::try_from(&both).unwrap_err().0.contains("api_key_file"));
    }
}
