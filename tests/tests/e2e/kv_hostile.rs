//! Hazard: whoever listens at the place of a worker's KV events takes the gateway's memory, holds it up, or
//! is believed, by what it announces and by what it sends. The publishers here speak their protocol
//! themselves, in which none of the gateway's limits is.

use std::cell::Cell;
use std::time::Duration;

use keyway_tests::{FakeWorker, Gateway, Resources, eventually};
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, EventBatch, KvEvent, WireFormat};
use keyway_wire::zmtp::{SocketType, greeting, message, ready};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;

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

/// A worker, who publishes its events, and the gateway before it.
struct Site {
    gateway: Gateway,
    /// Connections that have ended.
    meetings: UnboundedReceiver<()>,
    publisher: JoinHandle<()>,
    _worker: FakeWorker,
}

impl Site {
    async fn start<F: Future<Output = ()> + Send + 'static>(
        serve: impl Fn(TcpStream) -> F + Send + 'static,
    ) -> Self {
        let worker = FakeWorker::with_models(&["base"]).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let toml = format!(
            "[[model]]\nname = \"base\"\ntokenizer = \"random\"\n[[worker]]\nurl = \"http://{}\"\n\
             kv_events = \"tcp://127.0.0.1:{port}\"\n",
            worker.addr()
        );
        let (met, meetings) = unbounded_channel();
        let publisher = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (met, serving) = (met.clone(), serve(stream));
                tokio::spawn(async move {
                    serving.await;
                    let _ = met.send(());
                });
            }
        });
        let gateway = Gateway::builder().config(&toml).start().await;
        eventually!(gateway.readyz().await == 200);
        Self { gateway, meetings, publisher, _worker: worker }
    }

    async fn completes(&self, what: &dyn std::fmt::Debug) {
        let body = serde_json::json!({"model": "base", "prompt": [1, 2, 3], "max_tokens": 1}).to_string();
        let answer = keyway_tests::post(self.gateway.addr, "/v1/completions", body.as_bytes()).await;
        assert_eq!(answer.status(), 200, "{what:?}: {}", answer.text());
    }
}

#[tokio::test]
async fn what_is_announced_or_sent_takes_no_memory_and_holds_up_nobody() {
    let mut usual = None;
    for sends in ALL {
        let mut site = Site::start(move |stream| async move {
            let _ = tokio::time::timeout(Duration::from_millis(500), serve(stream, sends)).await;
        })
        .await;
        site.meetings.recv().await.unwrap();
        for _ in 0..3 {
            site.completes(&sends).await;
        }
        // From its start on, beside the one that was sent nothing.
        let peak = Resources::of(&site.gateway.process).peak_bytes;
        let grown = peak.saturating_sub(*usual.get_or_insert(peak));
        assert!(grown < MEMORY_BYTES, "{sends:?}: {grown} bytes");
        site.publisher.abort();
        site.gateway.idle().await;
    }
}

/// What a publisher says that is as it should be, but for how much of it there is: each message near the
/// largest.
#[derive(Debug, Clone, Copy)]
enum Says {
    ManyEvents,
    ManyBlocks,
    ManyRemovals,
    /// A prompt's first block goes and comes back, and with it each time all that follow.
    Uprooting,
    Clearing,
    /// Names of blocks as engines have them whose hashes do not cover the salt.
    Namesakes,
}

fn stored(names: std::ops::Range<u64>, salt: Option<String>) -> KvEvent {
    KvEvent::BlockStored(BlockStored {
        token_ids: names.clone().map(|name| name as u32 % 100).collect(),
        block_hashes: names.map(EngineHash::Int).collect(),
        block_size: 1,
        cache_salt: salt,
        ..BlockStored::default()
    })
}

fn removed(names: std::ops::Range<u64>) -> KvEvent {
    let block_hashes = names.map(EngineHash::Int).collect();
    KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..BlockRemoved::default() })
}

