//! A tenant's salt in the requests that workers see: engines that know `cache_salt` share cached prefixes only among
//! requests with the same one, so that nobody learns by the time to the first token, or by the count of cached tokens,
//! what another tenant has asked. The client's own is taken out: it could be another's.

use bytes::{BufMut, Bytes, BytesMut};
use keyway_wire::block_hash::{Chain, HashKey};

use crate::{error::Error, json::Value};

/// The field that engines read.
const FIELD: &str = "cache_salt";

/// The salt of a tenant: says nothing of its name to who does not know the key.
pub(super) fn salt_of(key: HashKey, tenant: &str) -> String {
    let chain = Chain::new(key, tenant.as_bytes());
    let half = |chain: Chain, part: &[u8]| {
        let mut chain = chain;
        chain.push(part).0
    };
    format!("{:016x}{:016x}", half(chain, b"salt"), half(chain, b"more salt"))
}

/// The body with this salt and no other.
pub fn salted(body: &Bytes, salt: &str) -> Result<Bytes, Error> {
    let unreadable = || Error::BodyUnreadable("it is not a JSON object".to_owned());
    let text = std::str::from_utf8(body).map_err(|_| unreadable())?;
    let mut fields = Value::document(text).ok_or_else(unreadable)?;
    let mut out = BytesMut::with_capacity(body.len() + salt.len() + FIELD.len() + 8);
    out.put_slice(format!("{{\"{FIELD}\":\"{salt}\"").as_bytes());
    while let Some(field) = fields.next() {
        let (name, _) = field.map_err(|_| unreadable())?;
        if name != FIELD {
            out.put_u8(b',');
            out.put_slice(fields.last_written().as_bytes());
        }
    }
    out.put_u8(b'}');
    Ok(out.freeze())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with_salt(body: &str) -> Result<Bytes, Error> {
        salted(&Bytes::copy_from_slice(body.as_bytes()), "s")
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
