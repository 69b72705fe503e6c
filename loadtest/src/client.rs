//! The connection to the server under test: its base URL, its key, its connections. Measures nothing.

pub mod calibrate;
pub mod connection;
mod embeddings;
pub mod event;
pub mod exchange;
mod lanes;
pub mod names;
pub mod pool;
pub mod record;
pub mod sender;
pub mod sse;

use std::{
    fmt,
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use serde_json::Value;

use self::{
    connection::{Answering, Broken},
    pool::{Pool, Unconnected},
};
use crate::limits;

/// What is sent in one request, beside what all have in common.
#[derive(Debug, Default)]
pub struct PreparedRequest {
    /// JSON in the words of the endpoint; empty without one.
    pub body: Bytes,
    /// Headers of its own.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// Why the server cannot be used. `request` is such as `GET http://host:8080/v1/models`.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// `--url` is not one this client can use.
    #[error("--url {url}: {reason}")]
    Url {
        /// The refused URL, as it was given.
        url: String,
        /// What to write instead.
        reason: String,
    },
    /// What `--header` gives is no header.
    #[error("--header {name}: write `Name: value`")]
    Header {
        /// What stands in front of its first colon; the value is never shown.
        name: String,
    },
    /// The file of the API key cannot be read.
    #[error("--api-key-file {path}: {source}")]
    KeyFile {
        /// The file that was named.
        path: PathBuf,
        /// The system's own error, with which the message ends.
        source: std::io::Error,
    },
    /// There is no key in the file of the API key.
    #[error("--api-key-file {0}: the file is empty")]
    NoKey(PathBuf),
    /// No answer came that could be read: no connection, a broken one, or none in time.
    #[error("{request}: {reason}")]
    NoAnswer {
        /// Method and URL of the request; of a scrape, method and path.
        request: String,
        /// Down to the system's reason.
        reason: String,
    },
    /// The answer is an error.
    #[error("{request}: status {status}: {message}")]
    Status {
        /// Method and URL of the request; of a scrape, method and path.
        request: String,
        /// HTTP status of the answer, none of 200 to 299.
        status: u16,
        /// The server's own words.
        message: String,
    },
    /// The answer is not what an OpenAI-compatible server gives.
    #[error("{request}: {reason}")]
    Answer {
        /// Method and URL of the request; of a calibration without a ratio, method and path.
        request: String,
        /// What is missing, and what to do.
        reason: String,
    },
}

/// Why the body of an answer could not be read whole.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The connection broke before its end.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// There is more than [`limits::ANSWER_BYTES_MAX`] of it.
    #[error("length limit exceeded")]
    TooLong,
}

/// Why no head of an answer came.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// Nothing could be sent.
    #[error(transparent)]
    Unconnected(#[from] Unconnected),
    /// The connection broke, or what came is no answer.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// The server under test. Clones share its connections.
#[derive(Clone)]
pub struct Server {
    pool: Arc<Pool>,
    /// `http://host:port` and any path in front of `/v1`.
    base: String,
    /// That path; empty where there is none.
    path: String,
    authorization: Option<HeaderValue>,
    headers: HeaderMap,
    /// The headers that all requests have, as they are sent.
    lines: Vec<u8>,
}

impl From<Bytes> for PreparedRequest {
    /// A request without headers of its own.
    fn from(body: Bytes) -> Self {
        Self { body, headers: Vec::new() }
    }
}

impl fmt::Debug for Server {
    /// Its headers carry secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("base", &self.base).finish_non_exhaustive()
    }
}

