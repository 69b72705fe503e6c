//! Blocks that go through memory of both ends, and an exporter or importer that does with it what it should
//! not.

use super::hostile::asked;
use super::*;
use crate::engine::holds::BlockKv;
use crate::kv_transfer::chain;
use crate::kv_transfer::room::{Room, Spot};
use crate::kv_transfer::wire::{Ask, BlockHead, CONTROL_MAX, Kind as Word, Sealed};

/// An exporter's end that has a room, and the blocks that it is to give.
struct Exporter {
    channel: Sealed<TcpStream>,
    room: Room,
    blocks: Vec<BlockKv>,
    links: Vec<chain::Link>,
}

impl Exporter {
    /// Puts a block where it says that it does, after something was done to its bytes.
    async fn place(&mut self, i: usize, spoil: impl FnOnce(&mut Vec<u8>)) {
        let BlockKv { group, place, bytes } = &self.blocks[i];
        let head = BlockHead { group: *group as u8, place: *place as u32, link: self.links[i + 1] };
        let mut sum = self.room.put(bytes).unwrap().to_vec();
        spoil(&mut sum);
        // Once it is found out, the importer is gone.
        let _ = self.channel.send_both(Word::Placed, &head.write(), &sum).await;
    }
}

/// What an exporter does with the importer's room: the fault that the importer finds, and how many blocks it
/// uses.
async fn found(act: impl AsyncFnOnce(&mut Exporter)) -> (Vec<&'static str>, u64) {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let request = request(70, "");
    let hold = first.held(&request).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let remote = RemoteKv { transfer: 5, peer: peer("127.0.0.1", port), tokens: 64 };
    let exporting = async {
        let (channel, ask) = asked(&listener).await;
        let layout = &first.transfers.identity.layout;
        let room =
            Room::open(ask.room, &channel.mark, layout.block_bytes_max()).expect("it is of this process");
        let blocks = hold.copy(0..4).await.unwrap();
        let links = chain::links(&request.prompt[..64], 16, &request.salt);
        act(&mut Exporter { channel, room, blocks, links }).await;
    };
    let ((tokens, _), ()) = tokio::join!(second.answer(&request, &remote), exporting);
    assert_eq!(tokens, first.alone(&request).await);
    second.is_empty().await;
    let outcomes = ["done", "corrupt", "protocol", "prompt", "lost"];
    let ended = outcomes.into_iter().filter(|outcome| second.imports(outcome) == 1).collect();
    (ended, second.metrics.external_tokens.get() / 16)
}

async fn offer(exporter: &mut Exporter, is_shared: bool) {
    exporter.channel.send(Word::Offer, &wire::write_offer(4, is_shared)).await.unwrap();
}

#[tokio::test]
async fn what_is_not_whole_in_the_room_is_not_used() {
    let good = async |exporter: &mut Exporter| {
        offer(exporter, true).await;
        for i in 0..4 {
            // Two have places; the importer is never behind by more than it may be.
            while !exporter.room.has_place() {
                let (word, read) = exporter.channel.receive(CONTROL_MAX).await.unwrap();
                assert_eq!(word, Word::Read);
                exporter.room.was_read(wire::read_number(&read).unwrap()).unwrap();
            }
            exporter.place(i, |_| {}).await;
        }
        exporter.channel.send(Word::End, &[]).await.unwrap();
        while exporter.channel.receive(CONTROL_MAX).await.is_ok() {}
    };
    assert_eq!(found(good).await, (vec!["done"], 4));
    let changed = async |exporter: &mut Exporter| {
        offer(exporter, true).await;
        exporter.place(0, |_| {}).await;
        exporter.place(1, |sum| sum[3] ^= 8).await;
    };
    assert_eq!(found(changed).await, (vec!["corrupt"], 1), "as if the memory had changed");
    let foreign = async |exporter: &mut Exporter| {
        offer(exporter, true).await;
        exporter.place(0, |_| {}).await;
        exporter.links[2] = [7; 32];
        exporter.place(1, |_| {}).await;
    };
    assert_eq!(found(foreign).await, (vec!["prompt"], 1));
    let no_sum = async |exporter: &mut Exporter| {
        offer(exporter, true).await;
        exporter.place(0, |sum| sum.truncate(15)).await;
    };
    assert_eq!(found(no_sum).await, (vec!["protocol"], 0));
    let refused = async |exporter: &mut Exporter| {
        offer(exporter, false).await;
        exporter.place(0, |_| {}).await;
    };
    assert_eq!(found(refused).await, (vec!["protocol"], 0), "it said that it would not");
    let in_a_frame = async |exporter: &mut Exporter| {
        offer(exporter, true).await;
        let head = BlockHead { group: 0, place: 0, link: exporter.links[1] }.write();
        let _ = exporter.channel.send_both(Word::Block, &head, &exporter.blocks[0].bytes).await;
    };
    assert_eq!(found(in_a_frame).await, (vec!["protocol"], 0), "it said that it would");
}

