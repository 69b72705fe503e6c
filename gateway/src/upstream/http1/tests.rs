//! A connection against a worker at the other end of a pipe; hyper's client reads the same bytes beside it.

use std::time::Duration;

use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{CONTENT_LENGTH, TRANSFER_ENCODING},
    uri::PathAndQuery,
};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use proptest::{prelude::*, sample::Index};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    net::{TcpListener, TcpStream},
    runtime,
    time::timeout,
};

use super::*;
use crate::{headers::strip_hop_by_hop, net::Stream};

impl Transport for DuplexStream {}

/// What became of an exchange: status, headers, body and trailers.
type Answered = (StatusCode, HeaderMap, Vec<u8>, HeaderMap);

fn get(method: Method) -> Outgoing<'static> {
    Outgoing::own(method, PathAndQuery::from_static("/"), Bytes::new())
}

fn host() -> HeaderValue {
    HeaderValue::from_static("worker:1")
}

/// Sends a request; the worker answers with these pieces, each on its own, and closes the connection if it is
/// told to.
async fn exchange(
    method: Method,
    pieces: Vec<Vec<u8>>,
    close: bool,
) -> (Result<Answered, Http1Error>, Connection<DuplexStream>) {
    let (near, mut far) = duplex(1 << 20);
    let mut connection = Connection::new(near);
    let worker = tokio::spawn(async move {
        let _ = far.read(&mut [0; 512]).await;
        for piece in pieces {
            let _ = far.write_all(&piece).await;
            tokio::task::yield_now().await;
        }
        if close {
            drop(far);
            return None;
        }
        Some(far)
    });
    let request = get(method);
    let answered = async {
        let response = connection.ask(&request, &host()).await?;
        let (mut body, mut trailers) = (Vec::new(), HeaderMap::new());
        while let Some(frame) = poll_fn(|cx| connection.poll_frame(cx)).await {
            match frame?.into_data() {
                Ok(data) => body.extend_from_slice(&data),
                Err(frame) => trailers.extend(frame.into_trailers().unwrap_or_default()),
            }
        }
        Ok((response.status(), response.headers().clone(), body, trailers))
    };
    let answered = timeout(Duration::from_secs(10), answered).await.expect("waits for ever");
    std::mem::forget(worker.await.unwrap());
    (answered, connection)
}

/// What hyper's client makes of the same.
async fn by_hyper(method: Method, answer: Vec<u8>) -> Option<Answered> {
    let (near, mut far) = duplex(1 << 20);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(near)).await.ok()?;
    tokio::spawn(connection);
    tokio::spawn(async move {
        let _ = far.read(&mut [0; 512]).await;
        let _ = far.write_all(&answer).await;
    });
    let request = http::Request::builder().method(method).uri("/").body(Full::<Bytes>::default()).ok()?;
    let response = sender.send_request(request).await.ok()?;
    let (mut parts, body) = response.into_parts();
    strip_hop_by_hop(&mut parts.headers);
    // Clients are told a length once.
    if let Some(length) = parts.headers.get(CONTENT_LENGTH) {
        let once = length.to_str().ok()?.split(',').next()?.trim().parse::<u64>().ok()?;
        let said =
            parts.headers.get_all(CONTENT_LENGTH).iter().count() > 1 || length.to_str().ok()?.contains(',');
        if said {
            parts.headers.insert(CONTENT_LENGTH, once.into());
        }
    }
    let body = body.collect().await.ok()?;
    let mut trailers = body.trailers().cloned().unwrap_or_default();
    // How long a message is, its head alone may say (RFC 9110, section 6.5.1); hyper leaves that to others.
    trailers.remove(CONTENT_LENGTH);
    trailers.remove(TRANSFER_ENCODING);
    Some((parts.status, parts.headers, body.to_bytes().to_vec(), trailers))
}

fn run<T>(test: impl Future<Output = T>) -> T {
    runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(test)
}

