//! ZMTP 3.0 (ZeroMQ RFC 23, github `zeromq/rfc`) with the mechanism NULL, as engines publish their KV events:
//! what one side sends, and a reader of what comes, which also knows the commands of ZMTP 3.1 (RFC 37). Bytes
//! in, messages out; sockets are their owners' business.
//!
//! A peer is trusted with no more memory than [`Bounds`] says: a frame's announced length is checked before
//! anything is kept of it, and kept is only what has come.

use std::fmt;

use bytes::{Buf, Bytes, BytesMut};

/// The frames of one message.
pub type Frames = Vec<Bytes>;

/// What a socket is for, of the kinds that KV events need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketType {
    /// Publishes messages; a subscriber gets those whose first frame begins as it asked.
    Pub,
    /// Reads what a publisher says.
    Sub,
    /// Replies, to whom it names.
    Router,
    /// Asks, without waiting in turn.
    Dealer,
}

/// What a peer may send.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Bytes of one message, all frames together.
    pub message_bytes: usize,
    /// Frames of one message.
    pub frames: usize,
}

/// Frames from so many bytes on are sent from where they are: copying shorter ones costs less than another
/// piece to write.
const SHARED_BYTES_MIN: usize = 512;
/// Largest command: those that are known have some hundred bytes.
const COMMAND_BYTES_MAX: usize = 4 << 10;
/// Bytes of a greeting, and of its first part, which tells ZMTP from anything else.
const GREETING_BYTES: usize = 64;
const SIGNATURE_BYTES: usize = 10;
/// Of a greeting: the version's first number stands behind the signature, the mechanism behind the version.
const MAJOR: u8 = 3;
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Flags of a frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// One thing that a peer has sent whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    /// The peer's greeting: it is to be sent [`ready`] now.
    Greeting,
    /// The peer is ready: messages may be sent.
    Ready,
    /// A whole message, unless it is a subscription to a [`SocketType::Pub`].
    Message(Frames),
    /// It wants a sign of life: [`pong`] with this.
    Ping(Bytes),
    /// To a [`SocketType::Pub`] alone: it wants the messages whose first frame begins so. RFC 23 says it as a
    /// message, RFC 37 (ZMTP 3.1) as a command; either is read.
    Subscribe(Bytes),
    /// To a [`SocketType::Pub`] alone: it no longer does.
    Cancel(Bytes),
}

/// Why a connection is of no use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZmtpError {
    /// What comes is not ZMTP.
    NotZmtp,
    /// The peer speaks a ZMTP before 3: this is its major version.
    Version(u8),
    /// A mechanism other than NULL, such as CURVE.
    Mechanism(String),
    /// Another kind of socket than is talked to.
    Socket(String),
    /// The peer refuses the connection, in its words.
    Refused(String),
    /// A frame that breaks the protocol.
    Malformed(&'static str),
    /// A message of more bytes than are read.
    TooLarge {
        /// As its frames announce so far.
        announced: u64,
        /// Bytes that are read at most: [`Bounds::message_bytes`], or 4 KiB of a command.
        most: usize,
    },
    /// A message of more frames than are read.
    TooMany {
        /// Frames that are read at most: [`Bounds::frames`].
        most: usize,
    },
}

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotZmtp => f.write_str("it does not speak ZMTP"),
            Self::Version(major) => write!(f, "it speaks ZMTP {major}, not {MAJOR}"),
            Self::Mechanism(name) => {
                write!(f, "it wants ZMTP's mechanism {name:?}; only NULL is spoken here, without encryption")
            }
            Self::Socket(name) => {
                write!(f, "its socket is {name:?}, of the wrong kind: is its port another one's?")
            }
            Self::Refused(reason) => write!(f, "it refuses the connection: {reason:?}"),
            Self::Malformed(what) => write!(f, "it breaks ZMTP: {what}"),
            Self::TooLarge { announced, most } => {
                write!(f, "it announces a message of {announced} bytes; the most is {most}")
            }
            Self::TooMany { most } => write!(f, "a message of it has more than {most} frames"),
        }
    }
}

impl std::error::Error for ZmtpError {}

impl SocketType {
    const fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    /// Whether it may talk to a socket that calls itself so (RFC 23, "The Socket-Type Property").
    fn goes_with(self, peer: &[u8]) -> bool {
        let known: &[&[u8]] = match self {
            Self::Pub => &[b"SUB", b"XSUB"],
            Self::Sub => &[b"PUB", b"XPUB"],
            Self::Router => &[b"REQ", b"DEALER", b"ROUTER"],
            Self::Dealer => &[b"REP", b"DEALER", b"ROUTER"],
        };
        known.contains(&peer)
    }
}

