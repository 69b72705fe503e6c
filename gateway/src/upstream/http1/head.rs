//! The head of an answer, and what it says of the body's end and of the connection (RFC 9112, sections 4 to 6
//! and 9). What two readers could take for two things is refused: several lengths, a length beside chunks,
//! codings that are not undone here.

use std::{mem::MaybeUninit, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{HeaderName, HeaderValue, Method, StatusCode};
use httparse::ParserConfig;
use hyper::ext::ReasonPhrase;
use smallvec::SmallVec;

use super::{Http1Error, body::Body, hop::Hop};
use crate::{headers::ADDED_MOSTLY, upstream::interim::Interim};

/// Headers of an answer at most.
const MAX_HEADERS: usize = 100;

/// What a head says.
pub(super) struct Head {
    /// Without the fields of its hop.
    pub(super) response: http::Response<()>,
    pub(super) body: Body,
    pub(super) keep_alive: bool,
    /// For how long the connection may wait for the next request.
    pub(super) lease: Duration,
    /// Whether nothing may follow the body, because `Connection` names fields of its hop.
    pub(super) drops_trailers: bool,
}

/// Takes a whole head from what was read, interim ones (1xx) left out; nothing while there is none.
pub(super) fn parse(
    read: &mut BytesMut,
    method: &Method,
    interim: &mut Interim,
) -> Result<Option<Head>, Http1Error> {
    loop {
        let before = read.len();
        let Some((response, hop, is_1_1)) = parse_one(read)? else { return Ok(None) };
        match response.status() {
            StatusCode::SWITCHING_PROTOCOLS => return Err(Http1Error::Malformed("it switches protocols")),
            status if status.is_informational() => {
                if !interim.may_come(before - read.len()) {
                    return Err(Http1Error::Malformed("too many interim answers come before it"));
                }
            }
            _ => return judge(response, &hop, method, is_1_1).map(Some),
        }
    }
}

fn parse_one(read: &mut BytesMut) -> Result<Option<(http::Response<()>, Hop, bool)>, Http1Error> {
    if read.is_empty() {
        return Ok(None);
    }
    let mut room = [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let mut head = httparse::Response::new(&mut []);
    let parsed = ParserConfig::default().parse_response_with_uninit_headers(&mut head, read, &mut room);
    let malformed = |_| Http1Error::Malformed("its head is not HTTP/1.1");
    let httparse::Status::Complete(length) = parsed.map_err(malformed)? else { return Ok(None) };
    let status =
        StatusCode::from_u16(head.code.unwrap_or(0)).map_err(|_| Http1Error::Malformed("its status"))?;
    let reason = head.reason.filter(|reason| status.canonical_reason() != Some(reason)).unwrap_or_default();
    let reason = Bytes::copy_from_slice(reason.as_bytes());
    let is_1_1 = head.version == Some(1);
    // Where names and values lie; they are cut out of the bytes once these are split off.
    let start = read.as_ptr() as usize;
    let at = |part: &[u8]| (part.as_ptr() as usize - start, part.len());
    let headers = head.headers.iter();
    let mut places = SmallVec::<[_; 16]>::new();
    places.extend(headers.map(|header| (at(header.name.as_bytes()), at(header.value))));
    let bytes = read.split_to(length).freeze();
    let mut response = http::Response::new(());
    *response.status_mut() = status;
    if let (false, Ok(reason)) = (reason.is_empty(), ReasonPhrase::try_from(reason)) {
        response.extensions_mut().insert(reason);
    }
    let headers = response.headers_mut();
    headers.reserve(places.len() + ADDED_MOSTLY);
    let mut hop = Hop::default();
    for &((name, name_length), (value, value_length)) in &places {
        let name = HeaderName::from_bytes(&bytes[name..name + name_length]);
        let value = HeaderValue::from_maybe_shared(bytes.slice(value..value + value_length));
        let (Ok(name), Ok(value)) = (name, value) else { return Err(Http1Error::Malformed("a header")) };
        if hop.passes(&name, value.as_bytes()) {
            headers.append(name, value);
        }
    }
    Ok(Some((response, hop, is_1_1)))
}

fn judge(
    mut response: http::Response<()>,
    hop: &Hop,
    method: &Method,
    is_1_1: bool,
) -> Result<Head, Http1Error> {
    let no_content = response.status() == StatusCode::NO_CONTENT;
    let bodyless = no_content || response.status() == StatusCode::NOT_MODIFIED || method == Method::HEAD;
    let (body, delimited) = hop.body(is_1_1, bodyless, no_content)?;
    hop.settle(response.headers_mut());
    let keep_alive = delimited && hop.stays_open(is_1_1);
    let drops_trailers = matches!(body, Body::Chunked(_)) && hop.drops_trailers();
    Ok(Head { response, body, keep_alive, lease: hop.lease(), drops_trailers })
}
