//! `[traces]`: whether requests are traced, which of them, and where spans go.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::net::tls::{ClientTls, WorkerTls};

/// `[traces]`: which requests are traced, and where their spans go.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TracesFile {
    /// URL of an OpenTelemetry collector that takes OTLP over HTTP, without `/v1/traces`; no traces if
    /// absent.
    pub otlp_endpoint: Option<String>,
    /// Authorities that may have signed its certificate, PEM; the system's by default.
    pub ca_file: Option<PathBuf>,
    /// Share of the traces that begin here (1.0).
    pub sample: Option<f64>,
    /// Whether a client's trace is recorded exactly if the client says so (true); else it is one of the
    /// share.
    pub follow_client: Option<bool>,
    /// Version of OpenTelemetry's names for generative AI: `latest`, `1.36` or `off` (latest).
    pub genai: Option<GenAi>,
    /// `service.name` of the spans (keyway).
    pub service_name: Option<String>,
    /// What else they say of this gateway, such as `deployment.environment.name`.
    pub resource: BTreeMap<String, String>,
    /// Headers of the requests to the collector, often a secret: they come by the environment alone.
    #[serde(skip)]
    pub headers: Vec<(String, String)>,
}

/// `[traces]`, validated; made only where a collector is named.
#[derive(Debug, Clone, PartialEq)]
pub struct TracesConfig {
    /// URL of the collector, which takes OTLP over HTTP; without `/v1/traces`.
    pub endpoint: Uri,
    /// How TLS is spoken with it, where its URL begins with `https`.
    pub tls: Option<Arc<ClientTls>>,
    /// What is traced, and how it is named.
    pub rules: TraceRules,
    /// `service.name` of the spans.
    pub service_name: String,
    /// What else they say of this gateway.
    pub resource: BTreeMap<String, String>,
    /// Headers of the requests to the collector.
    pub headers: HeaderMap,
}

/// What decides which requests are traced, and how spans are named.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceRules {
    /// Share of the traces that begin here.
    pub sample: f64,
    /// Whether a client's own decision holds for its traces.
    pub follow_client: bool,
    /// Names of what concerns the model.
    pub genai: GenAi,
}

/// Which version of the conventions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum GenAi {
    /// No such attributes; spans are named by their method.
    #[serde(rename = "off")]
    Off,
    /// `gen_ai.system`, and token counts without those that were cached.
    #[serde(rename = "1.36")]
    V1_36,
    /// `gen_ai.provider.name`, token counts with those that were cached, time to the first chunk.
    #[default]
    #[serde(rename = "latest")]
    Latest,
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
        Ok(Some(TracesConfig {
            endpoint,
            tls,
            rules,
            service_name: self.service_name.clone().unwrap_or_else(|| "keyway".to_owned()),
            resource: self.resource.clone(),
            headers: self.headers.iter().map(header).collect::<Result<_, _>>()?,
        }))
    }
}

/// A header of the requests to the collector; its value is in no message, as it may be a secret.
fn header((name, value): &(String, String)) -> Result<(HeaderName, HeaderValue), ConfigError> {
    let wrong =
        || ConfigError(format!("the header {name:?} of the requests to the traces' collector is none"));
    let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
    value.set_sensitive(true);
    Ok((name.parse().map_err(|_| wrong())?, value))
}
