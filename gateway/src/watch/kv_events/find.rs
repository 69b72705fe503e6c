//! Where a worker's events are, asked of the worker itself, so that its URL is enough: `GET
//! /kv_event_sources` (vLLM 0.32 and keyway-worker) and `GET /server_info` (SGLang). Of what it says its
//! ports are believed; the host is the one where its requests go, so that no worker sends the gateway
//! elsewhere.

use std::{collections::BTreeMap, mem, sync::Arc, time::Duration};

use serde::Deserialize;
use tokio::sync::{Notify, watch};

use crate::{
    clock, config::KvSource, fleet::Worker, limits::MAX_MODELS_BYTES, upstream::Upstream, watch::probe,
};

/// How often a worker is asked that has no events, as long as it stays up: they come with a start.
const ASK_AGAIN: Duration = Duration::from_secs(600);
/// How often it is looked whether a worker is up.
const LOOK: Duration = Duration::from_secs(1);

/// What a worker says of its events.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    /// Where it publishes them, and where it repeats those that were missed.
    Place(KvSource),
    /// That there are none, or none that can be followed.
    None,
    /// That it has so many engines, each with events of its own, of which none is meant.
    Several(usize),
    /// Nothing: it does not know such a question, or has not answered.
    Nothing,
}

/// Asks a worker where its events are once it is up, and again whenever the connection to them is `lost`; for
/// ever. SGLang says beside it how many `engines` it has, as vLLM's metrics do.
pub async fn ask(
    worker: Arc<Worker>,
    upstream: Upstream,
    (place, engines): (watch::Sender<Option<KvSource>>, watch::Sender<u32>),
    lost: Arc<Notify>,
) {
    loop {
        while !worker.routable() {
            clock::sleep(LOOK).await;
        }
        let known = place.borrow().clone();
        let said = match said(&worker, &upstream, &engines).await {
            // Each will be a worker of its own.
            Said::Several(_) if worker.config().finds_ranks => Said::None,
            said => said,
        };
        let found = match said {
            Said::Place(found) => Some(found),
            // Where it was in a hurry, they are where they were.
            Said::Nothing => known,
            Said::None => None,
            Said::Several(engines) => {
                tracing::warn!(
                    worker = %worker.name,
                    engines,
                    "its data-parallel engines have a cache and KV events each, but data_parallel_size says that there is one"
                );
                None
            }
        };
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
            until_anew(&worker).await;
        }
    }
}

/// Until a worker may have begun anew.
async fn until_anew(worker: &Worker) {
    let down = async {
        while worker.routable() {
            clock::sleep(LOOK).await;
        }
    };
    let _ = clock::timeout(ASK_AGAIN, down).await;
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
    dp_size: Option<usize>,
}

async fn said(worker: &Worker, upstream: &Upstream, engines: &watch::Sender<u32>) -> Said {
    let (host, rank) = (worker.origin().host(), worker.rank());
    if let Some(body) = probe::get(worker, upstream, "/kv_event_sources", MAX_MODELS_BYTES).await {
        return of_vllm(&body, host, rank);
    }
    match probe::get(worker, upstream, "/server_info", MAX_MODELS_BYTES).await {
        Some(body) => {
            if let Some(count) = engines_of_sglang(&body) {
                engines.send_if_modified(|known| mem::replace(known, count) != count);
            }
            of_sglang(&body, host, rank)
        }
        None => Said::Nothing,
    }
}

/// How many data-parallel engines an SGLang has, where it says so beside its events. One that does not is
/// older, and may not heed which of them a request is for.
fn engines_of_sglang(body: &[u8]) -> Option<u32> {
    let ports = serde_json::from_slice::<ServerInfo>(body).ok()?.kv_events?;
    u32::try_from(ports.dp_size?).ok().filter(|count| *count > 0)
}

/// vLLM: a publisher for each data-parallel rank, whose ports are its own already.
fn of_vllm(body: &[u8], host: &str, rank: Option<u32>) -> Said {
    let publishers: BTreeMap<u32, Publisher> = serde_json::from_slice(body).unwrap_or_default();
    let speak = |publisher: &&Publisher| publisher.enable_kv_cache_events && publisher.kind == "zmq";
    let speaking = publishers.values().filter(speak).count();
    if rank.is_none() && speaking > 1 {
        return Said::Several(speaking);
    }
    let port = |endpoint: &str| endpoint.strip_prefix("tcp://")?.rsplit_once(':')?.1.parse::<u16>().ok();
    // A node that has some of a fleet's engines names them by their ranks in the fleet.
    let publisher = publishers.values().nth(rank.unwrap_or(0) as usize).filter(speak);
    let place = publisher.and_then(|publisher| {
        let replay = publisher.replay_endpoint.as_deref().and_then(port);
        Some(at(host, port(&publisher.endpoint)?, replay))
    });
    place.map_or(Said::None, Said::Place)
}

