//! The house rules that no compiler checks, over every file of the repository: documented, short, without
//! leftovers, `unsafe` only where it belongs and explained. Function length and the rest are clippy's.
#![allow(clippy::expect_used, reason = "helpers of tests fail the test by panicking")]

use std::path::Path;

use keyway_tests::bins::workspace_root;
use keyway_tests::sources;

/// Lines a file may have without its tests.
const FILE_LINES_MAX: usize = 500;
/// Half of the files are at most this long, without their tests.
const MEDIAN_LINES_MAX: usize = 150;
/// Columns of a line that is a comment: as many as of code.
const COMMENT_COLUMNS_MAX: usize = 110;
/// Lines above an `unsafe` block in which its `SAFETY:` comment stands.
const SAFETY_LINES: usize = 8;

/// What no Rust file may say outside of this one; split so that it does not say it either.
const BANNED: [(&str, &str); 6] = [
    (concat!("to", "do!("), "finish it"),
    (concat!("unimple", "mented!("), "finish it"),
    (concat!("TO", "DO"), "finish it, or say what is absent in the crate's documentation"),
    (concat!("FIX", "ME"), "fix it"),
    (concat!("for", " now"), "say what it does, not what it may become"),
    (concat!("thread::", "sleep"), "wait for the event itself"),
];

/// Folders of one machine that no file may name.
const MACHINE_PATHS: [&str; 3] = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Where `unsafe` may stand: SIMD and CUDA code, and the backend that calls it.
const UNSAFE: [&str; 2] = ["kernels/", "worker/src/model"];

/// Kinds of files written by people.
const TEXT: [&str; 12] =
    ["rs", "toml", "md", "sh", "py", "yaml", "yml", "json", "cu", "cuh", "service", "conf"];

struct Text {
    /// Relative to the repository's root.
    path: String,
    text: String,
}

impl Text {
    /// Whether the whole file is test code.
    fn is_test(&self) -> bool {
        self.path.contains("/tests/") || self.path.ends_with("/tests.rs")
    }

    /// Lines before the file's test module.
    fn code_lines(&self) -> usize {
        self.text.lines().take_while(|l| l.trim() != "#[cfg(test)]").count()
    }
}

fn files() -> Vec<Text> {
    let found = sources::texts(&TEXT);
    assert!(found.len() > 50, "the repository is found");
    found.into_iter().map(|(path, text)| Text { path, text }).collect()
}

fn rust_files() -> Vec<Text> {
    files().into_iter().filter(|f| Path::new(&f.path).extension().is_some_and(|e| e == "rs")).collect()
}

#[track_caller]
fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_file_begins_by_saying_what_it_is_for() {
    let undocumented = rust_files().into_iter().filter(|f| !f.text.starts_with("//! "));
    none(undocumented.map(|f| format!("{}: begins without `//!`", f.path)).collect());
}

#[test]
fn files_are_short() {
    let files: Vec<Text> = rust_files().into_iter().filter(|f| !f.is_test()).collect();
    let long = files.iter().filter(|f| f.code_lines() > FILE_LINES_MAX);
    none(long.map(|f| format!("{}: {} lines without tests", f.path, f.code_lines())).collect());
    let mut lengths: Vec<usize> = files.iter().map(Text::code_lines).collect();
    lengths.sort_unstable();
    let median = lengths[lengths.len() / 2];
    assert!(median <= MEDIAN_LINES_MAX, "the median file has {median} lines");
}

#[test]
fn comments_are_as_narrow_as_the_code() {
    let mut faults = Vec::new();
    for file in rust_files() {
        for (i, line) in file.text.lines().enumerate() {
            let columns = line.chars().count();
            if line.trim_start().starts_with("//") && columns > COMMENT_COLUMNS_MAX {
                faults.push(format!("{}:{}: {columns} columns", file.path, i + 1));
            }
        }
    }
    none(faults);
}

#[test]
fn nothing_is_left_over() {
    let mut faults = Vec::new();
    for file in rust_files() {
        for (i, line) in file.text.lines().enumerate() {
            for (word, instead) in BANNED.iter().filter(|(word, _)| line.contains(word)) {
                faults.push(format!("{}:{}: {word:?}: {instead}", file.path, i + 1));
            }
        }
    }
    none(faults);
}

#[test]
fn no_file_names_a_folder_of_one_machine() {
    let mut faults = Vec::new();
    for file in files() {
        for (i, line) in file.text.lines().enumerate() {
            if MACHINE_PATHS.iter().any(|p| names_path(line, p)) {
                faults.push(format!("{}:{}: {line}", file.path, i + 1));
            }
        }
    }
    none(faults);
}

/// What a document links to, and what CONTRIBUTING says where things are, is there.
#[test]
fn documents_name_files_that_exist() {
    let root = workspace_root();
    let mut faults = Vec::new();
    for file in files().into_iter().filter(|f| Path::new(&f.path).extension().is_some_and(|e| e == "md")) {
        let folder = root.join(&file.path).parent().expect("a file is in a folder").to_owned();
        let links = file.text.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
        let links = links.filter(|to| !to.is_empty() && !to.contains(':')).map(|to| folder.join(to));
        let is_guide = file.path == "CONTRIBUTING.md";
        let named = file.text.split('`').skip(1).step_by(2).filter(|word| is_guide && names_file(word));
        let missing = links.chain(named.map(|word| root.join(word))).filter(|path| !path.exists());
        faults.extend(missing.map(|path| format!("{}: {} is not there", file.path, path.display())));
    }
    none(faults);
}

/// Whether a word in backticks is a file of the repository.
fn names_file(word: &str) -> bool {
    word.contains('/') && !word.contains(' ') && Path::new(word).extension().is_some()
}

/// Whether `line` has the absolute path `prefix`, not a part of a longer relative one.
fn names_path(line: &str, prefix: &str) -> bool {
    line.match_indices(prefix).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-/}".contains(c))
    })
}

#[test]
fn unsafe_stands_where_it_belongs_and_is_explained() {
    let mut faults = Vec::new();
    for file in rust_files() {
        let lines: Vec<&str> = file.text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let words: Vec<&str> = code.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            if !words.contains(&concat!("un", "safe")) || code.contains('"') {
                continue;
            }
            if !UNSAFE.iter().any(|place| file.path.starts_with(place)) {
                faults.push(format!("{}:{}: does not belong here", file.path, i + 1));
            }
            let block = code.contains(concat!("un", "safe {"));
            let above = &lines[i.saturating_sub(SAFETY_LINES)..=i];
            if block && !above.iter().any(|l| l.contains("SAFETY:")) {
                faults.push(format!("{}:{}: without a SAFETY comment", file.path, i + 1));
            }
        }
    }
    none(faults);
}
