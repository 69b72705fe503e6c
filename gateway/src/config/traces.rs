//! `[traces]`: whether requests are traced, which of them, and where spans go.

use std::{path::PathBuf, sync::Arc};

use http::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, WorkerTls};
use crate::{
    tls::ClientTls,
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
#[derive(Debug, Clone, PartialEq)]
pub struct TracesConfig {
    /// The collector.
    pub endpoint: Uri,
    /// How TLS is spoken with it, where its URL begins with `https`.
    pub tls: Option<Arc<ClientTls>>,
    /// What is traced, and how it is named.
    pub rules: TraceRules,
}

impl TracesFile {
    /// What follows from it; `None`: no traces.
    pub fn validated(&self) -> Result<Option<TracesConfig>, ConfigError> {
        let Some(text) = &self.otlp_endpoint else { return Ok(None) };
        let wrong = |what: &str| ConfigError(format!("traces.otlp_endpoint {text:?}: {what}"));
        let endpoint: Uri = text.parse().map_err(|_| wrong("not a URL"))?;
        let tls = match endpoint.scheme_str() {
            Some("http") => None,
            Some("https") => {
                Some(ClientTls::load(WorkerTls { ca_file: self.ca_file.clone(), ..WorkerTls::default() })?)
            }
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
        Ok(Some(TracesConfig { endpoint, tls, rules }))
    }
}
