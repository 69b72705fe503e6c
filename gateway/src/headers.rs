//! Which headers cross the gateway. End-to-end headers pass untouched, order and duplicates kept; hop-by-hop
//! ones (RFC 9110 §7.6.1), and every header that `Connection` names, stay on their own hop. Beside that how
//! large a request's head may be, and the project's own names, as values that are not parsed at each use.

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONNECTION, COOKIE, EXPECT, HOST},
};
use keyway_wire::headers as names;
use smallvec::SmallVec;

use crate::{
    error::Error,
    limits::{MAX_HEAD_BYTES, MAX_HEAD_FIELDS, MAX_URI_BYTES},
};

/// [`names::REQUEST_ID`]: identifies a request; the client's own value is kept.
pub const REQUEST_ID: HeaderName = HeaderName::from_static(names::REQUEST_ID);
/// [`names::ANTHROPIC_REQUEST_ID`]: the same, where Anthropic's clients look for it.
pub const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static(names::ANTHROPIC_REQUEST_ID);
/// [`names::WORKER`]: which worker answered, where answers may say so.
pub const WORKER: HeaderName = HeaderName::from_static(names::WORKER);
/// [`names::REASON`]: why that worker was chosen, where answers may say so.
pub const REASON: HeaderName = HeaderName::from_static(names::REASON);
/// [`names::MATCHED_TOKENS`]: prompt tokens that were expected in that worker's cache.
pub const MATCHED_TOKENS: HeaderName = HeaderName::from_static(names::MATCHED_TOKENS);
/// [`names::MODEL`]: which model a request went to, where its client named another.
pub const MODEL: HeaderName = HeaderName::from_static(names::MODEL);
/// [`names::DATA_PARALLEL_RANK`]: which engine behind a worker's address takes the request.
pub const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static(names::DATA_PARALLEL_RANK);
/// [`names::BUDGET_LEFT`]: what is left of a tenant's budgets, once it is warned of them.
pub const BUDGET_LEFT: HeaderName = HeaderName::from_static(names::BUDGET_LEFT);

/// [`names::PRIORITY`]: a request's place among those that wait.
pub const PRIORITY: HeaderName = HeaderName::from_static(names::PRIORITY);
/// [`names::TTFT_OBJECTIVE`]: the time to first token that a request wants, in milliseconds.
pub const TTFT_OBJECTIVE: HeaderName = HeaderName::from_static(names::TTFT_OBJECTIVE);

/// Headers that the gateway adds to a request at most, to make room for them once.
pub const ADDED_MAX: usize = 8;
/// Headers that it adds to most answers: the request's id. Room for all that it may add would take a table of
/// twice the size, beyond what an allocator has at hand.
pub const ADDED_MOSTLY: usize = 1;

/// Whether a client speaks Anthropic's API: each of its requests has this header.
pub fn of_anthropics_client(headers: &HeaderMap) -> bool {
    headers.contains_key(names::ANTHROPIC_VERSION)
}

/// Whether headers of this name stay on their hop, whatever `Connection` names.
pub fn is_hop_by_hop(name: &HeaderName) -> bool {
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
    // As bytes: a name beside one that is no text counts all the same.
    let names = headers.get_all(CONNECTION).iter().flat_map(|list| list.as_bytes().split(|b| *b == b','));
    // What most of them say is left out in any case.
    let names = names.map(<[u8]>::trim_ascii).filter(|name| !name.eq_ignore_ascii_case(b"keep-alive"));
    names.filter_map(|name| HeaderName::from_bytes(name).ok()).collect()
}

/// Removes what must not be forwarded.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Mostly none is there.
    let mut gone: SmallVec<[HeaderName; 4]> =
        headers.keys().filter(|name| is_hop_by_hop(name)).cloned().collect();
    if gone.contains(&CONNECTION) {
        gone.extend(named_by_connection(headers));
    }
    for name in gone {
        headers.remove(name);
    }
}

/// Whether a client's header of this name goes on to a worker, unless `Connection` names it: besides
/// hop-by-hop ones, `Host` (the worker's own is set) and `Expect` (the gateway has answered it by reading the
/// body) do not.
pub fn is_for_worker(name: &HeaderName) -> bool {
    name != HOST && name != EXPECT && !is_hop_by_hop(name)
}

/// A request's cookies as one field, where they are several: HTTP/2 clients split theirs, and who speaks
/// HTTP/1.1 reads one (RFC 9113, section 8.2.3).
pub fn whole_cookie(headers: &HeaderMap) -> Option<HeaderValue> {
    // Mostly no name is there twice.
    if headers.len() == headers.keys_len() {
        return None;
    }
    let mut crumbs = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes);
    let (first, second) = (crumbs.next()?, crumbs.next()?);
    let whole =
        crumbs.fold([first, second].join(&b"; "[..]), |whole, crumb| [&whole, crumb].join(&b"; "[..]));
    // Valid values joined by one are one.
    HeaderValue::from_maybe_shared(bytes::Bytes::from(whole)).ok()
}

