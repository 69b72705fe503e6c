//! Answers that are not a generation: status, OpenAI's error body, and what the request counts as. One
//! constructor per kind, so that a kind always looks the same.

use http::{StatusCode, header};
use keyway_clients::impatient::TooSlow;
use keyway_text::{ConversationError, TextError};
use keyway_wire::openai::{ErrorBody, ErrorDetail};

use super::answer_body::AnswerBody;
use super::{Response, full};
use crate::answer::output::ResumeError;
use crate::engine::SubmitError;
use crate::engine::grammar::NotCompiled;
use crate::limits::{BODY_BYTES_MAX, ERROR_BYTES_MAX, RETRY_AFTER_S};
use crate::metrics::Outcome;
use crate::request_memory::NoMemory;

const INVALID: &str = "invalid_request_error";

/// The code by which Anthropic's clients know that they must send whole conversations.
pub(crate) const NO_THREADS: &str = "thread_unsupported_request";

/// The field of the worker extension that resumes an output.
pub(crate) const OUTPUT_IDS: &str = "keyway.output_ids";
/// The field that says how much of its text a client has.
pub(crate) const EMITTED_BYTES: &str = "keyway.emitted_bytes";

/// An error that a request is answered with: its HTTP status, and a body of OpenAI's form.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
    /// What the request counts as.
    pub(crate) outcome: Outcome,
}

impl ApiError {
    fn invalid(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let body = ErrorBody::new(INVALID, code, shortened(message.into()));
        Self { status, body, outcome: Outcome::Invalid }
    }

    /// A field has a value that cannot be right.
    pub(crate) fn invalid_value(param: &str, message: impl Into<String>) -> Self {
        Self::invalid(StatusCode::BAD_REQUEST, "invalid_value", message).with_param(param)
    }

    /// There is nothing to resume.
    pub(crate) fn output_complete() -> Self {
        let message = "'keyway.output_ids' is a complete output: there is nothing to resume.";
        Self::invalid(StatusCode::BAD_REQUEST, "output_complete", message).with_param(OUTPUT_IDS)
    }