/// The bytes in pieces that end at these places.
fn cut(bytes: &[u8], at: &[Index]) -> Vec<Vec<u8>> {
    let mut at: Vec<_> = at.iter().map(|at| at.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
    at.sort_unstable();
    at.windows(2).filter(|pair| pair[0] < pair[1]).map(|pair| bytes[pair[0]..pair[1]].to_vec()).collect()
}

fn chunked(parts: &[Vec<u8>], extension: &str, trailers: &str) -> Vec<u8> {
    let mut out = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n".to_vec();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        out.extend_from_slice(format!("{:x}{extension}\r\n", part.len()).as_bytes());
        out.extend_from_slice(part);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    out
}

proptest! {
    #[test]
    fn any_cut_gives_the_same_body(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6),
        cuts in prop::collection::vec(any::<Index>(), 0..12),
        extension in prop::sample::select(vec!["", ";a=b", "  ", " ;x"]),
        trailers in prop::sample::select(vec!["", "x-sum: 1\r\n", "a: b\r\nc:\r\n"]),
    ) {
        let whole: Vec<u8> = parts.concat();
        let length = format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 Fine\r\ncontent-length: {}\r\n\r\n", whole.len());
        let chunked = (chunked(&parts, extension, trailers), trailers.lines().count());
        for (answer, trailers) in [chunked, ([length.as_bytes(), &whole].concat(), 0)] {
            let (answered, mut connection) = run(exchange(Method::POST, cut(&answer, &cuts), false));
            let (status, _, body, fields) = answered.unwrap();
            prop_assert_eq!((status, &body), (StatusCode::OK, &whole));
            prop_assert_eq!(fields.len(), trailers);
            prop_assert!(connection.is_idle(Waker::noop()));
        }
    }

    /// Whatever is accepted, another reader accepts as well and reads the same: nobody's bytes are taken for
    /// somebody else's.
    #[test]
    fn hyper_reads_what_is_accepted_in_the_same_way(
        seed in prop::sample::select(SEEDS.to_vec()),
        changes in prop::collection::vec((any::<Index>(), any::<Index>(), prop::sample::select(SCRAPS.to_vec())), 0..4),
        head in any::<bool>(),
    ) {
        let mut answer = seed.as_bytes().to_vec();
        for (from, to, scrap) in changes {
            let (from, to) = (from.index(answer.len() + 1), to.index(answer.len() + 1));
            let span = from.min(to)..from.max(to).min(from.min(to) + 3);
            answer.splice(span, scrap.bytes());
        }
        let method = if head { Method::HEAD } else { Method::POST };
        let ours = run(exchange(method.clone(), vec![answer.clone()], true)).0;
        if let Ok(ours) = ours {
            let theirs = run(by_hyper(method, answer.clone()));
            prop_assert_eq!(Some(ours), theirs, "{:?}", String::from_utf8_lossy(&answer));
        }
    }
}

const SEEDS: [&str; 9] = [
    "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx: y\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\ncontent-length: 5\r\n\r\nhello",
    "HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nhello\r\n3;x\r\nyou\r\n0\r\n\r\n",
    "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi",
    "HTTP/1.1 200 OK\r\n\r\nuntil the end",
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    "HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\nx-t: 1\r\n\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\ncontent-length: 3\r\nx-t: 1\r\n\r\n",
];

const SCRAPS: [&str; 16] = [
    "",
    "\r\n",
    "\n",
    "\r",
    "0",
    "5",
    " ",
    ",",
    ";",
    ":",
    "content-length: 3\r\n",
    "transfer-encoding: chunked\r\n",
    "transfer-encoding: gzip\r\n",
    "ff",
    "\r\n\r\n",
    "HTTP/1.1 200 OK\r\n",
];

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nno field\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-t:\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-t: 1\r\n\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        "HTTP/2 200 OK\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/1.1 200 OK\r\nx : y\r\n\r\n",
        "HTTP/1.1 200 OK\r\na: b\r\n folded: c\r\n\r\n",
        // Of a body that does not come, clients are told as well.
        "HTTP/1.1 204 No Content\r\ncontent-length: x\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let (answered, mut connection) = run(exchange(Method::POST, vec![answer.as_bytes().to_vec()], false));
        assert!(matches!(answered, Err(Http1Error::Malformed(_))), "{answer:?}: {answered:?}");
        assert!(!connection.is_idle(Waker::noop()), "{answer:?}");
    }
    let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(ANSWER_BUFFER_BYTES));
    let (answered, _) = run(exchange(Method::POST, vec![long.into_bytes()], false));
    assert!(matches!(answered, Err(Http1Error::Malformed(_))), "{answered:?}");
}

#[test]
fn interim_answers_have_an_end() {
    let whole = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";
    let large = format!("HTTP/1.1 103 E\r\nlink: {}\r\n\r\n", "y".repeat(20_000));
    for (interim, most) in
        [("HTTP/1.1 100 Continue\r\n\r\n", 64), ("HTTP/1.1 103 E\r\nlink: </x>\r\n\r\n", 64), (&large, 3)]
    {
        let after = |count: usize| {
            run(exchange(Method::POST, vec![(interim.repeat(count) + whole).into_bytes()], false))
        };
        let (answered, mut connection) = after(most);
        assert_eq!(answered.unwrap().2, b"hi", "{most} of {} bytes", interim.len());
        assert!(connection.is_idle(Waker::noop()));
        let (answered, mut connection) = after(most + 1);
        assert!(matches!(answered, Err(Http1Error::Malformed(_))), "{} bytes: {answered:?}", interim.len());
        assert!(!connection.is_idle(Waker::noop()));
    }
}

