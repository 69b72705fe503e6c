//! `[traces]`: whether requests are traced, which of them, and where spans go.

use std::{path::PathBuf, sync::Arc};

use http::Uri;
use rustls::ClientConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::{
    tls::client_config,
    trace::{GenAi, TraceRules},
};

/// `[traces]`
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TracesFile {
    /// URL of an OpenTelemetry collector that takes OTLP over HTTP, without `/v1/traces`; no traces if absent.
    pub otlp_endpoint: Option<String>,
    /// Authorities that may have signed its certificate, PEM; the system's by default.
    pub ca_file: Option<PathBuf>,
    /// Share of the traces that begin here (1.0).
    pub sample: Option<f64>,
    /// Whether a client's trace is recorded exactly if the client says so (true); else it is one of the share.
    pub follow_client: Option<bool>,
    /// Version of OpenTelemetry's names for generative AI: `latest`, `1.36` or `off` (latest).
    pub genai: Option<GenAi>,
}

/// `[traces]`, validated.
#[derive(Debug, Clone)]
pub struct TracesConfig {
    /// The collector.
    pub endpoint: Uri,
    /// How TLS is spoken with it, where its URL begins with `https`.
    pub tls: Option<Arc<ClientConfig>>,
    /// What is traced, and how it is named.
    pub rules: TraceRules,
    /// What `tls` was made from.
    ca_file: Option<PathBuf>,
}

impl PartialEq for TracesConfig {
    // What TLS was made from stands for it: a file that is read again makes it anew.
    fn eq(&self, other: &Self) -> bool {
        self.endpoint == other.endpoint && self.rules == other.rules && self.ca_file == other.ca_file
    }
}

impl TracesFile {
    /// What follows from it; `None`: no traces.
    pub fn validated(&self) -> Result<Option<TracesConfig>, ConfigError> {
        let Some(text) = &self.otlp_endpoint else { return Ok(None) };
        let wrong = |what: &str| ConfigError(format!("traces.otlp_endpoint {text:?}: {what}"));
        let endpoint: Uri = text.parse().map_err(|_| wrong("not a URL"))?;
        let tls = match endpoint.scheme_str() {
            Some("http") => None,
            Some("https") => Some(client_config(self.ca_file.as_deref(), None)?),
            _ => return Err(wrong("expected http://HOST:4318 or https://HOST:PORT of an OTLP collector")),
        };
        let sample = self.sample.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&sample) {
            return Err(ConfigError("traces.sample must be between 0 and 1".to_owned()));
        }
        let rules = TraceRules {
            sample,
            follow_client: self.follow_client.unwrap_or(true),
            genai: self.genai.unwrap_or_default(),
        };
        Ok(Some(TracesConfig { endpoint, tls, rules, ca_file: self.ca_file.clone() }))
    }
}
