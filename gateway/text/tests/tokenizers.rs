//! Tokenizers against transformers: each folder of `data/tokenizers` is a small checkpoint with the pipeline
//! of a real family, and what transformers makes of many texts with it. `make_tokenizer_goldens.py` makes
//! them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use keyway_text::{Decoder, IncrementalTokenizer, TextModel};
use proptest::prelude::*;
use serde_json::Value;

fn families() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    assert_eq!(folders.len(), 6);
    folders
}

/// The folder's tokenizer, the first line of its goldens, and the others.
fn load(folder: &Path) -> (TextModel, Value, Vec<Value>) {
    let goldens = std::fs::read_to_string(folder.join("goldens.jsonl")).unwrap();
    let mut lines = goldens.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let head = lines.next().unwrap();
    let lines: Vec<Value> = lines.collect();
    assert!(lines.len() > 30);
    (TextModel::from_dir(folder).unwrap(), head, lines)
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn text(line: &Value) -> &str {
    line["text"].as_str().unwrap()
}

#[test]
fn the_vocabulary_is_the_references() {
    for folder in families() {
        let (model, head, _) = load(&folder);
        assert_eq!(model.eos_token_id.map(u64::from), head["eos_token_id"].as_u64(), "{}", folder.display());
        assert_eq!(model.tokenizer.vocab_size() as u64, head["vocab_size"], "{}", folder.display());
        for (token, id) in head["special_tokens"].as_object().unwrap() {
            assert_eq!(model.tokenizer.token_id(token).map(u64::from), id.as_u64(), "{token}");
        }
    }
}

#[test]
fn encoding_is_the_references() {
    for folder in families() {
        let (model, _, lines) = load(&folder);
        for line in &lines {
            let encode = |special| model.tokenizer.encode(text(line), special).unwrap();
            let plain = ids(&line["plain"]);
            assert_eq!(encode(false), plain, "{}: {:?}", folder.display(), text(line));
            let around = [ids(&line["before"]), plain, ids(&line["after"])].concat();
            assert_eq!(encode(true), around, "{}: {:?}", folder.display(), text(line));
        }
    }
}

#[test]
fn decoding_is_the_references() {
    for folder in families() {
        let (model, _, lines) = load(&folder);
        for line in &lines {
            let want = line["decoded"].as_str().unwrap_or_else(|| text(line));
            let got = model.tokenizer.decode(&ids(&line["plain"])).unwrap();
            assert_eq!(got, want, "{}: {:?}", folder.display(), text(line));
        }
    }
}

/// Wherever the prompt ends, the pieces joined are the text of all ids without the prompt's, and after each
/// id what is shown is a beginning of it.
#[test]
fn decoding_one_by_one_is_decoding_at_once() {
    for folder in families() {
        let (model, _, lines) = load(&folder);
        for line in &lines {
            let ids = ids(&line["plain"]);
            let ids = &ids[..ids.len().min(400)];
            let whole = model.tokenizer.decode(ids).unwrap();
            for prompt in (0..=ids.len()).step_by(1 + ids.len() / 12) {
                let (prompt, answer) = ids.split_at(prompt);
                let before = model.tokenizer.decode(prompt).unwrap();
                let Some(want) = whole.strip_prefix(&before).filter(|_| !before.ends_with('\u{fffd}')) else {
                    continue; // ends inside a character
                };
                let mut decoder = Decoder::new(model.tokenizer.clone(), prompt).unwrap();
                let mut shown = String::new();
                for id in answer {
                    shown.push_str(&decoder.push(*id).unwrap());
                    assert!(want.starts_with(&shown), "{}: {:?}: {shown:?}", folder.display(), text(line));
                }
                shown.push_str(&decoder.finish().unwrap());
                assert_eq!(shown, want, "{}: {:?} after {prompt:?}", folder.display(), text(line));
            }
        }
    }
}

/// Texts in which special tokens, their beginnings and ends, blanks and words stand beside each other in any
/// order.
fn fragments(special: Vec<String>) -> impl Strategy<Value = String> {
    let half = |token: &str| token.chars().count() / 2;
    let cut: Vec<String> = special.iter().map(|token| token.chars().take(half(token)).collect()).collect();
    let rest: Vec<String> = special.iter().map(|token| token.chars().skip(half(token)).collect()).collect();
    let plain =
        ["a", " ", "  ", "\n", "word", "Hello, world 123", "é", "日本", "<", "<|", "|>", "_", "\t", "."];
    let mut all: Vec<String> = plain.map(str::to_owned).into_iter().chain(cut).chain(rest).collect();
    all.retain(|text| !text.is_empty());
    let special = if special.is_empty() { vec![" ".to_owned()] } else { special };
    let piece = prop_oneof![
        3 => prop::sample::select(all),
        2 => prop::sample::select(special),
        // Long enough that there is something to cut.
        1 => "[a-z ,.]{60,90}",
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// Cut, remembered and joined, or at once: the same tokens, whatever stands beside a place to cut.
#[test]
fn remembered_pieces_give_the_same_tokens_as_the_whole() {
    for folder in families() {
        let (model, head, lines) = load(&folder);
        let incremental = IncrementalTokenizer::new(Arc::clone(&model.tokenizer), 1 << 16, 3);
        let same = |text: &str| {
            for special in [false, true] {
                let want = model.tokenizer.encode(text, special).unwrap();
                assert_eq!(
                    incremental.encode(text, special).unwrap().ids,
                    want,
                    "{}: {text:?}",
                    folder.display()
                );
            }
        };
        for line in &lines {
            same(text(line));
        }
        let special = head["special_tokens"].as_object().unwrap().keys().cloned().collect();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        runner
            .run(&fragments(special), |text| {
                same(&text);
                Ok(())
            })
            .unwrap();
    }
}
