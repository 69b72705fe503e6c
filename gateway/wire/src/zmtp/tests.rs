//! What libzmq sends, byte for byte as its protocol's text has it; what no peer may; and any of it in any
//! pieces.

use proptest::prelude::*;

use super::*;

const BOUNDS: Bounds = Bounds { message_bytes: 1 << 20, frames: 4 };

/// A reader of a SUB socket that has had all of this.
fn fed(parts: &[&[u8]]) -> Reader {
    let mut reader = Reader::new(SocketType::Sub, BOUNDS);
    for part in parts {
        reader.unread.extend_from_slice(part);
    }
    reader
}

/// A reader whose publisher is ready, and what it sends then.
fn open(parts: &[&[u8]]) -> Reader {
    let mut reader = fed(&[&greeting(), &ready(SocketType::Pub)]);
    assert_eq!(reader.read(), Ok(Some(Incoming::Greeting)));
    assert_eq!(reader.read(), Ok(Some(Incoming::Ready)));
    assert_eq!(reader.read(), Ok(None));
    for part in parts {
        reader.unread.extend_from_slice(part);
    }
    reader
}

#[test]
fn a_handshake_is_as_the_protocol_has_it() {
    assert_eq!(greeting()[..13], *b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0N");
    assert_eq!(ready(SocketType::Sub), b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0");
    assert_eq!(subscribe_to_all(), b"\0\x01\x01");
    assert_eq!(message(&[&b""[..], b"ab"]), b"\x01\0\0\x02ab");
    let long = message(&[vec![7; 256]]);
    assert_eq!(long[..9], *b"\x02\0\0\0\0\0\0\x01\0");
    // A publisher of version 3.1, as libzmq's.
    let mut newer = greeting();
    newer[11] = 1;
    let mut reader = fed(&[&newer, b"\x04\x19\x05READY\x0bsocket-type\0\0\0\x03PUB", b"\x01\x01t\0\x01x"]);
    assert_eq!(reader.read(), Ok(Some(Incoming::Greeting)));
    assert_eq!(reader.read(), Ok(Some(Incoming::Ready)));
    assert_eq!(reader.read(), Ok(Some(Incoming::Message(vec!["t".into(), "x".into()]))));
    assert_eq!(reader.read(), Ok(None));
}

#[test]
fn who_is_no_peer_is_told_apart() {
    let greeting_of = |change: &dyn Fn(&mut [u8; 64])| {
        let mut bytes = greeting();
        change(&mut bytes);
        fed(&[&bytes]).read().unwrap_err()
    };
    assert_eq!(fed(&[b"HTTP/1.1 400 Bad Request"]).read(), Err(ZmtpError::NotZmtp));
    assert_eq!(greeting_of(&|bytes| bytes[9] = 0), ZmtpError::NotZmtp);
    assert_eq!(greeting_of(&|bytes| bytes[10] = 1), ZmtpError::Version(1));
    let curve = greeting_of(&|bytes| bytes[12..17].copy_from_slice(b"CURVE"));
    assert!(curve.to_string().contains("CURVE"));
    let mut router = fed(&[&greeting(), &ready(SocketType::Router)]);
    assert_eq!(router.read(), Ok(Some(Incoming::Greeting)));
    assert_eq!(router.read(), Err(ZmtpError::Socket("ROUTER".to_owned())));
    let mut refused = fed(&[&greeting(), b"\x04\x0a\x05ERROR\x03no\n"]);
    assert_eq!(refused.read(), Ok(Some(Incoming::Greeting)));
    assert_eq!(refused.read(), Err(ZmtpError::Refused("no".to_owned())));
}

#[test]
fn a_ping_is_told_and_other_commands_are_not() {
    let mut reader =
        open(&[b"\x04\x09\x04PING\0\x0aok", b"\x04\x05\x04PONG", b"\x04\x04\x03NEW", b"\0\x01x"]);
    assert_eq!(reader.read(), Ok(Some(Incoming::Ping("ok".into()))));
    assert_eq!(reader.read(), Ok(Some(Incoming::Message(vec!["x".into()]))));
    assert_eq!(pong(b"ok"), b"\x04\x07\x04PONGok");
}

/// A reader of a PUB socket whose subscriber is ready.
fn publisher(parts: &[&[u8]]) -> Reader {
    let mut reader = Reader::new(SocketType::Pub, BOUNDS);
    for part in [&greeting()[..], &ready(SocketType::Sub)].iter().chain(parts) {
        reader.unread.extend_from_slice(part);
    }
    assert_eq!(reader.read(), Ok(Some(Incoming::Greeting)));
    assert_eq!(reader.read(), Ok(Some(Incoming::Ready)));
    reader
}

#[test]
fn subscriptions_are_told_as_messages_and_as_commands() {
    let mut reader = publisher(&[
        b"\0\x03\x01kv",
        b"\0\x03\0kv",
        b"\x04\x0c\x09SUBSCRIBEkv",
        b"\x04\x07\x06CANCEL",
        b"\0\x02\x02x",
        b"\x01\x01\x01\0\x01\x01",
    ]);
    for want in [
        Incoming::Subscribe("kv".into()),
        Incoming::Cancel("kv".into()),
        Incoming::Subscribe("kv".into()),
        Incoming::Cancel(Bytes::new()),
        Incoming::Message(vec!["\x02x".into()]),
        Incoming::Message(vec!["\x01".into(), "\x01".into()]),
    ] {
        assert_eq!(reader.read(), Ok(Some(want)));
    }
    // To a subscriber the same is a message, and a command that it does not know.
    let mut reader = open(&[b"\x04\x0c\x09SUBSCRIBEkv", b"\0\x03\x01kv"]);
    assert_eq!(reader.read(), Ok(Some(Incoming::Message(vec!["\x01kv".into()]))));
}

#[test]
fn long_frames_are_shared_and_the_bytes_are_the_same() {
    for lengths in
        [&[0, 8, 5000][..], &[SHARED_BYTES_MIN, 0, SHARED_BYTES_MIN - 1], &[300], &[70_000, 70_000]]
    {
        let frames: Vec<Bytes> = lengths.iter().map(|length| vec![3; *length].into()).collect();
        let pieces = shared_message(&frames);
        assert_eq!(pieces.concat(), message(&frames), "{lengths:?}");
        let shared = |frame: &Bytes| pieces.iter().any(|piece| piece.as_ptr() == frame.as_ptr());
        for frame in &frames {
            assert_eq!(shared(frame), frame.len() >= SHARED_BYTES_MIN, "{lengths:?}");
        }
    }
}

#[test]
fn nothing_over_a_bound_is_waited_for_or_kept() {
    let long = |flags: u8, length: u64| [&[flags | LONG][..], &length.to_be_bytes()].concat();
    for (flags, length, most) in [
        (0, 1 << 46, BOUNDS.message_bytes),
        (MORE, u64::MAX, BOUNDS.message_bytes),
        (0, BOUNDS.message_bytes as u64 + 1, BOUNDS.message_bytes),
        (COMMAND, COMMAND_BYTES_MAX as u64 + 1, COMMAND_BYTES_MAX),
    ] {
        let refused = open(&[&long(flags, length)]).read();
        assert_eq!(refused, Err(ZmtpError::TooLarge { announced: length, most }), "{flags} {length}");
    }
    // Many small frames are as many bytes as one large one, and are counted too.
    let half = vec![0; BOUNDS.message_bytes / 2 + 1];
    let mut twice = open(&[&long(MORE, half.len() as u64), &half, &long(0, half.len() as u64)]);
    assert!(matches!(twice.read(), Err(ZmtpError::TooLarge { .. })));
    assert_eq!(open(&[&[MORE, 0].repeat(5)]).read(), Err(ZmtpError::TooMany { most: 4 }));
    for flags in [8, 0x80, MORE | COMMAND] {
        assert!(matches!(open(&[&[flags, 0]]).read(), Err(ZmtpError::Malformed(_))));
    }
    let whole = vec![1; BOUNDS.message_bytes];
    assert_eq!(open(&[&message(&[&whole])]).read(), Ok(Some(Incoming::Message(vec![whole.into()]))));
}

proptest! {
    #[test]
    fn messages_come_as_they_were_sent_in_any_pieces(
        messages in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..4), 0..8),
        pieces in prop::collection::vec(1usize..500, 1..20),
    ) {
        let mut sent = greeting().to_vec();
        sent.extend(ready(SocketType::Pub));
        for frames in &messages {
            sent.extend(message(frames));
        }
        let (mut reader, mut came) = (fed(&[]), Vec::new());
        let mut pieces = pieces.iter().cycle();
        let mut rest = &sent[..];
        while !rest.is_empty() {
            let (piece, more) = rest.split_at((*pieces.next().unwrap()).min(rest.len()));
            reader.unread.extend_from_slice(piece);
            rest = more;
            while let Some(incoming) = reader.read().unwrap() {
                came.push(incoming);
            }
        }
        let want = messages.into_iter().map(|frames| Incoming::Message(frames.into_iter().map(Bytes::from).collect()));
        let want: Vec<_> = [Incoming::Greeting, Incoming::Ready].into_iter().chain(want).collect();
        prop_assert_eq!(came, want);
    }

    #[test]
    fn anything_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..600), met_as in 0..3) {
        let mut reader = match met_as {
            0 => fed(&[&bytes]),
            1 => open(&[&bytes]),
            _ => publisher(&[&bytes]),
        };
        let mut steps = 0;
        while let Ok(Some(_)) = reader.read() {
            steps += 1;
            prop_assert!(steps <= bytes.len());
        }
    }
}
