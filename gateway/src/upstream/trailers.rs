//! What may follow an answer's body: fields that say something of it, such as a checksum. Those that a reader
//! needs before the body, or that its head alone may say, stay behind (RFC 9110, section 6.5.1), as do the
//! fields of one hop. A client's trailers go nowhere: bodies of requests are sent on with their length.

use http::{
    HeaderMap, HeaderName,
    header::{CONTENT_LENGTH, HOST},
};

use crate::headers::strip_hop_by_hop;

/// Fields that frame a message, name who is spoken to, show or ask for credentials, say how an answer is to
/// be kept or its content read, or send a client elsewhere; and this gateway's own.
const OF_HEADS: [&str; 37] = [
    "accept-encoding",
    "age",
    "allow",
    "authentication-info",
    "authorization",
    "cache-control",
    "clear-site-data",
    "content-disposition",
    "content-encoding",
    "content-length",
    "content-location",
    "content-range",
    "content-security-policy",
    "content-type",
    "cookie",
    "date",
    "expect",
    "expires",
    "forwarded",
    "host",
    "link",
    "location",
    "max-forwards",
    "pragma",
    "range",
    "refresh",
    "retry-after",
    "set-cookie",
    "strict-transport-security",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "x-api-key",
    "x-real-ip",
    "x-request-id",
    "x-data-parallel-rank",
];

/// Families of such fields.
const FAMILIES: [&str; 5] = ["access-control-", "if-", "proxy-", "x-forwarded-", "x-keyway-"];

/// Takes out what must not follow a body.
pub fn filter(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    let of_heads = |name: &HeaderName| {
        let name = name.as_str();
        OF_HEADS.contains(&name) || FAMILIES.iter().any(|family| name.starts_with(family))
    };
    let gone: Vec<HeaderName> = trailers.keys().filter(|name| of_heads(name)).cloned().collect();
    for name in gone {
        trailers.remove(name);
    }
}

/// Whether a request over HTTP/2 is malformed by its trailers (RFC 9113, section 8.1): they frame it or name
/// its server, or there is none besides pseudo-header fields, which may not be there and are not shown here.
pub fn are_malformed(trailers: &HeaderMap) -> bool {
    trailers.is_empty() || trailers.contains_key(CONTENT_LENGTH) || trailers.contains_key(HOST)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn only_what_says_something_of_the_body_follows_it(
            kept in prop::collection::vec("(x-sum|digest|server-timing|grpc-status)", 0..4),
            of_heads in prop::collection::vec(prop::sample::select(OF_HEADS.to_vec()), 0..6),
            families in prop::collection::vec((prop::sample::select(FAMILIES.to_vec()), "[a-z]{1,5}"), 0..4),
            of_hop in prop::collection::vec(prop::sample::select(vec!["te", "connection", "transfer-encoding", "trailer", "keep-alive"]), 0..3),
        ) {
            let mut trailers = HeaderMap::new();
            let families: Vec<String> = families.iter().map(|(family, name)| format!("{family}{name}")).collect();
            let others = of_heads.iter().chain(&of_hop).map(|name| (*name).to_owned()).chain(families);
            for name in kept.iter().cloned().chain(others) {
                trailers.append(HeaderName::try_from(name).unwrap(), HeaderValue::from_static("1"));
            }
            filter(&mut trailers);
            prop_assert_eq!(trailers.len(), kept.len(), "{:?}", trailers);
            prop_assert!(kept.iter().all(|name| trailers.contains_key(name)));
        }
    }
}