/// SGLang: the ports of rank 0, and each further rank's behind them.
fn of_sglang(body: &[u8], host: &str, rank: Option<u32>) -> Said {
    let Some(ports) = serde_json::from_slice::<ServerInfo>(body).ok().and_then(|info| info.kv_events) else {
        return Said::None;
    };
    if ports.publisher.is_some_and(|publisher| publisher != "zmq") {
        return Said::None;
    }
    let engines = ports.dp_size.unwrap_or(1);
    if rank.is_none() && engines > 1 {
        return Said::Several(engines);
    }
    let of_rank = |port: u16| port.checked_add(u16::try_from(rank.unwrap_or(0)).ok()?);
    let events = ports.endpoint_port_base.and_then(of_rank);
    let replay = ports.replay_endpoint_port_base.and_then(of_rank);
    events.map_or(Said::None, |events| Said::Place(at(host, events, replay)))
}

fn at(host: &str, events: u16, replay: Option<u16>) -> KvSource {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let place = |port: u16| format!("tcp://{host}:{port}");
    KvSource { events: place(events), replay: replay.map(place) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(events: &str, replay: Option<&str>) -> Said {
        Said::Place(KvSource { events: events.to_owned(), replay: replay.map(str::to_owned) })
    }

    #[test]
    fn vllm_says_it_for_each_rank_and_its_ports_are_believed_but_no_host() {
        let of = |body: &str, rank| of_vllm(body.as_bytes(), "w", rank);
        let one = r#""0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://*:5558","buffer_steps":10000,"hwm":100000,"topic":"kv"}"#;
        let two = format!(
            r#"{{{one},"1":{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://10.9.9.9:7000","replay_endpoint":null}}}}"#
        );
        assert_eq!(of(&format!("{{{one}}}"), None), place("tcp://w:5557", Some("tcp://w:5558")));
        assert_eq!(of(&two, Some(0)), place("tcp://w:5557", Some("tcp://w:5558")));
        assert_eq!(of(&two, Some(1)), place("tcp://w:7000", None));
        // One of two caches alone would be taken for both.
        assert_eq!((of(&two, Some(2)), of(&two, None)), (Said::None, Said::Several(2)));
        // The second node of a fleet has its third and fourth engines, or the second alone.
        let node = two.replace("\"0\":", "\"2\":").replace("\"1\":", "\"3\":");
        assert_eq!(of(&node, Some(1)), place("tcp://w:7000", None));
        let alone = format!("{{{}}}", one.replace("\"0\":", "\"1\":"));
        assert_eq!(of(&alone, None), place("tcp://w:5557", Some("tcp://w:5558")));
        for nothing in [
            "{}",
            "[]",
            "",
            r#"{"0":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:5557"}}"#,
            r#"{"0":{"enable_kv_cache_events":true,"publisher":"null","endpoint":"tcp://*:5557"}}"#,
            r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"ipc:///tmp/x"}}"#,
            r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:70000"}}"#,
        ] {
            assert_eq!(of(nothing, None), Said::None, "{nothing}");
        }
    }

    #[test]
    fn sglang_says_it_among_much_else() {
        let of = |body: &str, rank| of_sglang(body.as_bytes(), "::1", rank);
        let body = r#"{"model_path":"m","kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,
            "replay_endpoint_port_base":5657,"block_size":64,"dp_size":2},"tp_size":1}"#;
        assert_eq!(of(body, Some(0)), place("tcp://[::1]:5557", Some("tcp://[::1]:5657")));
        assert_eq!(of(body, Some(1)), place("tcp://[::1]:5558", Some("tcp://[::1]:5658")));
        assert_eq!((of(body, None), engines_of_sglang(body.as_bytes())), (Said::Several(2), Some(2)));
        let alone = body.replace("\"dp_size\":2", "\"dp_size\":1");
        assert_eq!(of(&alone, None), place("tcp://[::1]:5557", Some("tcp://[::1]:5657")));
        for nothing in [
            r#"{"kv_events":null}"#,
            "{}",
            r#"{"kv_events":{"publisher":"null","endpoint_port_base":5557}}"#,
            r#"{"kv_events":{"publisher":"zmq"}}"#,
        ] {
            assert_eq!(of(nothing, None), Said::None, "{nothing}");
        }
    }
}
