//! What steers an engine rather than asks it something: whose turn it is, on which rank it computes, from
//! which host it fetches KV. One tenant could jump another's queue by it, or read another's cache, so none of
//! it passes unless the operator says so.

use std::collections::BTreeSet;

use http::{HeaderMap, HeaderName};

use crate::config::ConfigError;

/// Fields of a request's body: vLLM's, SGLang's and Dynamo's.
const FIELDS: [&str; 21] = [
    // Whose turn it is.
    "priority",
    // Where KV is fetched from, and where it is put.
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "lmcache_kv_transfer_params",
    // vLLM takes the transfer's parameters from among these, too.
    "vllm_xargs",
    // Which rank computes it.
    "data_parallel_rank",
    "data_parallel_rank_decode",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    // Whose cache and whose session it uses.
    "extra_key",
    "session_params",
    // By what name it is aborted, or found by another engine.
    "request_id",
    "rid",
    // Programs that the engine runs.
    "custom_logit_processor",
    "custom_params",
    "logits_processors",
    // Dynamo's hints, which hold all of these.
    "nvext",
];

/// Headers, by their beginnings.
const HEADERS: [&str; 12] = [
    "x-vllm-",
    "x-sglang-",
    "x-smg-",
    "x-dynamo-",
    "x-data-parallel-",
    "x-gateway-destination-",
    "x-gateway-inference-",
    "x-prefiller-",
    "x-encoder-hosts-",
    "x-kv-",
    "x-bootstrap-",
    "epp-",
];

/// What tenants' requests may steer by.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Steering {
    allowed: BTreeSet<String>,
}

impl Steering {
    /// By these fields and headers.
    pub fn allowing(names: &[String]) -> Result<Self, ConfigError> {
        let allowed: BTreeSet<String> = names.iter().map(|name| canonical(name)).collect();
        match allowed.iter().find(|name| !FIELDS.contains(&name.as_str()) && !is_header(name)) {
            Some(other) => Err(ConfigError(format!(
                "auth.steering: {other:?} steers no engine; what does are the fields {} and headers that begin with {}",
                FIELDS.join(", "),
                HEADERS.join(", ")
            ))),
            None => Ok(Self { allowed }),
        }
    }

    /// Takes out what may not pass.
    pub(super) fn headers(&self, headers: &mut HeaderMap) {
        let steers = |name: &HeaderName| {
            let name = canonical(name.as_str());
            is_header(&name) && !self.allowed.contains(&name)
        };
        // Mostly none is there.
        let gone: Vec<HeaderName> = headers.keys().filter(|name| steers(name)).cloned().collect();
        for name in gone {
            headers.remove(name);
        }
    }

    /// Whether a field of a body may not pass.
    pub(super) fn forbids(&self, field: &str) -> bool {
        let is_field = FIELDS.iter().any(|name| name.eq_ignore_ascii_case(field));
        is_field && !self.allowed.contains(&field.to_ascii_lowercase())
    }
}

/// Some servers take one of these for the other.
fn canonical(name: &str) -> String {
    let name = name.to_ascii_lowercase();
    if FIELDS.contains(&name.as_str()) { name } else { name.replace('_', "-") }
}

fn is_header(name: &str) -> bool {
    HEADERS.iter().any(|beginning| name.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn allowing(names: &[&str]) -> Result<Steering, ConfigError> {
        Steering::allowing(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
    }

    fn left(steering: &Steering, names: &[&'static str]) -> Vec<String> {
        let header = |name: &&'static str| (HeaderName::from_static(name), HeaderValue::from_static("1"));
        let mut headers: HeaderMap = names.iter().map(header).collect();
        steering.headers(&mut headers);
        headers.keys().map(ToString::to_string).collect()
    }

    #[test]
    fn what_steers_goes_unless_it_is_allowed() {
        let sent =
            ["x-vllm-priority", "x_vllm_priority", "x-data-parallel-rank", "epp-profile", "x-session-id"];
        assert_eq!(left(&Steering::default(), &sent), ["x-session-id"]);
        let some = allowing(&["X-Vllm-Priority", "priority"]).unwrap();
        assert_eq!(left(&some, &sent), ["x-vllm-priority", "x_vllm_priority", "x-session-id"]);
        assert!(!some.forbids("priority") && some.forbids("rid") && some.forbids("Kv_Transfer_Params"));
        assert!(!some.forbids("messages") && Steering::default().forbids("priority"));
    }

    #[test]
    fn what_steers_nothing_cannot_be_allowed() {
        let error = allowing(&["priorities"]).unwrap_err().to_string();
        assert!(error.contains("\"priorities\"") && error.contains("kv_transfer_params"), "{error}");
    }
}