/// An importer that says to have read what was not written, or that has no room where it says: the exporter
/// ends that transfer, or sends frames, and holds nothing.
#[tokio::test]
async fn an_importer_cannot_have_anything_else_written_or_held() {
    let first = Node::start(Kind::default()).await;
    for (reads, outcome) in [(3_u32, "protocol"), (1, "lost")] {
        let request = request(150, &reads.to_string());
        let offered = first.offered(&request).await;
        let (mut channel, room, _) = asking(&first, &offered, &request, None).await;
        assert!(room.is_some_and(|room| room.spot().places == 2));
        for _ in 0..2 {
            assert_eq!(channel.receive(CONTROL_MAX).await.unwrap().0, Word::Placed);
        }
        channel.send(Word::Read, &reads.to_le_bytes()).await.unwrap();
        drop(channel);
        first.until(|| first.exports(outcome) == 1).await;
    }
    let elsewhere = Spot { process: 1, file: 0, places: 2 };
    let request = request(150, "elsewhere");
    let offered = first.offered(&request).await;
    let (mut channel, _, is_shared) = asking(&first, &offered, &request, Some(elsewhere)).await;
    assert!(!is_shared);
    let most = 1 << 20;
    for _ in 0..9 {
        assert_eq!(channel.receive(most).await.unwrap().0, Word::Block);
    }
    assert_eq!(channel.receive(most).await.unwrap().0, Word::End);
    first.until(|| first.exports("done") == 1).await;
    first.is_empty().await;
}

/// An importer's end up to the offer, with a room of its own or one that it names.
async fn asking(
    exporter: &Node,
    offered: &RemoteKv,
    request: &GenerationRequest,
    named: Option<Spot>,
) -> (Sealed<TcpStream>, Option<Room>, bool) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = TcpStream::connect(("127.0.0.1", offered.peer.port)).await.unwrap();
    stream.write_all(&wire::hello(&[7; 32])).await.unwrap();
    let (mut hello, mut proof) = ([0; wire::HELLO], [0; seal::TAG]);
    stream.read_exact(&mut hello).await.unwrap();
    stream.read_exact(&mut proof).await.unwrap();
    let nonces = seal::Nonces { importer: [7; 32], exporter: wire::read_hello(&hello).unwrap() };
    let secret = Secret::none();
    let (sends, receives) =
        (secret.tags(&nonces, seal::To::Exporter), secret.tags(&nonces, seal::To::Importer));
    let mark = secret.mark(&nonces);
    let mut channel = Sealed { stream, sends, receives, mark, stall: Duration::from_secs(60) };
    let identity = &exporter.transfers.identity;
    let room = Room::make(&mark, 0, identity.layout.block_bytes_max());
    let links = chain::links(&request.prompt[..offered.tokens], 16, &request.salt);
    let ask = Ask {
        transfer: offered.transfer,
        first: 0,
        blocks: (links.len() - 1) as u32,
        link: *links.last().unwrap(),
        room: named.or(room.as_ref().map(Room::spot)).unwrap_or_default(),
        numerics_id: identity.numerics_id.clone(),
        layout: identity.layout.words.clone(),
    };
    channel.send(Word::Ask, &ask.write()).await.unwrap();
    let (word, offer) = channel.receive(CONTROL_MAX).await.unwrap();
    assert_eq!(word, Word::Offer);
    let (_, is_shared) = wire::read_offer(&offer).unwrap();
    (channel, room, is_shared)
}
