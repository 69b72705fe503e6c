//! TLS on both sides of the gateway: for clients (`tls/server.rs`) and to workers (`tls/client.rs`).
//! Certificates, keys and authorities are read again when their files change; connections keep what they
//! began with, and files that cannot be used change nothing but the log.

mod client;
mod files;
mod server;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use rustls::{
    RootCertStore,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use x509_cert::{Certificate, der::Decode, time::Time};

pub use self::{
    client::{ClientTls, believes_nobody},
    files::{TlsFiles, WorkerTls},
    server::{Prepared, ServerTls, check, prepare},
};
use crate::metrics::Validity;

/// Which file of certificates, keys or authorities cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |error: &dyn std::fmt::Display| TlsError(format!("certificate {}: {error}", path.display()));
    let all = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(|error| wrong(&error))?;
    if all.is_empty() { Err(wrong(&"holds no PEM certificate")) } else { Ok(all) }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| TlsError(format!("private key {}: {error}", path.display())))
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(path)?);
    if added == 0 {
        return Err(TlsError(format!("CA file {}: no certificate in it can be used", path.display())));
    }
    Ok(roots)
}

impl Validity {
    /// That of the certificate of a chain that runs out first; `None` for no chain, and for one that cannot
    /// be read. RFC 5280, section 4.1.2.5.
    fn of(chain: &[CertificateDer<'_>]) -> Option<Self> {
        let seconds = |time: Time| i64::try_from(time.to_unix_duration().as_secs()).ok();
        let of = |der: &CertificateDer<'_>| {
            let certificate = Certificate::from_der(der).ok()?;
            let validity = certificate.tbs_certificate().validity();
            Some(Self { start: seconds(validity.not_before)?, expiry: seconds(validity.not_after)? })
        };
        chain.iter().filter_map(of).min_by_key(|validity| validity.expiry)
    }
}

/// When each of these files was changed.
fn changed_at<'a>(files: impl IntoIterator<Item = &'a PathBuf>) -> Vec<Option<SystemTime>> {
    let changed = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    files.into_iter().map(changed).collect()
}
