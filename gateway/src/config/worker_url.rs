//! A worker's URL, as people write it: with the `/v1` that clients call the base URL, with a user and a
//! password, with slashes at its end. What cannot be meant is refused with what to write instead, and no
//! error repeats a password.

use std::str::FromStr;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use http::{HeaderValue, Uri};
use percent_encoding::percent_decode_str;
use rustls::pki_types::ServerName;

/// Ends of URLs that are one endpoint's, not an engine's.
const ENDPOINTS: [&str; 6] =
    ["/chat/completions", "/completions", "/embeddings", "/messages", "/models", "/responses"];

/// A worker's URL, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerUrl {
    /// Scheme, host and perhaps port and a path without a slash at its end.
    pub(super) url: Uri,
    /// `Basic …` for the user and password that it had, marked sensitive so that it is never printed.
    pub(super) basic: Option<HeaderValue>,
    /// Whether it ended in `/v1`, which requests bring themselves.
    pub(super) had_v1: bool,
}

impl FromStr for WorkerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if !text.is_ascii() {
            return Err("not in ASCII; write a name as xn--… and bytes of a path as %…".to_owned());
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            let shown = without_secret(text);
            return Err(format!("the URL must begin with http:// or https://: write http://{shown}"));
        };
        let scheme = scheme.to_ascii_lowercase();
        if !["http", "https"].contains(&scheme.as_str()) {
            return Err("the URL must begin with http:// or https://".to_owned());
        }
        if let Some(at) = rest.find(['?', '#']) {
            let what = if rest.as_bytes()[at] == b'?' { "query (?…)" } else { "fragment (#…)" };
            return Err(format!("a worker's URL has no {what}: leave it out"));
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if path.contains('@') {
            return Err(
                "an @ behind a slash: in a user or a password write % and two digits, %2F for /".to_owned()
            );
        }
        let (secret, place) = authority.rsplit_once('@').map_or((None, authority), |(s, p)| (Some(s), p));
        check_place(place)?;
        let (path, had_v1) = base_path(path)?;
        let url = format!("{scheme}://{}{path}", place.to_ascii_lowercase());
        let url: Uri =
            url.parse().map_err(|_| "not a URL; expected such as http://10.0.0.7:8000".to_owned())?;
        let name = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        // Without a name to expect there would be no TLS.
        if scheme == "https" && ServerName::try_from(name).is_err() {
            return Err(format!("{name:?} is no name that a certificate can have"));
        }
        Ok(Self { url, basic: secret.filter(|secret| !secret.is_empty()).map(basic).transpose()?, had_v1 })
    }
}

/// Whether it is `HOST` or `HOST:PORT`, with a port from 1 to 65535; else why not.
fn check_place(place: &str) -> Result<(), String> {
    let (host, port) = match place.rfind(']') {
        Some(end) => place.split_at(end + 1),
        None if place.matches(':').count() > 1 => {
            return Err(format!("an address of IPv6 stands in brackets, such as http://[{place}]:8000"));
        }
        None => place.split_at(place.find(':').unwrap_or(place.len())),
    };
    if host.is_empty() {
        return Err("it names no host; expected http://HOST:PORT".to_owned());
    }
    let good = |port: &str| {
        port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
    };
    if !port.is_empty() && !good(port) {
        return Err(format!("{port:?} is no port; expected http://HOST:PORT with a port from 1 to 65535"));
    }
    Ok(())
}

/// The path before `/v1`, and whether it ended so.
fn base_path(path: &str) -> Result<(&str, bool), String> {
    let path = path.trim_end_matches('/');
    if let Some(base) = path.strip_suffix("/v1") {
        return Ok((base.trim_end_matches('/'), true));
    }
    let endpoint = ENDPOINTS.iter().find_map(|endpoint| path.strip_suffix(endpoint));
    if endpoint.is_some_and(|base| base.ends_with("/v1")) {
        return Err("it is one endpoint's URL: write what stands before /v1".to_owned());
    }
    Ok((path, false))
}

