//! Hazard: whoever listens at the place of a worker's KV events takes the gateway's memory, holds it up, or
//! is believed, by what it announces and by what it sends. The publishers here speak their protocol
//! themselves, in which none of the gateway's limits is.

use std::time::Duration;

use keyway_tests::{FakeWorker, Gateway, Resources, eventually};
use keyway_wire::zmtp::{SocketType, greeting, message, ready};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Memory that no publisher may take of the gateway, all of its connections together.
const MEMORY_BYTES: u64 = 64 << 20;

/// What is sent to who connects.
#[derive(Debug, Clone, Copy)]
enum Sends {
    Nothing,
    AnotherProtocol,
    /// The same in small pieces, for ever.
    HalfAGreeting,
    AnotherMechanism,
    AnotherSocket,
    /// A greeting, and never that it is ready.
    NoReady,
    /// A frame is announced of so many bytes, of which few come.
    Announced(u64),
    /// The same, as a command.
    AnnouncedCommand(u64),
    /// A message of frames without end.
    EndlessFrames,
    /// One of frames that each are allowed, without end.
    EndlessLargeFrames,
    /// A whole message of 64 MB.
    LargeMessage,
    /// Pings without end, whose answers it does not read.
    Pings,
    /// Messages that are none of KV events.
    Nonsense,
}

const ALL: [Sends; 15] = [
    Sends::Nothing,
    Sends::AnotherProtocol,
    Sends::HalfAGreeting,
    Sends::AnotherMechanism,
    Sends::AnotherSocket,
    Sends::NoReady,
    Sends::Announced(1 << 46),
    Sends::Announced(u64::MAX),
    Sends::Announced(1 << 30),
    Sends::AnnouncedCommand(1 << 40),
    Sends::EndlessFrames,
    Sends::EndlessLargeFrames,
    Sends::LargeMessage,
    Sends::Pings,
    Sends::Nonsense,
];

fn long_frame(flags: u8, length: u64) -> Vec<u8> {
    [&[flags | 2][..], &length.to_be_bytes(), &[b'x'; 100]].concat()
}

/// Says hello as a publisher, and then what is to be sent; an error where the gateway has hung up.
async fn serve(mut stream: TcpStream, sends: Sends) -> std::io::Result<()> {
    let mut hello = greeting();
    match sends {
        Sends::Nothing => return wait(stream).await,
        Sends::AnotherProtocol => {
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await?;
            return wait(stream).await;
        }
        Sends::HalfAGreeting => {
            for byte in &hello[..40] {
                stream.write_all(&[*byte]).await?;
            }
            return wait(stream).await;
        }
        Sends::AnotherMechanism => hello[12..17].copy_from_slice(b"CURVE"),
        _ => {}
    }
    stream.write_all(&hello).await?;
    stream.read_exact(&mut [0; 64]).await?;
    let socket = if let Sends::AnotherSocket = sends { SocketType::Router } else { SocketType::Pub };
    if let Sends::NoReady = sends {
        return wait(stream).await;
    }
    stream.write_all(&ready(socket)).await?;
    // Its READY, and that it wants everything.
    stream.read_exact(&mut [0; 43]).await?;
    match sends {
        Sends::Announced(length) => stream.write_all(&long_frame(0, length)).await?,
        Sends::AnnouncedCommand(length) => stream.write_all(&long_frame(4, length)).await?,
        Sends::EndlessFrames => loop {
            stream.write_all(&[1, 1, b'x'].repeat(10_000)).await?;
        },
        Sends::EndlessLargeFrames => loop {
            let mut frame = long_frame(1, 1 << 20);
            frame.resize(9 + (1 << 20), 0);
            stream.write_all(&frame).await?;
        },
        Sends::LargeMessage => stream.write_all(&message(&[vec![0; 64 << 20]])).await?,
        Sends::Pings => loop {
            stream.write_all(&b"\x04\x09\x04PING\0\x0aok".repeat(10_000)).await?;
        },
        Sends::Nonsense => {
            for frames in
                [vec![vec![]], vec![b"t".to_vec(), vec![1; 8], vec![0xc1; 1_000]], vec![vec![0; 9]; 7]]
            {
                stream.write_all(&message(&frames)).await?;
            }
        }
        _ => {}
    }
    wait(stream).await
}

/// Until the gateway hangs up.
async fn wait(mut stream: TcpStream) -> std::io::Result<()> {
    let mut read = [0; 1024];
    while stream.read(&mut read).await? > 0 {}
    Ok(())
}

#[tokio::test]
async fn what_is_announced_or_sent_takes_no_memory_and_holds_up_nobody() {
    let mut usual = None;
    for sends in ALL {
        let worker = FakeWorker::with_models(&["base"]).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let toml = format!(
            "[[model]]\nname = \"base\"\ntokenizer = \"random\"\n[[worker]]\nurl = \"http://{}\"\n\
             kv_events = \"tcp://127.0.0.1:{port}\"\n",
            worker.addr()
        );
        let (met, mut meetings) = tokio::sync::mpsc::unbounded_channel();
        let publisher = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let met = met.clone();
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(Duration::from_millis(500), serve(stream, sends)).await;
                    let _ = met.send(());
                });
            }
        });
        let gateway = Gateway::builder().config(&toml).start().await;
        eventually!(gateway.readyz().await == 200);
        meetings.recv().await.unwrap();
        for _ in 0..3 {
            let body = serde_json::json!({"model": "base", "prompt": [1, 2, 3], "max_tokens": 1}).to_string();
            let answer = keyway_tests::post(gateway.addr, "/v1/completions", body.as_bytes()).await;
            assert_eq!(answer.status(), 200, "{sends:?}: {}", answer.text());
        }
        // From its start on, beside the one that was sent nothing.
        let peak = Resources::of(&gateway.process).peak_bytes;
        let grown = peak.saturating_sub(*usual.get_or_insert(peak));
        assert!(grown < MEMORY_BYTES, "{sends:?}: {grown} bytes");
        publisher.abort();
        gateway.idle().await;
    }
}