impl Says {
    /// The batches, the first of which prepares what the others do again and again.
    fn batches(self) -> [Vec<KvEvent>; 2] {
        let many = 0..400_000;
        match self {
            Self::ManyEvents => [vec![], (0..18_000).map(|i| stored(i..i + 1, None)).collect()],
            Self::ManyBlocks => [vec![], vec![stored(many, None)]],
            Self::ManyRemovals => {
                [vec![stored(many.clone(), None)], vec![removed(many.clone()), stored(0..100, None)]]
            }
            Self::Uprooting => {
                let pair = || [removed(0..1), stored(0..1, None)];
                [vec![stored(many, None)], (0..15_000).flat_map(|_| pair()).collect()]
            }
            Self::Clearing => {
                let pair = |i| [stored(i..i + 1, None), KvEvent::AllBlocksCleared];
                [vec![], (0..15_000).flat_map(pair).collect()]
            }
            Self::Namesakes => {
                [vec![], (0..15_000).map(|i: u64| stored(7..8, Some(i.to_string()))).collect()]
            }
        }
    }

    fn messages(self) -> [Vec<u8>; 2] {
        self.batches()
            .map(|events| EventBatch { events, ..EventBatch::default() }.encode(WireFormat::SglangMap))
    }
}

/// Publishes these batches, the last one again and again, until the gateway hangs up.
async fn publish(mut stream: TcpStream, [first, then]: [Vec<u8>; 2]) -> std::io::Result<()> {
    stream.write_all(&greeting()).await?;
    stream.read_exact(&mut [0; 64]).await?;
    stream.write_all(&ready(SocketType::Pub)).await?;
    stream.read_exact(&mut [0; 43]).await?;
    for seq in 0_u64.. {
        let payload = if seq == 0 { first.clone() } else { then.clone() };
        stream.write_all(&message(&[vec![], seq.to_be_bytes().to_vec(), payload])).await?;
    }
    Ok(())
}

#[tokio::test]
async fn however_much_is_said_at_once_takes_no_time_of_those_who_serve() {
    use Says::{Clearing, ManyBlocks, ManyEvents, ManyRemovals, Namesakes, Uprooting};
    for says in [ManyEvents, ManyBlocks, ManyRemovals, Uprooting, Clearing, Namesakes] {
        let messages = says.messages();
        let longest = messages.iter().map(Vec::len).max().unwrap_or_default();
        assert!((500 << 10..4 << 20).contains(&longest), "{says:?}: {longest} bytes");
        let site = Site::start(move |stream| {
            let messages = messages.clone();
            async move { drop(publish(stream, messages).await) }
        })
        .await;
        let process = &site.gateway.process;
        let of_events = || Resources::cpu_of_threads(process, |name| name == "keyway-events");
        let of_others = || Resources::cpu_of_threads(process, |name| name != "keyway-events");
        eventually!(of_events() > Duration::from_millis(200));
        let (events, others) = (of_events(), of_others());
        let mut served = 0;
        while of_events().saturating_sub(events) < Duration::from_millis(400) {
            site.completes(&says).await;
            served += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (events, others) = (of_events().saturating_sub(events), of_others().saturating_sub(others));
        eprintln!("{says:?}: {others:?} beside {events:?}, {served} requests");
        assert!(others < events / 2, "{says:?}: {others:?} beside {events:?}, {served} requests");
        // Taken out, it is forgotten in the middle of whatever it says.
        let worker = site.gateway.workers().await[0]["worker"].as_str().unwrap_or_default().to_owned();
        let answer = keyway_tests::post(site.gateway.admin, &format!("/workers/{worker}/drain"), b"").await;
        assert_eq!(answer.status(), 202, "{says:?}: {}", answer.text());
        eventually!(site.gateway.metrics().await.sum("keyway_worker_cached_blocks", &[]) == 0.0);
        let last = Cell::new(of_events());
        eventually!(last.replace(of_events()) == last.get());
    }
}
