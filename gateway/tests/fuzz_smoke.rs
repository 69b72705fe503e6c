//! The fuzz targets on stable Rust: seeds, and what becomes of them under random cuts, flips, doublings and
//! splices. A fuzzer goes further (`cargo +nightly fuzz run request` in `gateway/`); this says that the
//! targets hold at all.

#[path = "../fuzz/bodies.rs"]
mod bodies;

use std::path::Path;

use keyway_wire::{
    kv_event::{BlockStored, EngineHash, EventBatch, KvEvent, WireFormat},
    zmtp,
};
use proptest::{prelude::*, sample::Index};

const BODIES: [&str; 6] = [
    r#"{"model":"m","messages":[{"role":"user","content":"hello \u00e9\ud83d\ude00"}],"stream":true}"#,
    r#"{"model":"a","model":"b","cache_salt":"x","prompt":["p",[1,2]],"stream":false}"#,
    r#"{"mo\u0064el":"m","input":[{"type":"text","text":"t\"\\\n"}],"temperature":1e-7,"n":-0.0}"#,
    "{\"model\":\"m\"\r\n,\t\"tools\":[{\"a\":{\"b\":[[],[{}]]}}],\"system\":\"s\",\"x\":null}",
    r#"{"":"","cache_salt":{"a":1},"prompt":"long long long long long long long long long"}"#,
    "[1,2,3]",
];
const FORMS: [&str; 3] = [
    "b--xXb\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xXb\r\nx: y\r\ncontent-disposition: form-data; name=f; filename=a\r\n\r\n--x\r\n--xXb--",
    "cpreamble\n--xXc \ncontent-disposition: form-data; name=\"a\\\"b\"\n\nv\n--xXc\n\nv\n--xXc--\nepilogue",
    "/v1/vector_stores/vs_%31/files/f%2f?x",
];
const STREAMS: [&str; 3] = [
    "12345678data: {\"a\":1}\n\ndata: [DONE]\n\n",
    "\u{1}\u{2}\u{3}\u{0}\u{0}\u{0}\u{0}\u{0}event: x\r\ndata: y\r\n\r\n:c\r\rdata: z",
    "abcdefgh\n\n\r\n\r\n\r\r\n\n",
];

/// The committed corpus of a target, where a fuzzer finds and leaves its inputs as well.
#[expect(clippy::expect_used, reason = "a test fails by panicking")]
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files = std::fs::read_dir(folder).expect("the corpus");
    let mut files: Vec<_> = files.map(|entry| entry.expect("an entry").path()).collect();
    files.sort_unstable();
    files.iter().map(|file| std::fs::read(file).expect("a seed")).collect()
}

/// What a fuzzer does to a seed.
#[derive(Debug, Clone)]
enum Change {
    Flip(Index, u8),
    Cut(Index, Index),
    Double(Index, Index),
    Insert(Index, Vec<u8>),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, bits)| Change::Flip(at, bits)),
        (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Change::Cut(a, b)),
        (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Change::Double(a, b)),
        (any::<Index>(), prop::collection::vec(any::<u8>(), 0..12))
            .prop_map(|(at, new)| Change::Insert(at, new)),
    ]
}

fn changed(seed: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for change in changes {
        let span = |a: &Index, b: &Index| {
            let (a, b) = (a.index(bytes.len() + 1), b.index(bytes.len() + 1));
            a.min(b)..a.max(b)
        };
        match change {
            Change::Flip(at, bits) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] ^= bits;
            }
            Change::Flip(..) => {}
            Change::Cut(a, b) => drop(bytes.drain(span(a, b))),
            Change::Double(a, b) => {
                let span = span(a, b);
                let copy = bytes[span.clone()].to_vec();
                bytes.splice(span.end..span.end, copy);
            }
            Change::Insert(at, new) => {
                let at = at.index(bytes.len() + 1);
                bytes.splice(at..at, new.iter().copied());
            }
        }
        bytes.truncate(1 << 16);
    }
    bytes
}

