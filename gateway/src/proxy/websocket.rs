//! Requests for a WebSocket (RFC 6455, section 4.2.1). Such a client takes nothing but a WebSocket for an
//! answer, so what is wrong with its request is said here, whatever a worker would say; and bytes that follow
//! a request whose WebSocket was not opened are never read as a request. Other upgrades (`h2c`, which some
//! clients offer with each request) are passed over, as RFC 9110, section 7.8, allows: what asks for them is
//! a whole request without.

use http::{
    HeaderMap, HeaderName, Method, Request, Version,
    header::{
        CONNECTION, CONTENT_LENGTH, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, TRANSFER_ENCODING, UPGRADE,
    },
};

use crate::error::Error;

/// Whether a request asks for a WebSocket; an error, if it does so wrongly.
pub fn is_asked_for<B>(request: &Request<B>) -> Result<bool, Error> {
    let headers = request.headers();
    if !lists(headers, &UPGRADE, "websocket") {
        return Ok(false);
    }
    let fault = |what| Err(Error::BadUpgrade(what));
    if request.version() != Version::HTTP_11 {
        return fault("it needs HTTP/1.1");
    }
    if request.method() != Method::GET {
        return fault("its method must be GET");
    }
    if !lists(headers, &CONNECTION, "upgrade") {
        return fault("\"Connection: Upgrade\" is missing; a proxy in between may have dropped it");
    }
    let empty = headers.get_all(CONTENT_LENGTH).iter().all(|length| length == "0");
    if !empty || headers.contains_key(TRANSFER_ENCODING) {
        return fault("it may have no body");
    }
    if only(headers, &SEC_WEBSOCKET_VERSION) != Some(b"13") {
        return Err(Error::WebSocketVersion);
    }
    if !only(headers, &SEC_WEBSOCKET_KEY).is_some_and(is_key) {
        return fault("Sec-WebSocket-Key must be 16 bytes in base64");
    }
    Ok(true)
}

/// Whether a header, in all its lines, lists this name.
pub fn lists(headers: &HeaderMap, header: &HeaderName, name: &str) -> bool {
    let lines = headers.get_all(header).iter();
    let mut names = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    names.any(|listed| listed.trim_ascii().eq_ignore_ascii_case(name.as_bytes()))
}

/// The header's value, if it is there once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none()).map(|value| value.as_bytes().trim_ascii())
}

/// Whether this is 16 bytes in base64.
fn is_key(key: &[u8]) -> bool {
    let digits = key.strip_suffix(b"==").filter(|digits| digits.len() == 22);
    let is_digit = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    digits.is_some_and(|digits| digits.iter().all(is_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: [(&str, &str); 4] = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];

    /// A good request with these headers in place of its own of those names, or beside them.
    fn asked(changed: &[(&str, &str)], beside: &[(&str, &str)]) -> Result<bool, Error> {
        let mut request = Request::get("/v1/realtime");
        let kept = GOOD.iter().filter(|(name, _)| changed.iter().all(|(other, _)| other != name));
        for (name, value) in kept.chain(changed).chain(beside) {
            request = request.header(*name, *value);
        }
        is_asked_for(&request.body(()).unwrap())
    }

    #[test]
    fn a_websocket_is_asked_for_in_any_case_and_among_others() {
        for changed in [
            &[][..],
            &[("connection", "keep-alive, UPGRADE")],
            &[("upgrade", "h2c, WebSocket")],
            &[("connection", "upgrade , close"), ("upgrade", " websocket")],
            &[("content-length", "0")],
        ] {
            assert_eq!(asked(changed, &[]), Ok(true), "{changed:?}");
        }
        assert_eq!(asked(&[], &[("connection", "keep-alive"), ("upgrade", "h2c")]), Ok(true));
    }

    #[test]
    fn what_asks_for_something_else_asks_for_none() {
        for upgrade in ["h2c", "TLS/1.3", "websockets", "x-websocket", "websocket/13", ""] {
            assert_eq!(asked(&[("upgrade", upgrade)], &[]), Ok(false), "{upgrade:?}");
        }
        assert_eq!(is_asked_for(&Request::post("/v1/chat/completions").body(()).unwrap()), Ok(false));
    }

    #[test]
    fn what_is_wrong_with_it_is_said() {
        for (changed, says) in [
            (("connection", "keep-alive"), "Connection"),
            (("sec-websocket-key", "short"), "Key"),
            (("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ="), "Key"),
            (("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZ==="), "Key"),
            (("sec-websocket-key", "dGhlIHNhbXBsZ!Bub25jZQ=="), "Key"),
            (("content-length", "2"), "body"),
            (("transfer-encoding", "chunked"), "body"),
        ] {
            let fault = asked(&[changed], &[]).unwrap_err();
            assert!(matches!(&fault, Error::BadUpgrade(what) if what.contains(says)), "{changed:?}: {fault}");
        }
        for version in ["8", "13, 8", ""] {
            assert_eq!(asked(&[("sec-websocket-version", version)], &[]), Err(Error::WebSocketVersion));
        }
        assert_eq!(asked(&[], &[("sec-websocket-version", "13")]), Err(Error::WebSocketVersion));
        assert!(asked(&[], &[("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")]).is_err());
        let (method, version) = (Method::POST, Version::HTTP_10);
        for change in [(method, Version::HTTP_11), (Method::GET, version)] {
            let mut request = Request::builder().method(change.0).version(change.1).uri("/v1/realtime");
            for (name, value) in GOOD {
                request = request.header(name, value);
            }
            assert!(matches!(is_asked_for(&request.body(()).unwrap()), Err(Error::BadUpgrade(_))));
        }
    }
}
