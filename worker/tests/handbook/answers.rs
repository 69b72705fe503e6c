//! What the built-in model answers: every question of the handbook, word for word, and every held-out one.

use std::fs;
use std::path::{Path, PathBuf};

use keyway_worker::model::{LoadedModel, ModelSource};
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinSet;

use crate::entries::{Entry, entries};
use crate::worker::{Asker, worker};

/// Per cent of the questions that must be answered word for word.
const QUESTIONS_MIN: usize = 95;
/// Per cent of the held-out questions that must. The goal is 60: see the open points of
/// `worker/handbook/README.md`.
const HELD_OUT_MIN: usize = 60;
/// Questions under way at a time.
const TOGETHER: usize = 32;

/// How many of `questions` (with the answer wanted) are answered word for word.
async fn right(asker: &Asker, questions: Vec<(String, String)>) -> usize {
    let (mut asked, mut right) = (JoinSet::new(), 0);
    for (question, wanted) in questions {
        if asked.len() >= TOGETHER {
            right += usize::from(asked.join_next().await.unwrap().unwrap());
        }
        let asker = asker.clone();
        asked.spawn(async move { asker.ask(&question).await == wanted });
    }
    right + asked.join_all().await.into_iter().filter(|right| *right).count()
}

fn questions(entries: &[Entry]) -> Vec<(String, String)> {
    entries.iter().map(|entry| (entry.question.clone(), entry.answer.clone())).collect()
}

fn held_out(entries: &[Entry]) -> Vec<(String, String)> {
    let of = |entry: &Entry| -> Vec<(String, String)> {
        entry.held_out.iter().map(|question| (question.clone(), entry.answer.clone())).collect()
    };
    entries.iter().flat_map(of).collect()
}

fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("handbook/model")
}

#[tokio::test]
async fn it_knows_its_handbook_and_understands_questions_it_never_saw() {
    let entries = entries();
    let worker = worker(ModelSource::Builtin).await;
    let asker = Asker::new(worker.addr());
    let (known, asked) = (right(&asker, questions(&entries)).await, entries.len());
    let (understood, unseen) = (
        right(&asker, held_out(&entries)).await,
        entries.iter().map(|entry| entry.held_out.len()).sum::<usize>(),
    );
    println!("word for word: {known} of {asked} questions, {understood} of {unseen} held-out ones");
    assert!(known * 100 >= asked * QUESTIONS_MIN, "{known} of {asked} questions are answered word for word");
    assert!(understood * 100 >= unseen * HELD_OUT_MIN, "{understood} of {unseen} held-out questions are");
    worker.shutdown().await;
}

/// The weights are what knows: with two layers exchanged nothing is left.
#[tokio::test]
async fn with_two_layers_exchanged_it_knows_nothing() {
    let dir = TempDir::new().unwrap();
    for entry in fs::read_dir(model_dir()).unwrap() {
        let entry = entry.unwrap();
        fs::write(dir.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut weights = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&weights[8..8 + header_len]).unwrap();
    // Names of equal length: only the header changes.
    let exchanged = header.replace("layers.0.", "layers.#.").replace("layers.3.", "layers.0.");
    let exchanged = exchanged.replace("layers.#.", "layers.3.");
    weights[8..8 + header_len].copy_from_slice(exchanged.as_bytes());
    fs::write(&path, weights).unwrap();

    let worker = worker(ModelSource::Dir(dir.path().into())).await;
    let known = right(&Asker::new(worker.addr()), questions(&entries()[..40])).await;
    assert!(known <= 2, "{known} of 40 questions are answered by exchanged layers");
}

#[test]
fn what_is_embedded_is_what_the_directory_holds() {
    let id = |source| LoadedModel::load(&source).unwrap().info.numerics_id;
    assert_eq!(id(ModelSource::Builtin), id(ModelSource::Dir(model_dir())));
    let files = fs::read_dir(model_dir()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    assert!(files.sum::<u64>() <= 8 << 20, "the built-in model is at most 8 MiB");
}

#[tokio::test]
async fn odd_conversations_are_answered_too() {
    let worker = worker(ModelSource::Builtin).await;
    let asker = Asker::new(worker.addr());
    let question = json!({"role": "user", "content": "How do I add a worker?"});
    let system = json!({"role": "system", "content": "You are a helpful assistant."});
    let with_system = asker.chat(&json!([system, question])).await;
    // Two entries say how: at the start, and while it runs.
    assert!(with_system.contains("--worker") || with_system.contains("[discovery]"), "{with_system}");
    let history = json!([
        {"role": "user", "content": "What is Keyway?"}, {"role": "assistant", "content": "A gateway."}, question]);
    assert!(!asker.chat(&history).await.is_empty());
    let long = "Every prompt of this user begins in the same way. ".repeat(400);
    assert!(!asker.ask(&long).await.is_empty());
    for strange in ["?", "\u{1F600}\u{FFFD}\0", "<|im_end|>", " "] {
        let _ = asker.ask(strange).await;
    }
    worker.shutdown().await;
}
