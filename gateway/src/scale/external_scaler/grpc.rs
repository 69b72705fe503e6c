//! gRPC over HTTP/2, as much of it as calls with one message and answers with one or many need: frames,
//! status in the trailers, bounds. No compression and no TLS; what methods there are is the service's
//! business. Source of the format: the gRPC project's `doc/PROTOCOL-HTTP2.md`.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Request, StatusCode, header::CONTENT_TYPE};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prost::Message;
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    clock,
    limits::{MAX_SCALER_CONNECTIONS, MAX_SCALER_MESSAGE_BYTES, MAX_SCALER_STREAMS, SHORTAGE_LOOK},
    net::{self, TcpListener},
};

/// Flag and length before each message.
const FRAME_HEAD_BYTES: usize = 5;
/// A silent connection is asked for a sign of life so often, and closed without one in this time.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));

/// What a call is answered with.
pub(super) type Answer = http::Response<UnsyncBoxBody<Bytes, Infallible>>;

/// The codes that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    InvalidArgument = 3,
    NotFound = 5,
    Unimplemented = 12,
}

/// Why a call failed.
#[derive(Debug)]
pub(super) struct Status {
    code: Code,
    message: String,
}

impl Status {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Answers calls until it is dropped; connections and their streams end with it.
pub(super) async fn serve<F>(
    listener: TcpListener,
    service: impl Fn(Request<Incoming>) -> F + Clone + Send + 'static,
) where
    F: Future<Output = Answer> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(MAX_SCALER_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match net::accept(&listener).await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection of a scaler could not be accepted");
                clock::sleep(SHORTAGE_LOOK).await;
                continue;
            }
        };
        let service = service.clone();
        connections.spawn(async move {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.timer(TokioTimer::new()).max_concurrent_streams(MAX_SCALER_STREAMS);
            builder.keep_alive_interval(PING.0).keep_alive_timeout(PING.1);
            let answer = service_fn(move |request| {
                let answer = service(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            if let Err(error) = builder.serve_connection(TokioIo::new(stream), answer).await {
                tracing::debug!(%error, "a scaler's connection ended with an error");
            }
            drop(slot);
        });
    }
}

/// Reads a call's only message.
pub(super) async fn message<M: Message + Default>(request: Request<Incoming>) -> Result<M, Status> {
    let body = Limited::new(request.into_body(), MAX_SCALER_MESSAGE_BYTES).collect().await;
    let body = body.map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
    decode(body.to_bytes())
}

fn decode<M: Message + Default>(mut body: Bytes) -> Result<M, Status> {
    let wrong = |what: &str| Status::new(Code::InvalidArgument, what);
    if body.len() < FRAME_HEAD_BYTES {
        return Err(wrong("a call has one message"));
    }
    let (compressed, length) = (body.get_u8(), body.get_u32());
    if compressed != 0 {
        return Err(Status::new(Code::Unimplemented, "compressed messages are not read"));
    }
    if body.len() != length as usize {
        return Err(wrong("a call has one message, whole"));
    }
    M::decode(body).map_err(|error| wrong(&error.to_string()))
}

/// One message and the good status.
pub(super) fn unary<M: Message>(message: &M) -> Answer {
    frames(stream::iter([Frame::data(framed(message)), Frame::trailers(trailers(None))]))
}

/// Messages as they come, then the good status.
pub(super) fn stream<M: Message>(messages: impl Stream<Item = M> + Send + 'static) -> Answer {
    let end = stream::once(async { Frame::trailers(trailers(None)) });
    frames(messages.map(|message| Frame::data(framed(&message))).chain(end))
}

/// A status without a message: all in the head, which must end the stream, as a body that is known to be
/// empty makes it.
pub(super) fn failed(status: &Status) -> Answer {
    let mut answer = answer(Empty::new().boxed_unsync());
    answer.headers_mut().extend(trailers(Some(status)));
    answer
}

fn frames(frames: impl Stream<Item = Frame<Bytes>> + Send + 'static) -> Answer {
    answer(StreamBody::new(frames.map(Ok)).boxed_unsync())
}

fn answer(body: UnsyncBoxBody<Bytes, Infallible>) -> Answer {
    let mut answer = http::Response::new(body);
    *answer.status_mut() = StatusCode::OK;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    answer
}

fn framed<M: Message>(message: &M) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(FRAME_HEAD_BYTES + length);
    frame.put_u8(0);
    // Answers here are a few names and numbers.
    frame.put_u32(length as u32);
    frame.put_slice(&message.encode_to_vec());
    frame.freeze()
}

fn trailers(status: Option<&Status>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    let code = status.map_or(0, |status| status.code as u16);
    trailers.insert("grpc-status", code.into());
    if let Some(status) = status
        && let Ok(message) = HeaderValue::from_str(&percent_encoded(&status.message))
    {
        trailers.insert("grpc-message", message);
    }
    trailers
}

/// As `grpc-message` is written: printable ASCII but `%` as it is, every other byte as `%XX`.
fn percent_encoded(text: &str) -> String {
    use std::fmt::Write;
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        match byte {
            b'%' | ..0x20 | 0x7f.. => {
                // Writing to a string cannot fail.
                let _ = write!(out, "%{byte:02X}");
            }
            _ => out.push(byte.into()),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::external_scaler::messages::{MetricValue, ScaledObject};

    fn code<M: Message + Default>(bytes: &[u8]) -> Option<Code> {
        decode::<M>(Bytes::copy_from_slice(bytes)).err().map(|status| status.code)
    }

    #[test]
    fn a_message_is_read_back_and_anything_but_one_whole_message_is_refused() {
        let value = MetricValue { name: "m".to_owned(), value: 7, value_float: 7.0 };
        let frame = framed(&value);
        assert_eq!(decode::<MetricValue>(frame.clone()).unwrap(), value);
        assert_eq!(code::<ScaledObject>(&[0, 0, 0, 0, 0]), None, "all fields at their defaults");
        for wrong in [&frame[..frame.len() - 1], &frame[..3], b"", &[&frame[..], &frame[..]].concat()] {
            assert_eq!(code::<MetricValue>(wrong), Some(Code::InvalidArgument), "{wrong:?}");
        }
        assert_eq!(code::<ScaledObject>(&[0, 0, 0, 0, 1, 0xff]), Some(Code::InvalidArgument));
        assert_eq!(code::<ScaledObject>(&[1, 0, 0, 0, 0]), Some(Code::Unimplemented));
    }

    #[test]
    fn any_text_is_a_header_s_value() {
        assert_eq!(percent_encoded("no \"ü\"\n50 %"), "no \"%C3%BC\"%0A50 %25");
    }
}
