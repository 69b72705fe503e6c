//! `[peers]`: the other gateways in front of the same workers.

use std::{path::PathBuf, time::Duration};

use http::{HeaderValue, Uri};
use keyway_wire::block_hash::HashKey;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{ConfigError, port_of, worker::read_key};
use crate::limits::{PEER_EVERY, PEER_EVERY_RANGE};

/// `[peers]`: the other gateways in front of the same workers.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PeersFile {
    /// Admin listeners of the other gateways in front of the same workers, such as
    /// `http://keyway-admin:9090`: each address of each name is one. This gateway itself may be among
    /// them.
    pub urls: Vec<String>,
    /// Milliseconds between two words of theirs on what they have at each worker, where that changes (50;
    /// 10 to 1000). Where they send a request they tell at once, but for a tenth of this time after they last
    /// did.
    pub every_ms: Option<u64>,
    /// File with the token that they ask of operators; by default they are shown this gateway's own
    /// (`auth.admin_token_file`).
    pub token_file: Option<PathBuf>,
}

/// `[peers]`, validated: where the other gateways' admin listeners are, and how they are asked.
#[derive(Debug, Clone, PartialEq)]
pub struct PeersConfig {
    /// Host and port of each URL.
    pub places: Vec<(String, u16)>,
    /// Time between two words of theirs.
    pub every: Duration,
    /// `Bearer …` to show them in place of this gateway's own.
    pub token: Option<HeaderValue>,
}

impl PeersConfig {
    /// The key of prompts' names where there is no file for it: it follows from the token that gateways
    /// show each other, so that those who tell each other name alike. The token does not follow from it.
    /// `None`: there is no token.
    pub fn hash_key(&self, admin_token: Option<&HeaderValue>) -> Option<HashKey> {
        let token = self.token.as_ref().or(admin_token)?;
        let digest = Sha256::new().chain_update(b"keyway: names of prompts\0").chain_update(token.as_bytes());
        Some(HashKey::from_bytes(&digest.finalize()))
    }
}

impl PeersFile {
    /// What follows from it; `None`: no others.
    pub fn validated(&self) -> Result<Option<PeersConfig>, ConfigError> {
        let places = self.urls.iter().map(|url| place(url)).collect::<Result<Vec<_>, _>>()?;
        let every = self.every_ms.map_or(PEER_EVERY, Duration::from_millis);
        if !PEER_EVERY_RANGE.contains(&every) {
            return Err(ConfigError("peers.every_ms must be between 10 and 1000".to_owned()));
        }
        let token = self.token_file.as_ref().map(read_key).transpose()?;
        Ok((!places.is_empty()).then_some(PeersConfig { places, every, token }))
    }
}

fn place(url: &str) -> Result<(String, u16), ConfigError> {
    let wrong = || {
        let expected = "expected http://HOST:PORT of another gateway's admin listener";
        ConfigError(format!("peers.urls {url:?}: {expected}"))
    };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let host = uri.host().filter(|_| uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/"));
    let host = host.ok_or_else(wrong)?.trim_start_matches('[').trim_end_matches(']');
    Ok((host.to_owned(), port_of(&uri)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validated(urls: &[&str], every_ms: Option<u64>) -> Result<Option<PeersConfig>, ConfigError> {
        let urls = urls.iter().map(ToString::to_string).collect();
        PeersFile { urls, every_ms, token_file: None }.validated()
    }

    #[test]
    fn gateways_with_one_token_name_alike() {
        let [one, other] = ["Bearer one", "Bearer other"].map(HeaderValue::from_static);
        let key = |own: Option<&HeaderValue>, admin: Option<&HeaderValue>| {
            let config = PeersConfig { places: Vec::new(), every: PEER_EVERY, token: own.cloned() };
            config.hash_key(admin).map(HashKey::to_bytes)
        };
        assert_eq!(key(Some(&one), Some(&other)), key(None, Some(&one)));
        assert_ne!(key(None, Some(&one)), key(None, Some(&other)));
        assert_ne!(key(None, Some(&one)), Some(HashKey::from_bytes(one.as_bytes()).to_bytes()));
        assert_eq!(key(None, None), None);
    }

    #[test]
    fn each_url_is_a_place_to_ask() {
        assert_eq!(validated(&[], None).unwrap(), None);
        let config = validated(&["http://keyway-admin:9090", "http://[::1]:91/"], Some(20)).unwrap().unwrap();
        assert_eq!(config.places, [("keyway-admin".to_owned(), 9090), ("::1".to_owned(), 91)]);
        assert_eq!((config.every, config.token), (Duration::from_millis(20), None));
        for url in ["keyway-admin:9090", "https://a:1", "http://a:1/load", "", "http://"] {
            assert!(validated(&[url], None).unwrap_err().0.contains("admin listener"), "{url}");
        }
        for every_ms in [0, 9, 1_001] {
            assert!(validated(&["http://a:1"], Some(every_ms)).unwrap_err().0.contains("every_ms"));
        }
    }
}
