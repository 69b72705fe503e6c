//! Raw HTTP/1.1 client: sends exactly the bytes it is given and reports exactly what came back, events as
//! they arrive and how the body ended. No redirects, no retries, no pool.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use tokio::net::{TcpSocket, TcpStream};

use crate::canary;
use crate::eventually::patient;
use crate::http1::{Conn, End, Framing, Head};
use crate::sse::{Next, SseReader};

/// One connection to a server.
#[derive(Debug)]
pub struct Client {
    conn: Conn,
    framing: Framing,
    events: SseReader,
    authority: String,
    /// Whether the answer that is read is an error, which may not repeat what was sent.
    is_error: bool,
}

/// A whole response.
#[derive(Debug, Clone)]
pub struct Response {
    /// Status line and headers.
    pub head: Head,
    /// The body, unframed.
    pub body: Vec<u8>,
    /// How the body ended.
    pub end: End,
}

impl Response {
    /// Status code.
    pub fn status(&self) -> u16 {
        self.head.status()
    }

    /// First value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.header(name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is not JSON; the message shows head and body.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("not JSON ({e}): {:?} {:?}", self.head.start_line, self.text()))
    }
}

impl Client {
    /// Connects.
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = patient("connection", TcpStream::connect(addr)).await;
        Self::on(stream.unwrap_or_else(|e| panic!("connect to {addr}: {e}")), addr)
    }

    /// Connects from an address of its own, such as another one of loopback.
    pub async fn connect_from(own: IpAddr, addr: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind((own, 0).into()).expect("an address of this machine");
        let stream = patient("connection", socket.connect(addr)).await;
        Self::on(stream.unwrap_or_else(|e| panic!("connect from {own} to {addr}: {e}")), addr)
    }

    fn on(stream: TcpStream, addr: SocketAddr) -> Self {
        let conn = Conn::new(stream);
        Self {
            conn,
            framing: Framing::Over,
            events: SseReader::default(),
            authority: addr.to_string(),
            is_error: false,
        }
    }

    /// Writes bytes as they are.
    pub async fn send(&mut self, bytes: &[u8]) {
        patient("write", self.conn.write(bytes)).await.expect("write");
    }

    /// Writes bytes; false when the server has closed instead.
    pub async fn try_send(&mut self, bytes: &[u8]) -> bool {
        patient("write", self.conn.write(bytes)).await.is_ok()
    }

    /// Sends a request with `content-length` framing.
    pub async fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.authority);
        for (name, value) in headers {
            if *name == "authorization" {
                canary::register(value);
            }
            let _ = write!(head, "{name}: {value}\r\n");
        }
        if !body.is_empty() || method == "POST" {
            let _ = write!(head, "content-length: {}\r\n", body.len());
        }
        canary::register_body(body);
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.send(&bytes).await;
    }

    /// Sends a JSON `POST`.
    pub async fn post(&mut self, path: &str, body: &[u8]) {
        self.request("POST", path, &[("content-type", "application/json")], body).await;
    }

    /// Reads the response's head; `None` when the server closed instead.
    pub async fn try_head(&mut self) -> Option<Head> {
        let head = patient("response head", self.conn.read_head()).await?;
        self.is_error = head.status() >= 400;
        self.framing = match head.status() {
            204 | 304 => Framing::Over,
            _ => head.framing(Framing::Close),
        };
        Some(head)
    }

    /// Reads the response's head.
    ///
    /// # Panics
    /// When the server closed instead.
    pub async fn head(&mut self) -> Head {
        self.try_head().await.expect("the server closed before a response head")
    }

    /// Reads the rest of the body.
    pub async fn body(&mut self) -> (Vec<u8>, End) {
        let (body, end) = patient("response body", self.conn.read_body(&mut self.framing)).await;
        if self.is_error {
            canary::assert_none("errors", &body);
        }
        (body, end)
    }

    /// Reads a whole response.
    pub async fn response(&mut self) -> Response {
        let head = self.head().await;
        let (body, end) = self.body().await;
        Response { head, body, end }
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
            match patient("next event", self.conn.next_piece(&mut self.framing)).await {
                Ok(bytes) => self.events.push(&bytes),
                Err(end) => return Next::End { end, torn: self.events.torn() },
            }
        }
    }
}

/// `GET` on a connection of its own.
pub async fn get(addr: SocketAddr, path: &str) -> Response {
    let mut client = Client::connect(addr).await;
    client.request("GET", path, &[], b"").await;
    client.response().await
}

/// JSON `POST` on a connection of its own.
pub async fn post(addr: SocketAddr, path: &str, body: &[u8]) -> Response {
    let mut client = Client::connect(addr).await;
    client.post(path, body).await;
    client.response().await
}
