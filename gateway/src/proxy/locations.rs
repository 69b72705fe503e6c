//! Where answers send their client. Who builds a link from the `Host` that it saw (FastAPI's redirect of a
//! path with a slash too many) names the worker's own address, which the client may not be able to reach and
//! has no business to know: it becomes a path, which leads through the gateway again. Links to elsewhere pass
//! as they are.

use std::net::Ipv6Addr;

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{CONTENT_LOCATION, LINK, LOCATION, REFRESH},
};
use memchr::{memchr, memmem, memrchr};

use crate::config::port_of;

/// Makes paths of the links in an answer's head that name the worker at `url`.
pub fn lead_back(headers: &mut HeaderMap, url: &Uri) {
    for (name, value) in headers.iter_mut() {
        let Some(links) = links_in(name) else { continue };
        let led_back = links(value.as_bytes(), &Home::of(url));
        if let Some(Ok(led_back)) = led_back.map(|bytes| HeaderValue::from_bytes(&bytes)) {
            *value = led_back;
        }
    }
}

/// Makes paths of the links in a value; `None` where there are none to be made.
type Links = fn(&[u8], &Home<'_>) -> Option<Vec<u8>>;

/// Where links stand in headers of this name, if it is one that has some.
fn links_in(name: &HeaderName) -> Option<Links> {
    match name {
        name if name == LOCATION || name == CONTENT_LOCATION => Some(|value, home| home.path_of(value)),
        name if name == LINK => Some(link),
        name if name == REFRESH => Some(refresh),
        _ => None,
    }
}

/// Of a `Link` header, each link in angle brackets: `<a>; rel="next", <b>`.
fn link(value: &[u8], home: &Home<'_>) -> Option<Vec<u8>> {
    let (mut made, mut rest, mut any) = (Vec::new(), value, false);
    while let Some(start) = memchr(b'<', rest) {
        let Some(length) = memchr(b'>', &rest[start..]) else { break };
        let target = &rest[start + 1..start + length];
        let path = home.path_of(target);
        any |= path.is_some();
        made.extend_from_slice(&rest[..=start]);
        made.extend_from_slice(path.as_deref().unwrap_or(target));
        rest = &rest[start + length..];
    }
    made.extend_from_slice(rest);
    any.then_some(made)
}

/// `5; url=a`, with the link in quotes or without.
fn refresh(value: &[u8], home: &Home<'_>) -> Option<Vec<u8>> {
    let start = memmem::find(&value.to_ascii_lowercase(), b"url=")? + "url=".len();
    let quote = value.get(start).copied().filter(|byte| matches!(byte, b'"' | b'\''));
    let start = start + usize::from(quote.is_some());
    let target = &value[start..];
    let target = quote.and_then(|quote| memchr(quote, target)).map_or(target, |end| &target[..end]);
    let path = home.path_of(target)?;
    Some([&value[..start], &path, &value[start + target.len()..]].concat())
}

/// A worker's own address.
struct Home<'a> {
    host: &'a str,
    port: u16,
    /// Whether the port is its scheme's, so that its address may be said without one.
    is_default_port: bool,
    /// Its URL's path, without a slash at the end.
    prefix: &'a [u8],
}

impl<'a> Home<'a> {
    fn of(url: &'a Uri) -> Self {
        let port = port_of(url);
        Self {
            host: without_brackets(url.host().unwrap_or_default()),
            port,
            is_default_port: url.scheme_str().and_then(|scheme| default_port(scheme.as_bytes()))
                == Some(port),
            prefix: url.path().trim_end_matches('/').as_bytes(),
        }
    }

    /// The path at the gateway to which a link of this worker leads; `None` where it may stay as it is.
    fn path_of(&self, link: &[u8]) -> Option<Vec<u8>> {
        let link = link.trim_ascii();
        let Some((default_port, behind)) = behind_slashes(link) else {
            // A path of the worker's, or one from where the client is.
            return self.without_prefix(link).map(rooted);
        };
        let end = behind.iter().position(|byte| b"/\\?#".contains(byte)).unwrap_or(behind.len());
        let (authority, path) = behind.split_at(end);
        self.is_at(authority, default_port).then(|| rooted(self.without_prefix(path).unwrap_or(path)))
    }

    /// Whether `user@host:port` is the worker; `default_port` is that of the link's scheme, if it names one.
    fn is_at(&self, authority: &[u8], default_port: Option<u16>) -> bool {
        let place = memrchr(b'@', authority).map_or(authority, |at| &authority[at + 1..]);
        let Ok(place) = std::str::from_utf8(place) else { return false };
        let colon = place.rfind(':').filter(|colon| !place[*colon..].contains(']'));
        let (host, port) = colon.map_or((place, ""), |colon| (&place[..colon], &place[colon + 1..]));
        let same_port = match port {
            "" => self.is_default_port || default_port == Some(self.port),
            port => port.parse() == Ok(self.port),
        };
        same_port && is_same_host(without_brackets(host), self.host)
    }

    /// What follows the prefix, if a path begins with that.
    fn without_prefix<'p>(&self, path: &'p [u8]) -> Option<&'p [u8]> {
        let rest = path.strip_prefix(self.prefix).filter(|_| !self.prefix.is_empty())?;
        rest.first().is_none_or(|byte| b"/?#".contains(byte)).then_some(rest)
    }
}

/// What follows the slashes of `http://…` or `//…`, and the port of that scheme. Clients take backslashes for
/// slashes there.
fn behind_slashes(link: &[u8]) -> Option<(Option<u16>, &[u8])> {
    let after = |link: &[u8]| link.len() >= 2 && link[..2].iter().all(|byte| is_slash(*byte));
    if after(link) {
        return Some((None, &link[2..]));
    }
    let (scheme, rest) = link.split_at(memchr(b':', link)?);
    let port = default_port(scheme)?;
    after(&rest[1..]).then(|| (Some(port), &rest[3..]))
}

fn default_port(scheme: &[u8]) -> Option<u16> {
    let is = |name: &str| scheme.eq_ignore_ascii_case(name.as_bytes());
    match () {
        () if is("http") || is("ws") => Some(80),
        () if is("https") || is("wss") => Some(443),
        () => None,
    }
}

fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn is_same_host(a: &str, b: &str) -> bool {
    let (a, b) = (a.strip_suffix('.').unwrap_or(a), b.strip_suffix('.').unwrap_or(b));
    let addresses = (a.parse::<Ipv6Addr>(), b.parse::<Ipv6Addr>());
    a.eq_ignore_ascii_case(b) || matches!(addresses, (Ok(a), Ok(b)) if a == b)
}

/// The path from the gateway's root. One that begins with two slashes would name a host.
fn rooted(path: &[u8]) -> Vec<u8> {
    let rest = if path.first().is_some_and(|byte| is_slash(*byte)) { &path[1..] } else { path };
    let root: &[u8] = if rest.first().is_some_and(|byte| is_slash(*byte)) { b"/./" } else { b"/" };
    [root, rest].concat()
}

fn is_slash(byte: u8) -> bool {
    matches!(byte, b'/' | b'\\')
}

#[cfg(test)]
mod tests;
