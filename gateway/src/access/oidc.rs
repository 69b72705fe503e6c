//! Tokens that an issuer has signed (OpenID Connect; JWT, RFC 7519), in place of keys: whose each is, by a
//! claim. An issuer's public keys are fetched at the start, each ten minutes, and where a token names one
//! that is not known. A token that was found good once is known until it expires, or its key is gone.
//!
//! What a token has to say: a signature by one of the issuer's keys and an asymmetric algorithm, `iss`, `aud`
//! as configured, `exp` in the future, `nbf` not in the future.

mod issuer;
mod keys;
mod known;
mod signatures;

use std::{sync::Arc, time::Duration};

use jsonwebtoken::{Algorithm, Validation, decode, decode_header, errors::ErrorKind};
use parking_lot::{Mutex, RwLock};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokio::sync::Notify;

use self::{keys::Keys, known::KnownTokens};
use crate::{
    clock::{self, Clock},
    config::OidcConfig,
    error::Error,
    ledger::KeyId,
    metrics::OidcMetrics,
    upstream::Upstream,
};

/// Bytes of a token: a head has no more room for it.
const MAX_TOKEN_BYTES: usize = 16 << 10;
/// From one look at the keys to the next.
const FETCH_EVERY: Duration = Duration::from_secs(600);
/// The same where the last look has failed: at first, and at most.
const RETRY_AFTER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// The same where a token names a key that is not known: who sends such tokens is not to ask the issuer.
const UNKNOWN_EVERY: Duration = Duration::from_secs(30);

/// Judges tokens by an issuer's keys.
#[derive(Debug)]
pub struct Oidc {
    config: OidcConfig,
    clock: Clock,
    counted: OidcMetrics,
    keys: RwLock<Fetched>,
    known: Mutex<KnownTokens>,
    /// A token named a key that is not known.
    wanted: Notify,
}

#[derive(Debug, Default)]
struct Fetched {
    keys: Keys,
    /// When they were fetched last, or it was tried.
    tried: Option<Duration>,
    /// Whether they ever were.
    are_here: bool,
}

/// Whose a good token is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// What its claim says, of which the first that is a tenant's name counts.
    pub names: Arc<[String]>,
    /// Stands for issuer and subject, where usage is kept.
    pub key: KeyId,
    /// Until when it is good, in seconds of Unix time.
    expires: u64,
}

/// Why a token is not good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Malformed,
    Algorithm,
    UnknownKey,
    Signature,
    Expired,
    Early,
    Issuer,
    Audience,
    Claims,
    NoTenant,
}

// === impl Oidc ===

impl Oidc {
    /// Knows no keys yet: [`Oidc::keep`] fetches them.
    pub fn new(config: OidcConfig, clock: Clock, counted: OidcMetrics) -> Arc<Self> {
        signatures::install();
        let (keys, known, wanted) = (RwLock::default(), Mutex::default(), Notify::new());
        Arc::new(Self { config, clock, counted, keys, known, wanted })
    }

    /// Whether this may be a token, and no key: three parts, the first of which is a JSON object's base64.
    pub fn may_be_one(key: &[u8]) -> bool {
        key.starts_with(b"eyJ") && key.split(|byte| *byte == b'.').count() == 3
    }

    /// Whose a token is. `hash`: its SHA-256.
    ///
    /// # Errors
    /// [`Error::BadToken`], or that the keys by which it could be judged are not here yet.
    pub fn judge(&self, token: &[u8], hash: &[u8; 32]) -> Result<Holder, Error> {
        let now = clock::unix_seconds() as u64;
        if let Some(holder) = self.known.lock().get(hash, now) {
            return Ok(holder);
        }
        let fetched = self.keys.read();
        match self.verify(&fetched.keys, token) {
            Ok(holder) => {
                // While these are the keys: what others have signed was forgotten with them.
                self.known.lock().add(*hash, holder.clone());
                Ok(holder)
            }
            Err(fault) => {
                drop(fetched);
                if fault == Fault::UnknownKey && self.awaits_keys() {
                    self.counted.judged("keys_not_here");
                    return Err(Error::TokenKeysNotHere);
                }
                self.refused(fault)
            }
        }
    }

    /// A good token has a tenant: only then is it counted as good, so that each is counted once.
    pub fn admits(&self) {
        self.counted.judged("good");
    }

    /// The tenant of a good token that names none.
    ///
    /// # Errors
    /// [`Error::BadToken`]: it is none's.
    pub fn tenant_of_others(&self) -> Result<&str, Error> {
        match &self.config.tenant {
            Some(tenant) => Ok(tenant),
            None => self.refused(Fault::NoTenant),
        }
    }

    fn refused<T>(&self, fault: Fault) -> Result<T, Error> {
        self.counted.judged(fault.name());
        Err(Error::BadToken(fault.words()))
    }

