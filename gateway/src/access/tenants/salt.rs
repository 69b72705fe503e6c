//! What a tenant's requests become before workers see them. Engines that know `cache_salt` share cached
//! prefixes only among requests with the same one, so that no tenant learns by the time to the first token,
//! or by the count of cached tokens, what another tenant has asked. The client's own is taken out: it could
//! be another's. So is what steers the engine.
//!
//! Whatever its path, a body gets the salt unless it is known to need none: engines offer more paths than are
//! known here.

use bytes::{BufMut, Bytes, BytesMut};
use http::request::Parts;
use keyway_wire::block_hash::{Chain, HashKey};

use super::Visit;
use crate::{
    error::Error,
    json::Value,
    machine::heap,
    prompt::{
        content::{self, Coding, Content, Unread},
        work::Work,
    },
};

/// The field that engines read.
const FIELD: &str = "cache_salt";
/// What SGLang's own path reads in its place.
const EXTRA_KEY: &str = "extra_key";
const SGLANG_PATH: &str = "/generate";

/// Where forms are sent, which can carry no salt: to what is uploaded, heard or painted.
const FORM_PATHS: [&str; 4] = ["/v1/audio/", "/v1/images/", "/v1/files", "/v1/uploads"];

/// Makes a request a tenant's own: without what steers the engine, and with its salt where tenants are kept
/// apart. Returns whether its body is another now.
pub fn keep_apart(
    visit: &Visit,
    parts: &mut Parts,
    content: &mut Content,
    limit_bytes: usize,
) -> Result<bool, Error> {
    let tenant = visit.tenant();
    tenant.steering.headers(&mut parts.headers);
    let path = parts.uri.path();
    // What only counts tokens leaves no KV behind.
    if content.text.is_empty() || Work::of(&parts.method, path) == Work::Counts {
        return Ok(false);
    }
    if content::is_form(&parts.headers, &content.text) {
        let is_sent_there = FORM_PATHS.iter().any(|beginning| path.starts_with(beginning));
        return if visit.salt().is_none() || is_sent_there { Ok(false) } else { Err(not_an_object()) };
    }
    content.mend(limit_bytes)?;
    let keys = if path == SGLANG_PATH { &[FIELD, EXTRA_KEY][..] } else { &[FIELD] };
    let rewritten = readable(content).and_then(|text| {
        let forbids = |name: &str| tenant.steering.forbids(name);
        rewritten(&text, visit.salt().map(|salt| (keys, salt)), forbids)
    });
    match rewritten {
        Ok(None) => Ok(false),
        Ok(Some(text)) => {
            content.replace(&mut parts.headers, text);
            Ok(true)
        }
        // Where no salt is wanted, what cannot be read steers nothing either.
        Err(_) if visit.salt().is_none() => Ok(false),
        Err(error) => Err(error),
    }
}

fn not_an_object() -> Error {
    Error::BodyUnreadable("it is not a JSON object".to_owned())
}

/// The text of a body into which something must be put.
fn readable(content: &Content) -> Result<Bytes, Error> {
    match content.unread {
        Some(Unread::Coding) => Err(Error::CodingUnsupported { accepted: Coding::NAMES }),
        Some(Unread::Damaged) => {
            Err(Error::BodyUnreadable("it is not what its content-encoding says".to_owned()))
        }
        _ => Ok(content.text.clone()),
    }
}

/// The salt of a tenant: says nothing of its name to who does not know the key.
pub(super) fn salt_of(key: HashKey, tenant: &str) -> String {
    let chain = Chain::new(key, tenant.as_bytes());
    let half = |chain: Chain, part: &[u8]| {
        let mut chain = chain;
        chain.hash(part)
    };
    format!("{:016x}{:016x}", half(chain, b"salt"), half(chain, b"more salt"))
}

