//! A request as a worker is sent it: the client's own head, seen through what is changed of it on this hop.
//! Nothing of it is copied before it is written. What is changed, and why, is [`crate::proxy::asked`]'s
//! business.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{CONTENT_LENGTH, COOKIE},
    uri::PathAndQuery,
};

use crate::headers::{self, ADDED_MAX};

/// A request for a worker.
#[derive(Debug)]
pub struct Outgoing<'a> {
    method: Method,
    target: PathAndQuery,
    /// The client's, if it is a client's request.
    headers: Option<&'a HeaderMap>,
    /// Which of them are its hop's, because it says so.
    of_its_hop: Vec<HeaderName>,
    /// What stands in place of the client's of that name; `None`: nothing.
    changed: Vec<(HeaderName, Option<HeaderValue>)>,
    body: Bytes,
    /// Whether it may be sent again where it is not known that its worker has not begun it.
    may_repeat: bool,
}

impl<'a> Outgoing<'a> {
    /// A request with a client's method and headers. The target is path and query; scheme, host and the
    /// body's length follow from where and what is sent.
    pub fn new(method: Method, target: PathAndQuery, headers: &'a HeaderMap, body: Bytes) -> Self {
        let of_its_hop = headers::named_by_connection(headers);
        let mut changed = Vec::with_capacity(ADDED_MAX);
        let cookie = headers::whole_cookie(headers).filter(|_| !of_its_hop.contains(&COOKIE));
        changed.extend(cookie.map(|whole| (COOKIE, Some(whole))));
        let (headers, may_repeat) = (Some(headers), method.is_safe());
        Self { method, target, headers, of_its_hop, changed, body, may_repeat }
    }

    /// A request of the gateway's own.
    pub fn own(method: Method, target: PathAndQuery, body: Bytes) -> Self {
        let may_repeat = method.is_safe();
        Self { method, target, headers: None, of_its_hop: Vec::new(), changed: Vec::new(), body, may_repeat }
    }

    /// A question of the gateway's own.
    pub fn get(target: PathAndQuery) -> Self {
        Self::own(Method::GET, target, Bytes::new())
    }

    /// Puts a value in place of the client's, which need not have one.
    pub fn set(&mut self, name: HeaderName, value: HeaderValue) {
        self.changed.push((name, Some(value)));
    }

    /// Leaves the client's out.
    pub fn leave_out(&mut self, name: HeaderName) {
        self.changed.push((name, None));
    }

    /// Says whether it may be sent again where its worker may have begun it; unless said, what only asks may.
    #[must_use]
    pub fn repeatable(self, may_repeat: bool) -> Self {
        Self { may_repeat, ..self }
    }

    pub(super) fn may_repeat(&self) -> bool {
        self.may_repeat
    }

    /// Whether it is a client's, and no question of the gateway's own.
    pub(super) fn is_a_client_s(&self) -> bool {
        self.headers.is_some()
    }

    pub(super) fn method(&self) -> &Method {
        &self.method
    }

    pub(super) fn target(&self) -> &PathAndQuery {
        &self.target
    }

    pub(super) fn body(&self) -> &Bytes {
        &self.body
    }

    /// All headers but `Host` and `Content-Length`: the client's in its order, repeated ones too, then those
    /// that are set.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
        let passes = |name: &HeaderName| {
            headers::is_for_worker(name)
                && name != CONTENT_LENGTH
                && !self.of_its_hop.contains(name)
                && !self.changed.iter().any(|(changed, _)| changed == name)
        };
        let set = self.changed.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        self.headers.into_iter().flatten().filter(move |(name, _)| passes(name)).chain(set)
    }

    /// [`Outgoing::headers`] as a map, with the length where the client says one.
    pub(super) fn header_map(&self) -> HeaderMap {
        let mut map = HeaderMap::with_capacity(self.headers.map_or(0, HeaderMap::len) + ADDED_MAX);
        for (name, value) in self.headers() {
            map.append(name.clone(), value.clone());
        }
        if self.headers.is_some_and(|headers| headers.contains_key(CONTENT_LENGTH)) {
            map.insert(CONTENT_LENGTH, self.body.len().into());
        }
        map
    }
}
