//! Transfers that are refused, that break, and that never come.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// Has the second answer what the first offered: it computes all of it itself, for this reason.
async fn computes_itself(
    first: &Node,
    second: &Node,
    request: &GenerationRequest,
    offer: &RemoteKv,
    why: Fault,
) {
    let expected =
        second.alone(&GenerationRequest { salt: Arc::from(&b"elsewhere"[..]), ..request.clone() }).await;
    let before = second.metrics.external_tokens.get();
    assert_eq!(second.answer(request, offer).await, (expected, 0), "{why}");
    assert_eq!((second.imports(why.as_str()), second.metrics.external_tokens.get()), (1, before), "{why}");
    second.is_empty().await;
    // What may still be fetched by another is kept.
    first.transfers.kept.take(offer.transfer);
    first.is_empty().await;
}

#[tokio::test]
async fn kv_of_another_model_arithmetic_or_layout_is_not_taken() {
    let first = Node::start(Kind::default()).await;
    for (kind, why) in [
        (Kind { source: family("llama"), ..Kind::default() }, Fault::Numerics),
        (Kind { quantize: Quantize::Int8, ..Kind::default() }, Fault::Numerics),
        (Kind { block_size: 32, ..Kind::default() }, Fault::Layout),
    ] {
        let second = Node::start(kind).await;
        let request = request(70, "");
        let offer = first.offered(&request).await;
        assert_eq!(offer.tokens, 64);
        computes_itself(&first, &second, &request, &offer, why).await;
    }
    assert_eq!((first.exports("numerics"), first.exports("layout")), (2, 1));
}

#[tokio::test]
async fn kv_of_another_prompt_or_salt_is_not_given() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let own = request(70, "a");
    let offer = first.offered(&own).await;
    for (i, mut other) in [request(70, "b"), request(70, "a"), request(90, "a")].into_iter().enumerate() {
        if i > 0 {
            other.prompt[5] += 1;
        }
        let expected = first.alone(&other).await;
        assert_eq!(second.answer(&other, &offer).await.0, expected, "{i}");
        assert_eq!((second.imports("prompt"), first.exports("prompt")), (i as u64 + 1, i as u64 + 1));
    }
    // More than the prompt has.
    let more = RemoteKv { tokens: 160, ..offer.clone() };
    second.answer(&request(70, "b"), &more).await;
    assert_eq!((second.imports("prompt"), second.metrics.external_tokens.get()), (4, 0));
    // Whoever has the prompt still finds it, once.
    second.answer(&own, &offer).await;
    assert_eq!((second.imports("done"), second.metrics.external_tokens.get()), (1, 64));
    second.answer(&GenerationRequest { prompt: own.prompt.clone(), ..request(70, "a") }, &offer).await;
    assert_eq!(second.imports("unknown"), 1, "it was fetched");
    first.is_empty().await;
    second.is_empty().await;
}

#[tokio::test]
async fn another_key_is_refused_at_both_ends() {
    let keys = tempfile::tempdir().unwrap();
    let kind = |name: &str| {
        let path = keys.path().join(name);
        std::fs::write(&path, format!("the secret of fleet {name}")).unwrap();
        Kind { key: Some(path), ..Kind::default() }
    };
    let (first, second) = (Node::start(kind("a")).await, Node::start(kind("b")).await);
    let request = request(70, "");
    let offer = first.offered(&request).await;
    computes_itself(&first, &second, &request, &offer, Fault::Unauthenticated).await;
    // One that goes on although the other end's proof is not what it takes for one.
    let offer = first.offered(&request).await;
    let mut stream = TcpStream::connect((offer.peer.host.as_str(), offer.peer.port)).await.unwrap();
    stream.write_all(&wire::hello(&[7; 32])).await.unwrap();
    stream.read_exact(&mut [0; wire::HELLO + seal::TAG]).await.unwrap();
    let ask = [&[8, 0, 0, 0, 1][..], &[0; 8 + seal::TAG]].concat();
    stream.write_all(&ask).await.unwrap();
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap_or(0), 0, "the connection ends without a word");
    first.until(|| first.exports("unauthenticated") > 0).await;
    assert_eq!(first.transfers.kept.len(), 1, "nothing was given");
}

