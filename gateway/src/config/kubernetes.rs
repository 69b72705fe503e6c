//! `[[discovery.kubernetes]]`: which Services of a Kubernetes cluster have workers behind them, and what is
//! true of those. How they are watched is `crate::watch::kubernetes`.

use std::{net::IpAddr, num::NonZeroU16, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, KvTransfer, RankError, Role, WorkerConfig, WorkerTable};

/// The label by which Kubernetes says to which Service an EndpointSlice belongs.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// `[[discovery.kubernetes]]`: Services each of whose ready endpoints is a worker.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesTable {
    /// Name of the Service whose endpoints are workers.
    pub service: Option<String>,
    /// Labels of the Services whose endpoints are workers, as Kubernetes writes selectors: `tier in (a,
    /// b),!canary`.
    pub selector: Option<String>,
    /// Where the Services are; the gateway's own namespace by default.
    pub namespace: Option<String>,
    /// The workers' port: a number, or the name of a port of the Service; needed where it has several.
    pub port: Option<PortRef>,
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
    /// Speak HTTP/2 with them, without TLS; by default if the port's `appProtocol` is `kubernetes.io/h2c`.
    pub http2: Option<bool>,
    /// Which part of requests they are for: `prefill`, `decode` or `both` (both); see `[[worker]]`. With
    /// `role_label`, those whose pods have no such label.
    pub role: Option<Role>,
    /// How their KV is moved, `nixl`, `mooncake` or `sglang`; see `[[worker]]`.
    pub kv_transfer: Option<KvTransfer>,
    /// Port at which others learn where KV is; see `[[worker]]`.
    pub bootstrap_port: Option<NonZeroU16>,
    /// Port at which other workers fetch what each has cached; see `[[worker]]`.
    pub kv_source_port: Option<NonZeroU16>,
    /// Label of pods that says for which part each of them is, by these words or by llm-d's; needs the right
    /// to watch pods. A pod whose label says no role gets no requests.
    pub role_label: Option<String>,
    /// Whether the pod that is worth least is marked, so that a scale-in takes it first (false).
    pub deletion_cost: bool,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PortRef {
    /// Its number at the pod.
    Number(u16),
    /// The name that the Service gives it; EndpointSlices say its number.
    Name(String),
}

/// Services whose endpoints are workers, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct KubernetesFleet {
    /// Labels of their EndpointSlices, which have those of their Service.
    pub selector: String,
    /// Where they are; `None`: where the gateway is.
    pub namespace: Option<String>,
    /// Port at which the workers listen; `None`: the Service's only one, or the one named `http`.
    pub port: Option<PortRef>,
    /// Whether the pod that is worth least is marked.
    pub deletion_cost: bool,
    /// Label of pods that says their role.
    pub role_label: Option<String>,
    table: KubernetesTable,
}

impl TryFrom<&KubernetesTable> for KubernetesFleet {
    type Error = ConfigError;

    fn try_from(table: &KubernetesTable) -> Result<Self, ConfigError> {
        let wrong = |why: &str| ConfigError(format!("discovery.kubernetes: {why}"));
        let service = table.service.as_ref().map(|name| format!("{SERVICE_NAME}={name}"));
        let selector = [service.as_deref(), table.selector.as_deref()].into_iter().flatten();
        let selector = selector.collect::<Vec<_>>().join(",");
        if selector.is_empty() {
            return Err(wrong("needs a service, or a selector of Services by their labels"));
        }
        if let Some(name) =
            [&table.service, &table.namespace].into_iter().flatten().find(|name| !is_name(name))
        {
            return Err(wrong(&format!("{name:?} is no name of an object in Kubernetes")));
        }
        if let Some(label) = table.role_label.as_ref().filter(|label| !is_label(label)) {
            return Err(wrong(&format!("role_label: {label:?} is no label's name")));
        }
        let fleet = Self {
            selector,
            namespace: table.namespace.clone(),
            port: table.port.clone(),
            deletion_cost: table.deletion_cost,
            role_label: table.role_label.clone(),
            table: table.clone(),
        };
        // All but the address is checked now, not at the first endpoint.
        let worker = fleet.worker(IpAddr::from([127, 0, 0, 1]), 1, None, false);
        fleet.by_rank(worker.map_err(|error| wrong(&error.0))?).map_err(|why| wrong(&why.to_string()))?;
        Ok(fleet)
    }
}

/// A DNS label: <https://kubernetes.io/docs/concepts/overview/working-with-objects/names/>.
fn is_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// A label's key: <https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/>.
fn is_label(text: &str) -> bool {
    let (domain, name) = text.split_once('/').map_or((None, text), |(domain, name)| (Some(domain), name));
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=63).contains(&name.len())
        && name.chars().all(inner)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
        && domain.is_none_or(|domain| domain.len() <= 253 && domain.split('.').all(is_name))
}

impl KubernetesFleet {
    /// The role of a pod with this value of the label; `None`: not known, so it is to get nothing. llm-d's
    /// words are those of its filters by role (`llm-d-inference-scheduler`); a worker that encodes alone is
    /// for no part that is known here.
    pub fn role_by_label(&self, value: Option<&str>) -> Option<Role> {
        match value {
            None => self.table.role,
            Some("prefill-decode" | "encode-prefill-decode") => Some(Role::Both),
            Some("encode-prefill") => Some(Role::Prefill),
            Some(value) => value.parse().ok(),
        }
    }

