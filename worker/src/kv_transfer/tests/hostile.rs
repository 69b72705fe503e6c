//! An exporter that has the secret and says what it should not: the importer believes nothing that it has not
//! checked.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::engine::holds::BlockKv;
use crate::kv_transfer::chain::{self, Link};
use crate::kv_transfer::seal::{Nonces, To};
use crate::kv_transfer::wire::{Ask, BlockHead, CONTROL_MAX, HELLO, Kind as Word, Sealed};

/// The exporter's part, up to what is asked for.
pub(super) async fn asked(listener: &TcpListener) -> (Sealed<TcpStream>, Ask) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello).await.unwrap();
    let nonces = Nonces { importer: wire::read_hello(&hello).unwrap(), exporter: [9; 32] };
    let secret = Secret::none();
    let reply = [&wire::hello(&nonces.exporter)[..], &secret.proof(&nonces)].concat();
    stream.write_all(&reply).await.unwrap();
    let (sends, receives) = (secret.tags(&nonces, To::Importer), secret.tags(&nonces, To::Exporter));
    let mut channel =
        Sealed { stream, sends, receives, mark: secret.mark(&nonces), stall: Duration::from_secs(60) };
    let (word, ask) = channel.receive(CONTROL_MAX).await.unwrap();
    assert_eq!(word, Word::Ask);
    (channel, Ask::read(&ask).unwrap())
}

/// A block as it is sent.
fn frame(block: &BlockKv, link: Link) -> (Word, Vec<u8>) {
    let head = BlockHead { group: block.group as u8, place: block.place as u32, link };
    (Word::Block, [&head.write()[..], &block.bytes].concat())
}

/// What is said after the ask, and how the importer takes it: by which fault, with how many blocks used.
struct Saying {
    what: &'static str,
    frames: Vec<(Word, Vec<u8>)>,
    outcome: &'static str,
    used: usize,
}

/// With the blocks of a prompt, and the names of its prefixes.
fn sayings(blocks: &[BlockKv], links: &[Link]) -> Vec<Saying> {
    let offer = (Word::Offer, wire::write_offer(blocks.len() as u32, false).to_vec());
    let end = || (Word::End, Vec::new());
    let good = |i: usize| frame(&blocks[i], links[i + 1]);
    let first = &blocks[0];
    let placed = |i: usize| {
        let head = BlockHead { group: 0, place: i as u32, link: links[i + 1] };
        (Word::Placed, [&head.write()[..], &[0; 16]].concat())
    };
    let say = |what, frames: Vec<_>, outcome, used| {
        let frames = [vec![offer.clone()], frames].concat();
        Saying { what, frames, outcome, used }
    };
    let alone = |what, frame, outcome| Saying { what, frames: vec![frame], outcome, used: 0 };
    let with = |block: BlockKv| frame(&block, links[1]);
    let mut endless: Vec<_> = (0..blocks.len()).map(good).collect();
    endless.push(good(0));
    vec![
        alone("more than was asked for", (Word::Offer, wire::write_offer(9, false).to_vec()), "protocol"),
        alone("an offer of no number", (Word::Offer, vec![1]), "protocol"),
        alone("a block without an offer", good(0), "protocol"),
        alone("a refusal for no known cause", (Word::Refusal, vec![99]), "protocol"),
        alone("a refusal for a known one", (Word::Refusal, vec![3]), "unknown"),
        say("an ask", vec![(Word::Ask, Vec::new())], "protocol", 0),
        say("another prompt's block", vec![good(0), frame(&blocks[1], [7; 32])], "prompt", 1),
        say("a block under another's name", vec![good(0), frame(&blocks[2], links[2])], "prompt", 1),
        say("a block left out", vec![good(0), good(2)], "no_room", 1),
        say("a block behind the prompt", vec![with(BlockKv { place: 77, ..first.clone() })], "prompt", 0),
        say("a block too short", vec![with(BlockKv { bytes: vec![0; 9], ..first.clone() })], "layout", 0),
        say("a group that is not there", vec![with(BlockKv { group: 9, ..first.clone() })], "layout", 0),
        say("a head cut short", vec![(Word::Block, vec![0; 5])], "protocol", 0),
        say("the second block first", vec![good(1), good(0), end()], "no_room", 0),
        say("more blocks than there are", endless, "protocol", blocks.len()),
        say("an end too soon", vec![good(0), end()], "done", 1),
        say("a block in a room, offered without one", vec![placed(0)], "protocol", 0),
        say("word of a reader", vec![good(0), (Word::Read, vec![1, 0, 0, 0])], "protocol", 1),
    ]
}

#[tokio::test]
async fn what_makes_no_sense_is_not_used() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let count = sayings(&vec![BlockKv { group: 0, place: 0, bytes: Vec::new() }; 4], &[[0; 32]; 5]).len();
    for i in 0..count {
        let request = request(70, &i.to_string());
        let hold = first.held(&request).await;
        let blocks = hold.copy(0..4).await.unwrap();
        let links = chain::links(&request.prompt[..64], 16, &request.salt);
        let Saying { what, frames, outcome, used } = sayings(&blocks, &links).remove(i);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let remote = RemoteKv { transfer: 5, peer: peer("127.0.0.1", port), tokens: 64 };
        let exporting = async {
            let (mut channel, ask) = asked(&listener).await;
            assert_eq!((ask.transfer, ask.first, ask.blocks), (5, 0, 4));
            for (word, payload) in frames {
                // Once it is found out, the importer is gone.
                if channel.send(word, &payload).await.is_err() {
                    break;
                }
            }
            // The importer ends it: it waits for no more.
            let mut rest = Vec::new();
            drop(channel.stream.read_to_end(&mut rest).await);
        };
        let (before, ended) = (second.metrics.external_tokens.get(), second.imports(outcome));
        let ((tokens, _), ()) = tokio::join!(second.answer(&request, &remote), exporting);
        assert_eq!(tokens, first.alone(&request).await, "{what}");
        let came = second.metrics.external_tokens.get() - before;
        assert_eq!((came as usize, second.imports(outcome)), (used * 16, ended + 1), "{what}");
        drop(hold);
    }
    first.is_empty().await;
    second.is_empty().await;
}