impl Server {
    /// A client for `url`, with or without a trailing `/v1`. The pool has no bound: an open loop needs as
    /// many connections as there are answers under way.
    pub fn new(url: &str, api_key: Option<&str>) -> Result<Self, ClientError> {
        let refuse = |reason: &str| ClientError::Url { url: url.into(), reason: reason.into() };
        let uri: Uri = url.parse().map_err(|e| refuse(&format!("{e}; write http://HOST:PORT")))?;
        match uri.scheme_str() {
            Some("http") if uri.authority().is_some() && uri.query().is_none() => {}
            Some("https") => {
                return Err(refuse("TLS is not supported; test the plain-HTTP listener behind it"));
            }
            _ => return Err(refuse("write http://HOST:PORT")),
        }
        let authorization = api_key.map(|key| HeaderValue::try_from(format!("Bearer {key}"))).transpose();
        let mut authorization =
            authorization.map_err(|_| refuse("the API key has characters no header can carry"))?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let path = base.parse::<Uri>().map_or_else(|_| String::new(), |base| base.path().to_owned());
        let path = path.trim_end_matches('/').to_owned();
        let pool = Arc::new(Pool::new(uri));
        Ok(Self { pool, base, path, authorization, headers: HeaderMap::new(), lines: Vec::new() }.sealed())
    }

    /// The same, sending `headers` (`Name: value`) too. Their values are never shown.
    pub fn with_headers(mut self, headers: &[String]) -> Result<Self, ClientError> {
        for header in headers {
            let name = header.split(':').next().unwrap_or_default();
            let wrong = || ClientError::Header { name: name.into() };
            let (name, value) = header.split_once(':').ok_or_else(wrong)?;
            let name = HeaderName::try_from(name.trim()).map_err(|_| wrong())?;
            let mut value = HeaderValue::try_from(value.trim()).map_err(|_| wrong())?;
            value.set_sensitive(true);
            self.headers.append(name, value);
        }
        Ok(self.sealed())
    }

    fn sealed(mut self) -> Self {
        self.lines = lines(&self.common());
        self
    }

