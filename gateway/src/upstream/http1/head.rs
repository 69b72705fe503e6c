//! The head of an answer, and what it says of the body's end and of the connection (RFC 9112, sections 4 to 6 and 9). What two
//! readers could take for two things is refused: several lengths, a length beside chunks, codings that nobody here undoes.

use std::{mem::MaybeUninit, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING},
};
use httparse::ParserConfig;
use hyper::ext::ReasonPhrase;
use smallvec::SmallVec;

use super::{Http1Error, body::Body, chunked::Chunked};
use crate::{
    headers::ADDED_MAX,
    limits::{POOL_IDLE_MARGIN, POOL_IDLE_TIMEOUT},
    trailers,
    upstream::interim::Interim,
};

/// Headers of an answer at most.
const MAX_HEADERS: usize = 100;

/// What a head says.
pub(super) struct Head {
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
        let Some((response, is_1_1)) = parse_one(read)? else { return Ok(None) };
        match response.status() {
            StatusCode::SWITCHING_PROTOCOLS => return Err(Http1Error::Malformed("it switches protocols")),
            status if status.is_informational() => {
                if !interim.may_come(before - read.len()) {
                    return Err(Http1Error::Malformed("too many interim answers come before it"));
                }
            }
            _ => return judge(response, method, is_1_1).map(Some),
        }
    }
}

fn parse_one(read: &mut BytesMut) -> Result<Option<(http::Response<()>, bool)>, Http1Error> {
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
    // Where names and values lie; they are cut out of the bytes once these are nobody else's.
    let start = read.as_ptr() as usize;
    let at = |part: &[u8]| (part.as_ptr() as usize - start, part.len());
    let headers = head.headers.iter();
    let places: SmallVec<[_; 16]> =
        headers.map(|header| (at(header.name.as_bytes()), at(header.value))).collect();
    let bytes = read.split_to(length).freeze();
    let mut response = http::Response::new(());
    *response.status_mut() = status;
    if let (false, Ok(reason)) = (reason.is_empty(), ReasonPhrase::try_from(reason)) {
        response.extensions_mut().insert(reason);
    }
    let headers = response.headers_mut();
    headers.reserve(places.len() + ADDED_MAX);
    for ((name, name_length), (value, value_length)) in places {
        let name = HeaderName::from_bytes(&bytes[name..name + name_length]);
        let value = HeaderValue::from_maybe_shared(bytes.slice(value..value + value_length));
        let (Ok(name), Ok(value)) = (name, value) else { return Err(Http1Error::Malformed("a header")) };
        headers.append(name, value);
    }
    Ok(Some((response, is_1_1)))
}

fn judge(mut response: http::Response<()>, method: &Method, is_1_1: bool) -> Result<Head, Http1Error> {
    let (body, delimited) = body_of(&mut response, method, is_1_1)?;
    let keep_alive = delimited && stays_open(response.headers(), is_1_1);
    let lease = lease(response.headers());
    let drops_trailers = matches!(body, Body::Chunked(_)) && trailers::are_of_one_hop(response.headers());
    Ok(Head { response, body, keep_alive, lease, drops_trailers })
}

/// Who says after how long it closes idle connections (`Keep-Alive: timeout=5`) is not met at its door.
fn lease(headers: &HeaderMap) -> Duration {
    const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
    // It has no number of its own among headers: to look through a few is less than to hash it.
    if !headers.keys().any(|name| name == KEEP_ALIVE) {
        return POOL_IDLE_TIMEOUT;
    }
    let seconds = |token: &[u8]| {
        let (name, value) = str::from_utf8(token).ok()?.split_once('=')?;
        let value = value.trim().trim_matches('"').parse().ok();
        value.filter(|_| name.trim().eq_ignore_ascii_case("timeout"))
    };
    let said = tokens(headers, KEEP_ALIVE).filter_map(seconds).min().map(Duration::from_secs);
    said.map_or(POOL_IDLE_TIMEOUT, |said| said.saturating_sub(POOL_IDLE_MARGIN).min(POOL_IDLE_TIMEOUT))
}

/// The body, and whether it ends before the connection does. What is said of a body that does not come must
/// be clear as well: clients are told it.
fn body_of(
    response: &mut http::Response<()>,
    method: &Method,
    is_1_1: bool,
) -> Result<(Body, bool), Http1Error> {
    let status = response.status();
    let bodyless =
        status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED || method == Method::HEAD;
    let headers = response.headers_mut();
    if headers.contains_key(TRANSFER_ENCODING) {
        if headers.contains_key(CONTENT_LENGTH) || !is_1_1 {
            return Err(Http1Error::Malformed("it has a transfer coding beside a length, or in HTTP/1.0"));
        }
        let mut codings = tokens(headers, TRANSFER_ENCODING);
        let chunked = codings.next().is_some_and(|coding| coding.eq_ignore_ascii_case(b"chunked"));
        if !chunked || codings.next().is_some() {
            return Err(Http1Error::Malformed("it has a transfer coding besides chunks"));
        }
        // Whoever says that a 204 has a body may send it: it must not be taken for the next answer.
        let body = if bodyless { Body::Ended } else { Body::Chunked(Chunked::default()) };
        return Ok((body, status != StatusCode::NO_CONTENT));
    }
    let (length, times) = length(headers)?;
    if let Some(length) = length.filter(|_| times > 1) {
        // Clients are told it once.
        headers.insert(CONTENT_LENGTH, length.into());
    }
    if bodyless {
        return Ok((Body::Ended, status != StatusCode::NO_CONTENT || length.unwrap_or(0) == 0));
    }
    Ok((length.map_or(Body::UntilClosed, Body::of_length), length.is_some()))
}

/// The body's length, and how often it is said: several times counts if it is always the same (RFC 9110, section 8.6).
fn length(headers: &HeaderMap) -> Result<(Option<u64>, usize), Http1Error> {
    let (mut length, mut times) = (None, 0);
    for token in tokens(headers, CONTENT_LENGTH) {
        let said = number(token);
        if said.is_none() || length.is_some_and(|length| Some(length) != said) {
            return Err(Http1Error::Malformed("its length"));
        }
        (length, times) = (said, times + 1);
    }
    Ok((length, times))
}

/// A number of digits alone.
fn number(digits: &[u8]) -> Option<u64> {
    let digit = |number: u64, byte: &u8| {
        let digit = char::from(*byte).to_digit(10)?;
        number.checked_mul(10)?.checked_add(digit.into())
    };
    digits.iter().try_fold(0, digit).filter(|_| !digits.is_empty())
}

/// RFC 9112, section 9.3; `close` counts wherever it stands.
fn stays_open(headers: &HeaderMap, is_1_1: bool) -> bool {
    let says = |option: &[u8]| tokens(headers, CONNECTION).any(|token| token.eq_ignore_ascii_case(option));
    !says(b"close") && (is_1_1 || says(b"keep-alive"))
}

/// The members of a header that is a list, in all of its lines.
fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
    lines.flat_map(|line| line.split(|byte| *byte == b',').map(<[u8]>::trim_ascii))
}