#[tokio::test]
async fn without_a_key_kv_comes_from_this_machine_alone() {
    let second = Node::start(Kind::default()).await;
    let offer = RemoteKv { transfer: 1, peer: peer("192.0.2.1", 9), tokens: 64 };
    let request = request(70, "");
    assert_eq!(second.answer(&request, &offer).await.0, second.alone(&request).await);
    assert_eq!(second.imports("not_loopback"), 1);
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let offer = RemoteKv { transfer: 1, peer: peer("localhost", nobody), tokens: 64 };
    second.answer(&super::request(70, "b"), &offer).await;
    assert_eq!(second.imports("unreachable"), 1);
    second.is_empty().await;
}

/// What passes between two workers, by a stranger's leave.
struct Middle {
    port: u16,
    _task: JoinSet<()>,
}

/// What becomes of the exporter's bytes.
#[derive(Debug, Clone, Copy)]
enum Spoil {
    FlipBit { byte: usize },
    CutAt { byte: usize },
}

impl Middle {
    async fn start(to: u16, spoil: Spoil) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let (importer, _) = listener.accept().await.unwrap();
            let exporter = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
            let (mut from_importer, mut to_importer) = importer.into_split();
            let (mut from_exporter, mut to_exporter) = exporter.into_split();
            let there = async {
                drop(tokio::io::copy(&mut from_importer, &mut to_exporter).await);
            };
            let back = async {
                let (mut buffer, mut passed) = (vec![0; 8192], 0);
                while let Ok(count @ 1..) = from_exporter.read(&mut buffer).await {
                    let mut bytes = buffer[..count].to_vec();
                    let end = match spoil {
                        Spoil::FlipBit { byte } => {
                            if let Some(byte) = byte.checked_sub(passed).and_then(|at| bytes.get_mut(at)) {
                                *byte ^= 4;
                            }
                            false
                        }
                        Spoil::CutAt { byte } => {
                            bytes.truncate(byte.saturating_sub(passed));
                            bytes.len() < count
                        }
                    };
                    passed += count;
                    if to_importer.write_all(&bytes).await.is_err() || end {
                        return;
                    }
                }
            };
            tokio::select! { () = there => {}, () = back => {} }
        });
        Self { port, _task: task }
    }
}

/// A bit that is flipped, or a connection that ends, anywhere: what came before is used, nothing behind it.
#[tokio::test]
async fn what_was_changed_or_cut_on_the_way_is_not_used() {
    let (first, second) = (Node::start(apart()).await, Node::start(apart()).await);
    let block = first.transfers.identity.layout.block_bytes[0];
    let frame = 5 + wire::BLOCK_HEAD + block + seal::TAG;
    let head = wire::HELLO + seal::TAG + 5 + 5 + seal::TAG;
    let expected = first.alone(&request(70, "")).await;
    let mut bytes: Vec<usize> = vec![0, 4, 7, 40, 70, 75, 80, head - 1];
    bytes
        .extend((0..4).flat_map(|i| [0, 5, 9, 30, 60, frame / 2, frame - 1].map(|at| head + i * frame + at)));
    for (i, byte) in bytes.into_iter().enumerate() {
        for (j, spoil) in [Spoil::FlipBit { byte }, Spoil::CutAt { byte }].into_iter().enumerate() {
            let request = request(70, &format!("{i} {j}"));
            let offer = first.offered(&request).await;
            let middle = Middle::start(offer.peer.port, spoil).await;
            let before = second.metrics.external_tokens.get();
            let (tokens, _) = second
                .answer(&request, &RemoteKv { peer: peer("127.0.0.1", middle.port), ..offer.clone() })
                .await;
            assert_eq!(tokens, expected, "{spoil:?}");
            let came = second.metrics.external_tokens.get() - before;
            let whole = byte.saturating_sub(head) / frame;
            assert_eq!(came as usize, whole * 16, "{spoil:?}: the blocks before it are good");
            first.transfers.kept.take(offer.transfer);
        }
    }
    assert_eq!(second.imports("done"), 0);
    first.is_empty().await;
    second.is_empty().await;
}

