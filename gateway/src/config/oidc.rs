//! `[auth.oidc]`: whose signed tokens are believed (OpenID Connect), and which tenant each stands for.

use std::{path::PathBuf, sync::Arc, time::Duration};

use http::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::net::tls::{ClientTls, WorkerTls};

/// Where an issuer says where its keys are (OpenID Connect Discovery 1.0, section 4).
const DISCOVERY: &str = "/.well-known/openid-configuration";
/// Difference between the issuer's clock and this one's, by default.
const LEEWAY: Duration = Duration::from_secs(60);
/// The most that may be configured: beyond it an old token is as good as a new one.
const MAX_LEEWAY_SECONDS: u64 = 600;

/// `[auth.oidc]`: whose signed tokens are believed, beside keys in the file of tenants.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OidcFile {
    /// `https` URL of who signs tokens, as their `iss` says it.
    pub issuer: Option<String>,
    /// Who tokens have to be for (`aud`): one of these.
    pub audience: Vec<String>,
    /// Where its keys are (JWKS); by default where the issuer's own `/.well-known/openid-configuration` says.
    pub jwks_url: Option<String>,
    /// Claim that names a tenant of the file, or several of which the first counts (sub). Dots lead into
    /// objects, as in `realm_access.roles`.
    pub tenant_claim: Option<String>,
    /// Tenant of tokens whose claim names none (none: they are refused).
    pub tenant: Option<String>,
    /// Authorities that may have signed the issuer's certificate, PEM; the system's by default.
    pub ca_file: Option<PathBuf>,
    /// By how much clocks may differ, in seconds (60).
    pub leeway_seconds: Option<u64>,
}

/// `[auth.oidc]`, validated: it has an issuer, an audience and a place of keys.
#[derive(Debug, Clone, PartialEq)]
pub struct OidcConfig {
    /// As tokens' `iss` says it.
    pub issuer: String,
    /// One of these a token's `aud` has to be.
    pub audience: Vec<String>,
    /// Where the keys are, or where it is said where they are.
    pub keys_at: KeysAt,
    /// Claim that names a tenant.
    pub tenant_claim: String,
    /// Tenant of tokens whose claim names none.
    pub tenant: Option<String>,
    /// By how much clocks may differ.
    pub leeway: Duration,
    /// How TLS is spoken with the issuer.
    pub tls: Arc<ClientTls>,
}

/// Where an issuer's keys are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeysAt {
    /// At this URL, as JWKS.
    Here(Uri),
    /// Where the `jwks_uri` of what is at this URL says.
    SaidAt(Uri),
}

impl OidcFile {
    /// What follows from it.
    ///
    /// # Errors
    /// What is missing, or may not be.
    pub fn validated(&self, has_tenants: bool) -> Result<OidcConfig, ConfigError> {
        let wrong = |what: &str| ConfigError(format!("auth.oidc: {what}"));
        let Some(issuer) = self.issuer.clone() else { return Err(wrong("it needs an issuer")) };
        if !has_tenants {
            return Err(wrong("it needs an auth.tenants_file, which says what each tenant may"));
        }
        if self.audience.is_empty() || self.audience.iter().any(String::is_empty) {
            return Err(wrong("it needs an audience: without one, tokens for others are as good"));
        }
        let leeway = self.leeway_seconds.map_or(LEEWAY, Duration::from_secs);
        if leeway > Duration::from_secs(MAX_LEEWAY_SECONDS) {
            return Err(wrong("leeway_seconds must be 600 at most"));
        }
        let named = |key: &str, error: &str| ConfigError(format!("auth.oidc.{key} {error}"));
        let keys_at = if let Some(url) = &self.jwks_url {
            KeysAt::Here(trusted(url).map_err(|error| named("jwks_url", error))?)
        } else {
            let url = format!("{}{DISCOVERY}", issuer.trim_end_matches('/'));
            KeysAt::SaidAt(trusted(&url).map_err(|error| named("issuer", error))?)
        };
        let tls = ClientTls::load(WorkerTls { ca_file: self.ca_file.clone(), ..WorkerTls::default() })?;
        Ok(OidcConfig {
            issuer,
            audience: self.audience.clone(),
            keys_at,
            tenant_claim: self.tenant_claim.clone().unwrap_or_else(|| "sub".to_owned()),
            tenant: self.tenant.clone(),
            leeway,
            tls,
        })
    }
}

/// A URL from which keys may come: who can change what is there can be any tenant.
///
/// # Errors
/// Why it is none, as the end of a sentence.
pub fn trusted(url: &str) -> Result<Uri, &'static str> {
    let uri: Uri = url.parse().map_err(|_| "is no URL")?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_here = host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    match uri.scheme_str() {
        _ if host.is_empty() => Err("is no URL with a host"),
        Some("https") => Ok(uri),
        Some("http") if is_here => Ok(uri),
        Some("http") => Err("must begin with https:// unless it is this machine's own"),
        _ => Err("must begin with https://"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(toml: &str) -> Result<OidcConfig, String> {
        let file: OidcFile = toml::from_str(toml).unwrap();
        file.validated(true).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_are_where_the_issuer_says_unless_it_is_configured() {
        let known = of("issuer = \"https://login.example.com/realm/\"\naudience = [\"keyway\"]").unwrap();
        let said_at = "https://login.example.com/realm/.well-known/openid-configuration".parse().unwrap();
        assert_eq!((known.keys_at, known.tenant_claim.as_str()), (KeysAt::SaidAt(said_at), "sub"));
        let here = of("issuer = \"us\"\naudience = [\"a\"]\njwks_url = \"http://127.0.0.1:9/keys\"").unwrap();
        assert_eq!(here.keys_at, KeysAt::Here("http://127.0.0.1:9/keys".parse().unwrap()));
    }

    #[test]
    fn what_would_let_others_in_is_refused() {
        for (toml, word) in [
            ("audience = [\"a\"]", "issuer"),
            ("issuer = \"https://a\"", "audience"),
            ("issuer = \"https://a\"\naudience = [\"\"]", "audience"),
            ("issuer = \"http://login.example.com\"\naudience = [\"a\"]", "https://"),
            ("issuer = \"us\"\naudience = [\"a\"]", "URL"),
            ("issuer = \"https://a\"\naudience = [\"a\"]\njwks_url = \"ftp://a/b\"", "jwks_url"),
            ("issuer = \"https://a\"\naudience = [\"a\"]\nleeway_seconds = 9999", "leeway_seconds"),
        ] {
            let error = of(toml).unwrap_err();
            assert!(error.contains(word), "{toml}: {error}");
        }
        let file: OidcFile = toml::from_str("issuer = \"https://a\"\naudience = [\"a\"]").unwrap();
        assert!(file.validated(false).unwrap_err().to_string().contains("tenants_file"));
    }
}