/// The body with the salt under these names and no other, and without fields that are forbidden; `None`: it
/// may stay as it is.
pub fn rewritten(
    body: &Bytes,
    salt: Option<(&[&str], &str)>,
    forbids: impl Fn(&str) -> bool,
) -> Result<Option<Bytes>, Error> {
    let text = std::str::from_utf8(body).map_err(|_| not_an_object())?;
    let mut fields = Value::document(text).ok_or_else(not_an_object)?;
    let (keys, salt) = salt.unwrap_or_default();
    let most = body.len() + keys.len() * (salt.len() + FIELD.len() + 8);
    let mut out = BytesMut::with_capacity(heap::room_for(most));
    for key in keys {
        out.put_slice(format!(",\"{key}\":\"{salt}\"").as_bytes());
    }
    let mut changed = !keys.is_empty();
    while let Some(field) = fields.next() {
        let (name, _) = field.map_err(|_| not_an_object())?;
        if forbids(&name) || keys.iter().any(|key| key.eq_ignore_ascii_case(&name)) {
            changed = true;
            continue;
        }
        out.put_u8(b',');
        out.put_slice(fields.last_written().as_bytes());
    }
    if out.is_empty() {
        out.put_u8(b'{');
    }
    out[0] = b'{';
    out.put_u8(b'}');
    Ok(changed.then(|| out.freeze()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with_salt(body: &str) -> Result<Bytes, Error> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        rewritten(&body, Some((&[FIELD], "s")), |name| name == "rid").map(Option::unwrap)
    }

    #[test]
    fn a_client_s_own_salt_is_replaced_however_it_is_written() {
        for body in [
            r#"{"model":"m", "cache_salt":"x", "n" : 1}"#,
            r#"{"cache_salt":"x","model":"m","n":1,"cache\u005fsalt":{"cache_salt":[1,2]}}"#,
            " { \"model\" : \"m\" ,\n\"n\":1}\n",
        ] {
            let out = with_salt(body).unwrap();
            let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
            assert_eq!(value, json!({"model": "m", "n": 1, "cache_salt": "s"}), "{body}");
            assert_eq!(out.windows(10).filter(|w| *w == b"cache_salt").count(), 1, "{body}");
        }
        assert_eq!(with_salt("{}").unwrap(), r#"{"cache_salt":"s"}"#);
    }

    #[test]
    fn other_fields_pass_as_they_were_written() {
        let out = with_salt(r#"{"a" : 1.0e5,"b":[ 1, 2 ],"c":"\u00e9"}"#).unwrap();
        assert_eq!(out, r#"{"cache_salt":"s","a" : 1.0e5,"b":[ 1, 2 ],"c":"\u00e9"}"#);
    }

    #[test]
    fn what_is_forbidden_goes_with_or_without_a_salt() {
        let body = Bytes::from_static(br#"{"rid":"x","a":1,"r\u0069d":{"b":[2]}}"#);
        let forbids = |name: &str| name == "rid";
        assert_eq!(rewritten(&body, None, forbids).unwrap().unwrap(), r#"{"a":1}"#);
        assert_eq!(rewritten(&body, None, |_| false).unwrap(), None);
        assert_eq!(rewritten(&Bytes::from_static(b" {\"rid\":1} "), None, forbids).unwrap().unwrap(), "{}");
        let both = rewritten(&body, Some((&[FIELD, EXTRA_KEY], "s")), forbids).unwrap().unwrap();
        assert_eq!(both, r#"{"cache_salt":"s","extra_key":"s","a":1}"#);
    }

    #[test]
    fn a_body_that_cannot_be_read_is_refused() {
        for body in ["", "[]", "{\"a\":1", "{\"cache_salt\":\"x\"}{", "nonsense", "{\"a\":1,}x"] {
            assert!(matches!(with_salt(body), Err(Error::BodyUnreadable(_))), "{body:?}");
        }
    }

    #[test]
    fn salts_differ_by_tenant_and_by_key() {
        let of = |key, tenant| salt_of(HashKey::new(key), tenant);
        assert_ne!(of(1, "a"), of(1, "b"));
        assert_ne!(of(1, "a"), of(2, "a"));
        assert_eq!(of(1, "a"), of(1, "a"));
    }
}