    /// The worker at an endpoint; `uid` is its pod's, `h2c` what its Service says of the port.
    pub fn worker(
        &self,
        address: IpAddr,
        port: u16,
        uid: Option<&str>,
        h2c: bool,
    ) -> Result<WorkerConfig, ConfigError> {
        let table = WorkerTable::at(address, port, self.table.kv_events_port, self.table.kv_replay_port);
        let worker = WorkerConfig::try_from(&WorkerTable {
            model: self.table.model.clone(),
            weight: self.table.weight,
            api_key_file: self.table.api_key_file.clone(),
            http2: self.table.http2.or(Some(h2c)),
            role: self.table.role,
            kv_transfer: self.table.kv_transfer,
            bootstrap_port: self.table.bootstrap_port,
            kv_source_port: self.table.kv_source_port,
            ..table
        })?;
        Ok(WorkerConfig { identity: uid.map(str::to_owned), ..worker })
    }

    /// The workers that one at an endpoint is: itself, or one for each of its ranks.
    pub fn by_rank(&self, worker: WorkerConfig) -> Result<Vec<WorkerConfig>, RankError> {
        worker.by_rank(self.table.data_parallel_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(toml: &str) -> Result<KubernetesFleet, ConfigError> {
        KubernetesFleet::try_from(&toml::from_str::<KubernetesTable>(toml).unwrap())
    }

    #[test]
    fn a_service_and_labels_become_one_selector_of_slices() {
        let both = fleet("service = \"vllm\"\nselector = \"tier in (a,b)\"").unwrap();
        assert_eq!(both.selector, "kubernetes.io/service-name=vllm,tier in (a,b)");
        assert_eq!(fleet("selector = \"!canary\"").unwrap().selector, "!canary");
    }

    #[test]
    fn an_endpoint_is_a_worker_with_its_pods_identity() {
        let fleet = fleet("service = \"vllm\"\nkv_events_port = 5557\nmodel = \"m\"").unwrap();
        let worker = fleet.worker("fd00::7".parse().unwrap(), 8000, Some("u1"), false).unwrap();
        assert_eq!((worker.name().as_str(), worker.identity.as_deref()), ("[fd00::7]:8000", Some("u1")));
        assert_eq!(worker.kv_events.as_ref().unwrap().events, "tcp://[fd00::7]:5557");
        let next = fleet.worker("fd00::7".parse().unwrap(), 8000, Some("u2"), false).unwrap();
        assert!(worker != next, "another pod at the same address is another worker");
        assert!(!worker.http2);
    }

    #[test]
    fn several_engines_behind_an_endpoint_are_a_worker_each() {
        let fleet = fleet("service = \"vllm\"\nkv_events_port = 5557\ndata_parallel_size = 2").unwrap();
        let worker = fleet.worker(IpAddr::from([10, 0, 0, 1]), 8000, Some("u1"), false).unwrap();
        let ranks = fleet.by_rank(worker).unwrap();
        let shown: Vec<_> = ranks
            .iter()
            .map(|rank| {
                (rank.name(), rank.kv_events.as_ref().unwrap().events.clone(), rank.identity.as_deref())
            })
            .collect();
        let rank = |rank: u16| {
            (format!("10.0.0.1:8000@{rank}"), format!("tcp://10.0.0.1:{}", 5557 + rank), Some("u1"))
        };
        assert_eq!(shown, [rank(0), rank(1)]);
    }

    #[test]
    fn the_port_s_protocol_counts_unless_the_table_says_otherwise() {
        for (toml, h2c, http2) in [
            ("service = \"a\"", true, true),
            ("service = \"a\"\nhttp2 = false", true, false),
            ("service = \"a\"\nhttp2 = true", false, true),
        ] {
            let worker = fleet(toml).unwrap().worker(IpAddr::from([10, 0, 0, 1]), 1, None, h2c).unwrap();
            assert_eq!(worker.http2, http2, "{toml}");
        }
    }

    #[test]
    fn a_label_says_a_role_in_keyway_s_words_and_in_llm_d_s() {
        let fleet = fleet("service = \"a\"\nrole_label = \"llm-d.ai/role\"").unwrap();
        for (value, role) in [
            ("prefill", Some(Role::Prefill)),
            ("encode-prefill", Some(Role::Prefill)),
            ("decode", Some(Role::Decode)),
            ("both", Some(Role::Both)),
            ("prefill-decode", Some(Role::Both)),
            ("encode-prefill-decode", Some(Role::Both)),
            ("encode", None),
            ("Prefill", None),
            ("", None),
        ] {
            assert_eq!(fleet.role_by_label(Some(value)), role, "{value:?}");
        }
        assert_eq!(fleet.role_by_label(None), None);
    }

    #[test]
    fn what_cannot_be_is_refused_at_once() {
        for (toml, word) in [
            ("namespace = \"a\"", "needs a service"),
            ("service = \"a.b\"", "no name"),
            ("service = \"a\"\nnamespace = \"B\"", "no name"),
            ("service = \"a\"\nrole_label = \"a/b/c\"", "role_label"),
            ("service = \"a\"\nrole_label = \"x=y\"", "role_label"),
            ("service = \"a\"\nweight = 0.0", "weight"),
            ("service = \"a\"\nkv_replay_port = 1", "kv_replay needs kv_events"),
            ("service = \"a\"\ndata_parallel_size = 0", "data_parallel_size"),
            ("service = \"a\"\ndata_parallel_size = 4\nkv_events_port = 65533", "no port for rank 3"),
            ("service = \"a\"\napi_key_file = \"/nonexistent\"", "key file"),
        ] {
            let error = fleet(toml).unwrap_err().0;
            assert!(error.contains(word), "{toml}: {error}");
        }
    }
}
