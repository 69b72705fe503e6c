//! Ranks on different machines: a TCP connection between each two of them. Words go as they lie in memory, so
//! both ends must have the same byte order, which the greeting shows. Nothing is encrypted, and no peer has
//! to prove who it is: for a network of the fleet's own.

use std::fmt;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::{Cause, Fabric, FabricError, Phase, blamed};

/// First word of a greeting; another byte order shows.
const MAGIC: u32 = 0x6b77_7831;
/// Words before a message: its exchange's number, its length.
const HEAD: usize = 2;
/// In the place of an exchange's number: the sender leaves the group, the second word says whose fault it is.
const FAREWELL: u32 = u32::MAX;
/// While one rank is waited for, those who are through are asked this often whether they have left.
const LISTEN: Duration = Duration::from_millis(50);
/// Between two attempts to reach a rank that does not listen yet.
const RETRY: Duration = Duration::from_millis(20);

/// One of the ranks of a group over TCP.
#[derive(Debug)]
pub struct Tcp {
    rank: usize,
    capacity: usize,
    exchange: u64,
    /// `None` for this rank itself.
    peers: Vec<Option<Peer>>,
    failed: Option<FabricError>,
}

struct Peer {
    stream: TcpStream,
    /// The next message with its head; of the one under way, how many of its bytes are sent, and how many it
    /// has.
    outbox: Vec<u32>,
    sent: usize,
    to_send: usize,
    /// The last message with its head, and how many of its bytes are here.
    inbox: Vec<u32>,
    received: usize,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// Why there is no further exchange with a peer.
enum Fault {
    Own(Cause),
    /// The fault of which the peer tells, as [`FabricError::blame`] says it.
    Told(u32),
}

impl From<Cause> for Fault {
    fn from(cause: Cause) -> Self {
        Self::Own(cause)
    }
}

/// How far a peer is in an exchange.
enum Progress {
    Done,
    Some,
    None,
}

// === impl Tcp ===

impl Tcp {
    /// Rank `rank` of a group whose ranks listen at `addrs`, this one with `listener`; returns when all are
    /// connected, `deadline` at most. Messages have at most `capacity` words. A rank calls those below it.
    pub fn join(
        rank: usize,
        addrs: &[SocketAddr],
        listener: &TcpListener,
        capacity: usize,
        deadline: Duration,
    ) -> io::Result<Self> {
        let until = Instant::now() + deadline;
        let greeting = [MAGIC, rank as u32, addrs.len() as u32, capacity as u32];
        let mut streams: Vec<Option<TcpStream>> = addrs.iter().map(|_| None).collect();
        for (other, addr) in addrs.iter().enumerate().take(rank) {
            let mut stream = call(*addr, until)?;
            stream.write_all(bytes(&greeting))?;
            streams[other] = Some(stream);
        }
        while streams.iter().skip(rank + 1).any(Option::is_none) {
            let mut stream = accept(listener, until)?;
            stream.set_read_timeout(Some(left(until)?))?;
            let mut theirs = [0; 4];
            stream.read_exact(bytes_mut(&mut theirs))?;
            let [magic, other, size, words] = theirs;
            let known = (rank + 1..addrs.len()).contains(&(other as usize));
            if magic != MAGIC || size as usize != addrs.len() || words as usize != capacity || !known {
                return Err(io::Error::other(format!("a caller who is not of this group: {theirs:x?}")));
            }
            streams[other as usize] = Some(stream);
            // Who called and gave up, before this rank was there to answer, calls again.
            for stream in &mut streams[rank + 1..] {
                if stream.as_ref().is_some_and(is_closed) {
                    *stream = None;
                }
            }
        }
        let peers = streams.into_iter().map(|stream| stream.map(Peer::new).transpose());
        Ok(Self { rank, capacity, exchange: 0, peers: peers.collect::<io::Result<_>>()?, failed: None })
    }

