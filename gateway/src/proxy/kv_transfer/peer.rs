//! The words by which a worker fetches what another one has cached of a prompt: those of vLLM's `p2p`
//! tier (0.32: `remote_kv_source` of `kv_transfer_params`, as its `v1/kv_offload/tiering/p2p/manager.py`
//! reads it), which `keyway-worker` knows too. Nothing is asked of the worker that has it.

use bytes::Bytes;

use super::decode_body;
use crate::fleet::Worker;

/// The body of a request whose worker is to fetch from this one; `None` where nothing is known of where it
/// gives its KV.
pub(in crate::proxy) fn pulling_body(body: &Bytes, from: &Worker) -> Option<Bytes> {
    let (host, port) = (from.url_host(), from.kv_source_port());
    if host.is_empty() || port == 0 {
        return None;
    }
    Some(decode_body(body, &params(host, port, fastrand::u128(..))))
}

/// `id` names the fetch at the worker that has the KV, where several may be under way.
fn params(host: &str, port: u16, id: u128) -> String {
    // Engines put the port behind it as it is, and an IPv6 address in brackets is what a host is there.
    format!(
        r#"{{"remote_kv_source":{{"kv_request_id":"{id:032x}","remote_host":"{host}","remote_port":{port}}}}}"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_told_where_and_under_which_name() {
        let body = Bytes::from_static(br#"{"a":1,"kv_transfer_params":null}"#);
        let want = concat!(
            r#"{"kv_transfer_params":{"remote_kv_source":{"kv_request_id":"0000000000000000000000000000000b","#,
            r#""remote_host":"10.0.0.7","remote_port":5710}},"a":1}"#
        );
        assert_eq!(decode_body(&body, &params("10.0.0.7", 5710, 11)), want);
    }
}