    /// A field asks for something this worker does not do.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::invalid(StatusCode::BAD_REQUEST, "unsupported_parameter", message).with_param(param)
    }

    /// A generation that cannot be resumed exactly because of something in it.
    pub(crate) fn not_resumable(what: &str) -> Self {
        let message = format!("A generation with {what} cannot be resumed.");
        Self::invalid(StatusCode::BAD_REQUEST, "not_resumable", message).with_param(OUTPUT_IDS)
    }

    /// The form of an answer was not compiled.
    pub(crate) fn not_compiled(why: NotCompiled) -> Self {
        match why {
            NotCompiled::Form(reason) => Self::bad_form(reason),
            NotCompiled::Busy => Self::overloaded(),
            NotCompiled::Memory => {
                let message = "The forms of answers under way take the memory that this worker has for them. Please try \
                               again, or on another worker.";
                Self {
                    body: ErrorBody::new("rate_limit_error", "engine_overloaded", message),
                    ..Self::overloaded()
                }
            }
        }
    }

    /// The form of an answer cannot be compiled.
    pub(crate) fn bad_form(reason: impl std::fmt::Display) -> Self {
        let message = format!("The answer's form cannot be compiled: {reason}");
        Self::invalid(StatusCode::BAD_REQUEST, "invalid_grammar", message)
    }

    /// The form of an answer could not be kept to its end.
    pub(crate) fn form_failed(reason: &str) -> Self {
        let message = format!("The answer's form cannot be kept any further: {reason}");
        Self::invalid(StatusCode::BAD_REQUEST, "invalid_grammar", message)
    }

    /// A field must be there.
    pub(crate) fn missing(param: &str) -> Self {
        let message = format!("Missing required parameter: '{param}'.");
        Self::invalid(StatusCode::BAD_REQUEST, "missing_required_parameter", message).with_param(param)
    }

    /// The body is not a JSON object.
    pub(crate) fn malformed(reason: impl std::fmt::Display) -> Self {
        let message = format!("We could not parse the JSON body of your request: {reason}.");
        Self::invalid(StatusCode::BAD_REQUEST, "invalid_json", message)
    }

    /// Prompt and answer do not fit the context, in OpenAI's words. `completion` is what the request asks
    /// for.
    pub(crate) fn context_length(
        max: usize,
        prompt: usize,
        completion: Option<usize>,
        noun: &'static str,
    ) -> Self {
        let message = match completion {
            Some(completion) => format!(
                "This model's maximum context length is {max} tokens. However, you requested {} tokens ({prompt} in \
                 the {noun}, {completion} in the completion). Please reduce the length of the {noun} or completion.",
                prompt.saturating_add(completion)
            ),
            None => format!(
                "This model's maximum context length is {max} tokens. However, your {noun} resulted in {prompt} \
                 tokens. Please reduce the length of the {noun}."
            ),
        };
        Self::invalid(StatusCode::BAD_REQUEST, "context_length_exceeded", message).with_param(noun)
    }

    /// A prompt that comes to more tokens than the context has, however it is tokenised.
    pub(crate) fn too_many_tokens(max: usize, noun: &'static str) -> Self {
        let message = format!(
            "This model's maximum context length is {max} tokens. However, your {noun} resulted in at least {max} tokens, \
             which leave no room for a completion. Please reduce the length of the {noun}."
        );
        Self::invalid(StatusCode::BAD_REQUEST, "context_length_exceeded", message).with_param(noun)
    }

    /// A text for whose tokens there would never be memory.
    pub(crate) fn text_too_large(most: usize) -> Self {
        let message = format!(
            "The text of this request has more than {most} bytes, for which this worker has no memory \
             (--request-memory). Send a shorter one."
        );
        Self::invalid(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// There is no memory for a request.
    pub(crate) fn no_memory(why: NoMemory) -> Self {
        let full = |message: &str| Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            body: ErrorBody::new("server_error", "overloaded", message),
            outcome: Outcome::Overloaded,
        };
        match why {
            NoMemory::Busy => full(
                "Requests under way take all memory that this worker has for them. Please try again, or on another \
                 worker.",
            ),
            NoMemory::Share => Self {
                status: StatusCode::TOO_MANY_REQUESTS,
                body: ErrorBody::new(
                    "rate_limit_error",
                    "share_taken",
                    "This client's other requests take its share of this worker's memory. Please try again when one of \
                     them has ended.",
                ),
                outcome: Outcome::Overloaded,
            },
            NoMemory::Never(needed, most) => {
                let message = format!(
                    "This request takes up to {} MiB of memory to read; this worker has {} MiB for that \
                     (--request-memory). Send a smaller one.",
                    needed.div_ceil(1 << 20),
                    most >> 20
                );
                Self::invalid(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
            }
        }
    }

    /// The client was too slow with its body.
    pub(crate) fn body_too_slow(why: TooSlow) -> Self {
        let error = Self::invalid(StatusCode::REQUEST_TIMEOUT, "body_too_slow", format!("{why}."));
        Self { outcome: Outcome::Aborted, ..error }
    }

    /// The request names another model.
    pub(crate) fn model_not_found(model: &str, served: &str) -> Self {
        let message = format!("The model `{model}` does not exist; this worker serves `{served}`.");
        Self::invalid(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
    }

    /// There is no such answer any more, or never was.
    pub(crate) fn response_not_found(id: &str, param: &str) -> Self {
        let message = format!(
            "Response with id '{id}' not found. This worker keeps the latest, and none that another one made."
        );
        Self::invalid(StatusCode::NOT_FOUND, "response_not_found", message).with_param(param)
    }

    /// The answer is made while its client waits: who leaves ends it.
    pub(crate) fn not_in_background() -> Self {
        let message =
            "Only a response with 'background' can be cancelled. Close the connection of any other.";
        Self::invalid(StatusCode::BAD_REQUEST, "not_in_background", message).with_param("response_id")
    }

    /// The answer that a request goes on from has not ended.
    pub(crate) fn response_unfinished(id: &str, param: &str) -> Self {
        let message = format!("Response with id '{id}' is not complete. Ask for it until it is.");
        Self::invalid(StatusCode::BAD_REQUEST, "response_unfinished", message).with_param(param)
    }

    /// An answer that nobody waits for could not be kept.
    pub(crate) fn not_kept() -> Self {
        let message = "This worker has no room to keep this response. Send it without 'background'.";
        Self::invalid(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message).with_param("background")
    }

    /// The request goes on from messages that a server is to have kept, which this one does not.
    pub(crate) fn no_threads() -> Self {
        let message =
            "This worker keeps no threads. Send the whole conversation in 'messages', without 'thread'.";
        Self::invalid(StatusCode::BAD_REQUEST, NO_THREADS, message).with_param("thread")
    }

    /// The worker serves no such path: 404.
    pub(crate) fn unknown_path(method: &http::Method, path: &str) -> Self {
        Self::invalid(StatusCode::NOT_FOUND, "unknown_url", format!("Unknown request URL: {method} {path}."))
    }

    /// The path exists for another method.
    pub(crate) fn method_not_allowed(method: &http::Method, path: &str, allowed: &str) -> Self {
        let message = format!("Not allowed to {method} on {path}; use {allowed}.");
        Self::invalid(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported", message)
    }

    /// The body is over the limit.
    pub(crate) fn too_large() -> Self {
        let message = format!("The request body is larger than {} MiB.", BODY_BYTES_MAX >> 20);
        Self::invalid(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// The client's body broke off.
    pub(crate) fn body_broken() -> Self {
        let error = Self::invalid(StatusCode::BAD_REQUEST, "incomplete_body", "The request body broke off.");
        Self { outcome: Outcome::Aborted, ..error }
    }

    /// The queue is full.
    pub(crate) fn overloaded() -> Self {
        let message = "This worker's queue is full. Please try again, or on another worker.";
        Self {
            status: StatusCode::TOO_MANY_REQUESTS,
            body: ErrorBody::new("rate_limit_error", "engine_overloaded", message),
            outcome: Outcome::Overloaded,
        }
    }

    /// An engine did not take a request.
    pub(crate) fn not_taken(error: SubmitError) -> Self {
        match error {
            SubmitError::Overloaded => Self::overloaded(),
            SubmitError::Stopped => Self::engine_stopped(),
        }
    }

    /// The engine's thread is gone.
    pub(crate) fn engine_stopped() -> Self {
        let message = "This worker's engine has stopped. Please try again on another worker.";
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            body: ErrorBody::new("server_error", "engine_stopped", message),
            outcome: Outcome::Error,
        }
    }

    /// A part of the engine outside of this process failed.
    pub(crate) fn broken_off(reason: &str) -> Self {
        let message = format!("The generation broke off: {reason}. Please try again, or on another worker.");
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            body: ErrorBody::new("server_error", "engine_unavailable", message),
            outcome: Outcome::Error,
        }
    }

    /// Not all expert-parallel ranks are there.
    pub(crate) fn ranks_missing() -> Self {
        Self::broken_off("the expert-parallel ranks are being started again")
    }

    /// Steps fail one after the other.
    pub(crate) fn steps_fail(reason: &str) -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            body: ErrorBody::new(
                "server_error",
                "engine_unavailable",
                format!("This worker cannot compute: {reason}."),
            ),
            outcome: Outcome::Error,
        }
    }

    /// Something broke that no client can help. The reason goes to the log, not to the client.
    pub(crate) fn internal(reason: impl std::fmt::Display) -> Self {
        tracing::error!(%reason, "a request failed");
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            body: ErrorBody::new(
                "server_error",
                "internal_error",
                "The worker failed on this request. Its log says why.",
            ),
            outcome: Outcome::Error,
        }
    }

    /// An output that is not as the extension says.
    pub(crate) fn resume(error: &ResumeError) -> Self {
        match error {
            ResumeError::Complete => Self::output_complete(),
            ResumeError::Text(error) => Self::text(error, OUTPUT_IDS),
            ResumeError::MoreThanGiven(_) | ResumeError::InsideCharacter => {
                let message = format!("'{EMITTED_BYTES}' does not belong to '{OUTPUT_IDS}': {error}.");
                Self::invalid_value(EMITTED_BYTES, message)
            }
        }
    }

    /// The template or the tokenizer does not take this input.
    pub(crate) fn text(error: &TextError, param: &str) -> Self {
        Self::invalid_value(param, error.to_string())
    }

    /// A conversation that no prompt can be made of.
    pub(crate) fn conversation(error: &ConversationError, param: &str) -> Self {
        match error {
            ConversationError::Text(error) => Self::text(error, param),
            ConversationError::Unsupported(what) => {
                Self::invalid_value(param, format!("'{param}' cannot be read: {what}."))
            }
            ConversationError::Tools(what) => {
                let message = format!("'tools' cannot be read: {what}. Leave out what is run by a server.");
                Self::invalid_value("tools", message)
            }
        }
    }

    fn with_param(mut self, param: &str) -> Self {
        self.body = self.body.with_param(&shortened(param.to_owned()));
        self
    }

    /// The event that ends a stream which failed after it began.
    pub(crate) fn to_event(&self) -> String {
        self.body.to_event()
    }

    pub(crate) const fn status(&self) -> StatusCode {
        self.status
    }

    /// What went wrong, as OpenAI's clients read it.
    pub(crate) const fn detail(&self) -> &ErrorDetail {
        &self.body.error
    }

    pub(crate) fn into_response(self) -> Response {
        let json = self.body.to_json();
        self.into_response_of(json)
    }

    /// The answer with a body of another form than OpenAI's.
    pub(crate) fn into_response_of(self, json: String) -> Response {
        let mut response = Response::new(AnswerBody::new(full(json)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, super::JSON);
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER_S.into());
        }
        response
    }
}

/// What a client is told never repeats more than the beginning of what it sent.
fn shortened(mut text: String) -> String {
    if text.len() > ERROR_BYTES_MAX {
        let end = (0..=ERROR_BYTES_MAX).rfind(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push('\u{2026}');
    }
    text
}
