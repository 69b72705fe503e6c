//! Where certificates and keys are: the listener's, and those for a worker.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[tls]`: the listener speaks TLS, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The certificate chain, PEM, the gateway's own first. Read again when the file changes.
    pub cert_file: PathBuf,
    /// Its private key, PEM.
    pub key_file: PathBuf,
    /// Authorities of clients' certificates, PEM: with it, only clients that have one come in.
    pub client_ca_file: Option<PathBuf>,
}

/// `tls` of a worker: for URLs that begin with `https://`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerTls {
    /// Authorities that may have signed its certificate, PEM; the system's by default.
    pub ca_file: Option<PathBuf>,
    /// The certificate that the gateway shows it, PEM.
    pub cert_file: Option<PathBuf>,
    /// That certificate's private key, PEM.
    pub key_file: Option<PathBuf>,
}
