//! The fields of an answer's head that concern its own hop (RFC 9110, section 7.6.1): they are read while the
//! head is taken apart, and go no further. Beside them the body's length, which goes on and frames the body.

use std::time::Duration;

use http::{
    HeaderMap, HeaderName,
    header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING},
};

use super::{Http1Error, body::Body, chunked::Chunked};
use crate::{
    headers::is_hop_by_hop,
    limits::{POOL_IDLE_MARGIN, POOL_IDLE_TIMEOUT},
};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// What an answer's own hop says: of its connection, its codings and its length.
#[derive(Debug, Default)]
pub(super) struct Hop {
    closes: bool,
    keeps_alive: bool,
    /// Other fields that `Connection` names.
    named: Vec<HeaderName>,
    /// `Connection` names something besides what it says of itself, be it no field's name.
    names_others: bool,
    codings: Codings,
    length: Length,
    /// After how long an idle connection is closed, as the worker says.
    timeout: Option<Duration>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Codings {
    #[default]
    None,
    Chunked,
    Others,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Length {
    #[default]
    Unsaid,
    /// How many bytes, and how often that is said.
    Said(u64, u32),
    Malformed,
}

impl Hop {
    /// Reads a field; whether it is one that goes on.
    pub(super) fn passes(&mut self, name: &HeaderName, value: &[u8]) -> bool {
        if name == CONTENT_LENGTH {
            members(value).for_each(|member| self.length.hear(member));
            return true;
        }
        if !is_hop_by_hop(name) {
            return true;
        }
        if name == CONNECTION {
            members(value).for_each(|option| self.option(option));
        } else if name == TRANSFER_ENCODING {
            members(value).for_each(|coding| self.codings.hear(coding));
        } else if name == KEEP_ALIVE {
            let timeout = members(value).filter_map(timeout).min();
            self.timeout = self.timeout.into_iter().chain(timeout).min();
        }
        false
    }

    /// `close` and `keep-alive` count wherever they stand (RFC 9112, section 9.3).
    fn option(&mut self, option: &[u8]) {
        if option.eq_ignore_ascii_case(b"keep-alive") {
            self.keeps_alive = true;
            return;
        }
        let closes = option.eq_ignore_ascii_case(b"close");
        self.closes |= closes;
        self.names_others |= !closes && !option.is_empty();
        // As bytes: a name beside one that is no text counts all the same.
        self.named.extend(HeaderName::from_bytes(option));
    }

    /// Takes out the fields that `Connection` names, and leaves one of several equal lengths.
    pub(super) fn settle(&self, headers: &mut HeaderMap) {
        if let Length::Said(bytes, 2..) = self.length {
            headers.insert(CONTENT_LENGTH, bytes.into());
        }
        for name in &self.named {
            headers.remove(name);
        }
    }

    /// The body, and whether it ends before the connection does; `bodyless` by what was asked, or by its
    /// status. What is said of a body that does not come must be clear as well: clients are told it.
    pub(super) fn body(
        &self,
        is_1_1: bool,
        bodyless: bool,
        no_content: bool,
    ) -> Result<(Body, bool), Http1Error> {
        match (self.codings, self.length) {
            (Codings::None, Length::Malformed) => Err(Http1Error::Malformed("its length")),
            (Codings::None, length) => {
                let bytes = length.bytes();
                if bodyless {
                    return Ok((Body::Ended, !no_content || bytes.unwrap_or(0) == 0));
                }
                Ok((bytes.map_or(Body::UntilClosed, Body::of_length), bytes.is_some()))
            }
            (_, length) if length != Length::Unsaid || !is_1_1 => {
                Err(Http1Error::Malformed("it has a transfer coding beside a length, or in HTTP/1.0"))
            }
            (Codings::Others, _) => Err(Http1Error::Malformed("it has a transfer coding besides chunks")),
            // A worker that says that a 204 has a body may send it: it must not be taken for the next answer.
            (Codings::Chunked, _) if bodyless => Ok((Body::Ended, !no_content)),
            (Codings::Chunked, _) => Ok((Body::Chunked(Chunked::default()), true)),
        }
    }

    /// Whether another request may follow (RFC 9112, section 9.3).
    pub(super) fn stays_open(&self, is_1_1: bool) -> bool {
        !self.closes && (is_1_1 || self.keeps_alive)
    }

    /// For how long the connection may wait for the next request: who says after how long it closes idle ones
    /// (`Keep-Alive: timeout=5`) is not met at its door.
    pub(super) fn lease(&self) -> Duration {
        self.timeout
            .map_or(POOL_IDLE_TIMEOUT, |said| said.saturating_sub(POOL_IDLE_MARGIN).min(POOL_IDLE_TIMEOUT))
    }

    /// Whether `Connection` names fields of this hop, besides what it says of itself. An answer's trailers
    /// may be such fields; then none of them goes on, since only few answers ever have both.
    pub(super) fn drops_trailers(&self) -> bool {
        self.names_others
    }
}

impl Codings {
    fn hear(&mut self, coding: &[u8]) {
        let first = *self == Self::None && coding.eq_ignore_ascii_case(b"chunked");
        *self = if first { Self::Chunked } else { Self::Others };
    }
}

impl Length {
    /// Several count if they are always the same (RFC 9110, section 8.6).
    fn hear(&mut self, digits: &[u8]) {
        *self = match (*self, number(digits)) {
            (Self::Unsaid, Some(bytes)) => Self::Said(bytes, 1),
            (Self::Said(bytes, times), said) if said == Some(bytes) => {
                Self::Said(bytes, times.saturating_add(1))
            }
            _ => Self::Malformed,
        };
    }

    fn bytes(self) -> Option<u64> {
        match self {
            Self::Said(bytes, _) => Some(bytes),
            Self::Unsaid | Self::Malformed => None,
        }
    }
}

/// A number of digits alone.
fn number(digits: &[u8]) -> Option<u64> {
    let digit = |number: u64, byte: &u8| {
        let digit = char::from(*byte).to_digit(10)?;
        number.checked_mul(10)?.checked_add(digit.into())
    };
    digits.iter().try_fold(0, digit).filter(|_| !digits.is_empty())
}

fn timeout(member: &[u8]) -> Option<Duration> {
    let (name, value) = str::from_utf8(member).ok()?.split_once('=')?;
    let seconds = value.trim().trim_matches('"').parse().ok();
    seconds.filter(|_| name.trim().eq_ignore_ascii_case("timeout")).map(Duration::from_secs)
}

/// The members of a field that is a list.
fn members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_connection_says_of_itself_names_no_field() {
        let names = |lists: &[&str]| {
            let mut hop = Hop::default();
            assert!(lists.iter().all(|list| !hop.passes(&CONNECTION, list.as_bytes())));
            hop.drops_trailers()
        };
        for plain in [&[][..], &["close"], &["Keep-Alive, close,,"], &[" CLOSE\t", "keep-alive"]] {
            assert!(!names(plain), "{plain:?}");
        }
        for others in [&["x-mine"][..], &["close, X-Mine"], &["close", "x-mine"], &["\u{e9}"]] {
            assert!(names(others), "{others:?}");
        }
    }

    #[test]
    fn fields_of_the_hop_go_no_further_and_those_it_names_neither() {
        let fields = [
            ("x-first", "1"),
            ("x-mine", "1"),
            ("connection", "close, X-Mine"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("proxy-authenticate", "Basic"),
            ("proxy-connection", "close"),
            ("trailer", "x-sum"),
            ("content-length", "3"),
            ("content-length", "3, 3"),
            ("x-mine-too", "1"),
        ];
        let (mut hop, mut headers) = (Hop::default(), HeaderMap::new());
        for (name, value) in fields {
            let name = HeaderName::from_static(name);
            if hop.passes(&name, value.as_bytes()) {
                headers.append(name, value.parse().unwrap());
            }
        }
        hop.settle(&mut headers);
        let mut left: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        left.sort_unstable();
        assert_eq!(left, [("content-length", &b"3"[..]), ("x-first", b"1"), ("x-mine-too", b"1")]);
        assert!(!hop.stays_open(true) && hop.drops_trailers());
    }
}
