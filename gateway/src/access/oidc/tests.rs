//! Tokens that other people's libraries have made (`tests/python/oidc_tokens.py`), good and bad ones.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::{access::tenants::key_hash, config::OidcFile};

#[derive(Deserialize)]
struct Made {
    jwks: Value,
    good: BTreeMap<String, String>,
    bad: BTreeMap<String, String>,
}

fn made() -> Made {
    serde_json::from_str(include_str!("../../../../tests/data/oidc_tokens.json")).unwrap()
}

fn oidc(more: &str) -> Arc<Oidc> {
    let toml = format!(
        "issuer = \"https://login.example.com\"\naudience = [\"keyway\", \"us\"]\ntenant_claim = \"team\"\n{more}"
    );
    let file: OidcFile = toml::from_str(&toml).unwrap();
    Oidc::new(file.validated(true).unwrap(), Clock::start(), OidcMetrics::alone())
}

fn with_keys(jwks: &Value) -> Arc<Oidc> {
    let oidc = oidc("");
    oidc.take_over(Keys::read(jwks.to_string().as_bytes()).unwrap());
    oidc
}

fn judge(oidc: &Oidc, token: &str) -> Result<Holder, Error> {
    assert!(Oidc::may_be_one(token.as_bytes()), "{token}");
    oidc.judge(token.as_bytes(), &key_hash(token.as_bytes()))
}

#[test]
fn good_tokens_are_their_holder_s_by_every_algorithm() {
    let Made { jwks, good, .. } = made();
    let oidc = with_keys(&jwks);
    let mut keys = Vec::new();
    for (name, token) in &good {
        for time in ["first", "second"] {
            let holder = judge(&oidc, token).unwrap_or_else(|error| panic!("{name}, {time}: {error}"));
            assert!(holder.names.iter().any(|name| name == "analysts"), "{name}: {holder:?}");
            keys.push(holder.key);
        }
    }
    assert!(keys.windows(2).all(|two| two[0] == two[1]), "one subject has one key in accounts");
}

#[test]
fn bad_tokens_are_refused_each_for_its_reason() {
    let Made { jwks, bad, .. } = made();
    let oidc = with_keys(&jwks);
    for (name, token) in &bad {
        let judged = oidc.verify(&oidc.keys.read().keys, token.as_bytes());
        match name.split(' ').next().unwrap().trim_end_matches(',') {
            "no_tenant" => {
                assert!(
                    judged.is_ok()
                        && oidc.tenant_of_others() == Err(Error::BadToken(Fault::NoTenant.words()))
                );
            }
            fault => assert_eq!(judged.map_err(Fault::name), Err(fault), "{name}"),
        }
    }
    assert_eq!(super::tests::oidc("tenant = \"others\"").tenant_of_others(), Ok("others"));
}

#[test]
fn a_token_is_good_no_longer_than_its_key_is_known() {
    let Made { jwks, good, .. } = made();
    let oidc = with_keys(&jwks);
    judge(&oidc, &good["ES256"]).unwrap();
    let mut fewer = jwks.clone();
    fewer["keys"].as_array_mut().unwrap().retain(|key| key["kid"] != "p256");
    oidc.take_over(Keys::read(fewer.to_string().as_bytes()).unwrap());
    assert_eq!(judge(&oidc, &good["ES256"]), Err(Error::BadToken(Fault::UnknownKey.words())));
    judge(&oidc, &good["RS256"]).unwrap();
    oidc.take_over(Keys::read(jwks.to_string().as_bytes()).unwrap());
    judge(&oidc, &good["ES256"]).unwrap();
}

#[test]
fn before_there_are_keys_no_token_is_called_bad() {
    let oidc = oidc("");
    assert_eq!(judge(&oidc, &made().good["ES256"]), Err(Error::TokenKeysNotHere));
    // Nor is one that is, since it cannot be told.
    assert_eq!(judge(&oidc, &made().bad["signature"]), Err(Error::TokenKeysNotHere));
    oidc.keys.write().tried = Some(oidc.clock.now());
    assert_eq!(judge(&oidc, &made().good["ES256"]), Err(Error::TokenKeysNotHere), "the issuer is away");
}

#[test]
fn keys_for_something_else_verify_nothing() {
    let Made { jwks, .. } = made();
    let of = |changed: &dyn Fn(&mut Value)| {
        let mut key = jwks["keys"][0].clone();
        changed(&mut key);
        Keys::read(serde_json::json!({ "keys": [key] }).to_string().as_bytes()).unwrap().len()
    };
    assert_eq!(of(&|_| ()), 1);
    assert_eq!(of(&|key| key["use"] = "enc".into()), 0);
    assert_eq!(of(&|key| key["alg"] = "RSA-OAEP".into()), 0);
    assert_eq!(of(&|key| key["alg"] = "HS256".into()), 0);
    assert_eq!(of(&|key| *key = serde_json::json!({ "kty": "oct", "k": "c2VjcmV0", "kid": "s" })), 0);
    assert_eq!(of(&|key| *key = "no key".into()), 0);
    assert_eq!(of(&|key| key["x5c"] = vec!["MIIB", "MIIC"].into()), 1);
    assert!(Keys::read(b"[]").is_none() && Keys::read(b"<html>").is_none());
}

#[test]
fn claims_are_found_by_name_or_by_the_way_to_them() {
    let claims =
        serde_json::json!({ "https://example.com/team": "a", "realm": { "roles": ["b"] }, "flat": 1 });
    let at = |path| claim(claims.as_object().unwrap(), path);
    assert_eq!(at("https://example.com/team"), Some(&"a".into()));
    assert_eq!(at("realm.roles"), Some(&serde_json::json!(["b"])));
    assert_eq!((at("realm.users"), at("flat.roles"), at("nothing"), at("")), (None, None, None, None));
}

proptest! {
    #[test]
    fn a_changed_token_is_never_good(which in 0_usize..64, at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let Made { jwks, good, .. } = made();
        let oidc = with_keys(&jwks);
        let token = good.values().nth(which % good.len()).unwrap();
        let mut changed = token.clone().into_bytes();
        let at = at.index(changed.len());
        changed[at] = byte;
        prop_assert!(oidc.verify(&oidc.keys.read().keys, &changed).is_err() || changed == token.as_bytes());
    }
}
