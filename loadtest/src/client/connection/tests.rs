//! Connections to servers that answer early, late, in part, or not at all.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    time::timeout,
};

use super::*;

const HEAD: &[u8] = b"POST / HTTP/1.1\r\nhost: h\r\n\r\n";
const GOOD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab";

/// A connection, and the server's end of it.
async fn pair() -> (Connection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (Connection::new(near), listener.accept().await.unwrap().0)
}

async fn whole(mut answer: Answering) -> Result<(Vec<u8>, Option<Connection>), Broken> {
    let mut body = Vec::new();
    while answer.more(|piece| body.extend_from_slice(piece)).await? {}
    Ok((body, answer.into_connection()))
}

#[tokio::test]
async fn one_answer_after_the_other() {
    let (mut connection, mut far) = pair().await;
    for turn in 0..3 {
        let server = tokio::spawn(async move {
            let mut asked = vec![0; HEAD.len() + 3];
            far.read_exact(&mut asked).await.unwrap();
            far.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
            far.write_all(GOOD).await.unwrap();
            (asked, far)
        });
        assert!(connection.is_quiet(), "{turn}");
        let (body, kept) = whole(connection.ask(HEAD, b"abc").await.unwrap()).await.unwrap();
        let (asked, end) = server.await.unwrap();
        assert_eq!((body, asked), (b"ab".to_vec(), [HEAD, b"abc"].concat()));
        (connection, far) = (kept.unwrap(), end);
    }
    drop(far);
    // The end has to arrive.
    connection.stream.readable().await.unwrap();
    assert!(!connection.is_quiet());
}

#[tokio::test]
async fn what_comes_behind_an_answer_makes_the_connection_useless() {
    for (more, is_kept) in [(&b""[..], true), (b"HTTP/1.1 408 Request Timeout\r\n\r\n", false)] {
        let (connection, mut far) = pair().await;
        far.write_all(&[GOOD, more].concat()).await.unwrap();
        let (body, kept) = whole(connection.ask(HEAD, b"").await.unwrap()).await.unwrap();
        assert_eq!((body, kept.is_some()), (b"ab".to_vec(), is_kept));
    }
}

#[tokio::test]
async fn a_server_that_goes() {
    for (said, fails_at_once) in [(&b""[..], true), (b"HTTP/1.1 200", true), (&GOOD[..GOOD.len() - 1], false)]
    {
        let (connection, mut far) = pair().await;
        let server = tokio::spawn(async move {
            far.read_exact(&mut vec![0; HEAD.len()]).await.unwrap();
            far.write_all(said).await.unwrap();
        });
        match connection.ask(HEAD, b"").await {
            Err(error) => assert!(fails_at_once && matches!(error, Broken::Early), "{error:?}"),
            Ok(answer) => assert!(!fails_at_once && matches!(whole(answer).await, Err(Broken::Early))),
        }
        server.await.unwrap();
    }
}

#[tokio::test]
async fn an_answer_to_a_request_that_nobody_reads() {
    let (connection, mut far) = pair().await;
    far.write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    // More than the sockets' buffers hold.
    let body = vec![b'x'; 64 << 20];
    let answer = timeout(Duration::from_secs(20), connection.ask(HEAD, &body)).await.unwrap().unwrap();
    assert_eq!(answer.head.status, 413);
    assert!(whole(answer).await.unwrap().1.is_none(), "the rest of the request was never sent");
}

#[tokio::test]
async fn a_body_larger_than_the_sockets_buffers_arrives_whole() {
    let (connection, mut far) = pair().await;
    let body: Vec<u8> = (0..8_000_000u32).map(|i| (i % 251) as u8).collect();
    let sent = [HEAD, &body].concat();
    let server = tokio::spawn(async move {
        let mut asked = vec![0; sent.len()];
        far.read_exact(&mut asked).await.unwrap();
        far.write_all(GOOD).await.unwrap();
        asked == sent
    });
    let (_, kept) = whole(connection.ask(HEAD, &body).await.unwrap()).await.unwrap();
    assert!(server.await.unwrap() && kept.is_some());
}

#[tokio::test]
async fn a_head_without_end() {
    let (connection, mut far) = pair().await;
    let server = tokio::spawn(async move {
        far.write_all(b"HTTP/1.1 200 OK\r\nx: ").await.unwrap();
        while far.write_all(&[b'x'; 4096]).await.is_ok() {}
    });
    assert!(matches!(connection.ask(HEAD, b"").await, Err(Broken::HeadTooLarge)));
    server.await.unwrap();
}
