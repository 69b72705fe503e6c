//! An issuer's public keys, as its JWKS (RFC 7517) has them.

use jsonwebtoken::{
    Algorithm, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse},
};
use serde::Deserialize;
use serde_json::Value;

use super::signatures::ALGORITHMS;

/// Keys that an issuer may have; those behind them are left out. Each may have to be tried for a token that
/// names none.
const MAX_KEYS: usize = 64;

/// The keys of an issuer by which tokens may be signed.
#[derive(Debug, Default)]
pub(super) struct Keys(Vec<Key>);

#[derive(Debug)]
struct Key {
    jwk: Jwk,
    /// The one algorithm that it is for, if it says so.
    algorithm: Option<Algorithm>,
    verifies: DecodingKey,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Value>,
}

impl Keys {
    /// Those of a JWKS that are for signatures and are understood here; `None`: it is no JWKS.
    pub(super) fn read(text: &[u8]) -> Option<Self> {
        let set: KeySet = serde_json::from_slice(text).ok()?;
        // One that is of a new kind does not hide the others.
        let keys = set.keys.into_iter().filter_map(|key| Key::of(serde_json::from_value(key).ok()?));
        Some(Self(keys.take(MAX_KEYS).collect()))
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Those that may have signed a token that names this key, or none, by this algorithm.
    pub(super) fn of(&self, name: Option<&str>, algorithm: Algorithm) -> Vec<DecodingKey> {
        let fits = |key: &&Key| {
            let is_named = name.is_none_or(|name| key.jwk.common.key_id.as_deref() == Some(name));
            let is_of_family = key.verifies.family().algorithms().contains(&algorithm);
            is_named && is_of_family && key.algorithm.is_none_or(|own| own == algorithm)
        };
        self.0.iter().filter(fits).map(|key| key.verifies.clone()).collect()
    }
}

impl PartialEq for Keys {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().map(|key| &key.jwk).eq(other.0.iter().map(|key| &key.jwk))
    }
}

impl Key {
    fn of(jwk: Jwk) -> Option<Self> {
        if jwk.common.public_key_use.as_ref().is_some_and(|usage| *usage != PublicKeyUse::Signature) {
            return None;
        }
        // Who may verify by a shared secret may sign by it.
        let is_public = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => true,
            AlgorithmParameters::EllipticCurve(of) => {
                matches!(of.curve, EllipticCurve::P256 | EllipticCurve::P384)
            }
            AlgorithmParameters::OctetKeyPair(of) => of.curve == EllipticCurve::Ed25519,
            _ => false,
        };
        let verifies = DecodingKey::from_jwk(&jwk).ok().filter(|_| is_public)?;
        // One for encryption, or for an algorithm that is not known here, verifies nothing.
        let algorithm = jwk.common.key_algorithm.map(Algorithm::try_from).transpose().ok()?;
        if algorithm.is_some_and(|algorithm| !ALGORITHMS.contains(&algorithm)) {
            return None;
        }
        Some(Self { jwk, algorithm, verifies })
    }
}
