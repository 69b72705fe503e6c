//! `[store]`: the Redis or Valkey by which several gateways keep tenants' limits together.

use std::{fs, path::PathBuf, sync::Arc};

use http::Uri;
use percent_encoding::percent_decode_str;
use rustls::pki_types::ServerName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, worker_url::without_secret};
use crate::net::{
    Security,
    tls::{ClientTls, WorkerTls},
};

/// Where Redis listens by default, with and without TLS.
const PORT: u16 = 6379;

/// `[store]`: the Redis or Valkey by which several gateways keep tenants' limits together.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StoreFile {
    /// `redis://USER:PASSWORD@HOST:PORT/DATABASE`, or `rediss://` for TLS; all but the host may be left out.
    /// Without it each gateway keeps tenants' limits by itself.
    pub url: Option<String>,
    /// File with that URL, in place of `url`: it holds a password.
    pub url_file: Option<PathBuf>,
    /// For `rediss://`: whose certificate is believed, and the one that the gateway shows.
    pub tls: Option<WorkerTls>,
    /// What the names of all keys begin with (keyway): gateways of one fleet have the same.
    pub prefix: Option<String>,
    /// How many gateways there are, where neither the store nor `[peers]` has said it yet (1).
    pub gateways: Option<usize>,
}

/// `[store]`, validated; made only where a URL is given.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Name or address of the server.
    pub host: String,
    /// TCP port at which it listens.
    pub port: u16,
    /// Who the gateway is there; `None`: the default user.
    pub user: Option<String>,
    /// What that user shows.
    pub password: Option<Secret>,
    /// Number of the database.
    pub database: i64,
    /// How TLS is spoken with it, where its URL begins with `rediss://`.
    pub security: Option<Security>,
    /// What the names of all keys begin with.
    pub prefix: String,
    /// Gateways that there are, as far as the configuration knows.
    pub gateways: usize,
    /// What it was made from.
    tls: Option<WorkerTls>,
}

/// What is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl PartialEq for StoreConfig {
    fn eq(&self, other: &Self) -> bool {
        let place = |config: &Self| (config.host.clone(), config.port, config.database, config.gateways);
        let who = |config: &Self| (config.user.clone(), config.password.clone(), config.prefix.clone());
        let tls = |config: &Self| (config.security.is_some(), config.tls.clone());
        place(self) == place(other) && who(self) == who(other) && tls(self) == tls(other)
    }
}

impl StoreConfig {
    /// Where it is, as logs and errors show it.
    pub fn place(&self) -> String {
        let scheme = if self.security.is_some() { "rediss" } else { "redis" };
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{scheme}://{host}:{}", self.port)
    }
}

impl StoreFile {
    /// What follows from it; `None`: no store.
    pub fn validated(&self) -> Result<Option<StoreConfig>, ConfigError> {
        let text = match (&self.url, &self.url_file) {
            (None, None) if self.tls.is_some() || self.prefix.is_some() || self.gateways.is_some() => {
                return Err(ConfigError("store: it needs a url or a url_file".to_owned()));
            }
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                return Err(ConfigError("store: url and url_file: give one of them".to_owned()));
            }
            (Some(url), None) => url.trim().to_owned(),
            (None, Some(path)) => {
                let wrong = |error| ConfigError(format!("store.url_file {}: {error}", path.display()));
                fs::read_to_string(path).map_err(wrong)?.trim().to_owned()
            }
        };
        let wrong = |what: &str| ConfigError(format!("store.url {:?}: {what}", without_secret(&text)));
        let mut config = self.read(&text).map_err(|what| wrong(&what))?;
        if self.gateways == Some(0) {
            return Err(ConfigError("store.gateways must be above 0".to_owned()));
        }
        if text.starts_with("rediss://") {
            let name = ServerName::try_from(config.host.clone());
            let name = name.map_err(|_| wrong("its host is no name that a certificate can have"))?;
            let tls: Arc<ClientTls> = ClientTls::load(self.tls.clone().unwrap_or_default())?;
            config.security = Some((tls, name));
        } else if self.tls.is_some() {
            return Err(wrong("tls is for URLs that begin with rediss://"));
        }
        Ok(Some(config))
    }

    /// Reads the URL; an error repeats none of it.
    fn read(&self, text: &str) -> Result<StoreConfig, String> {
        let expected = "expected redis://HOST:6379, or rediss://HOST:6379 for TLS";
        let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
        if !["redis", "rediss"].contains(&scheme) {
            return Err(expected.to_owned());
        }
        let uri: Uri = text.parse().map_err(|_| expected.to_owned())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or(expected)?;
        if uri.query().is_some() {
            return Err("it has no query (?…): leave it out".to_owned());
        }
        let database = uri.path().trim_matches('/');
        let database = if database.is_empty() { Some(0) } else { database.parse().ok().filter(|n| *n >= 0) };
        let authority = uri.authority().map_or("", http::uri::Authority::as_str);
        let (secret, place) =
            authority.rsplit_once('@').map_or((None, authority), |(secret, place)| (Some(secret), place));
        let port = match place.strip_prefix(host) {
            Some("") => PORT,
            _ => uri.port_u16().filter(|port| *port > 0).ok_or("its port is a number from 1 to 65535")?,
        };
        let (user, password) = match secret.map(|secret| secret.split_once(':').unwrap_or((secret, ""))) {
            Some((user, password)) => (decoded(user)?, decoded(password)?),
            None => (None, None),
        };
        Ok(StoreConfig {
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port,
            user,
            password: password.map(Secret),
            database: database
                .ok_or("what stands behind the port is the number of a database, such as /0")?,
            security: None,
            prefix: self.prefix.clone().unwrap_or_else(|| "keyway".to_owned()),
            gateways: self.gateways.unwrap_or(1),
            tls: self.tls.clone(),
        })
    }
}