#[tokio::test(start_paused = true)]
async fn each_request_may_have_interim_answers() {
    let (near, mut far) = duplex(1 << 20);
    let mut connection = Connection::new(near);
    let answer = "HTTP/1.1 102 P\r\n\r\n".repeat(60) + "HTTP/1.1 204 No Content\r\n\r\n";
    for _ in 0..3 {
        far.write_all(answer.as_bytes()).await.unwrap();
        let head = connection.ask(&get(Method::POST), &host()).await.unwrap();
        assert_eq!(head.status(), StatusCode::NO_CONTENT);
    }
}

#[test]
fn a_204_that_says_it_has_a_body_is_the_connection_s_last() {
    for (head, stays) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", true),
        ("HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n", true),
        ("HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n", false),
        ("HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n", false),
        ("HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", true),
    ] {
        let (answered, mut connection) = run(exchange(Method::POST, vec![head.as_bytes().to_vec()], false));
        assert_eq!(answered.unwrap().2, b"", "{head:?}");
        assert_eq!(connection.is_idle(Waker::noop()), stays, "{head:?}");
    }
}

#[test]
fn a_length_is_told_once() {
    for lengths in [
        "content-length: 2, 2",
        "content-length: 2\r\ncontent-length: 2",
        "content-length: 2 ,2\r\ncontent-length: 2",
    ] {
        for (method, body) in [(Method::POST, "hi"), (Method::HEAD, "")] {
            let answer = format!("HTTP/1.1 200 OK\r\n{lengths}\r\n\r\n{body}").into_bytes();
            let (_, headers, came, _) = run(exchange(method, vec![answer], false)).0.unwrap();
            let said: Vec<_> = headers.get_all(CONTENT_LENGTH).iter().map(HeaderValue::as_bytes).collect();
            assert_eq!((said, came.as_slice()), (vec![&b"2"[..]], body.as_bytes()), "{lengths:?}");
        }
    }
}

#[test]
fn trailers_say_nothing_that_heads_alone_may_say() {
    let answer = "HTTP/1.1 200 OK\r\nconnection: Keep-Alive\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\
                  x-sum: 1\r\ncontent-length: 9\r\nset-cookie: a=b\r\nx-keyway-worker: me\r\nx-sum: 3\r\n\r\n";
    let (_, _, body, trailers) =
        run(exchange(Method::POST, vec![answer.as_bytes().to_vec()], false)).0.unwrap();
    let left: Vec<_> =
        trailers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!((body.as_slice(), left), (&b"hi"[..], vec![("x-sum", "1"), ("x-sum", "3")]));
    let gone = answer.replace("Keep-Alive", "keep-alive, X-Sum");
    let (answered, mut connection) = run(exchange(Method::POST, vec![gone.into_bytes()], false));
    assert_eq!(answered.unwrap().3.len(), 0);
    assert!(connection.is_idle(Waker::noop()));
}

#[test]
fn an_answer_that_ends_early_is_no_answer() {
    for answer in [
        "HTTP",
        "HTTP/1.1 103 Early Hints\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-le",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
    ] {
        let (answered, _) = run(exchange(Method::POST, vec![answer.as_bytes().to_vec()], true));
        assert!(matches!(answered, Err(Http1Error::Cut)), "{answer:?}: {answered:?}");
    }
}

