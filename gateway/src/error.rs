//! Every error a client can get from the gateway itself, in one table: status, OpenAI's shape, metric label.
//! A worker's own errors are not here: they pass, and are told again where their API's clients would not read
//! them ([`crate::proxy`]'s `engine_error.rs`).

mod over_budget;

use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use keyway_wire::openai::ErrorBody;

pub use self::over_budget::OverBudget;
use crate::{
    api::{Api, NO_THREADS},
    impatient::TooSlow,
    shortage::Shortage,
    sse,
};

/// Methods that a request may have, as far as the gateway is concerned.
const ALLOWED_METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// What the gateway refuses or could not do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// No such path here.
    #[error("there is no {0}; requests go to paths under /v1/, such as /v1/chat/completions")]
    NotFound(String),
    /// The path could be read in several ways.
    #[error("the request's path cannot be used: {0}")]
    BadPath(&'static str),
    /// No worker serves the model.
    #[error("the model {model:?} does not exist here; this fleet serves: {known}")]
    ModelNotFound {
        /// As the client named it.
        model: String,
        /// The fleet's models, comma separated.
        known: String,
    },
    /// The body is over the limit.
    #[error(
        "the request body is larger than {limit_bytes} bytes, the limit of this gateway (limits.max_body_bytes)"
    )]
    BodyTooLarge {
        /// `limits.max_body_bytes`, which decoded bodies must keep, too; the admin listener's may be lower.
        limit_bytes: usize,
    },
    /// The path and query are over the limit.
    #[error("the path and query have more than {limit_bytes} bytes, the limit of this gateway")]
    UriTooLong {
        /// [`MAX_URI_BYTES`](crate::limits::MAX_URI_BYTES), which no configuration changes.
        limit_bytes: usize,
    },
    /// The head is over one of its limits.
    #[error(
        "the request's head has more than {limit_bytes} bytes or {limit_fields} header fields, the limits of this gateway"
    )]
    HeadTooLarge {
        /// In bytes, as HTTP/1.1 writes it.
        limit_bytes: usize,
        /// Header fields that it may have: [`MAX_HEAD_FIELDS`](crate::limits::MAX_HEAD_FIELDS).
        limit_fields: usize,
    },
    /// The client's body broke off or was malformed.
    #[error("the request body could not be read: {0}")]
    BodyUnreadable(String),
    /// What names the server in the request is missing, there twice, or no name.
    #[error(
        "the request does not say well which server it is for: {0}; send one Host, as in: Host: example.com"
    )]
    BadHost(&'static str),
    /// The request says that its body is transferred in another way than in chunks.
    #[error(
        "the request's transfer-encoding is not read here: send the body with a content-length, or with transfer-encoding: chunked alone"
    )]
    TransferCoding,
    /// The method is one that is answered nowhere here.
    #[error("the method {0} is not served here; use one of: {ALLOWED_METHODS}")]
    MethodRefused(&'static str),
    /// A WebSocket was asked for as none can be.
    #[error("no WebSocket can be opened by this request: {0}")]
    BadUpgrade(&'static str),
    /// A WebSocket of another version was asked for, or of none.
    #[error("no WebSocket can be opened by this request: Sec-WebSocket-Version must be 13")]
    WebSocketVersion,
    /// A WebSocket was asked for well.
    #[error("this gateway opens no WebSockets; use the paths of the API that answer over HTTP")]
    NoWebSocket,
    /// The model is not known, and workers would take the request for different ones.
    #[error("{why}, and this fleet serves several; say which in the field model: {known}")]
    ModelRequired {
        /// Why it is not.
        why: &'static str,
        /// The fleet's models, comma separated.
        known: String,
    },
    /// The body is in a `Content-Encoding` that is not undone here, and must be read.
    #[error(
        "the request body's content-encoding cannot be undone here; send it plain or as one of: {accepted}"
    )]
    CodingUnsupported {
        /// Names of the codings that are undone here, comma separated.
        accepted: &'static str,
    },
    /// What the request names is not stored here, or for another tenant.
    #[error("nothing is stored here by an id that the request names")]
    StateNotFound,
    /// The worker that stores it takes no requests now.
    #[error("what the request refers to is stored by a worker that is not ready; try again soon")]
    StateAway,
    /// The worker that stored it is gone.
    #[error("what the request refers to was stored by a worker that has left the fleet")]
    StateGone,
    /// More requests in flight than the gateway takes.
    #[error("the gateway has {limit} requests in flight, its limit; try again soon")]
    Overloaded {
        /// `limits.max_in_flight`, as it was when the request was refused.
        limit: usize,
    },
    /// One party has as many requests in the gateway as it may while others have theirs.
    #[error(
        "your {of} has {has} requests in flight here, its share while others have theirs; try again soon"
    )]
    ShareTaken {
        /// Whose share: a tenant's, an address's or a connection's.
        of: &'static str,
        /// Requests that it has.
        has: usize,
    },
    /// As many bytes of request bodies are held as may be, or as one party may have of them.
    #[error(
        "{} as many bytes of request bodies as it may (limits.max_body_memory_bytes); try again soon",
        of.map_or_else(|| "the gateway holds".to_owned(), |of| format!("your {of} has here"))
    )]
    BodyMemory {
        /// Whose share it is, if the gateway has more.
        of: Option<&'static str>,
    },
    /// The request would have to wait for too long.
    #[error("there is more to do than the workers can; try again in {} s", retry_after.as_secs_f64().ceil())]
    TooBusy {
        /// When it would begin in time.
        retry_after: Duration,
    },
    /// What was asked has broken several workers.
    #[error(
        "workers broke off when they were asked this, so it is not asked again for {} s; their logs may say why",
        retry_after.as_secs_f64().ceil()
    )]
    BreaksWorkers {
        /// When it may be tried again.
        retry_after: Duration,
    },
    /// No worker can be tried (any more).
    #[error("no worker is ready for this request; try again soon")]
    NoWorker,
    /// The worker that would answer can compute no prompt, and no other that could is ready.
    #[error("no worker that computes prompts is ready for this request; try again soon")]
    NoPrefill,
    /// A worker said in its own words that it could not compute the prompt for another.
    #[error("the worker that was to compute the prompt says: {said}")]
    PrefillFailed {
        /// Its words, shortened.
        said: String,
        /// Whether it finds the request at fault.
        is_request_s: bool,
    },
    /// The gateway itself can open no connection. No worker was asked.
    #[error("the gateway itself lacks {lacks}; try again soon")]
    Short {
        /// What this process or its host has run out of, or may not use.
        lacks: Shortage,
    },
    /// A kept connection ended as the request went out, which may or may not have arrived and must not be
    /// sent twice.
    #[error(
        "the connection to the worker was closed as the request was sent; it is not sent again, since the worker may have received it"
    )]
    ConnectionClosed,
    /// The worker closed the connection before it answered.
    #[error("the worker broke off before it answered")]
    WorkerLost,
    /// The worker broke off in the middle of its answer.
    #[error("the worker broke off in the middle of its answer")]
    StreamLost,
    /// The worker aborted its output: its engine was shut down, or put to sleep.
    #[error("the worker aborted its answer")]
    WorkerAborted,
    /// The worker said in its own words that its answer failed.
    #[error("the worker ended its answer with an error, which is the event before this one")]
    WorkerFailed,
    /// An event of the worker's answer is over the limit.
    #[error(
        "an event of the answer is larger than {limit_bytes} bytes, the limit of this gateway (limits.max_event_bytes)"
    )]
    EventTooLarge {
        /// `limits.max_event_bytes`: what an unfinished event may have.
        limit_bytes: usize,
    },
    /// The worker's answer began and then stopped.
    #[error("the worker sent nothing for {} s in the middle of its answer", limit.as_secs_f64())]
    Stalled {
        /// `limits.answer_idle_ms`: the longest pause between two pieces of an answer.
        limit: Duration,
    },
    /// The request took longer than any may.
    #[error("the request took longer than {} s, the limit of this gateway (limits.request_timeout_ms)", limit.as_secs_f64())]
    Deadline {
        /// `limits.request_timeout_ms`: from the request's head to its answer's end.
        limit: Duration,
    },
    /// The client was too slow with its body.
    #[error("{0}{option}", option = option_of(*.0))]
    BodyTooSlow(TooSlow),
    /// No key, or none of a tenant.
    #[error("a valid API key is needed: Authorization: Bearer KEY, or x-api-key")]
    BadKey,
    /// A token, in place of a key, that is not good.
    #[error("the token cannot be used: {0}")]
    BadToken(&'static str),
    /// A token cannot be judged yet.
    #[error("the public keys of who signed the token are being fetched; try again soon")]
    TokenKeysNotHere,
    /// The tenant has asked for more than it may.
    #[error("over the limit of {limit}; try again in {} s", retry_after.as_secs_f64().ceil())]
    TenantLimit {
        /// The limit in words, with its key in the file of tenants.
        limit: &'static str,
        /// When it will be enough.
        retry_after: Duration,
    },
    /// The tenant has used what it may in a day or month.
    #[error("{0}")]
    OverBudget(Box<OverBudget>),
    /// A tenant with a limit of tokens says in an unclear way what its stream is to hold.
    #[error(
        "the field {field} can be read in more than one way, which a key with a limit of tokens may not send; \
         write it once, with true or false in stream and in what stream_options say of usage"
    )]
    UnclearOption {
        /// Which field is unclear: `stream` or `stream_options`.
        field: &'static str,
    },
    /// The model's engines speak chats alone, and the request is none and cannot be made one.
    #[error("{message}")]
    NoChat {
        /// What is wrong and what to do, as a sentence.
        message: String,
        /// The field that it is about.
        param: Option<String>,
    },
    /// A request goes on from a conversation that a server is to have kept, and this model's workers keep
    /// none.
    #[error(
        "no worker of this model keeps the conversation of a 'thread': send the whole conversation in 'messages', \
         without 'thread' (a worker that keeps them needs threads = true in its model's [[model]])"
    )]
    NoThreads,
    /// What stands behind a path's question mark, or in a header that is for the gateway, is not understood.
    #[error("{message}")]
    BadQuery {
        /// What is wrong and what to do, as a sentence.
        message: String,
        /// The parameter or header that it is about.
        param: Option<String>,
    },
    /// The tokens of a prompt were to be counted, and the model's tokenizer is not known.
    #[error(
        "the tokens of this prompt cannot be counted here: it is not all text, or the gateway has no tokenizer \
         of this model (tokenizer in its [[model]])"
    )]
    CountUnknown,
    /// It is not kept who has used how much.
    #[error("usage is not kept here: name a file for it (usage.file)")]
    UsageNotKept,
    /// The file of what was used cannot be read at this time.
    #[error("the usage file cannot be read now: the log says why; try again soon")]
    UsageUnreadable,
    /// A worker's answer to a chat is none.
    #[error("the worker's answer is no chat completion, so it cannot be told in the API that was asked")]
    AnswerUnreadable,
    /// A bug of ours: the request's task panicked.
    #[error("internal error of the gateway")]
    Internal,
}

