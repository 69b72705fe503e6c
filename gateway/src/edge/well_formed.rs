//! Requests that HTTP forbids and hyper lets through: which server they are for is not said or said in two
//! ways (RFC 9112, section 3.2; RFC 9113, section 8.3.1), their body has a transfer coding besides one final
//! `chunked` (RFC 9112, section 6.1), or their method asks for the request itself. What can be seen in the
//! bytes alone is looked at in `clients/src/heads.rs`.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Version,
    header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
};

use crate::error::Error;

/// Whether a request may be read on. Its connection must be closed where it may not.
///
/// # Errors
/// What is wrong with it, as the client is told.
pub fn well_formed<B>(request: &Request<B>) -> Result<(), Error> {
    is_for_one_server(request).map_err(Error::BadHost)?;
    is_framed_once(request.version(), request.headers())?;
    // A worker would send back the key that it was sent in place of the client's.
    if request.method() == Method::TRACE {
        return Err(Error::MethodRefused("TRACE"));
    }
    Ok(())
}

/// Whether the request says clearly which server it is for. Where its target does, that counts, as RFC 9112,
/// section 3.2.2, has it: over HTTP/1.1 a `Host` must be there all the same, and over HTTP/2 it must agree.
fn is_for_one_server<B>(request: &Request<B>) -> Result<(), &'static str> {
    let (uri, version) = (request.uri(), request.version());
    let host = request.headers().get(HOST).map(HeaderValue::as_bytes);
    if is_repeated(request.headers(), &HOST) {
        return Err("Host is there twice");
    }
    if host.is_some_and(|host| !is_host_and_port(host)) {
        return Err("Host is not a name or an address with or without a port");
    }
    let authority = uri.authority().map(|authority| authority.as_str().as_bytes());
    if authority.is_some_and(|authority| !is_host_and_port(authority)) {
        return Err("the target's authority is not a name or an address with or without a port");
    }
    // The `http` crate takes an empty scheme for one.
    if uri.scheme_str().is_some_and(str::is_empty) {
        return Err("the target's scheme is empty");
    }
    match (host, authority) {
        (None, _) if version == Version::HTTP_11 => Err("Host is missing"),
        (None, None) if version >= Version::HTTP_2 => Err(":authority is missing"),
        (Some(host), Some(authority)) if version >= Version::HTTP_2 => {
            let port = if uri.scheme_str() == Some("https") { b":443" } else { &b":80"[..] };
            let bare = |name: &'_ [u8]| name.strip_suffix(port).unwrap_or(name).to_ascii_lowercase();
            // Mostly they are the same bytes.
            let agree = host == authority || bare(host) == bare(authority);
            if agree { Ok(()) } else { Err("Host differs from :authority") }
        }
        _ => Ok(()),
    }
}

/// Whether these bytes are `uri-host [ ":" port ]` (RFC 3986, section 3.2), with a host that is not empty.
fn is_host_and_port(bytes: &[u8]) -> bool {
    let port = if let Some(literal) = bytes.strip_prefix(b"[") {
        let end = memchr::memchr(b']', literal).filter(|end| is_ipv6(&literal[..*end]));
        end.map(|end| &literal[end + 1..])
    } else {
        let name = name_at(bytes);
        name.map(|name| &bytes[name..])
    };
    port.is_some_and(|port| port.is_empty() || port.strip_prefix(b":").is_some_and(is_port))
}

/// The length of a name at the beginning of these bytes: of unreserved characters, subdelimiters and
/// percent-encoded bytes. Of its labels none but the last may be empty.
fn name_at(bytes: &[u8]) -> Option<usize> {
    let (mut before, mut at) = (b'.', 0);
    while let Some(&byte) = bytes.get(at) {
        if IN_NAMES[usize::from(byte)] || byte == b'.' && before != b'.' {
            at += 1;
        } else if byte == b'%' && bytes.get(at + 1..at + 3)?.iter().all(u8::is_ascii_hexdigit) {
            at += 3;
        } else {
            break;
        }
        before = byte;
    }
    (at > 0).then_some(at)
}

fn is_name(bytes: &[u8]) -> bool {
    name_at(bytes) == Some(bytes.len())
}

