//! A peer that says what a test wants, over a real socket.

use std::{future::Future, net::SocketAddr, time::Duration};

use bytes::Bytes;
use keyway_wire::zmtp::{Bounds, Frames, Incoming, Reader, SocketType, greeting, ready};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Far more than anything here takes: without it a failure would be a test that never ends.
pub(crate) async fn patient<T>(what: &str, doing: impl Future<Output = T>) -> T {
    let most = Duration::from_secs(60);
    tokio::time::timeout(most, doing).await.unwrap_or_else(|_| panic!("{what} did not come"))
}

pub(crate) async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// More than the system takes of a connection that is not read.
const ENDLESS_BYTES: usize = 64 << 20;

/// Flags of a frame, and how long it claims to be.
pub(crate) fn head(flags: u8, length: u64) -> Vec<u8> {
    [&[flags | 2][..], &length.to_be_bytes()].concat()
}

/// What no peer may send once it is ready, whichever socket it talks to; some of it without end.
pub(crate) fn outrages() -> Vec<(&'static str, Vec<u8>, bool)> {
    vec![
        ("a frame of 2^62 bytes", head(0, 1 << 62), false),
        ("a frame of 2^64 - 1 bytes after another", [&[1, 0][..], &head(0, u64::MAX)].concat(), false),
        ("a command of 2^40 bytes", head(4, 1 << 40), false),
        ("a frame of a kilobyte", head(0, 1 << 10), false),
        ("flags that no frame has", vec![0xff, 0], false),
        ("frames without end", [1, 0].repeat(1000), true),
        ("long frames without end", [&[1, 200][..], &[0; 200]].concat(), true),
    ]
}

/// What no peer may send instead of a greeting.
pub(crate) fn no_greetings() -> Vec<(&'static str, Vec<u8>)> {
    let mut curve = greeting();
    curve[12..17].copy_from_slice(b"CURVE");
    vec![
        ("another protocol", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("noise", vec![0xff; 64]),
        ("an older version", b"\xff\0\0\0\0\0\0\0\x01\x7f\x01".to_vec()),
        ("another mechanism", curve.to_vec()),
        ("a peer of a kind that talks to neither", [&greeting()[..], &ready(SocketType::Pub)].concat()),
        ("a message before it is ready", [&greeting()[..], b"\0\x01\x01"].concat()),
        ("a long READY", [&greeting()[..], &head(4, 1 << 20)].concat()),
    ]
}

pub(crate) struct Peer {
    stream: TcpStream,
    reader: Reader,
}

impl Peer {
    /// Connected, and silent.
    pub(crate) async fn silent(addr: SocketAddr, socket: SocketType) -> Self {
        let stream = patient("a connection", TcpStream::connect(addr)).await.unwrap();
        let bounds = Bounds { message_bytes: 16 << 20, frames: 8 };
        Self { stream, reader: Reader::new(socket, bounds) }
    }

    /// Connected, and its hands shaken; `None` where it was sent away.
    pub(crate) async fn try_ready(addr: SocketAddr, socket: SocketType) -> Option<Self> {
        let mut peer = Self::silent(addr, socket).await;
        let hello = [&greeting()[..], &ready(socket)].concat();
        peer.stream.write_all(&hello).await.ok()?;
        while peer.next().await? != Incoming::Ready {}
        Some(peer)
    }

    pub(crate) async fn ready(addr: SocketAddr, socket: SocketType) -> Self {
        Self::try_ready(addr, socket).await.expect("it is let in")
    }

    pub(crate) async fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Says as much of it as there is room for.
    #[allow(dead_code, reason = "one file of tests needs it")]
    pub(crate) fn try_say(&self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.try_write(bytes)
    }

    /// Says this, again and again if so wanted, until it is disconnected.
    pub(crate) async fn say_until_disconnected(&mut self, what: &str, bytes: &[u8], for_ever: bool) {
        // Where it is disconnected while it speaks, the rest is of no matter.
        let mut said = bytes.len();
        while patient(what, self.stream.write_all(bytes)).await.is_ok() && for_ever {
            said += bytes.len();
            assert!(said < ENDLESS_BYTES, "{what}: {said} bytes were taken");
        }
        let mut rest = [0; 1 << 10];
        while patient(what, self.stream.read(&mut rest)).await.is_ok_and(|read| read > 0) {}
    }

    /// What comes next; `None` once the connection is closed.
    pub(crate) async fn next(&mut self) -> Option<Incoming> {
        loop {
            if let Some(incoming) = self.reader.read().unwrap() {
                return Some(incoming);
            }
            let read = self.stream.read_buf(&mut self.reader.unread);
            if patient("something", read).await.ok()? == 0 {
                return None;
            }
        }
    }

    /// Whether all that was said has been heard: what is said in order is read in order. For a peer that
    /// nothing is on its way to; false where it was disconnected.
    pub(crate) async fn is_heard(&mut self) -> bool {
        let mut pong = [0; 9];
        self.stream.write_all(b"\x04\x09\x04PING\0\x0aok").await.is_ok()
            && patient("a pong", self.stream.read_exact(&mut pong))
                .await
                .is_ok_and(|_| pong == *b"\x04\x07\x04PONGok")
    }

    pub(crate) async fn message(&mut self) -> Frames {
        loop {
            if let Incoming::Message(frames) = self.next().await.expect("a message") {
                return frames;
            }
        }
    }
}

pub(crate) fn frames(frames: &[&'static str]) -> Vec<Bytes> {
    frames.iter().map(|frame| Bytes::from_static(frame.as_bytes())).collect()
}