/// Whether a request's head is within the limits. It is counted as HTTP/1.1 writes it, whichever protocol it
/// came by: so it is written for the worker.
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
    use proptest::prelude::*;

    use super::*;

    fn to_worker(headers: &HeaderMap) -> Vec<(String, String)> {
        let named = named_by_connection(headers);
        let passed = headers.iter().filter(|(name, _)| is_for_worker(name) && !named.contains(name));
        passed.map(pair).collect()
    }

    fn pair((name, value): (&HeaderName, &HeaderValue)) -> (String, String) {
        (name.to_string(), value.to_str().unwrap().to_owned())
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
            prop_assert_eq!(to_worker(&headers), [(kept.clone(), "1".to_owned())]);
            strip_hop_by_hop(&mut headers);
            prop_assert_eq!(headers.len(), 1);
            prop_assert!(headers.contains_key(&kept));
        }
    }

    /// Those that name what concerns one hop alone, whoever sends them.
    const OF_ONE_HOP: [&str; 9] = [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];

    /// A name in either case, with the blanks and the rubbish beside it that senders put there.
    fn listed(name: &str, form: u8) -> Vec<u8> {
        match form % 4 {
            0 => name.as_bytes().to_vec(),
            1 => format!(" \t{} ", name.to_ascii_uppercase()).into_bytes(),
            2 => [name.as_bytes(), b", \xff"].concat(),
            _ => format!(",, close,{name}").into_bytes(),
        }
    }

    fn values(headers: &HeaderMap, name: &str) -> Vec<HeaderValue> {
        headers.get_all(name).iter().cloned().collect()
    }

    proptest! {
        #[test]
        fn what_concerns_one_hop_goes_and_all_else_stays_as_it_was(
            end_to_end in prop::collection::vec(("x-[a-d]", "[ -~]{0,6}"), 0..16),
            one_hop in prop::collection::vec(prop::sample::select(OF_ONE_HOP.to_vec()), 0..6),
            lists in prop::collection::vec(("y-[a-d]", any::<u8>()), 0..4),
            named in prop::collection::vec("y-[a-d]", 0..8),
        ) {
            let mut headers = HeaderMap::new();
            for (name, value) in &end_to_end {
                let name = HeaderName::try_from(name.as_str()).unwrap();
                headers.append(name, HeaderValue::from_str(value).unwrap());
            }
            let sent = headers.clone();
            for name in &named {
                headers.append(HeaderName::try_from(name.as_str()).unwrap(), HeaderValue::from_static("1"));
            }
            for name in one_hop {
                headers.append(HeaderName::from_static(name), HeaderValue::from_static("x"));
            }
            for (name, form) in &lists {
                headers.append(CONNECTION, HeaderValue::from_bytes(&listed(name, *form)).unwrap());
            }
            let to_worker = to_worker(&headers);
            strip_hop_by_hop(&mut headers);
            // What a worker is sent is the same, in the order in which it came.
            let of_sent: Vec<_> = to_worker.iter().filter(|(name, _)| sent.contains_key(name)).cloned().collect();
            prop_assert_eq!(of_sent, sent.iter().map(pair).collect::<Vec<_>>());
            let (mut passed, mut stripped) = (to_worker, headers.iter().map(pair).collect::<Vec<_>>());
            passed.sort_unstable();
            stripped.sort_unstable();
            prop_assert_eq!(passed, stripped);
            for name in OF_ONE_HOP {
                prop_assert!(!headers.contains_key(name), "{name}");
            }
            for (name, _) in &lists {
                prop_assert!(!headers.contains_key(name), "{name}");
            }
            for name in sent.keys() {
                prop_assert_eq!(values(&headers, name.as_str()), values(&sent, name.as_str()));
            }
            let unlisted = named.iter().filter(|name| lists.iter().all(|(listed, _)| listed != *name)).count();
            prop_assert_eq!(headers.len(), sent.len() + unlisted);
        }
    }

    proptest! {
        #[test]
        fn several_cookies_are_joined_in_their_order(crumbs in prop::collection::vec("[!-~ ]{0,9}", 0..6)) {
            let mut headers = HeaderMap::new();
            for crumb in &crumbs {
                headers.append(COOKIE, HeaderValue::from_str(crumb).unwrap());
                headers.append("x-between", HeaderValue::from_static("1"));
            }
            let whole = (crumbs.len() > 1).then(|| HeaderValue::from_str(&crumbs.join("; ")).unwrap());
            prop_assert_eq!(whole_cookie(&headers), whole);
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
        let many = |value: &str| ("x-many".to_owned(), value.to_owned());
        assert_eq!(to_worker(&headers), [many("b"), many("a")]);
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["expect", "host", "x-many"]);
    }
}