/// The bytes that names are made of, besides dots and what is percent-encoded.
const IN_NAMES: [bool; 256] = {
    let (mut table, mut byte, others) = ([false; 256], 0, b"-_~!$&'()*+,;=");
    while byte < 128 {
        table[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut at = 0;
    while at < others.len() {
        table[others[at] as usize] = true;
        at += 1;
    }
    table
};

/// An address of IPv6, with or without a zone: some clients send theirs along.
fn is_ipv6(literal: &[u8]) -> bool {
    let (address, zone) = match memchr::memchr(b'%', literal) {
        Some(at) => {
            (&literal[..at], Some(literal[at + 1..].strip_prefix(b"25").unwrap_or(&literal[at + 1..])))
        }
        None => (literal, None),
    };
    let text = std::str::from_utf8(address).ok();
    text.is_some_and(|text| text.parse::<std::net::Ipv6Addr>().is_ok())
        && zone.is_none_or(|zone| !zone.contains(&b':') && is_name(zone))
}

/// The port may be empty.
fn is_port(port: &[u8]) -> bool {
    let value = port.iter().try_fold(0_u16, |value, byte| {
        let digit = char::from(*byte).to_digit(10)?;
        value.checked_mul(10)?.checked_add(u16::try_from(digit).ok()?)
    });
    value.is_some()
}

/// Whether one thing alone says where the body ends. Of several lengths over HTTP/1.1 hyper shows one.
fn is_framed_once(version: Version, headers: &HeaderMap) -> Result<(), Error> {
    let unclear = |why: &str| Err(Error::BodyUnreadable(why.to_owned()));
    if version >= Version::HTTP_2 {
        return if is_repeated(headers, &CONTENT_LENGTH) {
            unclear("it has several content-lengths")
        } else {
            Ok(())
        };
    }
    let Some(coding) = headers.get(TRANSFER_ENCODING) else { return Ok(()) };
    if is_repeated(headers, &TRANSFER_ENCODING)
        || !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")
    {
        return Err(Error::TransferCoding);
    }
    if headers.contains_key(CONTENT_LENGTH) {
        return unclear("it has both a content-length and a transfer-encoding");
    }
    Ok(())
}

/// Whether a header is there more than once.
fn is_repeated(headers: &HeaderMap, name: &HeaderName) -> bool {
    // Mostly none is.
    headers.len() > headers.keys_len() && headers.get_all(name).iter().nth(1).is_some()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(version: Version, uri: &str, fields: &[(&'static str, &[u8])]) -> Result<(), Error> {
        let mut request = Request::builder().version(version).uri(uri).body(()).unwrap();
        for (name, value) in fields {
            request.headers_mut().append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        well_formed(&request)
    }

    fn is_bad_host(result: &Result<(), Error>) -> bool {
        matches!(result, Err(Error::BadHost(_)))
    }

    const HOSTS: &[&str] = &[
        "k",
        "K",
        "a-b_c.d",
        "k.",
        "1.2.3.4",
        "1.2.3.4:80",
        "k:",
        "k:0",
        "k:65535",
        "k:00080",
        "%6b",
        "a,b",
        "[::1]",
        "[::1]:80",
        "[fe80::1%25eth0]",
        "[fe80::1%eth0]:80",
    ];
    const NO_HOSTS: &[&str] = &[
        "",
        " ",
        "a b",
        "a\tb",
        "a@b",
        "user:word@k",
        "k/",
        "k/v1",
        "http://k",
        "k?x",
        "k#x",
        "k\\x",
        "\"k\"",
        "<k>",
        "{k}",
        "k|x",
        "k^x",
        "k`x",
        "k:x",
        "k:80x",
        "k:-1",
        "k:+80",
        "k:65536",
        "k:99999999999999999999",
        "k:80:80",
        "k::80",
        ":80",
        ":",
        "k: 80",
        "k :80",
        "[::1",
        "::1]",
        "[]",
        "[::1]x",
        "[::1]80",
        "[::1]:x",
        "[g::1]",
        "[::1]]",
        "[[::1]]",
        "[1.2.3.4]",
        "::1",
        "[v1.x]",
        "[::1%]",
        "[::1%a:b]",
        "[::1%a b]",
        "k..x",
        ".",
        "..",
        ".k",
        "%",
        "%6",
        "%zz",
        "k\u{e9}",
    ];

    #[test]
    fn a_host_is_a_name_or_an_address_and_a_port() {
        for host in HOSTS {
            assert_eq!(of(Version::HTTP_11, "/", &[("host", host.as_bytes())]), Ok(()), "{host}");
        }
        for host in NO_HOSTS {
            for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
                let refused = of(version, "/", &[("host", host.as_bytes())]);
                assert!(is_bad_host(&refused), "{host:?}: {refused:?}");
            }
        }
    }

    #[test]
    fn each_request_says_once_which_server_it_is_for() {
        let one: &[(&str, &[u8])] = &[("host", b"k")];
        let other: &[(&str, &[u8])] = &[("host", b"other")];
        let two: &[(&str, &[u8])] = &[("host", b"k"), ("host", b"k")];
        let fine = [
            (Version::HTTP_10, "/", &[][..]),
            (Version::HTTP_11, "/", one),
            (Version::HTTP_11, "http://k/", one),
            // The target counts.
            (Version::HTTP_11, "http://k/", other),
            (Version::HTTP_2, "/", one),
            (Version::HTTP_2, "http://k/", &[]),
            (Version::HTTP_2, "http://k/", one),
            (Version::HTTP_2, "http://K:80/", one),
            (Version::HTTP_2, "https://k/", &[("host", b"k:443")]),
        ];
        for (version, uri, fields) in fine {
            assert_eq!(of(version, uri, fields), Ok(()), "{version:?} {uri} {fields:?}");
        }
        let refused = [
            (Version::HTTP_11, "/", &[][..]),
            (Version::HTTP_11, "http://k/", &[]),
            (Version::HTTP_11, "http://k:x/", one),
            (Version::HTTP_11, "http://user@k/", one),
            (Version::HTTP_11, "http://k/", &[("host", b"a@b")]),
            (Version::HTTP_2, "/", &[]),
            (Version::HTTP_2, "http://k/", other),
            (Version::HTTP_2, "http://k/", &[("host", b"k:443")]),
            (Version::HTTP_2, "https://k/", &[("host", b"k:80")]),
            (Version::HTTP_2, "http://user@k/", &[]),
            (Version::HTTP_2, "http://k:x/", &[]),
        ];
        for (version, uri, fields) in refused {
            let refused = of(version, uri, fields);
            assert!(is_bad_host(&refused), "{version:?} {uri} {fields:?}: {refused:?}");
        }
        for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
            for uri in ["/", "http://k/"] {
                assert!(is_bad_host(&of(version, uri, two)), "{version:?} {uri}");
            }
        }
    }

    #[test]
    fn one_final_chunked_is_the_only_transfer_coding() {
        let host: (&str, &[u8]) = ("host", b"k");
        let codings = |all: &[&'static [u8]]| {
            let fields: Vec<_> =
                all.iter().map(|coding| ("transfer-encoding", *coding)).chain([host]).collect();
            of(Version::HTTP_11, "/", &fields)
        };
        for fine in ["chunked", "CHUNKED", " chunked\t"] {
            assert_eq!(codings(&[fine.as_bytes()]), Ok(()), "{fine:?}");
        }
        for odd in [
            "",
            "gzip, chunked",
            "chunked, chunked",
            "identity, chunked",
            "identity",
            "xchunked",
            "chunked;q=1",
            ",chunked",
            "chunked,",
            "\"chunked\"",
            "chunked x",
            "chun\u{e9}ked",
        ] {
            assert_eq!(codings(&[odd.as_bytes()]), Err(Error::TransferCoding), "{odd:?}");
        }
        for two in [
            [&b"chunked"[..], b"chunked"],
            [b"gzip", b"chunked"],
            [b"", b"chunked"],
            [b"chunked", b"identity"],
        ] {
            assert_eq!(codings(&two), Err(Error::TransferCoding), "{two:?}");
        }
        let both =
            of(Version::HTTP_11, "/", &[host, ("transfer-encoding", b"chunked"), ("content-length", b"5")]);
        assert!(matches!(both, Err(Error::BodyUnreadable(_))));
        let twice = of(Version::HTTP_2, "/", &[host, ("content-length", b"5"), ("content-length", b"5")]);
        assert!(matches!(twice, Err(Error::BodyUnreadable(_))));
    }

    #[test]
    fn nobody_is_sent_his_request_back() {
        let mut request = Request::builder().method("TRACE").header(HOST, "k").body(()).unwrap();
        let refused = well_formed(&request).unwrap_err().to_answer();
        assert_eq!(
            (refused.status().as_u16(), &refused.headers()["connection"]),
            (405, &HeaderValue::from_static("close"))
        );
        assert!(refused.headers()["allow"].to_str().unwrap().contains("POST"));
        *request.method_mut() = Method::OPTIONS;
        assert_eq!(well_formed(&request), Ok(()));
    }

    proptest! {
        /// What is taken for a host is one for the `http` crate too, which names the same host and port.
        #[test]
        fn a_library_reads_the_same_host(
            host in prop_oneof!["[a-z%0-9.:@/\\[\\]?# -]{0,12}", "\\[[0-9a-f:.%]{0,12}\\](:[0-9x]{0,6})?", "[a-z.]{1,9}(:[0-9]{0,6})?"],
        ) {
            // That crate takes few names with escapes.
            if is_host_and_port(host.as_bytes()) && !host.contains('%') {
                let parsed: http::uri::Authority = host.parse().unwrap();
                prop_assert!(!parsed.host().is_empty() && parsed.as_str() == host);
                let port = host.rsplit_once(':').map(|(_, port)| port).filter(|_| !host.ends_with(']'));
                prop_assert_eq!(parsed.port_u16(), port.and_then(|port| port.parse().ok()));
            }
        }
    }
}