/// A part of a URL as it is meant; `None` where there is nothing.
fn decoded(text: &str) -> Result<Option<String>, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| "its user and password must be UTF-8, odd characters as %…")?;
    Ok((!decoded.is_empty()).then(|| decoded.into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Result<StoreConfig, ConfigError> {
        let file = StoreFile { url: Some(url.to_owned()), ..StoreFile::default() };
        Ok(file.validated()?.unwrap())
    }

    #[test]
    fn a_url_says_where_and_as_whom() {
        assert!(StoreFile::default().validated().unwrap().is_none());
        let config = of("redis://10.0.0.9").unwrap();
        assert_eq!((config.host.as_str(), config.port, config.database), ("10.0.0.9", 6379, 0));
        assert_eq!((&config.user, &config.password, config.prefix.as_str()), (&None, &None, "keyway"));
        let config = of(" redis://gate:p%40ss:w@[::1]:7000/3 ").unwrap();
        assert_eq!((config.host.as_str(), config.port, config.database), ("::1", 7000, 3));
        assert_eq!(config.user.as_deref(), Some("gate"));
        assert_eq!(config.password, Some(Secret("p@ss:w".to_owned())));
        assert!(config.place() == "redis://[::1]:7000" && !format!("{config:?}").contains("p@ss"));
        assert_eq!(of("redis://:secret@h").unwrap().user, None);
    }

    #[test]
    fn what_is_no_store_is_refused_without_its_password() {
        for url in [
            "h:6379",
            "http://:canary@h",
            "redis-cluster://:canary@h",
            "redis://",
            "redis://:canary@h:6379/x",
            "redis://:canary@h:6379/0?a=b",
            "redis://:canary@h:70000",
            "redis://:canary@h:0",
            "redis://:canary@h:",
            "redis://:%ff@h",
        ] {
            let error = of(url).unwrap_err().to_string();
            assert!(error.starts_with("store.url ") && !error.contains("canary"), "{error}");
        }
    }

    #[test]
    fn what_belongs_to_a_url_needs_one() {
        let url = || Some("redis://h".to_owned());
        for (file, word) in [
            (StoreFile { prefix: url(), ..StoreFile::default() }, "needs a url"),
            (StoreFile { url: url(), url_file: Some("f".into()), ..StoreFile::default() }, "one of them"),
            (StoreFile { url_file: Some("/nowhere".into()), ..StoreFile::default() }, "/nowhere"),
            (StoreFile { url: url(), gateways: Some(0), ..StoreFile::default() }, "above 0"),
            (StoreFile { url: url(), tls: Some(WorkerTls::default()), ..StoreFile::default() }, "rediss://"),
        ] {
            let error = file.validated().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"redis://:secret@h:7\n").unwrap();
        let file = StoreFile { url_file: Some(file.path().to_owned()), ..StoreFile::default() };
        assert_eq!(file.validated().unwrap().unwrap().port, 7);
    }
}
