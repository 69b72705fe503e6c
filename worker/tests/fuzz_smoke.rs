//! The fuzz target on stable Rust: the committed corpus, and what becomes of it under random cuts, flips,
//! doublings and splices. A fuzzer goes further (`cargo +nightly fuzz run forms corpus/forms` in `worker/`);
//! this says that the target holds at all.

#[path = "../fuzz/bodies.rs"]
mod bodies;

use std::path::Path;

use proptest::prelude::*;
use proptest::sample::Index;

#[expect(clippy::expect_used, reason = "a test fails by panicking")]
fn corpus() -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/forms");
    let mut files: Vec<_> =
        std::fs::read_dir(dir).expect("the corpus").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() >= 12, "{} files", files.len());
    files.iter().map(|file| std::fs::read(file).expect("a seed")).collect()
}

/// What a fuzzer does to a seed.
#[derive(Debug, Clone)]
enum Change {
    Flip(Index, u8),
    Cut(Index, u8),
    Double(Index, u8),
    Word(Index, &'static str),
    Splice(Index, Index, Index),
}

/// What schemas and grammars are made of.
const WORDS: [&str; 24] = [
    "\"type\":\"string\"",
    "\"pattern\":\"a|b*\"",
    "\"anyOf\":[",
    "]",
    "{",
    "}",
    "\"$ref\":\"#\"",
    "\"minLength\":9",
    ",",
    "\"maxItems\":99999",
    "\"multipleOf\":0.01",
    "\"format\":\"date\"",
    "null",
    "true",
    "1e300",
    "-",
    "[a-z]{2,9}",
    "(",
    ")",
    "start: ",
    "%json ",
    "~",
    "&",
    "\\u0000",
];

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, bits)| Change::Flip(at, bits)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, bytes)| Change::Cut(at, bytes)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, bytes)| Change::Double(at, bytes)),
        (any::<Index>(), prop::sample::select(&WORDS[..])).prop_map(|(at, word)| Change::Word(at, word)),
        (any::<Index>(), any::<Index>(), any::<Index>())
            .prop_map(|(at, of, from)| Change::Splice(at, of, from)),
    ]
}

fn changed(corpus: &[Vec<u8>], seed: Index, changes: &[Change]) -> Vec<u8> {
    let mut bytes = seed.get(corpus).clone();
    for change in changes {
        let span = |at: &Index, bytes: u8, len: usize| {
            let at = at.index(len + 1);
            at..(at + usize::from(bytes)).min(len)
        };
        match change {
            Change::Flip(at, bits) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] ^= bits;
            }
            Change::Flip(..) => {}
            Change::Cut(at, count) => drop(bytes.drain(span(at, *count, bytes.len()))),
            Change::Double(at, count) => {
                let span = span(at, *count, bytes.len());
                let copy = bytes[span.clone()].to_vec();
                bytes.splice(span.end..span.end, copy);
            }
            Change::Word(at, word) => {
                let at = at.index(bytes.len() + 1);
                bytes.splice(at..at, word.bytes());
            }
            Change::Splice(at, of, from) => {
                let other = of.get(corpus);
                let at = at.index(bytes.len() + 1);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from.index(other.len() + 1)..]);
            }
        }
        bytes.truncate(1 << 14);
    }
    bytes
}

#[test]
fn the_corpus_itself_leads_answers() {
    let requests = keyway_worker::fuzz::Requests::new(64 << 20).unwrap();
    let mut led = 0;
    for seed in corpus() {
        bodies::forms(&seed);
        let body = &seed[25..];
        let read = requests.read(seed[0] % 2 == 0, body);
        led += usize::from(read.is_ok_and(|read| read.follow(&seed[1..25]).is_some_and(|came| came > 0)));
    }
    assert!(led >= 10, "{led} requests of the corpus have a form");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn whatever_form_a_request_asks_for_it_is_refused_or_leads_an_answer(
        seed in any::<Index>(), changes in prop::collection::vec(change(), 0..5),
    ) {
        bodies::forms(&changed(&corpus(), seed, &changes));
    }
}