/// What each side sends first.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[SIGNATURE_BYTES]) = (0xff, 0x7f, MAJOR);
    greeting[12..32].copy_from_slice(MECHANISM);
    greeting
}

/// The answer to a greeting: what this side's socket is.
pub fn ready(socket: SocketType) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", socket.name()), ("Identity", "")] {
        body.push(name.len() as u8);
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(&(value.len() as u32).to_be_bytes());
        body.extend_from_slice(value.as_bytes());
    }
    let mut out = Vec::new();
    push_frame(COMMAND, &body, &mut out);
    out
}

/// What a SUB socket says to have every message.
pub fn subscribe_to_all() -> Vec<u8> {
    message(&[b"\x01"])
}

/// One message as it is sent: its frames, each behind its flags and its length.
pub fn message<F: AsRef<[u8]>>(frames: &[F]) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, frame) in frames.iter().enumerate() {
        push_frame(if i + 1 < frames.len() { MORE } else { 0 }, frame.as_ref(), &mut out);
    }
    out
}

/// One message in pieces, to be sent one after the other: long frames are shared, not copied.
pub fn shared_message(frames: &[Bytes]) -> Vec<Bytes> {
    let (mut pieces, mut copied) = (Vec::new(), Vec::new());
    for (i, frame) in frames.iter().enumerate() {
        let flags = if i + 1 < frames.len() { MORE } else { 0 };
        if frame.len() < SHARED_BYTES_MIN {
            push_frame(flags, frame, &mut copied);
        } else {
            push_head(flags, frame.len(), &mut copied);
            pieces.extend([Bytes::from(std::mem::take(&mut copied)), frame.clone()]);
        }
    }
    if !copied.is_empty() {
        pieces.push(copied.into());
    }
    pieces
}

/// The answer to a ping.
pub fn pong(context: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    push_frame(COMMAND, &[b"\x04PONG", context].concat(), &mut out);
    out
}

fn push_frame(flags: u8, body: &[u8], out: &mut Vec<u8>) {
    push_head(flags, body.len(), out);
    out.extend_from_slice(body);
}

fn push_head(flags: u8, length: usize, out: &mut Vec<u8>) {
    if let Ok(length) = u8::try_from(length) {
        out.extend_from_slice(&[flags, length]);
    } else {
        out.push(flags | LONG);
        out.extend_from_slice(&(length as u64).to_be_bytes());
    }
}

/// Reads what a peer sends.
#[derive(Debug)]
pub struct Reader {
    socket: SocketType,
    bounds: Bounds,
    stage: Stage,
    /// What came and is not read yet: parts of one frame at most, once [`Reader::read`] says `None`.
    pub unread: BytesMut,
    /// The frames so far of the message that is read, and their bytes.
    frames: Frames,
    bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeting,
    Ready,
    Open,
}

impl Reader {
    /// For a socket of this kind.
    pub fn new(socket: SocketType, bounds: Bounds) -> Self {
        Self { socket, bounds, stage: Stage::Greeting, unread: BytesMut::new(), frames: Vec::new(), bytes: 0 }
    }

    /// The next thing that has come whole; `None` until more is in [`Reader::unread`].
    ///
    /// # Errors
    /// Where the peer breaks the protocol or a bound: nothing that comes after can be read.
    pub fn read(&mut self) -> Result<Option<Incoming>, ZmtpError> {
        if self.stage == Stage::Greeting {
            return self.greeting();
        }
        loop {
            let Some((flags, body)) = self.frame()? else { return Ok(None) };
            if flags & COMMAND != 0 {
                match self.command(body)? {
                    Some(incoming) => return Ok(Some(incoming)),
                    None => continue,
                }
            }
            if self.stage != Stage::Open {
                return Err(ZmtpError::Malformed("a message before it is ready"));
            }
            self.bytes += body.len();
            self.frames.push(body);
            if flags & MORE == 0 {
                self.bytes = 0;
                let frames = std::mem::take(&mut self.frames);
                return Ok(Some(self.subscription(&frames).unwrap_or(Incoming::Message(frames))));
            }
        }
    }

