//! Whether what the answers name exists: flags, variables, metrics, headers, paths, files, identifiers.
//! Whether the rest of a sentence is true is for people to see.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use keyway_worker::model::ModelSource;

use crate::entries::entries;
use crate::worker::{Asker, worker};

/// What can be looked up.
struct Known {
    /// Every source file's text; no documentation, no handbook.
    sources: String,
    /// Every file and folder of the repository, relative to its root.
    files: BTreeSet<String>,
    /// A worker's metrics.
    exposition: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn collect(root: &Path, dir: &Path, known: &mut Known) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if ["target", ".git", ".venv", ".cuda", "__pycache__"].contains(&name) {
            continue;
        }
        let relative = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let handbook = relative.contains("handbook");
        known.files.insert(relative);
        if path.is_dir() {
            collect(root, &path, known);
        } else if !handbook {
            let source = path.extension().and_then(|e| e.to_str());
            if source.is_some_and(|e| ["rs", "toml", "sh", "yml", "py"].contains(&e)) || name == "run" {
                known.sources += &fs::read_to_string(&path).unwrap_or_default();
            }
        }
    }
}

impl Known {
    async fn gather() -> Self {
        let worker = worker(ModelSource::Random).await;
        let exposition = Asker::new(worker.addr()).get("/metrics").await;
        let mut known = Self { sources: String::new(), files: BTreeSet::new(), exposition };
        collect(&root(), &root(), &mut known);
        known
    }

    /// Whether what `word` names exists; words that name nothing do.
    fn exists(&self, word: &str) -> bool {
        let in_sources = |text: &str| self.sources.contains(text);
        if let Some(flag) = word.strip_prefix("--") {
            // As it stands in a script, as an alias, or as the field that clap makes it from.
            let (quoted, field) = (format!("\"{flag}\""), format!("{}:", flag.replace('-', "_")));
            // Cargo's own are nobody's here.
            let cargo = ["release", "workspace", "example", "test", "no-default-features", "help", "version"];
            return cargo.contains(&flag) || in_sources(word) || in_sources(&quoted) || in_sources(&field);
        }
        if word.starts_with("keyway_worker_") || word.starts_with("vllm:") {
            return self.exposition.contains(word) || in_sources(&format!("\"{word}\""));
        }
        if word.starts_with('/') || word.starts_with("x-keyway") || word.starts_with("KEYWAY_") {
            return in_sources(word.trim_end_matches('/'));
        }
        let extension = Path::new(word).extension().and_then(|e| e.to_str()).unwrap_or_default();
        let file =
            ["rs", "toml", "md", "sh", "py", "yml", "html", "json", "jinja", "jsonl"].contains(&extension);
        if file || (word.contains('/') && !word.contains("://") && !word.contains("tokens/s")) {
            let path = word.trim_end_matches('/');
            let ends = format!("/{path}");
            let named = self.files.contains(path) || self.files.iter().any(|file| file.ends_with(&ends));
            return named || in_sources(path.rsplit('/').next().unwrap_or(path));
        }
        // A key of the configuration stands behind its table's name.
        let key = word.rsplit('.').next().unwrap_or(word);
        if key.contains('_') { in_sources(key) } else { true }
    }

    /// What `answer` names and does not exist.
    fn made_up<'a>(&self, answer: &'a str) -> Vec<&'a str> {
        let edges = |c: char| !(c.is_alphanumeric() || "-/_.".contains(c));
        let words = answer.split(|c: char| c.is_whitespace() || "()',;=".contains(c));
        let words = words.map(|word| word.trim_matches(edges).trim_end_matches('.'));
        words.filter(|word| !word.is_empty() && !self.exists(word)).collect()
    }
}

#[tokio::test]
async fn everything_that_answers_name_exists() {
    let known = Known::gather().await;
    let entries = entries();
    let mut faults = Vec::new();
    for entry in &entries {
        for word in known.made_up(&entry.answer) {
            faults.push(format!("`{word}` does not exist, but is in: {}", entry.answer));
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[tokio::test]
async fn what_does_not_exist_is_noticed() {
    let known = Known::gather().await;
    // Put together here, so that this file does not name it either.
    let parts = [
        ("--colour-of", "-the-sky"),
        ("keyway_worker_", "beauty"),
        ("vllm:", "beauty"),
        ("x-keyway-", "beauty"),
    ];
    let more =
        [("/no/such", "/path"), ("gateway/no_such", ".rs"), ("KEYWAY_NO", "THING"), ("no_such", "_word")];
    for (first, second) in parts.into_iter().chain(more) {
        let answer = format!("Use {first}{second}, or not.");
        assert_eq!(known.made_up(&answer), [format!("{first}{second}")]);
    }
}