/// `Basic …`, RFC 7617.
fn basic(secret: &str) -> Result<HeaderValue, String> {
    // RFC 3986, section 3.2.1. Readers differ in what they make of others, a backslash above all.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._~!$&'()*+,;=:%".contains(c);
    if !secret.chars().all(plain) {
        return Err("write odd characters of its user and password as % and two digits".to_owned());
    }
    let decoded: Vec<u8> = match secret.split_once(':') {
        Some((user, password)) => percent_decode_str(user)
            .chain(std::iter::once(b':'))
            .chain(percent_decode_str(password))
            .collect(),
        None => percent_decode_str(secret).chain(std::iter::once(b':')).collect(),
    };
    let mut value = HeaderValue::from_str(&format!("Basic {}", BASE64.encode(decoded)))
        .map_err(|_| "its user and password cannot be sent".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// A URL as errors may show it: without a user and a password.
pub(super) fn without_secret(text: &str) -> String {
    let Some(at) = text.rfind('@') else { return text.to_owned() };
    let begin = text.find("://").map_or(0, |scheme| scheme + 3).min(at);
    format!("{}…{}", &text[..begin], &text[at..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> WorkerUrl {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn what_people_write_is_understood() {
        for (text, url, had_v1) in [
            ("http://10.0.0.7:8000", "http://10.0.0.7:8000/", false),
            ("http://10.0.0.7:8000/", "http://10.0.0.7:8000/", false),
            (" http://10.0.0.7:8000//  ", "http://10.0.0.7:8000/", false),
            ("http://10.0.0.7:8000/v1", "http://10.0.0.7:8000/", true),
            ("http://10.0.0.7:8000/v1/", "http://10.0.0.7:8000/", true),
            ("http://h:1//v1//", "http://h:1/", true),
            ("https://openrouter.example/api/v1", "https://openrouter.example/api", true),
            ("http://h:1/a/b/", "http://h:1/a/b", false),
            ("http://h:1/v1beta", "http://h:1/v1beta", false),
            ("http://h:1/v1/account/gateway", "http://h:1/v1/account/gateway", false),
            ("http://h:1/models", "http://h:1/models", false),
            ("HTTP://Host:80/A", "http://host:80/A", false),
            ("https://[::1]:8443/v1", "https://[::1]:8443/", true),
            ("http://[FE80::1]", "http://[fe80::1]/", false),
        ] {
            let found = read(text);
            assert_eq!((found.url.to_string().as_str(), found.had_v1), (url, had_v1), "{text}");
            assert_eq!(found.basic, None);
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_to_write() {
        for (text, says) in [
            ("10.0.0.7:8000", "write http://10.0.0.7:8000"),
            ("localhost", "write http://localhost"),
            ("u:canary@h:8000", "write http://…@h:8000"),
            ("ftp://h:1", "begin with http://"),
            ("user:canary://x@h:1", "begin with http://"),
            ("http://user:can/ary@h:1", "%2F for /"),
            ("http://user:can@ary@h:1", "as % and two digits"),
            ("http://10.0.0.1\\@h:1", "as % and two digits"),
            ("http://h:1/?a=b", "no query"),
            ("http://h:1#top", "no fragment"),
            ("http://u:canary#2@h:1", "no fragment"),
            ("http://h:1/v1/chat/completions", "before /v1"),
            ("http://h:1/v1/models/", "before /v1"),
            ("http://::1:8000", "brackets"),
            ("http://:8000", "no host"),
            ("http:///v1", "no host"),
            ("http://h:", "no port"),
            ("http://h:0", "no port"),
            ("http://h:99999", "no port"),
            ("http://[::1]8000", "no port"),
            ("http://h o:1", "not a URL"),
            ("http://hö:1", "ASCII"),
            ("https://-.-", "certificate"),
        ] {
            let error = text.parse::<WorkerUrl>().unwrap_err();
            assert!(error.contains(says) && !error.contains("canary"), "{text}: {error}");
        }
    }

    #[test]
    fn a_user_and_a_password_become_a_header_that_is_not_printed() {
        for (text, header) in [
            ("http://user:pw@h:1/v1", "Basic dXNlcjpwdw=="),
            ("http://us%40er:p%3Aw@h:1", "Basic dXNAZXI6cDp3"),
            ("http://token@h:1", "Basic dG9rZW46"),
            ("http://:pw@h:1", "Basic OnB3"),
        ] {
            let found = read(text);
            assert_eq!(found.basic.as_ref().unwrap(), header, "{text}");
            assert_eq!(found.url.authority().unwrap(), "h:1");
            assert!(!format!("{found:?}").contains(&header[6..]));
        }
        assert_eq!(read("http://@h:1").basic, None);
    }

    proptest! {
        /// No text makes it panic, what is understood is understood again, and no password is in what is
        /// shown.
        #[test]
        fn any_text_is_understood_or_refused(text in "(http|https|HTTP)?(://)?[a-z:@/?#\\[\\].0-9%v]{0,40}") {
            if let Ok(found) = text.parse::<WorkerUrl>() {
                let again = found.url.to_string().parse::<WorkerUrl>().unwrap();
                prop_assert_eq!(&again.url, &found.url);
                prop_assert!(found.url.authority().is_some_and(|place| !place.as_str().contains('@')));
                prop_assert!(!found.url.path().ends_with("/v1"));
            }
        }

        #[test]
        fn what_is_shown_has_no_password(user in "[a-z]{1,8}", password in "[a-zA-Z0-9:;@/?# -]{0,12}") {
            let url = format!("http://{user}:QQQ{password}@h:1/x");
            prop_assert_eq!(without_secret(&url), "http://…@h:1/x");
            match url.parse::<WorkerUrl>() {
                Ok(found) => prop_assert_eq!(found.url, "http://h:1/x"),
                Err(error) => prop_assert!(!error.contains("QQQ"), "{}", error),
            }
        }
    }
}
