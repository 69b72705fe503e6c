//! Where a worker's events are, asked of the worker itself, so that its URL is enough: `GET
//! /kv_event_sources` (vLLM 0.32 and keyway-worker) and `GET /server_info` (SGLang). Of what it says its
//! ports are believed; the host is the one where its requests go, so that no worker sends the gateway
//! elsewhere.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde::Deserialize;
use tokio::sync::{Notify, watch};

use crate::{clock, config::KvSource, fleet::Worker, limits::MAX_MODELS_BYTES, probe, upstream::Upstream};

/// How often a worker is asked that has no events, or that is not up: it may begin anew with some.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// How often it is looked whether a worker is up.
const LOOK: Duration = Duration::from_secs(1);

/// Asks a worker where its events are once it is up, and again whenever the connection to them is `lost`; for
/// ever.
pub async fn ask(
    worker: Arc<Worker>,
    upstream: Upstream,
    place: watch::Sender<Option<KvSource>>,
    lost: Arc<Notify>,
) {
    loop {
        while !worker.routable() {
            clock::sleep(LOOK).await;
        }
        let found = source(&worker, &upstream).await;
        let has_some = found.is_some();
        worker.residency.set_announces(has_some);
        place.send_if_modified(|known| {
            let is_new = *known != found;
            *known = found;
            is_new
        });
        if has_some {
            lost.notified().await;
        } else {
            clock::sleep(ASK_AGAIN).await;
        }
    }
}

/// One engine's publisher, as vLLM's `KVEventsConfig` has it; what else that says is left out.
#[derive(Deserialize)]
struct Publisher {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default, rename = "publisher")]
    kind: String,
    #[serde(default)]
    endpoint: String,
    replay_endpoint: Option<String>,
}

/// SGLang's answer, as far as it is about events.
#[derive(Deserialize)]
struct ServerInfo {
    kv_events: Option<Ports>,
}

#[derive(Deserialize)]
struct Ports {
    publisher: Option<String>,
    endpoint_port_base: Option<u16>,
    replay_endpoint_port_base: Option<u16>,
}

/// The place, if the worker has one.
async fn source(worker: &Worker, upstream: &Upstream) -> Option<KvSource> {
    let host = worker.origin().host();
    let rank = worker.rank().unwrap_or(0);
    if let Some(body) = probe::get(worker, upstream, "/kv_event_sources", MAX_MODELS_BYTES).await {
        return of_vllm(&body, host, rank);
    }
    let body = probe::get(worker, upstream, "/server_info", MAX_MODELS_BYTES).await?;
    of_sglang(&body, host, rank)
}

/// vLLM: a publisher for each data-parallel rank, whose ports are its own already.
fn of_vllm(body: &[u8], host: &str, rank: u32) -> Option<KvSource> {
    let mut publishers: HashMap<u32, Publisher> = serde_json::from_slice(body).ok()?;
    let publisher = publishers.remove(&rank)?;
    if !publisher.enable_kv_cache_events || publisher.kind != "zmq" {
        return None;
    }
    let port = |endpoint: &str| endpoint.strip_prefix("tcp://")?.rsplit_once(':')?.1.parse::<u16>().ok();
    let replay = publisher.replay_endpoint.as_deref().and_then(port);
    Some(at(host, port(&publisher.endpoint)?, replay))
}

/// SGLang: the ports of rank 0, and each further rank's behind them.
fn of_sglang(body: &[u8], host: &str, rank: u32) -> Option<KvSource> {
    let ports = serde_json::from_slice::<ServerInfo>(body).ok()?.kv_events?;
    if ports.publisher.is_some_and(|publisher| publisher != "zmq") {
        return None;
    }
    let of_rank = |port: u16| port.checked_add(u16::try_from(rank).ok()?);
    Some(at(host, of_rank(ports.endpoint_port_base?)?, ports.replay_endpoint_port_base.and_then(of_rank)))
}

fn at(host: &str, events: u16, replay: Option<u16>) -> KvSource {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let place = |port: u16| format!("tcp://{host}:{port}");
    KvSource { events: place(events), replay: replay.map(place) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(source: Option<KvSource>) -> Option<(String, Option<String>)> {
        source.map(|source| (source.events, source.replay))
    }

    fn place(events: &str, replay: Option<&str>) -> (String, Option<String>) {
        (events.to_owned(), replay.map(str::to_owned))
    }

    #[test]
    fn vllm_says_it_for_each_rank_and_its_ports_are_believed_but_no_host() {
        let of = |body: &str, rank| places(of_vllm(body.as_bytes(), "w", rank));
        let two = r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://*:5558","buffer_steps":10000,"hwm":100000,"topic":"kv"},
            "1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://10.9.9.9:7000","replay_endpoint":null}}"#;
        assert_eq!(of(two, 0), Some(place("tcp://w:5557", Some("tcp://w:5558"))));
        assert_eq!(of(two, 1), Some(place("tcp://w:7000", None)));
        assert_eq!(of(two, 2), None);
        for nothing in [
            "{}",
            "[]",
            "",
            r#"{"0":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:5557"}}"#,
            r#"{"0":{"enable_kv_cache_events":true,"publisher":"null","endpoint":"tcp://*:5557"}}"#,
            r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"ipc:///tmp/x"}}"#,
            r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:70000"}}"#,
        ] {
            assert_eq!(of(nothing, 0), None, "{nothing}");
        }
    }

    #[test]
    fn sglang_says_it_among_much_else() {
        let of = |body: &str, rank| places(of_sglang(body.as_bytes(), "::1", rank));
        let body = r#"{"model_path":"m","kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,
            "replay_endpoint_port_base":5657,"block_size":64,"dp_size":2},"tp_size":1}"#;
        assert_eq!(of(body, 0), Some(place("tcp://[::1]:5557", Some("tcp://[::1]:5657"))));
        assert_eq!(of(body, 1), Some(place("tcp://[::1]:5558", Some("tcp://[::1]:5658"))));
        for nothing in [
            r#"{"kv_events":null}"#,
            "{}",
            r#"{"kv_events":{"publisher":"null","endpoint_port_base":5557}}"#,
            r#"{"kv_events":{"publisher":"zmq"}}"#,
        ] {
            assert_eq!(of(nothing, 0), None, "{nothing}");
        }
    }
}