#[test]
fn a_close_without_a_word_is_told_from_an_answer_cut_short() {
    let (answered, _) = run(exchange(Method::POST, Vec::new(), true));
    let error = answered.unwrap_err();
    assert!(error.is_silent_close(), "{error:?}");
    assert_eq!(error.to_string(), "the worker closed the connection without a word");
    for cut in
        ["H", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell", "garbage"]
    {
        let (answered, _) = run(exchange(Method::POST, vec![cut.as_bytes().to_vec()], true));
        assert!(!answered.unwrap_err().is_silent_close(), "{cut:?}");
    }
}

#[test]
fn a_worker_that_says_when_it_closes_idle_connections_is_believed() {
    for (said, seconds) in [
        ("", 4),
        ("keep-alive: timeout=5\r\n", 4),
        ("keep-alive: timeout=3, max=100\r\n", 2),
        ("keep-alive: max=7\r\nKeep-Alive: TimeOut = \"2\"\r\n", 1),
        ("keep-alive: timeout=1\r\n", 0),
        ("keep-alive: timeout=0\r\n", 0),
        ("keep-alive: timeout=600\r\n", 4),
        ("keep-alive: timeout=-1, timeout=x, =, timeout\r\n", 4),
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{said}content-length: 0\r\n\r\n").into_bytes();
        let (_, connection) = run(exchange(Method::POST, vec![answer], false));
        assert_eq!(connection.lease(), Duration::from_secs(seconds), "{said:?}");
    }
}

#[test]
fn answers_without_a_body_leave_the_connection_open() {
    for (method, answer) in [
        (Method::HEAD, "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        (Method::POST, "HTTP/1.1 204 No Content\r\n\r\n"),
        (Method::GET, "HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n"),
        (
            Method::GET,
            "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\ncontent-length: 0\r\n\r\n",
        ),
    ] {
        let (answered, mut connection) = run(exchange(method, vec![answer.as_bytes().to_vec()], false));
        assert_eq!(answered.unwrap().2, b"", "{answer:?}");
        assert!(connection.is_idle(Waker::noop()), "{answer:?}");
    }
}

#[test]
fn a_connection_serves_again_only_if_all_agrees() {
    for answer in [
        "HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 2\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\nconnection: close\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        // Another answer, that nobody asked for.
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ] {
        let (answered, mut connection) = run(exchange(Method::POST, vec![answer.as_bytes().to_vec()], false));
        assert_eq!(answered.unwrap().2, b"hi", "{answer:?}");
        assert!(!connection.is_idle(Waker::noop()), "{answer:?}");
    }
    let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi".to_vec();
    let (_, mut closed) = run(exchange(Method::POST, vec![whole], true));
    assert!(!closed.is_idle(Waker::noop()));
    let (answered, _) = run(exchange(Method::POST, vec![b"HTTP/1.1 299 Odd\xe9\r\n\r\nx".to_vec()], true));
    assert_eq!(answered.unwrap().2, b"x");
}

#[tokio::test(start_paused = true)]
async fn what_was_not_sent_is_told_from_what_was_lost() {
    let (near, far) = duplex(64);
    drop(far);
    let asked = Connection::new(near).ask(&get(Method::GET), &host()).await;
    assert!(matches!(asked, Err(Http1Error::NothingSent(_))), "{asked:?}");

    // Only a part fits; then the worker is gone.
    let (near, mut far) = duplex(64);
    let worker = tokio::spawn(async move { far.read(&mut [0; 8]).await });
    let asked = Connection::new(near).ask(&long_request(), &host()).await;
    assert!(matches!(asked, Err(Http1Error::Unanswered(_))), "{asked:?}");
    worker.await.unwrap().unwrap();
}

fn long_request() -> Outgoing<'static> {
    Outgoing::own(Method::GET, PathAndQuery::from_static("/"), Bytes::from(vec![b'x'; 10_000]))
}

#[tokio::test(start_paused = true)]
async fn a_worker_may_answer_before_it_has_read_all() {
    let (near, mut far) = duplex(64);
    tokio::spawn(async move {
        far.read_exact(&mut [0; 8]).await.unwrap();
        far.write_all(b"HTTP/1.1 413 No\r\ncontent-length: 3\r\n\r\n").await.unwrap();
        far.write_all(b"big").await.unwrap();
    });
    let mut connection = Connection::new(near);
    let response = connection.ask(&long_request(), &host()).await.unwrap();
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(response.extensions().get::<hyper::ext::ReasonPhrase>().unwrap().as_bytes(), b"No");
    let frame = poll_fn(|cx| connection.poll_frame(cx)).await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "big");
    assert!(connection.has_ended() && !connection.is_idle(Waker::noop()));
}

#[tokio::test(start_paused = true)]
async fn events_pass_through_the_same_memory_and_no_more_is_read_than_asked_for() {
    let (near, mut far) = duplex(1 << 20);
    let mut connection = Connection::new(near);
    let worker = tokio::spawn(async move {
        let _ = far.read(&mut [0; 512]).await.unwrap();
        far.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        far
    });
    drop(connection.ask(&get(Method::POST), &host()).await.unwrap());
    let mut far = worker.await.unwrap();
    let mut places = std::collections::HashSet::new();
    for _ in 0..1_000 {
        far.write_all(b"10\r\ndata: {\"a\":123}\n\r\n").await.unwrap();
        let frame = poll_fn(|cx| connection.poll_frame(cx)).await.unwrap().unwrap().into_data().unwrap();
        places.insert(frame.as_ptr() as usize);
    }
    assert!(places.len() <= 3, "{}", places.len());
    for _ in 0..100 {
        far.write_all(b"1000\r\n").await.unwrap();
        far.write_all(&[b'x'; 4096]).await.unwrap();
        far.write_all(b"\r\n").await.unwrap();
    }
    poll_fn(|cx| connection.poll_frame(cx)).await.unwrap().unwrap();
    assert!(connection.read.len() <= FIRST_READ_BYTES);
}

