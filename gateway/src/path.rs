//! A request's path, written in one way before anything looks at it. Engines undo a path's escapes before
//! they look what it is for: `/v1/%63ompletions` is a completion to them, so it must be one to limits, salts
//! and routing, too. What two readers could take for two things is refused.

use std::borrow::Cow;

use http::{Uri, uri::PathAndQuery};

use crate::error::Error;

/// Below it stands a model's name, whose slashes clients escape.
const MODELS: &str = "/v1/models/";

/// Undoes a target's escapes that say nothing (RFC 3986, section 6.2.2.2): those of letters, digits and
/// `-._~`. A path with a percent sign that begins no escape stays as it is, for [`is_plain`] to refuse.
pub(crate) fn undo_escapes(uri: &mut Uri) {
    // Mostly it has none.
    if memchr::memchr(b'%', uri.path().as_bytes()).is_none() {
        return;
    }
    let path = unescaped(uri.path());
    let target = uri.query().map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(target).ok().or(parts.path_and_query);
    if let Ok(plain) = Uri::from_parts(parts) {
        *uri = plain;
    }
}

/// A path as engines in Python read it: they undo its escapes before they look what it is for, so
/// `/v1/%63ompletions` is what it seems not to be.
pub(crate) fn as_engines_read(path: &str) -> Cow<'_, str> {
    // Mostly it has none.
    if memchr::memchr(b'%', path.as_bytes()).is_none() {
        return Cow::Borrowed(path);
    }
    percent_encoding::percent_decode_str(path).decode_utf8_lossy()
}

/// Refuses a plain path that workers could read in another way than this gateway does.
pub(crate) fn is_plain(path: &str) -> Result<(), Error> {
    let mut rest = path;
    while let Some(at) = memchr::memchr(b'%', rest.as_bytes()) {
        let why = match escape(&rest.as_bytes()[at..]) {
            None => "a percent sign in it begins no escape",
            Some(b'/') if !path.starts_with(MODELS) => "it has an escaped slash (%2F); write it as a slash",
            Some(0..0x20 | 0x7f) => "it has an escaped control character",
            Some(_) => {
                rest = &rest[at + ESCAPE_BYTES..];
                continue;
            }
        };
        return Err(Error::BadPath(why));
    }
    Ok(())
}

/// Bytes of an escape such as `%63`: a percent sign and two digits.
const ESCAPE_BYTES: usize = 3;

/// What the escape at the beginning of these bytes stands for.
fn escape(bytes: &[u8]) -> Option<u8> {
    let digit = |at: usize| bytes.get(at).and_then(|digit| char::from(*digit).to_digit(16));
    u8::try_from(digit(1)? << 4 | digit(2)?).ok().filter(|_| bytes[0] == b'%')
}

fn unescaped(path: &str) -> String {
    let (mut plain, mut rest) = (String::with_capacity(path.len()), path);
    while let Some(at) = memchr::memchr(b'%', rest.as_bytes()) {
        plain.push_str(&rest[..at]);
        match escape(&rest.as_bytes()[at..]) {
            // With what follows undone, a lone percent sign would begin an escape: `%%363` would be `%63`.
            None => return path.to_owned(),
            Some(byte @ (b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~')) => {
                plain.push(char::from(byte));
            }
            Some(_) => plain.push_str(&rest[at..at + ESCAPE_BYTES].to_ascii_uppercase()),
        }
        rest = &rest[at + ESCAPE_BYTES..];
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(target: &str) -> String {
        let mut uri = target.parse().unwrap();
        undo_escapes(&mut uri);
        uri.to_string()
    }

    #[test]
    fn escapes_that_say_nothing_are_undone_once_and_others_stay() {
        for (target, plain) in [
            ("/v1/chat/%63ompletions", "/v1/chat/completions"),
            ("/v1/%63%6F%6d%70letions?a=%63", "/v1/completions?a=%63"),
            ("/%761/messages", "/v1/messages"),
            ("/v1/%2e%2E/metrics", "/v1/../metrics"),
            ("/v1/chat%2fcompletions", "/v1/chat%2Fcompletions"),
            ("/v1/%2563ompletions", "/v1/%2563ompletions"),
            ("/v1/files/%c3%A9%20", "/v1/files/%C3%A9%20"),
            ("/v1/x%", "/v1/x%"),
            ("/v1/x%6", "/v1/x%6"),
            ("/v1/x%zz%6", "/v1/x%zz%6"),
            ("/v1/%%363ompletions", "/v1/%%363ompletions"),
            ("/%761/%6%33ompletions", "/%761/%6%33ompletions"),
            ("/v1/chat/completions?x=%2F", "/v1/chat/completions?x=%2F"),
            ("http://host:1/v1/%63ompletions?q", "http://host:1/v1/completions?q"),
        ] {
            assert_eq!(of(target), plain);
        }
    }

    #[test]
    fn what_may_be_read_in_two_ways_is_refused() {
        for path in [
            "/v1/chat%2Fcompletions",
            "/v1%2Fmessages",
            "/v1/modelsx/a%2Fb",
            "/v1/x%",
            "/v1/x%4",
            "/v1/%zz",
            "/v1/%%363ompletions",
            "/v1/%6%33ompletions",
            "/v1/models/a%2Fb%",
            "/v1/files/a%00",
            "/v1/files/%0A",
            "/v1/files/%7F",
        ] {
            assert!(matches!(is_plain(path), Err(Error::BadPath(_))), "{path}");
        }
        for path in ["/v1/chat/completions", "/v1/models/org%2Fname", "/v1/files/a%20b", "/v1/x/%C3%A9", "/"]
        {
            assert_eq!(is_plain(path), Ok(()), "{path}");
        }
    }

    proptest! {
        /// Engines undo all escapes once: the plain target means the same to them, and is its own plain form.
        #[test]
        fn a_plain_path_means_what_the_other_did(path in "(/([a-c%./~]|%[0-9a-fA-F]{2}){0,8}){1,4}") {
            let decoded = |path: &str| percent_encoding::percent_decode_str(path).collect::<Vec<u8>>();
            let once = unescaped(&path);
            prop_assert_eq!(decoded(&once), decoded(&path));
            prop_assert_eq!(unescaped(&once), once.clone());
            if is_plain(&once).is_ok() && !once.contains('%') {
                prop_assert_eq!(decoded(&path), once.into_bytes());
            }
        }
    }
}
