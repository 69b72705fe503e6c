//! HTTP/2 client with prior knowledge (no TLS), for one exchange at a time on a connection. It exists to see
//! frames: when headers and data arrive, and whether a stream ended or was reset.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::SendStream;
use h2::client::SendRequest;
use http::Request;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::canary;
use crate::eventually::patient;
use crate::http1::End;
use crate::sse::{Next, SseReader};

/// One HTTP/2 connection.
#[derive(Debug)]
pub struct H2Client {
    send: SendRequest<Bytes>,
    authority: String,
    driver: JoinHandle<()>,
}

/// One request on it. Dropping it resets the stream (`CANCEL`) while the connection stays.
#[derive(Debug)]
pub struct H2Exchange {
    response: Option<h2::client::ResponseFuture>,
    body: Option<h2::RecvStream>,
    events: SseReader,
}

impl H2Client {
    /// Connects and shakes hands.
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = patient("connection", TcpStream::connect(addr)).await.expect("connect");
        stream.set_nodelay(true).expect("TCP_NODELAY");
        let (send, connection) =
            patient("HTTP/2 handshake", h2::client::handshake(stream)).await.expect("handshake");
        let driver = tokio::spawn(async move {
            let _ = connection.await; // a broken connection shows in the exchange that uses it
        });
        Self { send, authority: addr.to_string(), driver }
    }

    /// Sends a JSON `POST`.
    pub async fn post(&mut self, path: &str, body: &[u8]) -> H2Exchange {
        let (exchange, mut stream) = self.begin(path, Some(body.len())).await;
        canary::register_body(body);
        stream.send_data(Bytes::copy_from_slice(body), true).expect("body");
        exchange
    }

    /// Begins a JSON `POST`, whose body is the caller's to send.
    pub async fn begin(&mut self, path: &str, bytes: Option<usize>) -> (H2Exchange, SendStream<Bytes>) {
        let mut request = Request::post(format!("http://{}{path}", self.authority))
            .header("content-type", "application/json");
        if let Some(bytes) = bytes {
            request = request.header("content-length", bytes);
        }
        let request = request.body(()).expect("a valid request");
        let mut send = patient("HTTP/2 stream", self.send.clone().ready()).await.expect("a stream");
        let (response, stream) = send.send_request(request, false).expect("request");
        (H2Exchange { response: Some(response), body: None, events: SseReader::default() }, stream)
    }

    /// Waits until the server has closed the connection.
    pub async fn closed(&mut self) {
        patient("the end of the connection", &mut self.driver).await.expect("the driver runs");
    }
}

impl Drop for H2Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl H2Exchange {
    /// Status and headers of the response.
    pub async fn head(&mut self) -> http::response::Parts {
        let response = self.response.take().expect("the head is read once");
        let (parts, body) = patient("response head", response).await.expect("response head").into_parts();
        self.body = Some(body);
        parts
    }

    /// The next event of a streamed response, or how it ended.
    pub async fn next_event(&mut self) -> Next {
        loop {
            if let Some(event) = self.events.next_event() {
                if event.starts_with("{\"error\"") {
                    canary::assert_none("error events", event.as_bytes());
                }
                return Next::Event(event);
            }
            match self.next_piece().await {
                Ok(bytes) => self.events.push(&bytes),
                Err(end) => return Next::End { end, torn: self.events.torn() },
            }
        }
    }

    /// The rest of the body and how it ended.
    pub async fn body(&mut self) -> (Vec<u8>, End) {
        let mut body = Vec::new();
        loop {
            match self.next_piece().await {
                Ok(bytes) => body.extend_from_slice(&bytes),
                Err(end) => return (body, end),
            }
        }
    }

    /// What follows the body, once that was read.
    pub async fn trailers(&mut self) -> http::HeaderMap {
        let body = self.body.as_mut().expect("read the head first");
        patient("HTTP/2 trailers", body.trailers()).await.expect("trailers").unwrap_or_default()
    }

    async fn next_piece(&mut self) -> Result<Bytes, End> {
        let body = self.body.as_mut().expect("read the head first");
        match patient("HTTP/2 data", body.data()).await {
            Some(Ok(bytes)) => {
                body.flow_control().release_capacity(bytes.len()).expect("flow control");
                Ok(bytes)
            }
            Some(Err(_)) => Err(End::Aborted),
            None => Err(End::Complete),
        }
    }
}
