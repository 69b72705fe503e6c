//! TLS for clients: TLS 1.2 and 1.3 with HTTP/2 by ALPN, and clients' certificates where a CA for them is
//! given.

use std::{io, sync::Arc, time::SystemTime};

use parking_lot::RwLock;
use rustls::{ServerConfig, pki_types::CertificateDer, server::WebPkiClientVerifier};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{TlsError, TlsFiles, Validity, certificates, changed_at, key, provider, roots};
use crate::{
    clock,
    limits::{TLS_HANDSHAKE_TIMEOUT, TLS_RELOAD_INTERVAL},
    machine::descriptors,
    metrics::CertificateMetrics,
    net::TcpStream,
};

/// The listener's side of TLS.
#[derive(Debug)]
pub struct ServerTls {
    files: RwLock<TlsFiles>,
    current: RwLock<Arc<ServerConfig>>,
    metrics: CertificateMetrics,
}

impl ServerTls {
    /// Reads the files; `metrics` say from then on when the certificate in use is good.
    pub fn load(files: &TlsFiles, metrics: CertificateMetrics) -> Result<Arc<Self>, TlsError> {
        let Prepared { files, config, validity } = prepare(files)?;
        metrics.listener(validity);
        Ok(Arc::new(Self { files: RwLock::new(files), current: RwLock::new(config), metrics }))
    }

    /// New connections get these from now on.
    pub fn change(&self, prepared: Prepared) {
        *self.files.write() = prepared.files;
        *self.current.write() = prepared.config;
        self.metrics.listener(prepared.validity);
    }

    /// Shakes hands on a new connection, within a time.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let acceptor = TlsAcceptor::from(Arc::clone(&self.current.read()));
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the client did not finish the TLS handshake");
        clock::timeout(TLS_HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await.map_err(late)?
    }

    /// Reads the files again whenever one of them has changed, for ever.
    pub async fn follow_files(self: Arc<Self>) {
        let mut seen = self.changed_at();
        loop {
            clock::sleep(TLS_RELOAD_INTERVAL).await;
            let now = self.changed_at();
            // Without a descriptor to read them by, they are read later.
            if now == seen || descriptors::have_run_out() {
                continue;
            }
            seen = now;
            let files = self.files.read().clone();
            match prepare(&files) {
                Ok(prepared) => {
                    self.change(prepared);
                    tracing::info!(cert = %files.cert_file.display(), "new connections get the new certificate");
                }
                Err(error) => tracing::warn!(%error, "the old certificate stays in use"),
            }
        }
    }

    fn changed_at(&self) -> Vec<Option<SystemTime>> {
        let files = self.files.read();
        changed_at([&files.cert_file, &files.key_file].into_iter().chain(&files.client_ca_file))
    }
}

/// Files that can be used.
#[derive(Debug)]
pub struct Prepared {
    files: TlsFiles,
    config: Arc<ServerConfig>,
    validity: Option<Validity>,
}

/// Whether the files can be used.
pub fn check(files: &TlsFiles) -> Result<(), TlsError> {
    prepare(files).map(drop)
}

/// Reads the files of a listener.
pub fn prepare(files: &TlsFiles) -> Result<Prepared, TlsError> {
    let chain = certificates(&files.cert_file)?;
    let validity = Validity::of(&chain);
    Ok(Prepared { files: files.clone(), config: Arc::new(server_config(files, chain)?), validity })
}

fn server_config(files: &TlsFiles, chain: Vec<CertificateDer<'static>>) -> Result<ServerConfig, TlsError> {
    let wrong = |error: &dyn std::fmt::Display| {
        TlsError(format!("tls: {} and its key: {error}", files.cert_file.display()))
    };
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&error))?;
    let builder = match &files.client_ca_file {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(roots(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                .build()
                .map_err(|error| TlsError(format!("client_ca_file {}: {error}", path.display())))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key(&files.key_file)?).map_err(|error| wrong(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
