//! The head of a request as HTTP/1.1 writes it (RFC 9112, sections 3 and 5). Bodies are known in full, so their length is said
//! and nothing is chunked.

use std::io::Write;

use bytes::{Buf, Bytes, buf::Chain};
use http::{
    HeaderValue, Method,
    header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
};

use crate::upstream::Outgoing;

/// What a request takes besides its headers, and each of these besides name and value.
const LINE_BYTES: usize = 128;

/// Bodies up to this size are copied behind their head: that is cheaper than to say where each of the two lies.
const COPIED_BODY_BYTES: usize = 4 << 10;

/// Request line and headers, with the worker's host and the body's length in place of whatever the headers say of them; and what
/// of the body is still to follow, which is all of it or nothing.
pub(super) fn bytes(request: &Outgoing, host: &HeaderValue) -> Chain<Bytes, Bytes> {
    let copied = Some(request.body()).filter(|body| body.len() <= COPIED_BODY_BYTES);
    let mut head = head(request, host, copied.map_or(0, Bytes::len));
    let Some(body) = copied else { return Bytes::from(head).chain(request.body().clone()) };
    head.extend_from_slice(body);
    Bytes::from(head).chain(Bytes::new())
}

fn head(request: &Outgoing, host: &HeaderValue, more_bytes: usize) -> Vec<u8> {
    let headers = request.headers();
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let mut head = Vec::with_capacity(bytes + target.len() + host.len() + LINE_BYTES + more_bytes);
    for part in [request.method().as_str(), " ", target, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    field(&mut head, HOST.as_str(), host);
    for (name, value) in headers {
        if ![HOST, CONTENT_LENGTH, TRANSFER_ENCODING].contains(name) {
            field(&mut head, name.as_str(), value);
        }
    }
    let length = request.body().len();
    // RFC 9110, section 8.6: said where a body has a meaning, be it empty.
    if length > 0 || [Method::POST, Method::PUT, Method::PATCH].contains(request.method()) {
        // Writing to memory does not fail.
        let _ = write!(head, "{CONTENT_LENGTH}: {length}\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head
}

/// A header's value has no line end by its type.
fn field(head: &mut Vec<u8>, name: &str, value: &HeaderValue) {
    for part in [name.as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
        head.extend_from_slice(part);
    }
}
