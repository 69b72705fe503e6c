//! What old and new process say to each other: a line each way, the sockets beside the second (`SCM_RIGHTS`,
//! unix(7)), and a last line once the new one serves.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use keyway_wire::block_hash::HashKey;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::process::sockets::Handles;

/// Both must speak the same; a number that is not known is refused.
const HELLO: &[u8] = b"keyway handover 1\n";
const READY: &[u8] = b"ready\n";
/// Bytes of the hash key and whether a worker was ready.
const LEGACY_BYTES: usize = 9;

/// What goes over besides the sockets.
#[derive(Debug, Clone, Copy)]
pub struct Legacy {
    /// The secret of the hashes.
    pub hash_key: HashKey,
    /// Whether a worker was ready: a successor whose workers are not must not take over then.
    pub was_ready: bool,
}

pub(super) fn hello(mut stream: &UnixStream) -> io::Result<()> {
    stream.write_all(HELLO)
}

pub(super) fn expect_hello(stream: &UnixStream) -> io::Result<()> {
    expect(stream, HELLO)
}

pub(super) fn ready(mut stream: &UnixStream) -> io::Result<()> {
    stream.write_all(READY)
}

pub(super) fn expect_ready(stream: &UnixStream) -> io::Result<()> {
    expect(stream, READY)
}

fn expect(mut stream: &UnixStream, wanted: &[u8]) -> io::Result<()> {
    let mut said = vec![0; wanted.len()];
    stream.read_exact(&mut said)?;
    if said == wanted { Ok(()) } else { Err(wrong("it speaks another protocol")) }
}

pub(super) fn send(stream: &UnixStream, handles: &Handles, legacy: Legacy) -> io::Result<()> {
    let mut bytes = [0; LEGACY_BYTES];
    bytes[..8].copy_from_slice(&legacy.hash_key.to_bytes());
    bytes[8] = legacy.was_ready.into();
    let mut fds = vec![handles.clients.as_fd(), handles.admin.as_fd()];
    fds.extend(handles.scaler.as_ref().map(AsFd::as_fd));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !beside.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(wrong("the sockets do not fit"));
    }
    sendmsg(stream, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(super) fn receive(stream: &UnixStream) -> io::Result<(Legacy, Handles)> {
    let mut bytes = [0; LEGACY_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(stream, into, &mut beside, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes != LEGACY_BYTES {
        return Err(wrong("it refused, or ended"));
    }
    // In the order in which they were sent: clients', operators', and KEDA's where there is one.
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            fds.extend(given);
        }
    }
    let mut fds = fds.into_iter();
    let (Some(clients), Some(admin), scaler) = (fds.next(), fds.next(), fds.next()) else {
        return Err(wrong("it gave no sockets"));
    };
    let mut key = [0; 8];
    key.copy_from_slice(&bytes[..8]);
    let legacy = Legacy { hash_key: HashKey::of_bytes(key), was_ready: bytes[8] != 0 };
    Ok((legacy, Handles { clients, admin, scaler }))
}

fn wrong(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_socket_passed_on_keeps_those_who_wait_in_its_queue() {
        let any = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (clients, admin, scaler) = (any(), any(), any());
        let scaled = scaler.local_addr().unwrap();
        let address = clients.local_addr().unwrap();
        let mut waiting = TcpStream::connect(address).unwrap();
        waiting.write_all(b"early").unwrap();
        let (old, new) = UnixStream::pair().unwrap();
        let legacy = Legacy { hash_key: HashKey::new(7), was_ready: true };
        let handles = Handles { clients: clients.into(), admin: admin.into(), scaler: Some(scaler.into()) };
        send(&old, &handles, legacy).unwrap();
        let (got, handles) = receive(&new).unwrap();
        assert!(got.was_ready && got.hash_key.to_bytes() == HashKey::new(7).to_bytes());
        let scaler = TcpListener::from(handles.scaler.unwrap());
        assert_eq!(scaler.local_addr().unwrap(), scaled);
        let listener = TcpListener::from(handles.clients);
        assert_eq!(listener.local_addr().unwrap(), address);
        let mut said = [0; 5];
        listener.accept().unwrap().0.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"early");
    }

    #[test]
    fn who_speaks_otherwise_gets_nothing() {
        let (old, mut new) = UnixStream::pair().unwrap();
        new.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(expect_hello(&old).unwrap_err().to_string().contains("another protocol"));
        drop(old);
        assert!(receive(&new).is_err());
    }
}
