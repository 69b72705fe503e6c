//! What browsers are told of pages from elsewhere (the Fetch standard's CORS protocol): which may use the
//! API, and what of an answer they may read. Off unless origins are allowed; then a preflight is answered
//! here, without a key and without a worker, and every answer says it, refusals and the gateway's own errors
//! too, as else a page would see no more than that something failed.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{
        ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
        ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
        ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
    },
};

use crate::{
    config::{Cors, Origins},
    proxy::body::{Response, full},
};

impl Cors {
    /// The answer to a browser that asks before it sends a request (a preflight); `None` if this is none.
    pub fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Response> {
        let asks = headers.contains_key(ORIGIN) && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if method != Method::OPTIONS || !asks {
            return None;
        }
        let mut response = Response::new(full(""));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let told = response.headers_mut();
        if self.allows(headers.get(ORIGIN)).is_some() {
            told.insert(ACCESS_CONTROL_ALLOW_METHODS, self.methods.clone());
            told.insert(ACCESS_CONTROL_MAX_AGE, self.max_age.clone());
            // Listed and not `*`, which means no `authorization`, and nothing at all where credentials come
            // along.
            let names = self.headers.as_ref().or_else(|| headers.get(ACCESS_CONTROL_REQUEST_HEADERS));
            told.extend(names.map(|names| (ACCESS_CONTROL_ALLOW_HEADERS, names.clone())));
        }
        if self.headers.is_none() {
            told.append(VARY, HeaderValue::from_name(ACCESS_CONTROL_REQUEST_HEADERS));
        }
        Some(response)
    }

    /// Says in an answer's head who may read it, in place of what a worker says of that.
    pub fn tell(&self, origin: Option<&HeaderValue>, answer: &mut HeaderMap, is_preflight: bool) {
        if !is_preflight {
            let said: Vec<HeaderName> = answer.keys().filter(|name| is_of_cors(name)).cloned().collect();
            for name in said {
                answer.remove(name);
            }
            answer.insert(ACCESS_CONTROL_EXPOSE_HEADERS, self.exposed.clone());
        }
        if self.origins != Origins::Any {
            // Also where no origin is allowed: a cache must not give that to a page of one that is.
            answer.append(VARY, HeaderValue::from_name(ORIGIN));
        }
        let Some(allowed) = self.allows(origin) else {
            answer.remove(ACCESS_CONTROL_EXPOSE_HEADERS);
            return;
        };
        answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        if self.credentials {
            answer.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
    }

    /// What an answer to a page of this origin says of it, if that may use the API.
    fn allows(&self, origin: Option<&HeaderValue>) -> Option<HeaderValue> {
        match &self.origins {
            Origins::Any => Some(HeaderValue::from_static("*")),
            Origins::Listed(listed) => origin.filter(|origin| listed.contains(origin)).cloned(),
        }
    }
}

/// Whether a header of this name is about that.
fn is_of_cors(name: &HeaderName) -> bool {
    name.as_str().starts_with("access-control-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CorsFile;

    fn cors(toml: &str) -> Cors {
        toml::from_str::<CorsFile>(toml).unwrap().validated().unwrap().unwrap()
    }

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        fields.iter().map(field).collect()
    }

    fn told(
        cors: &Cors,
        origin: Option<&'static str>,
        answer: &[(&'static str, &'static str)],
    ) -> Vec<String> {
        let mut answer = map(answer);
        cors.tell(origin.map(HeaderValue::from_static).as_ref(), &mut answer, false);
        answer.remove("access-control-expose-headers");
        let mut said: Vec<_> =
            answer.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        said.sort_unstable();
        said
    }

    #[test]
    fn an_answer_says_who_may_read_it_and_that_this_varies() {
        let listed = cors("allow_origins = [\"https://a\", \"https://b\"]\nallow_credentials = true");
        let (credentials, vary) = ("access-control-allow-credentials: true", "vary: origin");
        for (origin, allowed) in
            [("https://a", true), ("https://b", true), ("https://c", false), ("null", false)]
        {
            let allow = format!("access-control-allow-origin: {origin}");
            let want: Vec<&str> = if allowed { vec![credentials, &allow, vary] } else { vec![vary] };
            assert_eq!(told(&listed, Some(origin), &[]), want);
        }
        assert_eq!(told(&listed, None, &[]), [vary]);
        let any = cors("allow_origins = \"*\"");
        for origin in [Some("https://a"), Some("null"), None] {
            assert_eq!(told(&any, origin, &[]), ["access-control-allow-origin: *"]);
        }
    }

    #[test]
    fn what_a_worker_says_of_it_is_replaced_and_the_rest_stays() {
        let listed = cors("allow_origins = [\"https://a\"]");
        let worker = [
            ("access-control-allow-origin", "*"),
            ("access-control-allow-credentials", "true"),
            ("access-control-allow-private-network", "true"),
            ("vary", "accept-encoding"),
            ("x-of-worker", "1"),
        ];
        let own = ["vary: accept-encoding", "vary: origin", "x-of-worker: 1"];
        assert_eq!(told(&listed, Some("https://c"), &worker), own);
        let allow = "access-control-allow-origin: https://a";
        assert_eq!(told(&listed, Some("https://a"), &worker), [&[allow][..], &own].concat());
    }

    #[test]
    fn only_a_preflight_is_answered_here() {
        let cors = cors("allow_origins = [\"https://a\"]");
        let asks = [("origin", "https://a"), ("access-control-request-method", "POST")];
        assert!(cors.preflight(&Method::OPTIONS, &map(&asks)).is_some());
        assert!(cors.preflight(&Method::POST, &map(&asks)).is_none());
        assert!(cors.preflight(&Method::OPTIONS, &map(&asks[..1])).is_none());
        assert!(cors.preflight(&Method::OPTIONS, &map(&asks[1..])).is_none());
    }

    #[test]
    fn a_preflight_allows_what_is_listed_or_what_is_asked_for() {
        let asks = [
            ("origin", "https://a"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,x-stainless-os"),
        ];
        let answer = |toml: &str| {
            let cors = cors(toml);
            cors.preflight(&Method::OPTIONS, &map(&asks)).unwrap().headers().clone()
        };
        let any = answer("allow_origins = \"*\"");
        assert_eq!(any["access-control-allow-headers"], "authorization,x-stainless-os");
        assert_eq!(any["access-control-allow-methods"], "GET, POST, PUT, PATCH, DELETE");
        assert_eq!(any["vary"], "access-control-request-headers");
        let listed = answer("allow_origins = \"https://a\"\nallow_headers = [\"x-a\"]\nmax_age_s = 5");
        assert_eq!(listed["access-control-allow-headers"], "x-a");
        assert_eq!(listed["access-control-max-age"], "5");
        let elsewhere = answer("allow_origins = \"https://b\"");
        assert!(elsewhere.keys().all(|name| name == "vary"), "{elsewhere:?}");
    }
}