#[tokio::test]
async fn a_piece_on_its_way_costs_no_second_room() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut far, _) = listener.accept().await.unwrap();
    let mut connection = Connection::new(Stream::Plain(near));
    far.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
    drop(connection.ask(&get(Method::POST), &host()).await.unwrap());
    let mut places = Vec::new();
    for _ in 0..3 {
        far.write_all(b"10\r\ndata: {\"a\":123}\n\r\n").await.unwrap();
        let piece = poll_fn(|cx| connection.poll_frame(cx)).await.unwrap().unwrap().into_data().unwrap();
        // The server asks for the next piece before it has written this one.
        let next = poll_fn(|cx| Poll::Ready(connection.poll_frame(cx).is_pending())).await;
        assert!(next && connection.read.capacity() < FIRST_READ_BYTES, "{}", connection.read.capacity());
        places.push(piece.as_ptr());
    }
    assert_eq!(places[1], places[2]);
}

#[test]
fn a_request_s_head_says_the_worker_s_host_and_the_body_s_length() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("host", "gateway"),
        ("x-a", "1"),
        ("connection", "x-mine, close"),
        ("content-length", "99"),
        ("x-set", "old"),
        ("x-mine", "1"),
        ("te", "trailers"),
        ("x-gone", "1"),
        ("x-a", "2"),
        ("x-set", "older"),
    ] {
        headers.append(name, HeaderValue::from_static(value));
    }
    let request = |body: &str| {
        let target = PathAndQuery::from_static("/v1/x?a=%20");
        let mut request =
            Outgoing::new(Method::POST, target, &headers, Bytes::copy_from_slice(body.as_bytes()));
        request.set(HeaderName::from_static("x-set"), HeaderValue::from_static("new"));
        request.leave_out(HeaderName::from_static("x-gone"));
        request.set(HeaderName::from_static("x-added"), HeaderValue::from_static("3"));
        request
    };
    // As they are sent, one after the other, and whether in one piece.
    let mut bytes = Unsent::default();
    let mut sent = |request: &Outgoing<'_>| {
        bytes.begin(request, &host());
        let in_one = bytes.chunk().len() == bytes.remaining();
        // However it is cut, and by whichever view of it.
        let mut sent = Vec::new();
        while bytes.has_remaining() {
            let mut parts = [io::IoSlice::new(&[]); 3];
            let count = bytes.chunks_vectored(&mut parts);
            let parts: Vec<u8> = parts[..count].iter().flat_map(|part| part.to_vec()).collect();
            assert_eq!((parts.len(), &parts[..bytes.chunk().len()]), (bytes.remaining(), bytes.chunk()));
            let piece = bytes.remaining().min(70);
            sent.extend_from_slice(&parts[..piece]);
            bytes.advance(piece);
        }
        bytes.end();
        (String::from_utf8(sent).unwrap(), in_one)
    };
    let head = |length| {
        format!(
            "POST /v1/x?a=%20 HTTP/1.1\r\nhost: worker:1\r\nx-a: 1\r\nx-a: 2\r\nx-set: new\r\nx-added: 3\r\n\
             content-length: {length}\r\n\r\n"
        )
    };
    assert_eq!(sent(&request("{}")), (head(2) + "{}", true));
    let long = "x".repeat(100_000);
    assert_eq!(sent(&request(&long)), (head(100_000) + &long, false));
    // The same as a map, for HTTP/2.
    let map = request("{}").header_map();
    let all = |name: &str| map.get_all(name).iter().map(|value| value.to_str().unwrap()).collect::<Vec<_>>();
    assert_eq!((all("x-a"), all("x-set"), all("x-added")), (vec!["1", "2"], vec!["new"], vec!["3"]));
    assert_eq!((all("content-length"), map.len()), (vec!["2"], 5));
    assert_eq!(sent(&get(Method::GET)), ("GET / HTTP/1.1\r\nhost: worker:1\r\n\r\n".to_owned(), true));
    let empty = "POST / HTTP/1.1\r\nhost: worker:1\r\ncontent-length: 0\r\n\r\n".to_owned();
    assert_eq!(sent(&get(Method::POST)), (empty, true));
}