    fn error(&self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        FabricError { rank, exchange: self.exchange, phase, layer: None, cause }
    }

    fn run(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        let until = Instant::now() + deadline;
        let (number, capacity) = (self.exchange as u32, self.capacity);
        loop {
            let (mut waiting, mut progress) = (None, false);
            for rank in 0..self.peers.len() {
                let Some(peer) = &mut self.peers[rank] else { continue };
                match peer.advance(number, capacity) {
                    Ok(Progress::Done) => {}
                    Ok(Progress::Some) => (waiting, progress) = (Some(rank), true),
                    Ok(Progress::None) => waiting = waiting.or(Some(rank)),
                    Err(Fault::Own(cause)) => return Err(self.error(rank, phase, cause)),
                    Err(Fault::Told(word)) => {
                        let (rank, cause) = blamed(word, deadline);
                        return Err(self.error(rank, phase, cause));
                    }
                }
            }
            let Some(rank) = waiting else { return Ok(()) };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.error(rank, phase, Cause::Deadline(deadline)));
            }
            if !progress {
                // Who is through with this exchange may have given up since.
                if let Some(word) = self.peers.iter().flatten().find_map(Peer::farewell) {
                    let (rank, cause) = blamed(word, deadline);
                    return Err(self.error(rank, phase, cause));
                }
                self.wait(left.min(LISTEN));
            }
        }
    }

    fn leave(&mut self, error: FabricError) {
        if self.failed.is_none() {
            for peer in self.peers.iter_mut().flatten() {
                peer.leave(error.blame());
            }
            self.failed = Some(error);
        }
    }

    /// Waits until a connection has something to read, or room for what is not sent.
    #[cfg(target_os = "linux")]
    #[allow(unsafe_code)]
    fn wait(&self, at_most: Duration) {
        use std::os::fd::AsRawFd as _;
        let open = self.peers.iter().flatten().filter(|peer| !peer.is_done());
        let mut polled: Vec<libc::pollfd> = open
            .map(|peer| libc::pollfd {
                fd: peer.stream.as_raw_fd(),
                events: if peer.is_sent() { libc::POLLIN } else { libc::POLLIN | libc::POLLOUT },
                revents: 0,
            })
            .collect();
        let milliseconds = at_most.as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: the list is alive for the call and as long as it says.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
    }

    #[cfg(not(target_os = "linux"))]
    fn wait(&self, _: Duration) {
        std::thread::yield_now();
    }
}

impl Fabric for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn outbox(&mut self, to: usize, words: usize) -> Result<&mut [u32], FabricError> {
        let (capacity, phase) = (self.capacity, Phase::Dispatch);
        if words > capacity {
            return Err(self.error(to, phase, Cause::TooLong { words, capacity }));
        }
        let error = self.error(to, phase, Cause::Protocol("nothing: it is this rank itself"));
        let peer = self.peers[to].as_mut().ok_or(error)?;
        peer.outbox.resize(HEAD + words, 0);
        Ok(&mut peer.outbox[HEAD..])
    }

    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.exchange += 1;
        for peer in self.peers.iter_mut().flatten() {
            peer.begin(self.exchange as u32);
        }
        let done = self.run(phase, deadline);
        if done.is_ok() {
            for peer in self.peers.iter_mut().flatten() {
                peer.outbox.truncate(HEAD);
            }
        }
        if let Err(error) = &done {
            self.leave(error.clone());
        }
        done
    }

    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        let error = self.error(rank, phase, cause);
        self.leave(error.clone());
        error
    }

    fn inbox(&self, from: usize) -> &[u32] {
        match &self.peers[from] {
            Some(peer) if self.failed.is_none() && peer.inbox.len() > HEAD => &peer.inbox[HEAD..],
            _ => &[],
        }
    }
}

// === impl Peer ===

