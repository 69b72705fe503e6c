//! Which headers cross the gateway. End-to-end headers pass untouched, order and duplicates kept; hop-by-hop ones
//! (RFC 9110 §7.6.1), and every header that `Connection` names, stay on their own hop.

use http::{
    HeaderMap, HeaderName,
    header::{
        CONNECTION, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING,
        UPGRADE,
    },
};

const HOP_BY_HOP: [HeaderName; 7] =
    [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
const HOP_BY_HOP_UNREGISTERED: [&str; 2] = ["keep-alive", "proxy-connection"];

/// Removes what must not be forwarded, in either direction.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP_UNREGISTERED {
        headers.remove(name);
    }
}

/// Prepares a client's headers for a worker: besides hop-by-hop ones, `Host` (the worker's own is set) and
/// `Expect` (the gateway has answered it by reading the body) go.
pub fn for_worker(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    headers.remove(HOST);
    headers.remove(EXPECT);
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_header_that_connection_names_survives(names in prop::collection::vec("[a-z]{1,8}", 0..6), kept in "x-[a-z]{3,8}") {
            prop_assume!(!names.contains(&kept));
            let mut headers = HeaderMap::new();
            headers.append(CONNECTION, HeaderValue::from_str(&names.join(" , ")).unwrap());
            for name in names.iter().chain([&kept]) {
                headers.append(HeaderName::try_from(name.as_str()).unwrap(), HeaderValue::from_static("1"));
            }
            for_worker(&mut headers);
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
        for_worker(&mut headers);
        let left: Vec<_> = headers.iter().map(|(n, v)| (n.as_str(), v.to_str().unwrap())).collect();
        assert_eq!(left, [("x-many", "b"), ("x-many", "a")]);
    }
}
