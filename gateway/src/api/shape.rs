//! Errors of the gateway in the shape that each API's clients raise on: OpenAI's object for chat completions,
//! completions and everything else, the same beside the fields of its own error event for responses,
//! Anthropic's for messages. A worker's own error in a stream is told again in that shape, where the API's
//! clients would not raise on it as it is.
//!
//! Shapes: OpenAI's API reference ("streaming events", `error`); Anthropic's ("errors", and "error events" of
//! streaming).

use keyway_apis::{messages, said_in_event};
use keyway_wire::openai::ErrorBody;
use serde_json::json;

use super::{Api, NO_THREADS};

impl Api {
    /// The body of an answer that is an error.
    pub fn error_body(self, status: u16, error: &ErrorBody) -> String {
        match self {
            Self::Messages => anthropic(status, error).to_string(),
            _ => error.to_json(),
        }
    }

    /// The last event of a stream that failed after `events` of it were sent.
    pub fn error_event(self, status: u16, error: &ErrorBody, events: u64) -> String {
        match self {
            Self::Messages => format!("event: error\ndata: {}\n\n", anthropic(status, error)),
            Self::Responses => format!("event: error\ndata: {}\n\n", of_responses(error, events)),
            _ => error.to_event(),
        }
    }

    /// The same event with what a worker's own one says, of which this is the data: its text, and its code or
    /// class. `None` where it says nothing that can be told.
    pub fn error_event_of(self, data: &[u8], error: &ErrorBody, events: u64) -> Option<String> {
        let (text, code) = said_in_event(data).filter(|_| self != Self::Other)?;
        if self == Self::Messages {
            return Some(format!("event: error\ndata: {}\n\n", messages::error_of_event(data)));
        }
        let mut said = error.clone();
        (said.error.message, said.error.code) = (text, code.or(said.error.code));
        Some(self.error_event(0, &said, events))
    }
}

fn anthropic(status: u16, ErrorBody { error }: &ErrorBody) -> serde_json::Value {
    let kind = match status {
        400 | 405 | 415 | 422 => "invalid_request_error",
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    let mut told =
        json!({"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}});
    if error.code.as_deref() == Some(NO_THREADS) {
        told["error"]["details"] = json!({"error_code": NO_THREADS});
    }
    told
}

/// The fields of OpenAI's event, and the object that its clients raise on in any stream.
fn of_responses(body: &ErrorBody, events: u64) -> serde_json::Value {
    let ErrorBody { error } = body;
    json!({
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": events,
        "error": error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_api_has_its_own_words_for_an_error() {
        let error = ErrorBody::new("server_error", "stream_lost", "it broke");
        let event = |api: Api| api.error_event(502, &error, 3);
        assert_eq!(
            event(Api::Chat),
            "data: {\"error\":{\"message\":\"it broke\",\"type\":\"server_error\",\"param\":null,\"code\":\"stream_lost\"}}\n\n"
        );
        assert_eq!(event(Api::Completions), event(Api::Chat));
        let data = |event: &str| {
            let data = event.strip_prefix("event: error\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
            serde_json::from_str::<serde_json::Value>(data).unwrap()
        };
        let messages = data(&event(Api::Messages));
        assert_eq!((&messages["type"], &messages["error"]["type"]), (&json!("error"), &json!("api_error")));
        let responses = data(&event(Api::Responses));
        assert_eq!((&responses["sequence_number"], &responses["code"]), (&json!(3), &json!("stream_lost")));
        assert_eq!(responses["error"]["message"], "it broke");
        let vllm = br#"{"error":{"message":"too long","type":"BadRequestError","code":400}}"#;
        let again = |api: Api, said: &[u8]| api.error_event_of(said, &error, 3);
        let messages = data(&again(Api::Messages, vllm).unwrap());
        assert_eq!(
            messages,
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}})
        );
        let responses =
            data(&again(Api::Responses, br#"{"type":"error","code":"c","message":"m"}"#).unwrap());
        assert_eq!((&responses["code"], &responses["error"]["message"]), (&json!("c"), &json!("m")));
        let chat = again(Api::Chat, br#"{"detail":"engine dead"}"#).unwrap();
        assert_eq!(chat, event(Api::Chat).replace("it broke", "engine dead"));
        assert_eq!(again(Api::Chat, b"{}"), None);
        assert_eq!(again(Api::Other, vllm), None);
        let refused = Api::Messages.error_body(429, &error);
        assert!(refused.starts_with('{') && refused.contains("rate_limit_error"), "{refused}");
    }
}
