//! TLS for tests: an authority that signs certificates into files, a client that speaks HTTP over TLS, and a
//! front that puts TLS before a plain server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Signs certificates for loopback; its files live as long as it does.
#[derive(Debug)]
pub struct Authority {
    dir: TempDir,
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate, PEM.
    pub ca_file: PathBuf,
}

/// A certificate and its key, as files.
#[derive(Debug, Clone)]
pub struct Identity {
    /// PEM.
    pub cert_file: PathBuf,
    /// PEM.
    pub key_file: PathBuf,
}

impl Identity {
    fn certificates(&self) -> Vec<CertificateDer<'static>> {
        let all = CertificateDer::pem_file_iter(&self.cert_file).expect("a PEM file");
        all.collect::<Result<_, _>>().expect("certificates")
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_file(&self.key_file).expect("a key")
    }
}

impl Authority {
    /// A new one.
    pub fn new() -> Self {
        let dir = TempDir::new().expect("a folder");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let ca_file = dir.path().join("ca.crt");
        let certificate = params.self_signed(&key).expect("a certificate");
        std::fs::write(&ca_file, certificate.pem()).expect("write");
        Self { issuer: Issuer::new(params, key), dir, ca_file }
    }

    /// A new certificate for loopback, in files of this name, which are replaced if they exist.
    pub fn sign(&self, name: &str) -> Identity {
        let identity = Identity {
            cert_file: self.dir.path().join(format!("{name}.crt")),
            key_file: self.dir.path().join(format!("{name}.key")),
        };
        self.sign_into(&identity);
        identity
    }

    /// Replaces the files of an identity by a new certificate and key.
    pub fn sign_into(&self, identity: &Identity) {
        self.sign_until(identity, 2_100);
    }

    /// The same, good until this year begins.
    pub fn sign_until(&self, identity: &Identity, year: i32) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).expect("a name");
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        std::fs::write(&identity.key_file, key.serialize_pem()).expect("write");
        std::fs::write(&identity.cert_file, certificate.pem()).expect("write");
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        let certificate = CertificateDer::from_pem_file(&self.ca_file).expect("a PEM file");
        roots.add(certificate).expect("a certificate");
        Arc::new(roots)
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Posts over TLS by a protocol (`h2`, `http/1.1`); the status and the body, or why there was no answer.
pub async fn post_tls(
    addr: SocketAddr,
    authority: &Authority,
    identity: Option<&Identity>,
    protocol: &str,
    body: &[u8],
) -> Result<(u16, Bytes), String> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(authority.roots());
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(own) => builder.with_client_auth_cert(own.certificates(), own.key()).expect("an identity"),
    };
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    let stream = TcpStream::connect(addr).await.map_err(|error| error.to_string())?;
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    let stream = connecting.map_err(|error| error.to_string())?;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(protocol.as_bytes()), "what was asked for");
    let request = http::Request::post(format!("https://{addr}{}", crate::openai::CHAT))
        .header("host", addr.to_string())
        .header("content-type", "application/json")
        .body(Full::new(Bytes::copy_from_slice(body)))
        .expect("a request");
    let answer = if protocol == "h2" {
        let (mut send, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        send.send_request(request).await
    } else {
        let (mut send, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        send.send_request(request).await
    };
    let answer = answer.map_err(|error| error.to_string())?;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.map_err(|error| error.to_string())?;
    Ok((status, body.to_bytes()))
}

/// TLS before a plain server.
#[derive(Debug)]
pub struct TlsFront {
    /// Where it listens.
    pub addr: SocketAddr,
    acceptor: watch::Sender<Arc<ServerConfig>>,
}

impl TlsFront {
    /// Begins; with `clients`, only those who have a certificate of that authority come in.
    pub async fn start(backend: SocketAddr, identity: &Identity, clients: Option<&Authority>) -> Self {
        Self::with(backend, server_config(identity, clients)).await
    }

    /// Begins; it knows these protocols and no other.
    pub async fn speaking(backend: SocketAddr, identity: &Identity, protocols: &[&str]) -> Self {
        let mut config = ServerConfig::clone(&server_config(identity, None));
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        Self::with(backend, Arc::new(config)).await
    }

    async fn with(backend: SocketAddr, config: Arc<ServerConfig>) -> Self {
        let (acceptor, current) = watch::channel(config);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(pass(stream, backend, current.clone()));
            }
        });
        Self { addr, acceptor }
    }

    /// As if it were restarted with other files: connections end, and new ones get these.
    pub fn restart(&self, identity: &Identity, clients: Option<&Authority>) {
        self.acceptor.send_replace(server_config(identity, clients));
    }
}

fn server_config(identity: &Identity, clients: Option<&Authority>) -> Arc<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions");
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(authority.roots(), provider());
            builder.with_client_cert_verifier(verifier.build().expect("a verifier"))
        }
    };
    Arc::new(builder.with_single_cert(identity.certificates(), identity.key()).expect("a configuration"))
}

async fn pass(stream: TcpStream, backend: SocketAddr, mut current: watch::Receiver<Arc<ServerConfig>>) {
    let acceptor = TlsAcceptor::from(Arc::clone(&current.borrow_and_update()));
    let (Ok(mut front), Ok(mut back)) = (acceptor.accept(stream).await, TcpStream::connect(backend).await)
    else {
        return;
    };
    tokio::select! {
        // Either side's end is the other's.
        _ = tokio::io::copy_bidirectional(&mut front, &mut back) => {}
        Ok(()) = current.changed() => {}
    }
}
