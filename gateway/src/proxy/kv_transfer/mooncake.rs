//! The contract of vLLM's Mooncake connector (0.32, `mooncake_connector.py` and `mooncake_utils.py`): the
//! gateway names the transfer, and tells the worker that answers who computed and where that is found; the
//! worker that computes says nothing.
//!
//! Both legs might go at once, and do not: who fetches waits at the other worker for up to 480 s
//! (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`) with its blocks taken, and is not told if the prompt's request was
//! refused there, failed, or left with its client. KV that is kept and not fetched goes after the same time,
//! at the worker that computed it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use super::Prefilled;

/// Where a worker that computes prompts says who it is: `/query` of its bootstrap server.
pub(in crate::proxy) const QUERY: &str = "/query";

/// One data-parallel engine, as a bootstrap server lists it by its rank.
#[derive(Deserialize)]
struct Engine {
    engine_id: String,
}

pub(super) fn new_transfer_id() -> String {
    format!("keyway-{:032x}", fastrand::u128(..))
}

/// What asks a worker to keep a prompt's KV for another.
pub(super) fn keep(transfer_id: &str) -> String {
    format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer_id}"}}"#)
}

/// The name of the engine that a request goes to, as the bootstrap server has it; `None` also where there are
/// several and the gateway does not choose among them.
pub(in crate::proxy) fn engine_id(body: &[u8], rank: Option<u32>) -> Option<String> {
    let engines: BTreeMap<u32, Engine> = serde_json::from_slice(body).ok()?;
    if rank.is_none() && engines.len() > 1 {
        return None;
    }
    // A node that has some of a fleet's engines names them by their ranks in the fleet.
    engines.into_values().nth(rank.unwrap_or(0) as usize).map(|engine| engine.engine_id)
}

/// Whether the KV of a prompt is kept: vLLM keeps it where its one token was the limit, not the answer's end.
pub(in crate::proxy) fn is_kept(said: &Prefilled) -> bool {
    !said.has_ended()
}

/// Where the KV is.
pub(in crate::proxy) fn place(transfer_id: &str, engine_id: &str, bootstrap: (&str, u16)) -> Box<str> {
    let (host, port) = bootstrap;
    let place = json!({
        "do_remote_decode": false,
        "do_remote_prefill": true,
        "remote_bootstrap_addr": format!("http://{host}:{port}"),
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    });
    place.to_string().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::Api, config::KvTransfer, proxy::kv_transfer::FirstLeg};

    #[test]
    fn both_legs_bear_the_name_that_the_gateway_gives() {
        let leg = FirstLeg::of(KvTransfer::Mooncake, Api::Chat, br#"{"prompt":"a","stream":true}"#).unwrap();
        let id = leg.transfer_id.unwrap();
        let want = format!(
            r#"{{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{id}"}}}}"#
        );
        assert_eq!(leg.body, want);
        assert_eq!((id.len(), &id[..7]), (39, "keyway-"));
        assert_ne!(
            FirstLeg::of(KvTransfer::Mooncake, Api::Chat, b"{}").unwrap().transfer_id,
            Some(id.clone())
        );
        assert_eq!(
            *place(&id, "e\"1_dp0", ("[::1]", 8998)),
            format!(
                r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"http://[::1]:8998","remote_engine_id":"e\"1_dp0","transfer_id":"{id}"}}"#
            )
        );
    }

    #[test]
    fn an_engine_is_found_by_its_rank() {
        let of = |body: &str, rank| engine_id(body.as_bytes(), rank);
        let engine = |rank: u32, id: &str| {
            format!(r#""{rank}":{{"engine_id":"{id}","worker_addr":{{"0":{{"0":"tcp://h:1"}}}}}}"#)
        };
        let one = format!("{{{}}}", engine(0, "a"));
        let two = format!("{{{},{}}}", engine(0, "a_dp0"), engine(1, "a_dp1"));
        let node = format!("{{{},{}}}", engine(2, "c"), engine(3, "d"));
        assert_eq!((of(&one, None).as_deref(), of(&one, Some(0)).as_deref()), (Some("a"), Some("a")));
        assert_eq!((of(&two, Some(1)).as_deref(), of(&two, None)), (Some("a_dp1"), None));
        assert_eq!((of(&node, Some(1)).as_deref(), of(&node, Some(2))), (Some("d"), None));
        assert_eq!(
            (of("{}", None), of("[]", None), of("", None), of(&two, Some(9))),
            (None, None, None, None)
        );
    }

    #[test]
    fn kv_is_kept_where_the_limit_ended_the_answer() {
        let kept = |text: &str| is_kept(&serde_json::from_str(text).unwrap());
        assert!(kept(r#"{"choices":[{"finish_reason":"length"}]}"#));
        assert!(!kept(r#"{"choices":[{"finish_reason":"stop"}]}"#));
        assert!(!kept(r#"{"choices":[{"finish_reason":null}]}"#));
    }
}
