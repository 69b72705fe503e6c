//! A worker's refusal or failure, in the shape that the clients of the API that was asked read. Engines have
//! one of their own below some paths, and what stands between often sends a page or nothing: clients would
//! raise an error without a text or a class, or one of their own about the JSON. What has the API's shape
//! passes byte for byte; the status and the other headers always do, such as `retry-after`.

use std::{future::poll_fn, pin::Pin};

use bytes::BytesMut;
use http::{HeaderMap, HeaderValue, Method, header};
use http_body::Body;
use keyway_apis::ErrorShape;

use crate::{
    limits::ERROR_BYTES_MAX,
    proxy::body::{Response, ResponseBody, full},
    sse,
};

/// Paths that OpenAI's clients ask; what is below them too.
const OPENAIS: [&str; 11] = [
    "/v1/audio",
    "/v1/batches",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/conversations",
    "/v1/embeddings",
    "/v1/files",
    "/v1/images",
    "/v1/models",
    "/v1/moderations",
    "/v1/responses",
];

/// In whose shape the clients of a path read errors; `None`: what they are is not known.
fn shape_of(path: &str) -> Option<ErrorShape> {
    let below =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if below("/v1/messages") {
        return Some(ErrorShape::Anthropic);
    }
    OPENAIS.iter().any(|root| below(root)).then_some(ErrorShape::OpenAi)
}

/// The shape that a worker's answer may have to be given; `None`: it is no error, or passes unread.
pub(super) fn due(response: &Response, method: &Method, path: &str) -> Option<ErrorShape> {
    let (status, headers) = (response.status(), response.headers());
    if !status.is_client_error() && !status.is_server_error() {
        return None;
    }
    // What is compressed would have to be undone; an answer to HEAD has no body at all.
    let is_read = *method != Method::HEAD && !headers.contains_key(header::CONTENT_ENCODING);
    shape_of(path).filter(|_| is_read)
}

/// The same answer in this shape. Its body is read to its end, and held to a bound; what broke off says what
/// had come of it.
pub(super) async fn told(response: Response, shape: ErrorShape) -> Response {
    let (mut head, body) = response.into_parts();
    let (came, status) = (read(body).await, head.status.as_u16());
    // It may be another one, and hyper knows that of a whole body.
    head.headers.remove(header::CONTENT_LENGTH);
    let data = event_data(&head.headers, &came);
    let told = match shape.told(status, data.as_deref().unwrap_or(&came)) {
        Some(error) => error.to_string().into_bytes(),
        None if data.is_none() => return http::Response::from_parts(head, full(came)),
        None => data.unwrap_or_default(),
    };
    for name in [header::ETAG, header::LAST_MODIFIED, header::ACCEPT_RANGES] {
        head.headers.remove(name);
    }
    head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    http::Response::from_parts(head, full(told))
}

/// What came of a body, up to the bound. What is beyond that is read and left, so that the worker's
/// connection and the answer's account come to their end.
async fn read(mut body: ResponseBody) -> BytesMut {
    let mut came = BytesMut::new();
    while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        if let Some(data) = frame.data_ref() {
            let room = ERROR_BYTES_MAX.saturating_sub(came.len());
            came.extend_from_slice(&data[..data.len().min(room)]);
        }
    }
    came
}

/// The data of an error that came as an event, which clients read in no refusal.
fn event_data(headers: &HeaderMap, body: &[u8]) -> Option<Vec<u8>> {
    let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let mut events = sse::events(body).filter_map(|event| event.data);
    events.next().filter(|_| kind.starts_with(b"text/event-stream")).map(Into::into)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn response(status: u16, kind: &str, body: &str) -> Response {
        let response = http::Response::builder().status(status).header("content-type", kind);
        let response = response.header("retry-after", "7").header("content-length", body.len());
        response.body(full(body.to_owned())).unwrap()
    }

    #[test]
    fn errors_of_apis_with_a_shape_are_looked_at() {
        let due = |status, method: Method, path| due(&response(status, "text/html", "x"), &method, path);
        for (path, shape) in [
            ("/v1/messages", Some(ErrorShape::Anthropic)),
            ("/v1/messages/count_tokens", Some(ErrorShape::Anthropic)),
            ("/v1/messagesx", None),
            ("/v1/chat/completions", Some(ErrorShape::OpenAi)),
            ("/v1/responses/resp_1/cancel", Some(ErrorShape::OpenAi)),
            ("/v1/embeddings", Some(ErrorShape::OpenAi)),
            ("/v1/rerank", None),
            ("/tokenize", None),
        ] {
            assert_eq!(due(400, Method::POST, path), shape, "{path}");
            assert_eq!(due(503, Method::GET, path), shape, "{path}");
            assert_eq!(due(200, Method::POST, path), None);
            assert_eq!(due(404, Method::HEAD, path), None);
        }
        let mut coded = response(500, "application/json", "x");
        coded.headers_mut().insert("content-encoding", HeaderValue::from_static("gzip"));
        assert_eq!(super::due(&coded, &Method::POST, "/v1/messages"), None);
    }

    #[tokio::test]
    async fn the_status_and_what_else_the_head_says_stay() {
        let event = "data: {\"error\":{\"message\":\"m\"}}\n\n";
        for (kind, body, says) in [
            ("text/html", "<p>Busy</p>", "<p>Busy</p>"),
            ("application/json", "{\"error\":{\"message\":\"m\"}}", "m"),
            ("text/event-stream", event, "m"),
        ] {
            let told = told(response(503, kind, body), ErrorShape::OpenAi).await;
            assert_eq!(
                (told.status().as_u16(), &told.headers()["retry-after"]),
                (503, &HeaderValue::from_static("7"))
            );
            assert_eq!(told.headers()["content-type"], "application/json");
            let body = told.into_body().collect().await.unwrap().to_bytes();
            let json: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(json["error"]["message"], says);
        }
    }

    #[tokio::test]
    async fn a_body_is_held_to_a_bound() {
        let long = "x".repeat(ERROR_BYTES_MAX + 10);
        assert_eq!(read(full(long.clone())).await.len(), ERROR_BYTES_MAX);
        let told = told(response(500, "text/plain", &long), ErrorShape::Anthropic).await;
        assert!(told.into_body().collect().await.unwrap().to_bytes().len() < 4_096);
    }
}
