//! The contract of vLLM's NIXL connector (0.32: `kv_transfer_params` of its
//! `docs/features/nixl_connector_usage.md` and of its `toy_proxy_server.py`): the worker that computes says
//! where its KV is, and these words go to the one that answers as they are.

use super::Prefilled;

/// What asks a worker to keep a prompt's KV for another.
pub(super) const KEEP: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;

/// Where the KV is, in the worker's own words; `None` where it says nothing of that.
pub(in crate::proxy) fn place(said: &Prefilled) -> Option<Box<str>> {
    let params = said.params.as_ref().map(|params| params.get());
    params.filter(|params| *params != "null").map(Box::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::Api, config::KvTransfer, proxy::kv_transfer::FirstLeg};

    #[test]
    fn the_first_leg_asks_for_one_token_and_for_its_kv_to_be_kept() {
        const KEPT: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#;
        for (body, want) in [
            (
                r#"{"model": "m", "messages": [{"role":"user", "content":"ä\"{"}], "stream": true, "max_tokens": 9,
                    "stream_options": {"include_usage": true}, "min_tokens": 4, "temperature": 5.0e-1}"#,
                r#"{"model":"m","messages":[{"role":"user", "content":"ä\"{"}],"temperature":5.0e-1,"max_tokens":1,"stream":false,"#,
            ),
            (
                r#"{"prompt":[1, 2],"max_completion_tokens":7,"max_tokens":9,"n":1,"kv_transfer_params":null}"#,
                r#"{"prompt":[1, 2],"n":1,"max_completion_tokens":1,"stream":false,"#,
            ),
            ("{}", r#"{"max_tokens":1,"stream":false,"#),
        ] {
            let leg = FirstLeg::of(KvTransfer::Nixl, Api::Chat, body.as_bytes()).unwrap();
            assert_eq!((leg.body, leg.transfer_id), (format!("{want}{KEPT}").into(), None), "{body}");
        }
    }

    #[test]
    fn what_the_worker_says_is_passed_on_word_for_word() {
        let place = |text: &str| place(&Prefilled::read(text.as_bytes()).unwrap());
        let said = r#"{"choices":[],"kv_transfer_params":{"remote_port": 56e2, "x":[1]}}"#;
        assert_eq!(place(said).as_deref(), Some(r#"{"remote_port": 56e2, "x":[1]}"#));
        assert_eq!((place(r#"{"kv_transfer_params":null}"#), place("{}")), (None, None));
    }
}