struct Row<'a> {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<&'a str>,
    retry_after: Option<Duration>,
}

impl Error {
    #[allow(clippy::too_many_lines, reason = "a table: a row for each error")]
    fn row(&self) -> Row<'_> {
        const SOON: Option<Duration> = Some(Duration::from_secs(1));
        let row = |status, kind, code, param, retry_after| Row { status, kind, code, param, retry_after };
        let (invalid, server) = ("invalid_request_error", "server_error");
        let refused = |status, code| row(status, invalid, code, None, None);
        match self {
            Self::NotFound(_) => row(StatusCode::NOT_FOUND, invalid, "unknown_url", None, None),
            Self::BadPath(_) => row(StatusCode::BAD_REQUEST, invalid, "bad_path", None, None),
            Self::ModelNotFound { .. } => {
                row(StatusCode::NOT_FOUND, invalid, "model_not_found", Some("model"), None)
            }
            Self::BodyTooLarge { .. } => refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large"),
            Self::UriTooLong { .. } => row(StatusCode::URI_TOO_LONG, invalid, "uri_too_long", None, None),
            Self::HeadTooLarge { .. } => {
                refused(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large")
            }
            Self::BodyUnreadable(_) => row(StatusCode::BAD_REQUEST, invalid, "body_unreadable", None, None),
            Self::BadHost(_) => refused(StatusCode::BAD_REQUEST, "bad_host"),
            Self::TransferCoding => refused(StatusCode::NOT_IMPLEMENTED, "transfer_coding_unsupported"),
            Self::MethodRefused(_) => refused(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::BadUpgrade(_) => row(StatusCode::BAD_REQUEST, invalid, "bad_upgrade", None, None),
            Self::WebSocketVersion => refused(StatusCode::UPGRADE_REQUIRED, "websocket_version"),
            Self::NoWebSocket => refused(StatusCode::NOT_IMPLEMENTED, "websocket_unsupported"),
            Self::ModelRequired { .. } => {
                row(StatusCode::BAD_REQUEST, invalid, "model_required", Some("model"), None)
            }
            Self::CodingUnsupported { .. } => {
                refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_encoding_unsupported")
            }
            Self::StateNotFound => row(StatusCode::NOT_FOUND, invalid, "state_not_found", None, None),
            Self::StateAway => row(StatusCode::SERVICE_UNAVAILABLE, server, "state_not_ready", None, SOON),
            Self::StateGone => row(StatusCode::NOT_FOUND, invalid, "state_gone", None, None),
            Self::Overloaded { .. } => row(StatusCode::SERVICE_UNAVAILABLE, server, "overloaded", None, SOON),
            Self::BodyMemory { of: None } => {
                row(StatusCode::SERVICE_UNAVAILABLE, server, "overloaded", None, SOON)
            }
            Self::ShareTaken { .. } | Self::BodyMemory { .. } => {
                row(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "share_taken", None, SOON)
            }
            Self::TooBusy { retry_after } | Self::BreaksWorkers { retry_after } => {
                let code = if matches!(self, Self::TooBusy { .. }) { "too_busy" } else { "breaks_workers" };
                row(StatusCode::SERVICE_UNAVAILABLE, server, code, None, Some(whole_seconds(*retry_after)))
            }
            Self::NoWorker => row(StatusCode::SERVICE_UNAVAILABLE, server, "no_worker_ready", None, SOON),
            Self::NoPrefill => row(StatusCode::SERVICE_UNAVAILABLE, server, "no_prefill_ready", None, SOON),
            Self::PrefillFailed { is_request_s: true, .. } => {
                refused(StatusCode::BAD_REQUEST, "prefill_refused")
            }
            Self::PrefillFailed { .. } => row(StatusCode::BAD_GATEWAY, server, "prefill_failed", None, None),
            Self::Short { .. } => {
                row(StatusCode::SERVICE_UNAVAILABLE, server, "gateway_overloaded", None, SOON)
            }
            Self::ConnectionClosed => row(StatusCode::BAD_GATEWAY, server, "connection_closed", None, None),
            Self::WorkerLost => row(StatusCode::BAD_GATEWAY, server, "worker_lost", None, None),
            Self::StreamLost => row(StatusCode::BAD_GATEWAY, server, "stream_lost", None, None),
            Self::WorkerAborted => row(StatusCode::BAD_GATEWAY, server, "worker_aborted", None, None),
            Self::WorkerFailed => row(StatusCode::BAD_GATEWAY, server, "worker_failed", None, None),
            Self::EventTooLarge { .. } => row(StatusCode::BAD_GATEWAY, server, "event_too_large", None, None),
            Self::Stalled { .. } => row(StatusCode::GATEWAY_TIMEOUT, server, "worker_stalled", None, None),
            Self::Deadline { .. } => {
                row(StatusCode::GATEWAY_TIMEOUT, server, "deadline_exceeded", None, None)
            }
            Self::BodyTooSlow(_) => row(StatusCode::REQUEST_TIMEOUT, invalid, "body_too_slow", None, None),
            Self::BadKey | Self::BadToken(_) => refused(StatusCode::UNAUTHORIZED, "invalid_api_key"),
            Self::TokenKeysNotHere => {
                row(StatusCode::SERVICE_UNAVAILABLE, server, "token_keys_not_here", None, SOON)
            }
            Self::TenantLimit { retry_after, .. } => {
                let after = Some(whole_seconds(*retry_after));
                row(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded", None, after)
            }
            Self::OverBudget(over) => {
                let after = Some(whole_seconds(over.retry_after));
                row(StatusCode::TOO_MANY_REQUESTS, "insufficient_quota", "insufficient_quota", None, after)
            }
            Self::UnclearOption { field } => {
                row(StatusCode::BAD_REQUEST, invalid, "unclear_option", Some(field), None)
            }
            Self::NoChat { param, .. } => {
                // By this code Anthropic's clients know that they have to send the whole conversation.
                let is_thread = param.as_deref() == Some("thread");
                let code = if is_thread { NO_THREADS } else { "not_a_chat" };
                row(StatusCode::BAD_REQUEST, invalid, code, param.as_deref(), None)
            }
            Self::NoThreads => row(StatusCode::BAD_REQUEST, invalid, NO_THREADS, Some("thread"), None),
            Self::BadQuery { param, .. } => {
                row(StatusCode::BAD_REQUEST, invalid, "invalid_value", param.as_deref(), None)
            }
            Self::CountUnknown => row(StatusCode::NOT_IMPLEMENTED, invalid, "count_unknown", None, None),
            Self::UsageNotKept => row(StatusCode::NOT_FOUND, invalid, "usage_not_kept", None, None),
            Self::UsageUnreadable => {
                row(StatusCode::SERVICE_UNAVAILABLE, server, "usage_unreadable", None, SOON)
            }
            Self::AnswerUnreadable => row(StatusCode::BAD_GATEWAY, server, "answer_unreadable", None, None),
            Self::Internal => row(StatusCode::INTERNAL_SERVER_ERROR, server, "internal_error", None, None),
        }
    }

    /// The stable code, also the metric label `outcome`.
    pub fn code(&self) -> &'static str {
        self.row().code
    }

    /// The body in OpenAI's shape.
    pub fn to_body(&self) -> ErrorBody {
        let row = self.row();
        let body = ErrorBody::new(row.kind, row.code, self.to_string());
        match row.param {
            Some(param) => body.with_param(param),
            None => body,
        }
    }

    /// The last event of a stream of this API that failed after so many events.
    pub fn to_event(&self, api: Api, events: u64) -> String {
        api.error_event(self.row().status.as_u16(), &self.to_body(), events)
    }

    /// The same with what a worker's own event says; `None` where that is nothing.
    pub fn to_event_of(&self, api: Api, said: &[u8], events: u64) -> Option<String> {
        let said = sse::events(said).find_map(|event| event.data)?;
        api.error_event_of(&said, &self.to_body(), events)
    }

    /// The body of an answer in the shape of this API.
    pub fn to_body_of(&self, api: Api) -> String {
        api.error_body(self.row().status.as_u16(), &self.to_body())
    }

    /// The whole answer, in OpenAI's shape.
    pub fn to_answer(&self) -> http::Response<String> {
        let row = self.row();
        let mut response = http::Response::new(self.to_body().to_json());
        *response.status_mut() = row.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = row.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs()));
        }
        if row.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        self.close_after(headers);
        if let Self::MethodRefused(_) = self {
            headers.insert(header::ALLOW, HeaderValue::from_static(ALLOWED_METHODS));
        }
        if let Self::CodingUnsupported { accepted } = self {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(accepted));
        }
        response.extensions_mut().insert(Failed(self.clone()));
        response
    }
}

