//! Answers in pieces, beside what hyper makes of the same bytes.

use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

use super::*;

/// Status and body of a whole answer.
type Told = (u16, Vec<u8>);

/// Cuts `stream` into pieces.
fn pieces(stream: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut % (stream.len() + 1)).chain([0, stream.len()]).collect();
    cuts.sort_unstable();
    cuts.windows(2).map(|ends| stream[ends[0]..ends[1]].to_vec()).collect()
}

/// What is read of pieces, behind which the connection ends.
fn ours(pieces: &[Vec<u8>]) -> Option<Told> {
    let (mut ahead, mut under_way, mut told) = (Vec::new(), None, Vec::new());
    for piece in pieces {
        ahead.extend_from_slice(piece);
        if under_way.is_none()
            && let Some((length, head, body)) = read_head(&ahead).ok()?
        {
            ahead.drain(..length);
            under_way = Some((head.status, body));
        }
        if let Some((_, body)) = &mut under_way {
            let mut bytes = &ahead[..];
            body.take(&mut bytes, |piece| told.extend_from_slice(piece)).ok()?;
            let taken = ahead.len() - bytes.len();
            ahead.drain(..taken);
        }
    }
    let (status, body) = under_way?;
    body.ends_with_connection().then_some((status, told))
}

/// What hyper reads of the same.
async fn hypers(pieces: &[Vec<u8>]) -> Option<Told> {
    let (near, mut far) = duplex(1 << 16);
    let (mut sender, connection) = handshake::<_, Empty<&[u8]>>(TokioIo::new(near)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = http::Request::post("/").header("host", "h").body(Empty::new()).unwrap();
    let answer = tokio::spawn(async move {
        let response = sender.send_request(request).await.ok()?;
        let status = response.status().as_u16();
        Some((status, response.into_body().collect().await.ok()?.to_bytes().to_vec()))
    });
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        far.read_buf(&mut asked).await.unwrap();
    }
    for piece in pieces {
        // It may have seen enough of them.
        let _ = far.write_all(piece).await;
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
    }
    drop(far);
    let told = answer.await.unwrap();
    connection.abort();
    told
}

#[track_caller]
fn both_read(stream: &[u8], cuts: &[usize]) -> Option<Told> {
    let pieces = pieces(stream, cuts);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (ours, hypers) = (ours(&pieces), runtime.block_on(hypers(&pieces)));
    assert_eq!(ours, hypers, "{}", stream.escape_ascii());
    ours
}

#[test]
fn where_bodies_end() {
    for (stream, want) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", Some((200, "ab"))),
        ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", None),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\ncontent-length: 2\r\n\r\nab", Some((200, "ab"))),
        ("HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nab", Some((200, "ab"))),
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nab", None),
        ("HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nab", None),
        ("HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\nab", None),
        ("HTTP/1.1 200 OK\r\n\r\nab", Some((200, "ab"))),
        ("HTTP/1.0 200 OK\r\n\r\nab", Some((200, "ab"))),
        ("HTTP/1.1 204 No Content\r\ncontent-length: x\r\n\r\n", Some((204, ""))),
        ("HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", Some((304, ""))),
        ("HTTP/1.1 503\r\ncontent-length: 0\r\n\r\n", Some((503, ""))),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
            Some((200, "abc")),
        ),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", Some((200, "a"))),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ncontent-length: 1\r\n\r\nab", Some((200, "ab"))),
        ("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", None),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 9\r\n\r\n1\r\na\r\n0\r\n\r\n",
            Some((200, "a")),
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-y: z\r\n\r\n",
            Some((200, "a")),
        ),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", None),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", None),
        ("HTTP/1.1 200 OK\r\ncontent-len", None),
        ("HTTP/2 200 OK\r\n\r\n", None),
        ("<html>", None),
        ("", None),
    ] {
        let want = want.map(|(status, body)| (status, body.as_bytes().to_vec()));
        assert_eq!(both_read(stream.as_bytes(), &[]), want, "{stream}");
    }
}