    fn greeting(&mut self) -> Result<Option<Incoming>, ZmtpError> {
        // Told by its first bytes, so that the reader does not wait for the rest of something else.
        let came = &self.unread[..];
        if came.first().is_some_and(|byte| *byte != 0xff)
            || came.get(SIGNATURE_BYTES - 1).is_some_and(|byte| *byte != 0x7f)
        {
            return Err(ZmtpError::NotZmtp);
        }
        if let Some(major) = came.get(SIGNATURE_BYTES).filter(|major| **major < MAJOR) {
            return Err(ZmtpError::Version(*major));
        }
        if came.len() < GREETING_BYTES {
            return Ok(None);
        }
        let mechanism = &came[12..32];
        if mechanism != MECHANISM {
            let name = mechanism.split(|byte| *byte == 0).next().unwrap_or_default();
            return Err(ZmtpError::Mechanism(readable(name)));
        }
        self.unread.advance(GREETING_BYTES);
        self.stage = Stage::Ready;
        Ok(Some(Incoming::Greeting))
    }

    /// The next frame, once all of it is there. Whether it may be so long is looked at as soon as its length
    /// is.
    fn frame(&mut self) -> Result<Option<(u8, Bytes)>, ZmtpError> {
        let Some(flags) = self.unread.first().copied() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & COMMAND != 0 && flags & MORE != 0 {
            return Err(ZmtpError::Malformed("flags that no frame has"));
        }
        let (announced, head) = if flags & LONG == 0 {
            let Some(length) = self.unread.get(1) else { return Ok(None) };
            (u64::from(*length), 2)
        } else {
            let length = self.unread.get(1..9).and_then(|bytes| bytes.try_into().ok());
            let Some(length) = length else { return Ok(None) };
            (u64::from_be_bytes(length), 9)
        };
        let (before, most) = if flags & COMMAND == 0 {
            if self.frames.len() >= self.bounds.frames {
                return Err(ZmtpError::TooMany { most: self.bounds.frames });
            }
            (self.bytes as u64, self.bounds.message_bytes)
        } else {
            (0, COMMAND_BYTES_MAX)
        };
        let announced = before.saturating_add(announced);
        if announced > most as u64 {
            return Err(ZmtpError::TooLarge { announced, most });
        }
        // Below the bound, so it fits.
        let length = (announced - before) as usize;
        if self.unread.len() < head + length {
            return Ok(None);
        }
        self.unread.advance(head);
        Ok(Some((flags, self.unread.split_to(length).freeze())))
    }

    /// What a subscriber says of a topic in a message.
    fn subscription(&self, frames: &[Bytes]) -> Option<Incoming> {
        let ([frame], SocketType::Pub) = (frames, self.socket) else { return None };
        match frame.first()? {
            0 => Some(Incoming::Cancel(frame.slice(1..))),
            1 => Some(Incoming::Subscribe(frame.slice(1..))),
            _ => None,
        }
    }

    fn command(&mut self, body: Bytes) -> Result<Option<Incoming>, ZmtpError> {
        let malformed = ZmtpError::Malformed("a command without a name");
        let (length, _) = body.split_first().ok_or(malformed.clone())?;
        let name = body.get(1..1 + usize::from(*length)).ok_or(malformed)?;
        let rest = body.slice(1 + name.len()..);
        match (self.stage, name) {
            (Stage::Ready, b"READY") => {
                let peer = property(&rest, b"Socket-Type").unwrap_or_default();
                if !self.socket.goes_with(peer) {
                    return Err(ZmtpError::Socket(readable(peer)));
                }
                self.stage = Stage::Open;
                Ok(Some(Incoming::Ready))
            }
            (_, b"ERROR") => Err(ZmtpError::Refused(readable(rest.get(1..).unwrap_or_default()))),
            (Stage::Open, b"PING") => {
                // Behind the time to live, of two bytes.
                let context = rest.get(2..).ok_or(ZmtpError::Malformed("a ping without its time to live"))?;
                Ok(Some(Incoming::Ping(rest.slice_ref(context))))
            }
            (Stage::Open, b"SUBSCRIBE") if self.socket == SocketType::Pub => {
                Ok(Some(Incoming::Subscribe(rest)))
            }
            (Stage::Open, b"CANCEL") if self.socket == SocketType::Pub => Ok(Some(Incoming::Cancel(rest))),
            (Stage::Open, _) => Ok(None),
            _ => Err(ZmtpError::Malformed("a command before it is ready")),
        }
    }
}

/// The value of a command's property of this name, whose letters' case is of no matter.
fn property<'a>(mut properties: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    loop {
        let (length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        properties = rest;
    }
}

/// A peer's words for a log: short, and of letters.
fn readable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|char| !char.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests;
