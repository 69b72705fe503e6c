//! Which part of requests an SGLang is for, by its `/server_info` (older ones: `/get_server_info`): the
//! arguments that its server was started with, and what its schedulers add as `internal_states`, one for each
//! data-parallel engine (SGLang 0.5.23, `http_server.py` and `scheduler.py`).

use std::num::NonZeroU16;

use serde::Deserialize;

use super::ask::get;
use crate::{
    config::{KvTransfer, Role},
    fleet::{Model, PartsSaid, Worker},
    limits::MAX_MODELS_BYTES,
    upstream::Upstream,
};

/// SGLang's answer, as far as it is about parts of requests.
#[derive(Deserialize)]
struct ServerInfo {
    disaggregation_mode: Option<String>,
    disaggregation_bootstrap_port: Option<NonZeroU16>,
    max_running_requests: Option<u32>,
    dp_size: Option<u32>,
    #[serde(default)]
    internal_states: Vec<InternalState>,
}

#[derive(Deserialize)]
struct InternalState {
    effective_max_running_requests_per_dp: Option<u32>,
}

/// Whether it is an SGLang: by the operator's word, or because it calls its models its own.
pub(super) fn is_sglang(worker: &Worker, models: &[Model]) -> bool {
    #[derive(Deserialize)]
    struct Card {
        owned_by: String,
    }
    let owner = |model: &Model| serde_json::from_str(model.json.get()).map(|Card { owned_by }| owned_by);
    worker.config().kv_transfer == Some(KvTransfer::Sglang)
        || models.iter().any(|model| owner(model).is_ok_and(|owner| owner == "sglang"))
}

/// Asks it which part it is for, and notes that.
pub(super) async fn learn(worker: &Worker, upstream: &Upstream) {
    let mut body = get(worker, upstream, "/server_info", MAX_MODELS_BYTES).await;
    if body.is_none() {
        body = get(worker, upstream, "/get_server_info", MAX_MODELS_BYTES).await;
    }
    let Some(said) = body.and_then(|body| said(&body, worker.rank())) else { return };
    if worker.says_parts(said) && said.role != Role::Both {
        tracing::info!(worker = %worker.name, role = worker.role().as_str(), "worker is for a part of requests");
    }
}

fn said(body: &[u8], rank: Option<u32>) -> Option<PartsSaid> {
    let info: ServerInfo = serde_json::from_slice(body).ok()?;
    let role = match info.disaggregation_mode.as_deref() {
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        _ => Role::Both,
    };
    let of_state = |state: &InternalState| state.effective_max_running_requests_per_dp;
    let states = &info.internal_states;
    let window = match rank {
        Some(rank) => states.get(rank as usize).and_then(of_state),
        None if states.is_empty() => None,
        None => states.iter().map(of_state).sum::<Option<u32>>(),
    };
    // What it was started with is for all of its engines together.
    let engines = rank.and(info.dp_size).filter(|engines| *engines > 0).unwrap_or(1);
    let window = window.or(info.max_running_requests.map(|all| all / engines));
    Some(PartsSaid { role, bootstrap_port: info.disaggregation_bootstrap_port, window })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_sglang_says_its_part_its_port_and_how_many_it_runs() {
        let port = |port: u16| NonZeroU16::new(port);
        for (body, rank, role, bootstrap_port, window) in [
            (
                r#"{"model_path":"m","disaggregation_mode":"prefill","disaggregation_bootstrap_port":9000,"max_running_requests":null}"#,
                None,
                Role::Prefill,
                port(9000),
                None,
            ),
            (
                r#"{"disaggregation_mode":"decode","max_running_requests":64,"dp_size":2,
                    "internal_states":[{"effective_max_running_requests_per_dp":30,"x":1},{"effective_max_running_requests_per_dp":31}]}"#,
                None,
                Role::Decode,
                None,
                Some(61),
            ),
            (
                r#"{"disaggregation_mode":"decode","internal_states":[{"effective_max_running_requests_per_dp":30},{"effective_max_running_requests_per_dp":31}]}"#,
                Some(1),
                Role::Decode,
                None,
                Some(31),
            ),
            (
                r#"{"disaggregation_mode":"decode","max_running_requests":64,"dp_size":2,"internal_states":[{}]}"#,
                Some(1),
                Role::Decode,
                None,
                Some(32),
            ),
            (
                r#"{"disaggregation_mode":"decode","max_running_requests":64,"dp_size":2}"#,
                None,
                Role::Decode,
                None,
                Some(64),
            ),
            (
                r#"{"disaggregation_mode":"null","disaggregation_bootstrap_port":8998}"#,
                None,
                Role::Both,
                port(8998),
                None,
            ),
            ("{}", None, Role::Both, None, None),
        ] {
            assert_eq!(
                said(body.as_bytes(), rank),
                Some(PartsSaid { role, bootstrap_port, window }),
                "{body}"
            );
        }
        assert_eq!((said(b"[]", None), said(b"", None)), (None, None));
    }
}