fn events() -> Vec<Vec<u8>> {
    let stored = KvEvent::BlockStored(BlockStored {
        block_hashes: vec![EngineHash::Int(1), EngineHash::Int(2)],
        token_ids: (0..32).collect(),
        block_size: 16,
        ..BlockStored::default()
    });
    let batch =
        EventBatch { ts: 1.0, events: vec![stored, KvEvent::AllBlocksCleared], ..EventBatch::default() };
    [WireFormat::VllmArray, WireFormat::VllmMap].map(|format| batch.encode(format)).into()
}

#[test]
fn the_corpus_of_answers_holds() {
    let seeds = corpus("answer");
    assert!(seeds.len() >= 20, "{}", seeds.len());
    for seed in &seeds {
        bodies::answer(seed);
    }
}

proptest! {
    // Many, as an answer is short.
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn nothing_behind_an_answer_is_a_part_of_it(
        seed in prop::sample::select(corpus("answer")),
        other in prop::sample::select(corpus("answer")),
        changes in prop::collection::vec(change(), 0..6),
        splice in any::<bool>(),
    ) {
        let seed = if splice { [&seed[..], &other[2..]].concat() } else { seed };
        bodies::answer(&changed(&seed, &changes));
    }
}

/// The committed conversations, each behind the byte that chooses its template.
fn conversations() -> Vec<Vec<u8>> {
    let all = corpus("template");
    assert!(all.len() >= 10, "{} files", all.len());
    all
}

#[test]
fn the_committed_conversations_hold_in_every_template() {
    for mut conversation in conversations() {
        for which in 0..3 {
            conversation[0] = which;
            bodies::template(&conversation);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn a_body_is_read_as_a_json_library_reads_it(
        seed in prop::sample::select(&BODIES[..]), changes in prop::collection::vec(change(), 0..6),
    ) {
        let bytes = changed(seed.as_bytes(), &changes);
        bodies::request(&bytes);
        bodies::salt(&bytes);
        bodies::charset(&bytes);
    }

    #[test]
    fn a_form_s_parts_are_its_own_in_their_order(
        seed in prop::sample::select(&FORMS[..]), changes in prop::collection::vec(change(), 0..6),
    ) {
        bodies::form(&changed(seed.as_bytes(), &changes));
    }

    #[test]
    fn a_stream_loses_no_byte_however_it_is_cut(
        seed in prop::sample::select(&STREAMS[..]), changes in prop::collection::vec(change(), 0..6),
    ) {
        bodies::sse(&changed(seed.as_bytes(), &changes));
    }

    #[test]
    fn no_peer_breaks_a_bound(changes in prop::collection::vec(change(), 0..6), first: u8) {
        let hello = [&[first][..], &zmtp::greeting(), &zmtp::ready(zmtp::SocketType::Pub)].concat();
        let said = [hello, zmtp::message(&[&b"topic"[..], &[0; 8], &[7; 200]]), zmtp::pong(b"x")].concat();
        bodies::zmtp(&changed(&said, &changes));
    }

    #[test]
    fn no_conversation_breaks_a_template(
        seed in any::<Index>(), changes in prop::collection::vec(change(), 0..6), which in 0_u8..3,
        word in prop::sample::select(&["", "</think>", "<|im_end|>", "\\n\\n", "{{", "\\u0000", "[INST]"][..]), times in 0_usize..9,
    ) {
        let conversations = conversations();
        let mut bytes = changed(&conversations[seed.index(conversations.len())], &changes);
        if let Some(first) = bytes.first_mut() {
            *first = which;
        }
        // In a message's text, wherever one begins.
        let text = String::from_utf8_lossy(&bytes).replace("\"content\":\"", &format!("\"content\":\"{}", word.repeat(times)));
        bodies::template(text.as_bytes());
    }

    #[test]
    fn no_event_breaks_the_index(which in any::<Index>(), changes in prop::collection::vec(change(), 0..6)) {
        let seeds = events();
        bodies::kv_event(&changed(&seeds[which.index(seeds.len())], &changes));
    }
}