#[tokio::test(start_paused = true)]
async fn what_nobody_fetches_is_let_go_in_time() {
    let first = Node::start(Kind::default()).await;
    // The clock stands while there is no timer, and the engine is waited for.
    let (early, late) = (first.held(&request(70, "")).await, first.held(&request(80, "b")).await);
    first.engine.resident_blocks().await.unwrap();
    assert_eq!(first.metrics.kv_blocks_held.get(), 4 + 4);
    let offer = remote(&first.transfers.offer(Some(early)).unwrap());
    tokio::time::sleep(KEEP / 2).await;
    let later = remote(&first.transfers.offer(Some(late)).unwrap());
    assert_eq!(first.transfers.kept.len(), 2);
    tokio::time::sleep(KEEP / 2 + Duration::from_secs(1)).await;
    assert!(first.transfers.kept.get(offer.transfer).is_none());
    assert!(first.transfers.kept.get(later.transfer).is_some(), "its time has not come");
    tokio::time::sleep(KEEP).await;
    assert_eq!(first.exports("expired"), 2);
    first.is_empty().await;
}

/// A peer that says nothing is waited for so long and no longer.
#[tokio::test(start_paused = true)]
async fn a_silent_end_is_given_up() {
    let (near, _far) = tokio::io::duplex(64);
    let nonces = seal::Nonces { importer: [1; 32], exporter: [2; 32] };
    let tags = |to| Secret::none().tags(&nonces, to);
    let (sends, receives) = (tags(seal::To::Exporter), tags(seal::To::Importer));
    let stall = Duration::from_secs(5);
    let mark = Secret::none().mark(&nonces);
    let mut channel = wire::Sealed { stream: near, sends, receives, mark, stall };
    let began = tokio::time::Instant::now();
    assert_eq!(channel.receive(100).await, Err(Fault::Timeout));
    assert_eq!(
        channel.send(wire::Kind::Block, &[0; 100]).await,
        Err(Fault::Timeout),
        "nor one that takes nothing"
    );
    assert_eq!(began.elapsed(), 2 * stall);
}

/// An importer that leaves in the middle, or a client of its, leaves nothing held.
#[tokio::test]
async fn who_leaves_in_the_middle_leaves_nothing() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let request = request(70, "");
    let offer = RemoteKv { transfer: 1, peer: peer("127.0.0.1", port), tokens: 64 };
    {
        let fetching = second.transfers.fetch(&offer, &request.prompt, &request.salt);
        tokio::select! {
            _ = fetching => panic!("the other end says nothing"),
            accepted = silent.accept() => drop(accepted.unwrap()),
        }
    }
    second.is_empty().await;
    // One that asks and reads nothing of what it gets.
    let offered = first.offered(&request).await;
    drop(TcpStream::connect((offered.peer.host.as_str(), offered.peer.port)).await.unwrap());
    first.until(|| first.exports("lost") > 0).await;
    assert_eq!(first.transfers.kept.len(), 1, "who did not ask for it took nothing away");
    assert_eq!(second.answer(&request, &offered).await.0, first.alone(&request).await);
    assert_eq!(second.imports("done"), 1);
    first.is_empty().await;
}

#[tokio::test]
async fn options_that_cannot_be_are_refused_with_a_reason() {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "  0123456789abcde \n").unwrap();
    let refused = async |listen: &str, key_file: Option<&Path>| {
        let key_file = key_file.map(Path::to_owned);
        let listen = listen.parse().unwrap();
        let options = KvTransferOptions { listen, host: None, key_file, keep: KEEP, shared_memory: true };
        bind(&options).await.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused("0.0.0.0:0", None).await.contains("needs kv-transfer-key-file"));
    assert!(refused("127.0.0.1:0", Some(key.path())).await.contains("has 15 bytes: a key has 16 to 4096"));
    assert!(refused("127.0.0.1:0", Some(Path::new("/no/such/key"))).await.contains("cannot read"));
    std::fs::write(key.path(), "  0123456789abcdef \n").unwrap();
    assert_eq!(refused("127.0.0.1:0", Some(key.path())).await, "");
    assert!(refused("0.0.0.0:0", Some(key.path())).await.contains("say by kv-transfer-host"));
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    assert!(refused(&addr, None).await.contains(&format!("cannot listen for KV transfers on {addr}")));
}