impl Error {
    /// Behind a request for a WebSocket its frames may follow, and behind one that others may frame in
    /// another way what they take for its body: neither must ever be read as a request.
    fn close_after(&self, headers: &mut HeaderMap) {
        let websocket = matches!(self, Self::BadUpgrade(_) | Self::WebSocketVersion | Self::NoWebSocket);
        if websocket || matches!(self, Self::BadHost(_) | Self::TransferCoding | Self::MethodRefused(_)) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if *self == Self::WebSocketVersion {
            // RFC 6455, section 4.4, and RFC 9110, section 15.5.22.
            headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade, close"));
            headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        }
    }
}

/// As `Retry-After` says it: whole seconds, at least one.
fn whole_seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs_f64().ceil().max(1.0) as u64)
}

/// Marks an answer that the gateway made because it failed; its code becomes the request's outcome.
#[derive(Debug, Clone)]
pub struct Failed(pub Error);

/// Which option says how slow a body may be, where one does.
const fn option_of(slow: TooSlow) -> &'static str {
    match slow {
        TooSlow::Paused(_) => " (limits.body_idle_ms)",
        TooSlow::Crawled => "",
        TooSlow::Unfinished(_) => " (limits.body_timeout_ms)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overload_says_when_to_come_back() {
        let response = Error::Overloaded { limit: 2 }.to_answer();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "1");
    }

    #[test]
    fn an_unknown_model_names_the_field_and_the_known_models() {
        let body = Error::ModelNotFound { model: "a\"b".into(), known: "m1, m2".into() }.to_body();
        assert_eq!(body.error.param.as_deref(), Some("model"));
        assert!(body.error.message.contains(r#""a\"b""#) && body.error.message.contains("m1, m2"));
    }
}