    fn verify(&self, keys: &Keys, token: &[u8]) -> Result<Holder, Fault> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Fault::Malformed);
        }
        let header = decode_header(token).map_err(|_| Fault::Malformed)?;
        if !signatures::ALGORITHMS.contains(&header.alg) {
            return Err(Fault::Algorithm);
        }
        let keys = keys.of(header.kid.as_deref(), header.alg);
        if keys.is_empty() {
            return Err(Fault::UnknownKey);
        }
        let validation = self.validation(header.alg);
        let mut fault = Fault::Signature;
        for key in &keys {
            match decode::<Map<String, Value>>(token, key, &validation) {
                Ok(decoded) => return self.holder(&decoded.claims),
                Err(error) if matches!(error.kind(), ErrorKind::InvalidSignature) => {}
                Err(error) => fault = Fault::of(error.kind()),
            }
        }
        Err(fault)
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        validation.set_issuer(&[&self.config.issuer]);
        validation.set_audience(&self.config.audience);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation.validate_nbf = true;
        validation.leeway = self.config.leeway.as_secs();
        validation
    }

    fn holder(&self, claims: &Map<String, Value>) -> Result<Holder, Fault> {
        let text = |name: &str| claims.get(name).and_then(Value::as_str).unwrap_or_default();
        let expires = claims.get("exp").and_then(Value::as_f64).ok_or(Fault::Claims)? as u64;
        let names = match claim(claims, &self.config.tenant_claim) {
            Some(Value::String(name)) => vec![name.clone()],
            Some(Value::Array(names)) => {
                names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
            }
            _ => Vec::new(),
        };
        let mut subject = Sha256::new();
        subject.update(text("iss"));
        subject.update([0]);
        subject.update(text("sub"));
        let key = KeyId::of(&subject.finalize().into());
        Ok(Holder { names: names.into(), key, expires: expires + self.config.leeway.as_secs() })
    }

    /// Whether a key that is not known may be there soon: none was fetched yet, or it is looked for.
    fn awaits_keys(&self) -> bool {
        let fetched = self.keys.read();
        let since = fetched.tried.map(|tried| self.clock.now().saturating_sub(tried));
        if since.is_none_or(|since| since >= UNKNOWN_EVERY) {
            self.wanted.notify_one();
            return true;
        }
        !fetched.are_here
    }

    /// Fetches the keys, for ever.
    pub async fn keep(self: Arc<Self>, upstream: Upstream) {
        let name = &self.config.issuer;
        let [least, most] = RETRY_AFTER;
        let mut pause = least;
        loop {
            match issuer::fetch(&self.config, &upstream).await {
                Ok(keys) => {
                    if pause > least {
                        tracing::info!(issuer = name, "the keys of tokens are fetched again");
                    }
                    pause = least;
                    self.take_over(keys);
                    tokio::select! {
                        () = clock::sleep(FETCH_EVERY) => {}
                        () = self.wanted.notified() => {}
                    }
                }
                Err(error) => {
                    self.counted.fetch_failed();
                    self.keys.write().tried = Some(self.clock.now());
                    if pause == least {
                        tracing::warn!(
                            issuer = name, %error,
                            "the keys of tokens cannot be fetched; those known stay in use"
                        );
                    }
                    clock::sleep(pause).await;
                    pause = (2 * pause).min(most);
                }
            }
        }
    }

    fn take_over(&self, keys: Keys) {
        self.counted.fetched(keys.len());
        let mut fetched = self.keys.write();
        (fetched.tried, fetched.are_here) = (Some(self.clock.now()), true);
        if fetched.keys != keys {
            // What one that is gone has signed is not good any more.
            self.known.lock().clear();
            tracing::info!(issuer = self.config.issuer, keys = keys.len(), "the keys of tokens are here");
            fetched.keys = keys;
        }
    }
}

/// A claim by its name; where there is none of that name, dots in it lead into objects.
fn claim<'a>(claims: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = claims.get(path) {
        return Some(value);
    }
    let (first, rest) = path.split_once('.')?;
    claim(claims.get(first)?.as_object()?, rest)
}

impl Fault {
    fn of(error: &ErrorKind) -> Self {
        match error {
            ErrorKind::ExpiredSignature => Self::Expired,
            ErrorKind::ImmatureSignature => Self::Early,
            ErrorKind::InvalidIssuer => Self::Issuer,
            ErrorKind::InvalidAudience => Self::Audience,
            ErrorKind::InvalidAlgorithm | ErrorKind::UnsupportedAlgorithm => Self::Algorithm,
            ErrorKind::MissingRequiredClaim(_) | ErrorKind::InvalidClaimFormat(_) => Self::Claims,
            ErrorKind::InvalidSignature => Self::Signature,
            _ => Self::Malformed,
        }
    }

    /// Its outcome in metrics, where good ones are `good`.
    fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Algorithm => "algorithm",
            Self::UnknownKey => "unknown_key",
            Self::Signature => "signature",
            Self::Expired => "expired",
            Self::Early => "early",
            Self::Issuer => "issuer",
            Self::Audience => "audience",
            Self::Claims => "claims",
            Self::NoTenant => "no_tenant",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Malformed => "it is no signed JWT",
            Self::Algorithm => "it is signed by an algorithm that is not taken here",
            Self::UnknownKey => "it names a key that its issuer does not have",
            Self::Signature => "its signature is not its issuer's",
            Self::Expired => "it has expired; get a new one",
            Self::Early => "it is not good yet (nbf)",
            Self::Issuer => "it is of another issuer",
            Self::Audience => "it is for another audience",
            Self::Claims => "it lacks exp, iss or aud, or one of them is not as it has to be",
            Self::NoTenant => "its claims name no tenant of this gateway",
        }
    }
}

#[cfg(test)]
mod tests;
