//! Which headers cross the gateway. End-to-end headers pass untouched, order and duplicates kept; hop-by-hop ones
//! (RFC 9110 §7.6.1), and every header that `Connection` names, stay on their own hop. Beside that how large a request's head may
//! be, and the project's own names, as values that are not parsed at each use.

use http::{
    HeaderMap, HeaderName,
    header::{CONNECTION, EXPECT, HOST},
};
use keyway_wire::headers as names;

use crate::{
    error::Error,
    limits::{MAX_HEAD_BYTES, MAX_HEAD_FIELDS, MAX_URI_BYTES},
};

/// [`names::REQUEST_ID`].
pub const REQUEST_ID: HeaderName = HeaderName::from_static(names::REQUEST_ID);
/// [`names::WORKER`].
pub const WORKER: HeaderName = HeaderName::from_static(names::WORKER);
/// [`names::REASON`].
pub const REASON: HeaderName = HeaderName::from_static(names::REASON);
/// [`names::MATCHED_TOKENS`].
pub const MATCHED_TOKENS: HeaderName = HeaderName::from_static(names::MATCHED_TOKENS);
/// [`names::DATA_PARALLEL_RANK`].
pub const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static(names::DATA_PARALLEL_RANK);

/// Headers that the gateway adds to a request or an answer at most, to make room for them once.
pub const ADDED_MAX: usize = 6;

fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            // Not registered, but sent.
            | "keep-alive"
            | "proxy-connection"
    )
}

/// What else must not be forwarded, because `Connection` names it.
pub fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let lists = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).filter_map(|name| name.trim().parse().ok()).collect()
}

/// Removes what must not be forwarded, in either direction.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Mostly none is there.
    let mut gone: Vec<HeaderName> = headers.keys().filter(|name| is_hop_by_hop(name)).cloned().collect();
    if gone.contains(&CONNECTION) {
        gone.extend(named_by_connection(headers));
    }
    for name in gone {
        headers.remove(name);
    }
}

/// Whether a client's header of this name goes on to a worker, unless `Connection` names it: besides hop-by-hop ones, `Host` (the
/// worker's own is set) and `Expect` (the gateway has answered it by reading the body) do not.
pub fn is_for_worker(name: &HeaderName) -> bool {
    name != HOST && name != EXPECT && !is_hop_by_hop(name)
}

/// Whether a request's head is within the limits. It is counted as HTTP/1.1 writes it, whichever protocol it came by: so it is
/// written for the worker.
pub fn bounded<B>(request: &http::Request<B>) -> Result<(), Error> {
    const AROUND: usize = "  HTTP/1.1\r\n\r\n".len();
    let (uri, headers) = (request.uri(), request.headers());
    let target = uri.path_and_query().map_or(0, |path| path.as_str().len());
    if target > MAX_URI_BYTES {
        return Err(Error::UriTooLong { limit_bytes: MAX_URI_BYTES });
    }
    let fields = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len());
    let line =
        request.method().as_str().len() + target + uri.authority().map_or(0, |host| host.as_str().len());
    if headers.len() > MAX_HEAD_FIELDS || line + AROUND + fields.sum::<usize>() > MAX_HEAD_BYTES {
        return Err(Error::HeadTooLarge { limit_bytes: MAX_HEAD_BYTES, limit_fields: MAX_HEAD_FIELDS });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn to_worker(headers: &HeaderMap) -> Vec<(&str, &str)> {
        let named = named_by_connection(headers);
        let passed = headers.iter().filter(|(name, _)| is_for_worker(name) && !named.contains(name));
        passed.map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect()
    }

    proptest! {
        #[test]
        fn no_header_that_connection_names_survives(names in prop::collection::vec("[a-z]{1,8}", 0..6), kept in "x-[a-z]{3,8}") {
            prop_assume!(!names.contains(&kept));
            let mut headers = HeaderMap::new();
            headers.append(CONNECTION, HeaderValue::from_str(&names.join(" , ")).unwrap());
            for name in names.iter().chain([&kept]) {
                headers.append(HeaderName::try_from(name.as_str()).unwrap(), HeaderValue::from_static("1"));
            }
            prop_assert_eq!(to_worker(&headers), [(kept.as_str(), "1")]);
            strip_hop_by_hop(&mut headers);
            prop_assert_eq!(headers.len(), 1);
            prop_assert!(headers.contains_key(&kept));
        }
    }

    #[test]
    fn end_to_end_headers_keep_order_and_duplicates() {
        let mut headers = HeaderMap::new();
        for value in ["b", "a"] {
            headers.append("x-many", HeaderValue::from_static(value));
        }
        headers.append("te", HeaderValue::from_static("trailers"));
        headers.append("keep-alive", HeaderValue::from_static("5"));
        headers.append("host", HeaderValue::from_static("gateway"));
        headers.append("expect", HeaderValue::from_static("100-continue"));
        assert_eq!(to_worker(&headers), [("x-many", "b"), ("x-many", "a")]);
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["expect", "host", "x-many"]);
    }
}
