//! What a request makes its worker compute, as its path says. A prompt is taken to stay in a worker's prefix
//! cache only where it is known to: what counts tokens, embeds, scores or judges leaves nothing there that a
//! chat could use, and a path that is not known here is no reason to send a conversation anywhere.

use http::Method;

/// What a worker does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// It computes a prompt, whose KV stays in its prefix cache, and an answer behind it.
    Generates,
    /// It computes what it is sent, and keeps nothing of it: engines keep no prefixes of pooling models
    /// (vLLM, by default), and what these compute is no chat's.
    Pools,
    /// It counts or names tokens, which its GPU has no part in.
    Counts,
    /// Not known: what it is sent may have to be computed, and is not taken to stay.
    Unknown,
}

impl Work {
    /// The work of a request by this method to this path.
    pub fn of(method: &Method, path: &str) -> Self {
        if method != Method::POST {
            return Self::Unknown;
        }
        match path {
            "/v1/chat/completions"
            | "/v1/completions"
            | "/v1/messages"
            | "/v1/responses"
            | "/generate"
            | "/inference/v1/generate" => Self::Generates,
            "/v1/embeddings" | "/v1/moderations" | "/v1/rerank" | "/v2/rerank" | "/rerank" | "/v1/score"
            | "/score" | "/v1/classify" | "/classify" | "/pooling" => Self::Pools,
            "/v1/messages/count_tokens"
            | "/v1/responses/input_tokens"
            | "/v1/tokenize"
            | "/tokenize"
            | "/v1/detokenize"
            | "/detokenize"
            | "/v1/chat/completions/render"
            | "/v1/completions/render" => Self::Counts,
            _ => Self::Unknown,
        }
    }

    /// Whether its prompt is in the worker's prefix cache afterwards, which tenants must not share.
    pub fn fills_cache(self) -> bool {
        self == Self::Generates
    }

    /// Whether its prompt may be work for the worker's GPU.
    pub fn may_compute_prompt(self) -> bool {
        self != Self::Counts
    }

    /// Whether it is known to do nothing but to answer.
    pub fn has_no_side_effects(self) -> bool {
        self != Self::Unknown
    }

    /// Whether it is computed by an engine, and may come as a stream.
    pub fn is_inference(self) -> bool {
        matches!(self, Self::Generates | Self::Pools)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(path: &str) -> Work {
        Work::of(&Method::POST, path)
    }

    #[test]
    fn only_what_is_known_to_generate_fills_a_cache() {
        for path in [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
            "/generate",
            "/inference/v1/generate",
        ] {
            assert!(post(path).fills_cache(), "{path}");
            for other in [format!("{path}/"), format!("{path}/x"), format!("/{path}"), path.to_uppercase()] {
                assert!(!post(&other).fills_cache(), "{other}");
            }
            for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS] {
                assert!(!Work::of(&method, path).fills_cache(), "{method} {path}");
            }
        }
    }

    #[test]
    fn what_counts_tokens_is_no_work_and_what_is_not_known_may_be() {
        for path in ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"] {
            assert!(!post(path).may_compute_prompt() && post(path).has_no_side_effects(), "{path}");
        }
        for path in ["/v1/embeddings", "/rerank", "/v1/score", "/pooling", "/classify", "/v1/moderations"] {
            let work = post(path);
            assert!(work.may_compute_prompt() && work.is_inference() && work.has_no_side_effects(), "{path}");
        }
        for path in ["/v1/audio/speech", "/v1/files", "/v1/batches", "/v1/responses/r1/cancel", "/v1/x"] {
            assert!(post(path).may_compute_prompt() && !post(path).has_no_side_effects(), "{path}");
        }
    }
}