#[test]
fn what_is_read_of_a_head() {
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Keyway-Worker: a:1\r\n";
    for (more, keeps) in [("", true), ("connection: close\r\n", false), ("Connection: x, CLOSE\r\n", false)] {
        let bytes = format!("{head}{more}content-length: 0\r\n\r\n");
        let (length, head, body) = read_head(bytes.as_bytes()).unwrap().unwrap();
        assert_eq!((length, body.is_over(), body.keeps_connection()), (bytes.len(), true, keeps), "{more}");
        assert_eq!((head.status, head.worker.as_deref()), (200, Some("a:1")));
        assert_eq!(head.kind, b"text/event-stream; charset=utf-8");
    }
    let keeps = |bytes: &str| read_head(bytes.as_bytes()).unwrap().unwrap().2.keeps_connection();
    assert!(!keeps("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"));
    assert!(keeps("HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\ncontent-length: 0\r\n\r\n"));
    assert!(!keeps("HTTP/1.1 101 Switching Protocols\r\n\r\n"));
}

/// An answer in chunks, some of whose lines are none.
fn chunked() -> impl Strategy<Value = Vec<u8>> {
    let size = prop::sample::select(vec!["", ";a=b", " ", " ;a", "\t", "\n", " 1", ";\n", "g", "\r"]);
    let good = prop::collection::vec(any::<u8>(), 1..40)
        .prop_map(|data| [format!("{:x}\r\n", data.len()).as_bytes(), &data, b"\r\n"].concat());
    let odd =
        (prop::collection::vec(any::<u8>(), 1..20), size, any::<bool>()).prop_map(|(data, after, upper)| {
            let digits = if upper { format!("0{:X}", data.len()) } else { format!("{:x}", data.len()) };
            [digits.as_bytes(), after.as_bytes(), b"\r\n", &data, b"\r\n"].concat()
        });
    let none = prop::sample::select(vec!["\r\n", "x\r\n", "fffffffffffffffff\r\n", "1\na\n", "-1\r\n"]);
    let chunk = prop_oneof![8 => good, 2 => odd, 1 => none.prop_map(|line| line.as_bytes().to_vec())];
    let last = prop::sample::select(vec![
        "0\r\n\r\n",
        "000\r\n\r\n",
        "0;a\r\n\r\n",
        "0\r\na: b\r\nc: d\r\n\r\n",
        "0\r\n\n",
        "",
    ]);
    (prop::collection::vec(chunk, 0..8), last).prop_map(|(chunks, last)| {
        let head =
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
        [&head[..], &chunks.concat(), last.as_bytes()].concat()
    })
}

fn plain() -> impl Strategy<Value = Vec<u8>> {
    let status = prop::sample::select(vec!["200 OK", "204 No Content", "304", "404 Not Found", "500 "]);
    let lines = prop::sample::select(vec![
        "content-length: 5\r\n",
        "Content-Length:5 \r\n",
        "content-length: 05\r\n",
        "content-length: 5,5\r\n",
        "content-length: 5,\r\n",
        "content-length: 6\r\n",
        "content-length: 0\r\n",
        "connection: close\r\n",
        "transfer-encoding: identity\r\n",
        "x: y\r\n",
        "bad line\r\n",
    ]);
    let version = prop::sample::select(vec!["HTTP/1.1", "HTTP/1.0"]);
    (version, status, prop::collection::vec(lines, 0..3), "[a-z]{0,7}").prop_map(
        |(version, status, lines, body)| {
            format!("{version} {status}\r\n{}\r\n{body}", lines.concat()).into_bytes()
        },
    )
}

proptest! {
    #[test]
    fn any_pieces_are_read_as_hyper_reads_them(
        stream in prop_oneof![chunked(), plain()],
        cuts in prop::collection::vec(any::<usize>(), 0..12),
        end in prop::option::of(any::<usize>()),
    ) {
        let end = end.map_or(stream.len(), |end| end % (stream.len() + 1));
        both_read(&stream[..end], &cuts);
    }

    /// No bytes make it do worse than refuse them, however they are cut.
    #[test]
    fn any_bytes_are_read_or_refused(
        stream in prop_oneof![chunked(), plain()],
        at in any::<usize>(),
        byte in any::<u8>(),
        cuts in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        let mut stream = stream;
        let at = at % stream.len();
        stream[at] = byte;
        prop_assert_eq!(ours(&pieces(&stream, &cuts)), ours(&[stream]));
    }
}
