//! An issuer is asked for its keys: where it says that they are (OpenID Connect Discovery 1.0), or where the
//! configuration does.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{StatusCode, Uri, uri::PathAndQuery};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;

use super::keys::Keys;
use crate::{
    clock,
    config::{KeysAt, OidcConfig, trusted},
    upstream::{Origin, Outgoing, SendError, Upstream},
};

/// Bytes of what an issuer answers at most.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Time that an issuer's answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
#[error("{url}: {cause}")]
pub(super) struct FetchError {
    url: Uri,
    cause: Cause,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("{0}")]
    NotSent(SendError),
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    Late,
    #[error("status {0}")]
    Status(StatusCode),
    #[error("its answer broke off, or is larger than {MAX_ANSWER_BYTES} bytes")]
    NoBody,
    #[error("its answer has no issuer and jwks_uri (or set auth.oidc.jwks_url)")]
    NoConfiguration,
    /// OpenID Connect Discovery 1.0, section 4.3: who may say where the keys are has to be the issuer itself.
    #[error("it is the issuer {0:?}; write it so in auth.oidc.issuer")]
    OtherIssuer(String),
    #[error("its jwks_uri {0}")]
    Untrusted(&'static str),
    #[error("its answer is no JWKS")]
    NoKeySet,
    #[error("none of its keys can verify a token's signature")]
    NoKeys,
}

#[derive(Deserialize)]
struct Configuration {
    issuer: String,
    jwks_uri: String,
}

/// The keys of an issuer, at least one.
pub(super) async fn fetch(config: &OidcConfig, upstream: &Upstream) -> Result<Keys, FetchError> {
    let url = match &config.keys_at {
        KeysAt::Here(url) => url.clone(),
        KeysAt::SaidAt(url) => said_at(config, upstream, url).await.map_err(|cause| at(url, cause))?,
    };
    let keys = async {
        let keys = Keys::read(&get(config, upstream, &url).await?).ok_or(Cause::NoKeySet)?;
        if keys.len() == 0 { Err(Cause::NoKeys) } else { Ok(keys) }
    };
    keys.await.map_err(|cause| at(&url, cause))
}

fn at(url: &Uri, cause: Cause) -> FetchError {
    FetchError { url: url.clone(), cause }
}

/// Where the keys are, by what the issuer says at this URL.
async fn said_at(config: &OidcConfig, upstream: &Upstream, url: &Uri) -> Result<Uri, Cause> {
    let text = get(config, upstream, url).await?;
    let said: Configuration = serde_json::from_slice(&text).map_err(|_| Cause::NoConfiguration)?;
    if said.issuer != config.issuer {
        return Err(Cause::OtherIssuer(said.issuer));
    }
    trusted(&said.jwks_uri).map_err(Cause::Untrusted)
}

/// The body of a successful answer.
async fn get(config: &OidcConfig, upstream: &Upstream, url: &Uri) -> Result<Bytes, Cause> {
    let tls = (url.scheme_str() == Some("https")).then(|| Arc::clone(&config.tls));
    let origin = Origin::of(url, tls, false);
    let target = url.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
    let asked = async {
        let sent = upstream.send(&origin, Outgoing::get(target)).await;
        let (head, body) = sent.map_err(Cause::NotSent)?.into_parts();
        if !head.status.is_success() {
            return Err(Cause::Status(head.status));
        }
        let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(|_| Cause::NoBody)
    };
    clock::timeout(TIMEOUT, asked).await.unwrap_or(Err(Cause::Late))
}
