//! The project's own sources, for tests that read them.

use std::fs;
use std::path::Path;

/// Every Rust file below `dir`, by its path from there, with its text.
///
/// # Panics
/// When a file cannot be read.
#[must_use]
pub fn below(dir: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    collect(dir, dir, &mut found);
    found.sort();
    found
}

fn collect(root: &Path, dir: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(dir).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(root, &path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
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
