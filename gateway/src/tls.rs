//! TLS for clients: TLS 1.2 and 1.3 with HTTP/2 by ALPN, certificates that are read again when their files change, and
//! clients' certificates where a CA for them is given. Connections keep what they began with; a file that cannot be used
//! changes nothing but the log.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use parking_lot::RwLock;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    clock,
    config::{ConfigError, TlsFiles},
    limits::{TLS_HANDSHAKE_TIMEOUT, TLS_RELOAD_INTERVAL},
    net::TcpStream,
};

/// Where distributions keep the certificates of public authorities: Debian, Red Hat, Alpine.
const SYSTEM_CAS: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// The listener's side of TLS.
#[derive(Debug)]
pub struct ServerTls {
    files: RwLock<TlsFiles>,
    current: RwLock<Arc<ServerConfig>>,
}

impl ServerTls {
    /// Reads the files.
    pub fn load(files: TlsFiles) -> Result<Arc<Self>, ConfigError> {
        let current = RwLock::new(Arc::new(server_config(&files)?));
        Ok(Arc::new(Self { files: RwLock::new(files), current }))
    }

    /// Other files for new connections from now on: those that were [`prepare`]d.
    pub fn change(&self, prepared: Prepared) {
        *self.files.write() = prepared.files;
        *self.current.write() = prepared.config;
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
            if now == seen {
                continue;
            }
            seen = now;
            let files = self.files.read().clone();
            match server_config(&files) {
                Ok(config) => {
                    *self.current.write() = Arc::new(config);
                    tracing::info!(cert = %files.cert_file.display(), "new connections get the new certificate");
                }
                Err(error) => tracing::warn!(%error, "the old certificate stays in use"),
            }
        }
    }

    fn changed_at(&self) -> Vec<Option<SystemTime>> {
        let changed = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
        let files = self.files.read();
        [&files.cert_file, &files.key_file].into_iter().chain(&files.client_ca_file).map(changed).collect()
    }
}

/// Files that can be used.
#[derive(Debug)]
pub struct Prepared {
    files: TlsFiles,
    config: Arc<ServerConfig>,
}

/// Reads the files of a listener.
pub fn prepare(files: &TlsFiles) -> Result<Prepared, ConfigError> {
    Ok(Prepared { files: files.clone(), config: Arc::new(server_config(files)?) })
}

/// Whether the files can be used.
pub fn check(files: &TlsFiles) -> Result<(), ConfigError> {
    server_config(files).map(drop)
}

fn server_config(files: &TlsFiles) -> Result<ServerConfig, ConfigError> {
    let wrong = |error: &dyn std::fmt::Display| {
        ConfigError(format!("tls: {} and its key: {error}", files.cert_file.display()))
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
                .map_err(|error| ConfigError(format!("client_ca_file {}: {error}", path.display())))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(certificates(&files.cert_file)?, key(&files.key_file)?)
        .map_err(|error| wrong(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// TLS to a worker: who is believed (the system's authorities if no file says otherwise), and who the gateway is.
pub fn client_config(
    ca_file: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>, ConfigError> {
    let roots = if let Some(path) = ca_file {
        roots(path)?
    } else {
        let system = SYSTEM_CAS.iter().map(Path::new).find(|path| path.exists());
        roots(system.ok_or_else(|| ConfigError("https needs a ca_file: the system has none".to_owned()))?)?
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| ConfigError(format!("tls: {error}")))?
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((cert_file, key_file)) => builder
            .with_client_auth_cert(certificates(cert_file)?, key(key_file)?)
            .map_err(|error| ConfigError(format!("cert_file {}: {error}", cert_file.display())))?,
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let wrong =
        |error: &dyn std::fmt::Display| ConfigError(format!("certificate {}: {error}", path.display()));
    let all = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(|error| wrong(&error))?;
    if all.is_empty() { Err(wrong(&"holds no PEM certificate")) } else { Ok(all) }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, ConfigError> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| ConfigError(format!("private key {}: {error}", path.display())))
}

fn roots(path: &Path) -> Result<RootCertStore, ConfigError> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(path)?);
    if added == 0 {
        return Err(ConfigError(format!("CA file {}: no certificate in it can be used", path.display())));
    }
    Ok(roots)
}