    /// The headers of a request that has none of its own.
    fn common(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static("keyway-loadtest"));
        if let Some(value) = &self.authorization {
            headers.insert(header::AUTHORIZATION, value.clone());
        }
        if let Some(host) = self.pool.host() {
            headers.insert(header::HOST, host);
        }
        for (name, value) in &self.headers {
            headers.insert(name, value.clone());
        }
        headers
    }

    /// Sends one request; the answer's body is still to come.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        prepared: &PreparedRequest,
    ) -> Result<Answering, Unanswered> {
        let (mut head, mut body) = (self.head(&method, path, prepared), &prepared.body[..]);
        if body.len() <= limits::SENT_TOGETHER_BYTES {
            head.extend_from_slice(body);
            body = &[];
        }
        Ok(self.pool.connection().await?.ask(&head, body).await?)
    }

    fn head(&self, method: &Method, path: &str, prepared: &PreparedRequest) -> Vec<u8> {
        let line = [method.as_str(), " ", &self.path, path, " HTTP/1.1\r\n"];
        let mut head = Vec::with_capacity(
            self.lines.len() + path.len() + 128 + prepared.body.len().min(limits::SENT_TOGETHER_BYTES),
        );
        for part in line {
            head.extend_from_slice(part.as_bytes());
        }
        if prepared.headers.is_empty() {
            head.extend_from_slice(&self.lines);
        } else {
            let mut headers = self.common();
            for (name, value) in &prepared.headers {
                headers.insert(name, value.clone());
            }
            head.extend_from_slice(&lines(&headers));
        }
        if !(prepared.body.is_empty() && method == Method::GET) {
            // Writing to memory cannot fail.
            let _ = write!(head, "content-length: {}\r\n", prepared.body.len());
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    /// Keeps the connection of an answer that is over for another request.
    pub fn keep(&self, answer: Answering) {
        if let Some(connection) = answer.into_connection() {
            self.pool.put(connection);
        }
    }

    /// Reads a body of bounded size.
    pub async fn read(&self, answer: Answering) -> Result<Bytes, BodyError> {
        self.read_up_to(answer, limits::ANSWER_BYTES_MAX).await
    }

    /// Reads a body of at most `bytes_max`.
    pub async fn read_up_to(&self, mut answer: Answering, bytes_max: usize) -> Result<Bytes, BodyError> {
        let mut body = Vec::new();
        let mut more = true;
        while more {
            more = answer.more(|piece| body.extend_from_slice(piece)).await?;
            if body.len() > bytes_max {
                return Err(BodyError::TooLong);
            }
        }
        self.keep(answer);
        Ok(body.into())
    }

    /// Sends one request and reads the whole answer as JSON, within `timeout`.
    pub async fn json(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Value, ClientError> {
        let request = format!("{method} {}{path}", self.base);
        let no_answer = |reason| ClientError::NoAnswer { request: request.clone(), reason };
        let exchange = async {
            let answer = self.send(method, path, &body.into()).await.map_err(|e| no_answer(chain(&e)))?;
            let status = answer.head.status;
            let body = self.read(answer).await.map_err(|error| no_answer(error.to_string()))?;
            if !is_success(status) {
                let message = event::error_message(&body);
                return Err(ClientError::Status { request: request.clone(), status, message });
            }
            serde_json::from_slice(&body).map_err(|e| ClientError::Answer {
                request: request.clone(),
                reason: format!("the answer is not JSON ({e}); is this an OpenAI-compatible server?"),
            })
        };
        tokio::time::timeout(timeout, exchange)
            .await
            .unwrap_or_else(|_| Err(no_answer(format!("no answer within {timeout:?}"))))
    }

    /// The first model that the server lists.
    pub async fn first_model(&self, timeout: Duration) -> Result<String, ClientError> {
        let path = "/v1/models";
        let models = self.json(Method::GET, path, Bytes::new(), timeout).await?;
        models["data"][0]["id"].as_str().map(str::to_owned).ok_or_else(|| ClientError::Answer {
            request: format!("GET {}{path}", self.base),
            reason: "the server lists no model; name one with --model".into(),
        })
    }
}

/// The key in `path`, without surrounding white space.
pub fn read_api_key(path: &Path) -> Result<String, ClientError> {
    let key =
        std::fs::read_to_string(path).map_err(|source| ClientError::KeyFile { path: path.into(), source })?;
    let key = key.trim();
    if key.is_empty() { Err(ClientError::NoKey(path.into())) } else { Ok(key.into()) }
}

/// Whether a status says that all went well.
pub fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

/// Headers as they are sent.
fn lines(headers: &HeaderMap) -> Vec<u8> {
    let mut lines = Vec::new();
    // A request's length is that of its body, whatever else is said of it.
    let sent = |name: &HeaderName| *name != header::CONTENT_LENGTH && *name != header::TRANSFER_ENCODING;
    for (name, value) in headers.iter().filter(|(name, _)| sent(name)) {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            lines.extend_from_slice(part);
        }
    }
    lines
}

/// An error with its causes, which for connections say what happened.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        for (url, base) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://h:1/", "http://h:1"),
            ("http://h:1/v1/", "http://h:1"),
            ("http://h/tenant/v1", "http://h/tenant"),
        ] {
            assert_eq!(Server::new(url, None).unwrap().base, base);
        }
        for url in ["127.0.0.1:8080", "https://h", "ftp://h", "", "http://h/v1?x=1", "http://"] {
            let error = Server::new(url, None).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--url {url}: ")), "{error}");
        }
    }

    #[test]
    fn a_key_is_never_shown() {
        let server = Server::new("http://h", Some("sk-secret")).unwrap();
        assert!(!format!("{server:?}").contains("secret"));
        assert!(!Server::new("http://h", Some("sk-\nsecret")).unwrap_err().to_string().contains("secret"));
    }

    #[test]
    fn headers_of_one_s_own() {
        let server = || Server::new("http://h", None).unwrap();
        let with = server().with_headers(&["X-Tenant: secret".into(), "x-b:c:d".into()]).unwrap();
        assert_eq!(
            (&with.headers["x-tenant"], &with.headers["x-b"]),
            (&"secret".try_into().unwrap(), &"c:d".try_into().unwrap())
        );
        assert!(!format!("{with:?}").contains("secret"));
        for bad in ["x-tenant", "a b: c", ": c"] {
            assert!(server().with_headers(&[bad.into()]).is_err(), "{bad}");
        }
    }
}
