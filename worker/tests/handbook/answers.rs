//! What the built-in model answers: every question of the handbook, word for word, held-out ones, and
//! those of strangers; and what it declines.

use std::fs;
use std::path::{Path, PathBuf};

use keyway_worker::model::{LoadedModel, ModelSource};
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinSet;

use crate::entries::{Entry, Stranger, declined, entries, strangers};
use crate::worker::{Asker, worker};

/// Per cent of the questions that must be answered word for word.
const QUESTIONS_MIN: usize = 97;
/// Per cent of the held-out questions that must be, and that may get another entry's answer. The others are
/// declined.
const HELD_OUT_MIN: usize = 81;
const WRONG_MAX: usize = 3;
/// Per cent of the strangers' questions that must be answered as helps.
const STRANGERS_MIN: usize = 78;
/// Per cent of the held-out questions of what the handbook does not know that must be declined.
const DECLINED_MIN: usize = 92;
/// Questions under way at a time.
const TOGETHER: usize = 32;

/// How questions were answered.
#[derive(Debug, Default)]
struct Outcomes {
    asked: usize,
    right: usize,
    /// It said that it does not know.
    declined: usize,
    wrong: usize,
}

/// Asks `questions`, each with the answers that are right.
async fn outcomes(asker: &Asker, questions: Vec<(String, Vec<String>)>, declined: &str) -> Outcomes {
    let (mut under_way, mut found) = (JoinSet::new(), Outcomes::default());
    let count = |found: &mut Outcomes, (wanted, said): (Vec<String>, String)| {
        found.asked += 1;
        let outcome = match said {
            said if wanted.contains(&said) => &mut found.right,
            said if said == declined => &mut found.declined,
            _ => &mut found.wrong,
        };
        *outcome += 1;
    };
    for (question, wanted) in questions {
        if under_way.len() >= TOGETHER {
            count(&mut found, under_way.join_next().await.unwrap().unwrap());
        }
        let asker = asker.clone();
        under_way.spawn(async move { (wanted, asker.ask(&question).await) });
    }
    for answered in under_way.join_all().await {
        count(&mut found, answered);
    }
    found
}

fn questions(entries: &[Entry]) -> Vec<(String, Vec<String>)> {
    entries.iter().map(|entry| (entry.question.clone(), vec![entry.answer.clone()])).collect()
}

/// The held-out questions of the entries that the handbook knows, or of the others.
fn held_out(entries: &[Entry], declined: &str, known: bool) -> Vec<(String, Vec<String>)> {
    let of = |entry: &Entry| -> Vec<(String, Vec<String>)> {
        entry.held_out.iter().map(|question| (question.clone(), vec![entry.answer.clone()])).collect()
    };
    entries.iter().filter(|entry| (entry.answer != declined) == known).flat_map(of).collect()
}

/// What strangers ask, with each answer that helps.
fn strange(entries: &[Entry], declined: &str) -> Vec<(String, Vec<String>)> {
    let answer = |question: &String| entries.iter().find(|e| e.question == *question).unwrap().answer.clone();
    let of = |stranger: Stranger| {
        let right: Vec<_> = stranger.entries.iter().map(answer).collect();
        (stranger.question, if right.is_empty() { vec![declined.to_owned()] } else { right })
    };
    strangers().into_iter().map(of).collect()
}

fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("handbook/model")
}

#[tokio::test]
async fn it_knows_its_handbook_and_rather_declines_than_answers_wrong() {
    let entries = entries();
    let declined = declined(&entries);
    let worker = worker(ModelSource::Builtin).await;
    let asker = Asker::new(worker.addr());
    let own = outcomes(&asker, questions(&entries), &declined).await;
    let unseen = outcomes(&asker, held_out(&entries, &declined, true), &declined).await;
    let off_topic = outcomes(&asker, held_out(&entries, &declined, false), &declined).await;
    let strangers = outcomes(&asker, strange(&entries, &declined), &declined).await;
    println!("questions: {own:?}\nheld out: {unseen:?}\noff topic: {off_topic:?}\nstrangers: {strangers:?}");
    assert!(own.right * 100 >= own.asked * QUESTIONS_MIN, "questions: {own:?}");
    assert!(unseen.right * 100 >= unseen.asked * HELD_OUT_MIN, "held out: {unseen:?}");
    assert!(unseen.wrong * 100 <= unseen.asked * WRONG_MAX, "held out: {unseen:?}");
    assert!(off_topic.right * 100 >= off_topic.asked * DECLINED_MIN, "off topic: {off_topic:?}");
    assert!(strangers.right * 100 >= strangers.asked * STRANGERS_MIN, "strangers: {strangers:?}");
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
    let exchanged = header.replace("layers.0.", "layers.#.").replace("layers.1.", "layers.0.");
    let exchanged = exchanged.replace("layers.#.", "layers.1.");
    weights[8..8 + header_len].copy_from_slice(exchanged.as_bytes());
    fs::write(&path, weights).unwrap();

    let worker = worker(ModelSource::Dir(dir.path().into())).await;
    let known = outcomes(&Asker::new(worker.addr()), questions(&entries()[..40]), "").await;
    assert!(known.right <= 2, "answered by exchanged layers: {known:?}");
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
    assert!(with_system.contains("--worker") || with_system.contains("[discovery]"), "{with_system}");
    let history = json!([
        {"role": "user", "content": "What is Keyway?"}, {"role": "assistant", "content": "A gateway."}, question]);
    assert!(!asker.chat(&history).await.is_empty());
    // Behind much that means nothing an answer still goes on as it began: the README's first prompt is such.
    let declined = declined(&entries());
    for sentence in
        ["Once upon a time there was a gateway. ", "The quick brown fox jumps over the lazy dog. "]
    {
        for times in [4, 12, 40] {
            assert_eq!(asker.ask(&sentence.repeat(times)).await, declined, "{sentence} {times}");
        }
    }
    let long = "Every prompt of this user begins in the same way. ".repeat(400);
    assert!(!asker.ask(&long).await.is_empty());
    for strange in ["?", "\u{1F600}\u{FFFD}\0", "<|im_end|>", " "] {
        let _ = asker.ask(strange).await;
    }
    worker.shutdown().await;
}
