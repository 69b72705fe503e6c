//! TLS to workers and collectors: who is believed, and who the gateway is. What is in use is never older than
//! the files by more than the time between two looks at them: certificates of a mesh live for a day or less.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use parking_lot::{Mutex, RwLock};
use rustls::{ClientConfig, RootCertStore};

use super::{TlsError, Validity, WorkerTls, certificates, changed_at, key, provider, roots};
use crate::{clock::Instant, limits::TLS_RELOAD_INTERVAL, machine::descriptors};

/// Where distributions keep the certificates of public authorities: Debian, Red Hat, Alpine.
const SYSTEM_CAS: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// The gateway's side of TLS to others.
#[derive(Debug)]
pub struct ClientTls {
    files: WorkerTls,
    current: RwLock<Loaded>,
    looked: Mutex<Look>,
}

/// What was made from the files.
#[derive(Debug, Clone)]
struct Loaded {
    config: Arc<ClientConfig>,
    /// It, with HTTP/2 offered before HTTP/1.1.
    with_http2: Arc<ClientConfig>,
    /// Of the certificate that the gateway shows.
    validity: Option<Validity>,
}

/// The last look at the files.
#[derive(Debug)]
struct Look {
    at: Instant,
    changed: Vec<Option<SystemTime>>,
}

// What it was made from stands for it: a list of workers that is read again makes it anew.
impl PartialEq for ClientTls {
    fn eq(&self, other: &Self) -> bool {
        self.files == other.files
    }
}

impl ClientTls {
    /// Reads the files for the first time; changes of theirs are taken over later.
    pub fn load(files: WorkerTls) -> Result<Arc<Self>, TlsError> {
        let changed = changed_at(paths(&files));
        let current = RwLock::new(read(&files)?);
        Ok(Arc::new(Self { files, current, looked: Mutex::new(Look { at: Instant::now(), changed }) }))
    }

    /// What a new connection is made with; HTTP/2 is offered if the worker may choose it.
    pub fn config(&self, http2: bool) -> Arc<ClientConfig> {
        self.renew();
        let current = self.current.read();
        Arc::clone(if http2 { &current.with_http2 } else { &current.config })
    }

    /// When the certificate that the gateway shows is good; `None`: it shows none.
    pub fn validity(&self) -> Option<Validity> {
        self.renew();
        self.current.read().validity
    }

    /// Reads the files again if they have changed and were not looked at just now.
    fn renew(&self) {
        let mut looked = self.looked.lock();
        if looked.at.elapsed() < TLS_RELOAD_INTERVAL {
            return;
        }
        looked.at = Instant::now();
        let changed = changed_at(paths(&self.files));
        // Without a descriptor to read them by, they are read later.
        if changed == looked.changed || descriptors::have_run_out() {
            return;
        }
        looked.changed = changed;
        drop(looked);
        match read(&self.files) {
            Ok(loaded) => {
                *self.current.write() = loaded;
                let cert = self.files.cert_file.as_deref().map(Path::display).map(tracing::field::display);
                tracing::info!(cert, "new connections to workers are made with the new files");
            }
            Err(error) => tracing::warn!(%error, "the old certificate for workers stays in use"),
        }
    }
}

/// To learn whether a server speaks TLS at all; no connection comes of it.
pub fn believes_nobody() -> Option<Arc<ClientConfig>> {
    let builder =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().ok()?;
    Some(Arc::new(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth()))
}

fn paths(files: &WorkerTls) -> impl Iterator<Item = &PathBuf> {
    [&files.ca_file, &files.cert_file, &files.key_file].into_iter().flatten()
}

/// The system's authorities are believed if no file says otherwise.
fn read(files: &WorkerTls) -> Result<Loaded, TlsError> {
    let roots = if let Some(path) = &files.ca_file {
        roots(path)?
    } else {
        let system = SYSTEM_CAS.iter().map(Path::new).find(|path| path.exists());
        roots(system.ok_or_else(|| TlsError("https needs a ca_file: the system has none".to_owned()))?)?
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError(format!("tls: {error}")))?
        .with_root_certificates(roots);
    let (mut config, validity) = match (&files.cert_file, &files.key_file) {
        (None, None) => (builder.with_no_client_auth(), None),
        (Some(cert_file), Some(key_file)) => {
            let chain = certificates(cert_file)?;
            let validity = Validity::of(&chain);
            let wrong = |error| TlsError(format!("cert_file {}: {error}", cert_file.display()));
            (builder.with_client_auth_cert(chain, key(key_file)?).map_err(wrong)?, validity)
        }
        _ => return Err(TlsError("tls.cert_file and tls.key_file need each other".to_owned())),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let mut with_http2 = config.clone();
    with_http2.alpn_protocols.insert(0, b"h2".to_vec());
    Ok(Loaded { config: Arc::new(config), with_http2: Arc::new(with_http2), validity })
}