impl Peer {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(None)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, outbox: vec![0; HEAD], sent: 0, to_send: 0, inbox: vec![0; HEAD], received: 0 })
    }

    /// Says whose fault it is that this rank leaves; in the middle of a message there is no way to.
    fn leave(&mut self, fault: u32) {
        if self.is_sent() || self.sent == 0 {
            // If it does not go, the other end finds the connection closed.
            let _ = self.stream.write(bytes(&[FAREWELL, fault]));
        }
    }

    /// Whose fault it is, if the peer has left behind its message of this exchange.
    fn farewell(&self) -> Option<u32> {
        let mut head = [0; HEAD];
        let next = self.is_done().then(|| self.stream.peek(bytes_mut(&mut head)));
        (matches!(next, Some(Ok(8))) && head[0] == FAREWELL).then_some(head[1])
    }

    fn begin(&mut self, exchange: u32) {
        let words = (self.outbox.len() - HEAD) as u32;
        self.outbox[..HEAD].copy_from_slice(&[exchange, words]);
        self.inbox.resize(HEAD, 0);
        (self.sent, self.to_send, self.received) = (0, self.outbox.len() * 4, 0);
    }

    fn is_sent(&self) -> bool {
        self.sent == self.to_send
    }

    fn is_done(&self) -> bool {
        self.is_sent() && self.received >= HEAD * 4 && self.received == self.inbox.len() * 4
    }

    /// Sends and receives as much as goes at once.
    fn advance(&mut self, exchange: u32, capacity: usize) -> Result<Progress, Fault> {
        let before = (self.sent, self.received);
        while !self.is_sent() {
            match self.stream.write(&bytes(&self.outbox)[self.sent..self.to_send]) {
                Ok(0) => return Err(Cause::Gone.into()),
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Cause::Gone.into()),
            }
        }
        while self.received < self.inbox.len() * 4 {
            match self.stream.read(&mut bytes_mut(&mut self.inbox)[self.received..]) {
                Ok(0) => return Err(Cause::Gone.into()),
                Ok(n) => self.received += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Cause::Gone.into()),
            }
            if self.received == HEAD * 4 && self.inbox.len() == HEAD {
                let (number, words) = (self.inbox[0], self.inbox[1] as usize);
                if number == FAREWELL {
                    return Err(Fault::Told(self.inbox[1]));
                }
                if number != exchange {
                    return Err(Cause::Protocol("a message of another exchange").into());
                }
                if words > capacity {
                    return Err(Cause::Protocol("a message that is too long").into());
                }
                self.inbox.resize(HEAD + words, 0);
            }
        }
        Ok(match (self.is_done(), before == (self.sent, self.received)) {
            (true, _) => Progress::Done,
            (false, false) => Progress::Some,
            (false, true) => Progress::None,
        })
    }
}

// === connections ===

/// What is left until then; an error once it is past.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Connects to a rank, which may not listen yet.
fn call(addr: SocketAddr, until: Instant) -> io::Result<TcpStream> {
    loop {
        match TcpStream::connect_timeout(&addr, left(until)?) {
            Ok(stream) => return Ok(stream),
            Err(error) if left(until).is_err() => return Err(error),
            Err(_) => std::thread::park_timeout(RETRY),
        }
    }
}

/// Whether the other end has closed a connection that nothing was sent on yet.
fn is_closed(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    let peeked = stream.peek(&mut [0]);
    let _ = stream.set_nonblocking(false);
    match peeked {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

fn accept(listener: &TcpListener, until: Instant) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                left(until)?;
                std::thread::park_timeout(RETRY);
            }
            Err(error) => return Err(error),
        }
    }
}

#[allow(unsafe_code)]
fn bytes(words: &[u32]) -> &[u8] {
    // SAFETY: the bytes of the words, which have no padding.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

#[allow(unsafe_code)]
fn bytes_mut(words: &mut [u32]) -> &mut [u8] {
    // SAFETY: as above; every pattern of bits is a word, and the reference is exclusive.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
