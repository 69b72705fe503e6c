//! `kv_transfer_params`: what a request says of its prompt's KV, in the words of vLLM's NIXL connector and of
//! its tier of peers. This worker shall keep it for another, or it is to be had from another.

use serde_json::{Map, Value};

use super::App;
use super::error::ApiError;
use super::generate::Prepared;
use super::params::{Params, kind};
use super::running::Running;
use crate::kv_transfer::{Peer, RemoteKv};
use crate::limits::HOST_BYTES_MAX;

/// The field of requests, and of answers.
pub(super) const PARAMS: &str = "kv_transfer_params";
/// In it, the worker that may have some of the prompt cached.
const SOURCE: &str = "remote_kv_source";

/// What a request wants of its prompt's KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KvWish {
    /// It shall be kept for another worker.
    Keep,
    /// It is kept there; `None`: where no worker of this kind is.
    Fetch(Option<RemoteKv>),
    /// Some of it may be cached there; `None`: where no worker can be.
    Pull(Option<Peer>),
}

/// Whether a request asks for its prompt's KV to be kept: then it wants no answer.
pub(super) fn keeps(params: &Params) -> bool {
    params.get(PARAMS).and_then(|fields| fields.get("do_remote_decode")) == Some(&Value::Bool(true))
}

/// Takes the field, where this worker moves KV. Without that it is left, and so refused.
pub(super) fn take(params: &mut Params, app: &App) -> Result<Option<KvWish>, ApiError> {
    if app.kv_transfers.is_none() {
        return Ok(None);
    }
    let Some(fields) = params.take_object(PARAMS)? else { return Ok(None) };
    let source = match fields.get(SOURCE) {
        None | Some(Value::Null) => None,
        Some(Value::Object(source)) => Some(source),
        Some(other) => {
            let path = format!("{PARAMS}.{SOURCE}");
            let what = format!("'{path}' must be an object, not {}.", kind(other));
            return Err(ApiError::invalid_value(&path, what));
        }
    };
    match (flag(&fields, "do_remote_decode")?, flag(&fields, "do_remote_prefill")?) {
        (true, _) | (_, true) if source.is_some() => {
            let what = "'kv_transfer_params' asks for KV of two kinds; this worker moves one of them.";
            Err(ApiError::invalid_value(PARAMS, what))
        }
        (true, true) => {
            let what = "'kv_transfer_params' asks for KV to be kept and to be fetched; this worker does one of them.";
            Err(ApiError::invalid_value(PARAMS, what))
        }
        (true, false) => Ok(Some(KvWish::Keep)),
        (false, true) => Ok(Some(KvWish::Fetch(remote(&fields)))),
        (false, false) => Ok(source.map(|source| KvWish::Pull(peer(source)))),
    }
}

fn flag(fields: &Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => {
            let path = format!("{PARAMS}.{name}");
            let what = format!("'{path}' must be true or false, not {}.", kind(other));
            Err(ApiError::invalid_value(&path, what))
        }
    }
}

/// Where the KV is, as `KvTransfers::offer` says it.
fn remote(fields: &Map<String, Value>) -> Option<RemoteKv> {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let number = |name: &str| fields.get(name).and_then(Value::as_u64);
    let transfer = text("remote_request_id").filter(|id| id.len() == 32)?;
    Some(RemoteKv {
        transfer: u128::from_str_radix(transfer, 16).ok()?,
        peer: peer(fields)?,
        tokens: number("remote_num_tokens")?.try_into().ok()?,
    })
}

/// The worker that a request names.
fn peer<'a>(fields: &'a Map<String, Value>) -> Option<Peer> {
    let is_of_hosts = |byte: u8| byte.is_ascii_alphanumeric() || b".:-_".contains(&byte);
    let host = fields.get("remote_host").and_then(Value::as_str);
    // As URLs have an IPv6 address.
    let bare = |host: &'a str| host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = host.map(|host| bare(host).unwrap_or(host));
    let host = host.filter(|host| host.len() <= HOST_BYTES_MAX && host.bytes().all(is_of_hosts))?;
    let port = fields.get("remote_port").and_then(Value::as_u64)?;
    Some(Peer { host: host.to_owned(), port: port.try_into().ok()? })
}

/// Where the KV of an answered prompt is kept, if it is.
pub(super) fn place(app: &App, running: &mut [Running]) -> Option<Value> {
    let keeps = running.iter().any(|choice| choice.keeps);
    let kept = running.iter_mut().find_map(|choice| choice.kept.take());
    app.kv_transfers.as_ref().filter(|_| keeps)?.offer(kept)
}

/// Fetches what another worker has of the prompt, if all choices have one prompt.
pub(super) async fn fetch(app: &App, wish: Option<&KvWish>, prepared: &mut [Prepared]) {
    let (Some(transfers), Some(wish)) = (&app.kv_transfers, wish) else { return };
    let Some(((first, _), others)) = prepared.split_first_mut() else { return };
    // What is scored must be computed.
    if first.prompt_logprobs.is_some() || others.iter().any(|(other, _)| other.prompt != first.prompt) {
        return;
    }
    first.imported = match wish {
        KvWish::Keep => return,
        KvWish::Fetch(None) | KvWish::Pull(None) => return transfers.is_foreign(),
        KvWish::Fetch(Some(remote)) if remote.tokens == 0 => return,
        KvWish::Fetch(Some(remote)) => transfers.fetch(remote, &first.prompt, &first.salt).await,
        KvWish::Pull(Some(peer)) => transfers.pull(peer, &first.prompt, &first.salt).await,
    };
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn where_kv_is_is_read_as_it_is_told_and_nothing_else() {
        let told = json!({"remote_request_id": "0".repeat(31) + "f", "remote_host": "10.0.0.1", "remote_port": 7000,
                          "remote_num_tokens": 32, "remote_engine_id": "e", "of the future": {}});
        let read = |told: &Value| remote(told.as_object().unwrap());
        let expected =
            RemoteKv { transfer: 15, peer: Peer { host: "10.0.0.1".to_owned(), port: 7000 }, tokens: 32 };
        assert_eq!(read(&told), Some(expected));
        let at = |host: &str| peer(json!({"remote_host": host, "remote_port": 1}).as_object().unwrap());
        assert_eq!(at("[fd00::7]"), Some(Peer { host: "fd00::7".to_owned(), port: 1 }));
        assert_eq!((at("[fd00::7"), at("[]x"), at("a b")), (None, None, None));
        for (name, value) in [
            ("remote_request_id", json!("f")),
            ("remote_request_id", json!("x".repeat(32))),
            ("remote_host", json!("a\nb")),
            ("remote_host", json!("a".repeat(300))),
            ("remote_host", json!(null)),
            ("remote_port", json!(70_000)),
            ("remote_num_tokens", json!(-1)),
        ] {
            let mut other = told.clone();
            other[name] = value;
            assert_eq!(read(&other), None, "{name}");
        }
    }
}
