//! HTTP/1.1 over one socket with the bytes kept as they came: heads, the three ways a body is framed, and how
//! it ended. Shared by the raw client and the fake worker; it repairs and hides nothing.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A request's or response's head.
#[derive(Debug, Clone)]
pub struct Head {
    /// The bytes on the wire, blank line included.
    pub raw: Vec<u8>,
    /// Request line or status line.
    pub start_line: String,
    /// Names in lower case and values, in order, repetitions kept.
    pub headers: Vec<(String, String)>,
}

impl Head {
    fn parse(raw: Vec<u8>) -> Self {
        let text = String::from_utf8_lossy(&raw).into_owned();
        let mut lines = text.split("\r\n");
        let start_line = lines.next().unwrap_or_default().to_owned();
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Self { raw, start_line, headers }
    }

    /// First value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// All values of a header in order; `name` in lower case.
    pub fn header_values(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, v)| v.as_str()).collect()
    }

    /// Status code of a response head.
    ///
    /// # Panics
    /// When this is not a response head.
    pub fn status(&self) -> u16 {
        let code = self.start_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        code.unwrap_or_else(|| panic!("not a status line: {:?}", self.start_line))
    }

    /// How the body after this head is framed; `otherwise` where the head does not say.
    pub fn framing(&self, otherwise: Framing) -> Framing {
        if self.header("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
            return Framing::Chunked { left: 0 };
        }
        match self.header("content-length") {
            Some(length) => Framing::Length { left: length.parse().expect("content-length is a number") },
            None => otherwise,
        }
    }
}

/// How a body is framed, and how far it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// `content-length`: bytes left.
    Length {
        /// Bytes not read yet.
        left: usize,
    },
    /// Chunked: bytes left of the current chunk.
    Chunked {
        /// Bytes of the current chunk not read yet.
        left: usize,
    },
    /// Until the peer closes.
    Close,
    /// Read to its end.
    Over,
}

/// How a body ended on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// As its framing promises.
    Complete,
    /// The peer closed or reset before that.
    Aborted,
}

/// One connection with what was read ahead.
#[derive(Debug)]
pub struct Conn {
    stream: TcpStream,
    ahead: Vec<u8>,
}

impl Conn {
    /// Wraps a connected socket; small writes leave at once.
    pub fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("TCP_NODELAY");
        Self { stream, ahead: Vec::new() }
    }

    /// Writes all of `bytes`.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Closes this side's direction only.
    pub async fn half_close(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }

    /// Reads until the peer has closed or reset; what came is kept.
    pub async fn closed_by_peer(&mut self) {
        while self.fill().await {}
    }

    /// Reads one head; `None` when the peer closed before a whole one.
    pub async fn read_head(&mut self) -> Option<Head> {
        let mut searched = 0;
        loop {
            if let Some(at) = memchr::memmem::find(&self.ahead[searched..], b"\r\n\r\n") {
                return Some(Head::parse(self.take(searched + at + 4)));
            }
            searched = self.ahead.len().saturating_sub(3);
            if !self.fill().await {
                return None;
            }
        }
    }

    /// The next bytes of a body, or how it ended.
    pub async fn next_piece(&mut self, framing: &mut Framing) -> Result<Vec<u8>, End> {
        loop {
            match *framing {
                Framing::Over | Framing::Length { left: 0 } => {
                    *framing = Framing::Over;
                    return Err(End::Complete);
                }
                Framing::Length { left } => {
                    let bytes = self.take_some(left).await?;
                    *framing = Framing::Length { left: left - bytes.len() };
                    return Ok(bytes);
                }
                Framing::Close => {
                    return self.take_some(usize::MAX).await.map_err(|_| {
                        *framing = Framing::Over;
                        End::Complete
                    });
                }
                Framing::Chunked { left: 0 } => *framing = self.next_chunk().await?,
                Framing::Chunked { left } => {
                    let bytes = self.take_some(left).await?;
                    *framing = Framing::Chunked { left: left - bytes.len() };
                    if left == bytes.len() {
                        self.line().await?;
                    }
                    return Ok(bytes);
                }
            }
        }
    }

    /// The whole body and how it ended.
    pub async fn read_body(&mut self, framing: &mut Framing) -> (Vec<u8>, End) {
        let mut body = Vec::new();
        loop {
            match self.next_piece(framing).await {
                Ok(bytes) => body.extend_from_slice(&bytes),
                Err(end) => return (body, end),
            }
        }
    }

    async fn next_chunk(&mut self) -> Result<Framing, End> {
        let line = self.line().await?;
        let size = String::from_utf8_lossy(&line);
        let size =
            usize::from_str_radix(size.trim(), 16).unwrap_or_else(|_| panic!("bad chunk size {size:?}"));
        if size > 0 {
            return Ok(Framing::Chunked { left: size });
        }
        while !self.line().await?.is_empty() {} // trailers
        Ok(Framing::Over)
    }

    async fn line(&mut self) -> Result<Vec<u8>, End> {
        loop {
            if let Some(at) = memchr::memmem::find(&self.ahead, b"\r\n") {
                let mut line = self.take(at + 2);
                line.truncate(at);
                return Ok(line);
            }
            if !self.fill().await {
                return Err(End::Aborted);
            }
        }
    }

    async fn take_some(&mut self, most: usize) -> Result<Vec<u8>, End> {
        if self.ahead.is_empty() && !self.fill().await {
            return Err(End::Aborted);
        }
        Ok(self.take(most.min(self.ahead.len())))
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let rest = self.ahead.split_off(n);
        std::mem::replace(&mut self.ahead, rest)
    }

    /// Reads more; false when the peer closed or reset.
    async fn fill(&mut self) -> bool {
        self.ahead.reserve(64 * 1024);
        matches!(self.stream.read_buf(&mut self.ahead).await, Ok(n) if n > 0)
    }
}

/// `bytes` as one chunk of a chunked body.
pub fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(b"\r\n");
    framed
}

/// The end of a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
