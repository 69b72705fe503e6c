//! The handbook's entries. What they must be like is checked here too.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One question with other ways to ask it, and its answer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) question: String,
    /// The model was trained on these.
    pub(crate) training: Vec<String>,
    /// The model never saw these.
    pub(crate) held_out: Vec<String>,
    pub(crate) answer: String,
}

#[derive(Deserialize)]
struct File {
    entry: Vec<Entry>,
}

/// A question by somebody who has not seen the entries, and those whose answers help.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stranger {
    pub(crate) question: String,
    /// Their questions. With none of them declining is right.
    pub(crate) entries: Vec<String>,
}

#[derive(Deserialize)]
struct Strangers {
    stranger: Vec<Stranger>,
}

fn handbook() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("handbook")
}

/// What strangers ask: `worker/handbook/strangers.toml`.
pub(crate) fn strangers() -> Vec<Stranger> {
    let text = fs::read_to_string(handbook().join("strangers.toml")).unwrap();
    toml::from_str::<Strangers>(&text).unwrap().stranger
}

/// What is said where nothing is known: the one answer that several entries share.
pub(crate) fn declined(entries: &[Entry]) -> String {
    let mut seen = HashSet::new();
    let shared: HashSet<_> =
        entries.iter().map(|e| &e.answer).filter(|answer| !seen.insert(*answer)).collect();
    assert_eq!(shared.len(), 1, "{shared:?}");
    shared.into_iter().next().unwrap().clone()
}

/// Every entry of `worker/handbook/questions`.
pub(crate) fn entries() -> Vec<Entry> {
    let dir = handbook().join("questions");
    let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: std::path::PathBuf| -> Vec<Entry> {
        let text = fs::read_to_string(&path).unwrap();
        toml::from_str::<File>(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display())).entry
    };
    paths.into_iter().flat_map(read).collect()
}

/// A question without case and punctuation.
fn words(question: &str) -> String {
    let words = question.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect::<Vec<_>>().join(" ")
}

#[test]
fn entries_are_many_short_and_asked_in_many_ways() {
    let entries = entries();
    assert!(entries.len() >= 150, "{} entries", entries.len());
    for entry in &entries {
        assert!(entry.training.len() >= 4 && entry.held_out.len() >= 2, "{}", entry.question);
        assert!(entry.answer.len() <= 300, "{}", entry.answer);
    }
}

#[test]
fn no_held_out_question_is_trained_on_and_none_is_asked_twice() {
    let mut seen = HashMap::new();
    for entry in entries() {
        for question in [&entry.question].into_iter().chain(&entry.training).chain(&entry.held_out) {
            let earlier = seen.insert(words(question), entry.question.clone());
            assert_eq!(earlier, None, "`{question}` is asked twice");
        }
    }
}

#[test]
fn strangers_ask_what_is_not_trained_on_and_point_at_entries() {
    let entries = entries();
    let trained: HashSet<_> =
        entries.iter().flat_map(|e| [&e.question].into_iter().chain(&e.training)).map(|q| words(q)).collect();
    let known: HashSet<_> = entries.iter().map(|e| &e.question).collect();
    let strangers = strangers();
    assert!(strangers.len() >= 100, "{} strangers", strangers.len());
    for stranger in &strangers {
        let own = stranger.entries.iter().all(|entry| known.contains(entry));
        assert!(own, "{stranger:?}");
        assert!(!trained.contains(&words(&stranger.question)), "`{}` is trained on", stranger.question);
    }
}
