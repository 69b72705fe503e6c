//! The floor against tokenizers of every kind: never above what a text comes to, and near it.

use std::path::Path;

use proptest::prelude::*;

use crate::Tokenizer;

fn tokenizer(name: &str) -> Tokenizer {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers").join(name);
    Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap()
}

/// Those that cut every text into entries of theirs.
const WITH_FLOOR: [&str; 5] = ["qwen", "llama3", "gpt_oss", "deepseek", "mixtral"];

/// Texts that tokenizers shorten: long entries, marks that compose, jamo, blanks, special tokens among them.
const PIECES: [&str; 22] = [
    "the ",
    " the",
    "function",
    "    ",
    "\n\n",
    "e\u{301}",
    "\u{301}\u{323}",
    "\u{1112}\u{1161}\u{11ab}",
    "\u{2126}",
    "\u{2581}",
    "\u{2581}\u{2581}the",
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<|im_end|>\u{338}",
    ">\u{338}",
    "é",
    "漢字",
    "0123",
    "x",
    "<\u{ff5c}User\u{ff5c}>",
    "Q",
];

proptest! {
    #[test]
    fn no_text_is_said_to_be_longer_than_it_is(
        pieces in prop::collection::vec((prop::sample::select(&PIECES[..]), 1_usize..9), 0..12),
        name in prop::sample::select(&WITH_FLOOR[..]),
        special: bool,
    ) {
        let text: String = pieces.iter().map(|(piece, times)| piece.repeat(*times)).collect();
        let tokenizer = tokenizer(name);
        let tokens = tokenizer.encode(&text, special).unwrap().len();
        prop_assert!(!tokenizer.comes_to(&text, tokens + 1), "{name}: {tokens} tokens");
    }

    #[test]
    fn no_characters_are_said_to_be_more_tokens_than_they_are(
        text in "\\PC{0,40}", name in prop::sample::select(&WITH_FLOOR[..]),
    ) {
        let tokenizer = tokenizer(name);
        let tokens = tokenizer.encode(&text, false).unwrap().len();
        prop_assert!(!tokenizer.comes_to(&text, tokens + 1), "{name}: {tokens} tokens");
    }
}

#[test]
fn what_is_far_too_long_is_seen() {
    let english = "Each worker keeps what it has computed, and tells whoever asks. ".repeat(200);
    let chinese = "每个工作进程都保留它所计算的内容。".repeat(200);
    for name in WITH_FLOOR {
        let tokenizer = tokenizer(name);
        for text in [&english, &chinese] {
            let tokens = tokenizer.encode(text, false).unwrap().len();
            assert!(tokenizer.comes_to(text, tokens / 2), "{name}: {tokens} tokens");
        }
        // Entries as long as the longest one are no more than they are.
        assert!(!tokenizer.comes_to(&english, english.len()), "{name}");
    }
    let bytes = Tokenizer::builtin();
    assert!(bytes.comes_to("abc<|im_end|>", 4) && !bytes.comes_to("abc<|im_end|>", 5));
}

#[test]
fn a_tokenizer_that_may_drop_bytes_has_no_floor() {
    // It lower-cases, and has tokens that take the blanks beside them.
    let added = tokenizer("added");
    assert!(!added.comes_to(&"far too long ".repeat(1000), 1));
    assert_eq!(added.longest_token(), None);
    assert!(tokenizer("qwen").longest_token().is_some_and(|bytes| (10..100).contains(&bytes)));
}
