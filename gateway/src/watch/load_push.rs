//! An engine's load as it says it itself, at each change, where it does: SGLang with
//! `--load-publish-endpoint`. Fresher than what `load_scrape.rs` asks for, and no question is needed. What a
//! message holds is `keyway_wire`'s business.

use std::sync::Arc;

use keyway_core::EngineLoad;
use keyway_wire::kv_event::{frames::Live, load_stat::LoadStat};
use serde::Deserialize;

use crate::{
    clock::{self, Instant},
    fleet::Worker,
    limits::{KV_CONNECT_TIMEOUT, LOAD_PUSH_SILENCE, MAX_MODELS_BYTES},
    net::zmq::LiveStream,
    routing::Router,
    upstream::Upstream,
    watch::probe,
};

/// SGLang's answer, as far as it is about its load.
#[derive(Deserialize)]
struct ServerInfo {
    kv_events: Option<Ports>,
}

#[derive(Deserialize)]
struct Ports {
    load_endpoint_port_base: Option<u16>,
}

/// Where a worker says its load, by its own word; the host is the one that requests go to.
pub async fn place(worker: &Worker, upstream: &Upstream) -> Option<String> {
    let body = probe::get(worker, upstream, "/server_info", MAX_MODELS_BYTES).await?;
    place_in(&body, worker.origin().host(), worker.rank())
}

fn place_in(body: &[u8], host: &str, rank: Option<u32>) -> Option<String> {
    let ports = serde_json::from_slice::<ServerInfo>(body).ok()?.kv_events?;
    let port = ports.load_endpoint_port_base?.checked_add(u16::try_from(rank.unwrap_or(0)).ok()?)?;
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    Some(format!("tcp://{host}:{port}"))
}

/// Follows what it says until that ends: the connection is lost, or it has said nothing for some seconds.
/// Returns whether it has said anything.
pub async fn follow(place: &str, worker: &Worker, router: &Arc<Router>) -> bool {
    let Ok(mut live) = LiveStream::connect(place, KV_CONNECT_TIMEOUT).await else { return false };
    let mut has_said = false;
    let mut until = Instant::now() + LOAD_PUSH_SILENCE;
    // What is no word of its load breaks no silence: it is asked again then.
    while let Ok(Ok(frames)) = clock::timeout_at(until, live.next()).await {
        let stat = Live::parse(&frames).and_then(|message| LoadStat::decode(message.payload));
        let Some(stat) = stat.filter(|stat| is_of(stat, worker.rank())) else { continue };
        if !has_said {
            tracing::info!(worker = %worker.name, place, "worker says its load itself");
        }
        (has_said, until) = (true, Instant::now() + LOAD_PUSH_SILENCE);
        let load = EngineLoad {
            running: stat.running,
            waiting: stat.waiting,
            waiting_tokens: stat.waiting_uncached_tokens,
        };
        worker.load.engine_says(router.now(), load, worker.load.own());
        router.load_changed();
    }
    has_said
}

fn is_of(stat: &LoadStat, rank: Option<u32>) -> bool {
    rank.is_none_or(|rank| stat.rank.is_none_or(|of| of == u64::from(rank)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_where_the_engine_says_at_the_worker_s_host() {
        let body = |ports: &str| format!(r#"{{"model":"m","kv_events":{ports}}}"#);
        let of = |ports: &str, host: &str, rank| place_in(body(ports).as_bytes(), host, rank);
        let ports = r#"{"publisher":"zmq","endpoint_port_base":5557,"load_endpoint_port_base":5757,"load_topic":"load"}"#;
        assert_eq!(of(ports, "w", None).as_deref(), Some("tcp://w:5757"));
        assert_eq!(of(ports, "fd00::1", Some(2)).as_deref(), Some("tcp://[fd00::1]:5759"));
        assert_eq!(of(r#"{"load_endpoint_port_base":65535}"#, "w", Some(1)), None);
        for none in [r#"{"endpoint_port_base":5557}"#, "null", "7"] {
            assert_eq!(of(none, "w", None), None, "{none}");
        }
    }

    #[test]
    fn another_engine_s_load_is_not_this_one_s() {
        let stat = |rank| LoadStat { rank, ..LoadStat::default() };
        assert!(is_of(&stat(Some(1)), None) && is_of(&stat(None), Some(1)) && is_of(&stat(Some(1)), Some(1)));
        assert!(!is_of(&stat(Some(0)), Some(1)));
    }
}
