//! The project's own sources, for tests that read them.

use std::fs;
use std::path::Path;

use crate::bins::workspace_root;

/// Folders that hold nothing the project wrote.
const OTHERS: [&str; 5] = ["target", ".git", ".venv", ".cuda", "__pycache__"];

/// Every Rust file below `dir`, by its path from there, with its text.
///
/// # Panics
/// When a file cannot be read.
#[must_use]
pub fn below(dir: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    collect(dir, dir, &["rs"], &mut found);
    found.sort();
    found
}

/// Every file of the repository whose name ends as one of `kinds` does (no dot), by its path, with its text.
///
/// # Panics
/// When a file cannot be read.
#[must_use]
pub fn texts(kinds: &[&str]) -> Vec<(String, String)> {
    let (root, mut found) = (workspace_root(), Vec::new());
    collect(&root, &root, kinds, &mut found);
    found.sort();
    found
}

fn collect(root: &Path, dir: &Path, kinds: &[&str], found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(dir).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !OTHERS.contains(&name) {
                collect(root, &path, kinds, found);
            }
        } else if path.extension().and_then(|kind| kind.to_str()).is_some_and(|kind| kinds.contains(&kind)) {
            let file = path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
            found.push((file, fs::read_to_string(&path).expect("UTF-8")));
        }
    }
}

/// Whether all of a file is compiled for tests alone, by its path.
#[must_use]
pub fn is_test(file: &str) -> bool {
    file.trim_end_matches(".rs").split('/').any(|name| name == "tests")
}

/// Whether an item with these attributes is compiled for tests alone.
#[must_use]
pub fn is_of_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let of = |list: &syn::MetaList| list.tokens.to_string() == "test";
        attribute.path().is_ident("cfg") && attribute.meta.require_list().is_ok_and(of)
    })
}
