//! What launches and kernels must agree on: kernels' names are compared here, and no constant may stand in
//! both. Launches have theirs from the kernels' sources, by `src/cuda/constants.rs`, which the test program
//! `cuda` compares with them.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use keyway_kernels::cuda::Kernel;

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The files below `folder` with one of these endings, and what is in them.
fn files(folder: &Path, endings: &[&str]) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, endings));
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| endings.contains(&e)) {
            let source = read(&path);
            found.push((path, source));
        }
    }
    found
}

/// The names that CUDA's `constexpr` gives, also in lists: `constexpr int A = 1, B = 2;`.
fn of_cuda(source: &str) -> impl Iterator<Item = &str> {
    let definitions = source.split("constexpr ").skip(1).filter_map(|rest| rest.split(';').next());
    let parts = definitions.flat_map(|all| all.split(','));
    let names =
        parts.filter_map(|part| part.split_once(" = ")).filter_map(|(name, _)| name.split(' ').next_back());
    names.filter(|name| name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
}

/// The names that Rust's `const` gives to what is made of numbers alone.
fn of_rust(source: &str) -> impl Iterator<Item = &str> {
    source.split("const ").skip(1).filter_map(|rest| {
        let (definition, _) = rest.split_once(';')?;
        let (name, typed) = definition.split_once(": ")?;
        let (_, value) = typed.split_once(" = ")?;
        let is_name = name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        let is_number = value.chars().all(|c| c.is_ascii_digit() || "_ <*+-/()".contains(c));
        (is_name && is_number).then_some(name)
    })
}

#[test]
fn launches_state_no_constant_of_a_kernel() {
    let cuda = files(&sources(), &["cu", "cuh"]);
    let known: BTreeSet<&str> = cuda.iter().flat_map(|(_, source)| of_cuda(source)).collect();
    assert!(known.contains("THREADS") && known.contains("TILE_N") && known.contains("SHARED_WORDS"));
    for (path, source) in files(&sources().join("cuda"), &["rs"]) {
        if path.file_name().is_some_and(|name| name == "constants.rs") {
            continue;
        }
        for name in of_rust(&source) {
            assert!(!known.contains(name), "{}: {name} has to come from constants.rs", path.display());
        }
    }
}

#[test]
fn constants_are_found_in_both_languages() {
    let cuda =
        "static constexpr int WARPS = 4, ROWS = 16 * WARPS;\nconstexpr bool is_wide(int n) { return n; }";
    assert_eq!(of_cuda(cuda).collect::<Vec<_>>(), ["WARPS", "ROWS"]);
    let rust = "pub const WORDS: usize = 1 << 10;\nconst ROWS: usize = constants::ROWS;\nconst fn f() {}";
    assert_eq!(of_rust(rust).collect::<Vec<_>>(), ["WORDS"]);
}

/// The kernels that a `.cu` file defines: functions, or lines of a macro that makes one, `MACRO(name, ...)`.
fn defined(source: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut found = Vec::new();
    for line in source.lines() {
        let Some((made_by, rest)) = line.split_once('(') else { continue };
        let is_macro = made_by.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        if is_macro && rest.contains(',') {
            found.extend(rest.split(',').next().filter(|name| name.chars().all(is_name)));
        }
    }
    // A macro itself has `name` for one.
    for function in source.split("extern \"C\" __global__ void").skip(1) {
        let after = function.trim_start_matches([' ', '\\', '\n']);
        let after = after.strip_prefix("__launch_bounds__(").map_or(after, |bounds| {
            let mut depth = 1;
            let end = bounds.find(|c| {
                depth += i32::from(c == '(') - i32::from(c == ')');
                depth == 0
            });
            bounds[end.expect("a parenthesis") + 1..].trim_start_matches([' ', '\\', '\n'])
        });
        found.extend(after.split('(').next().filter(|name| *name != "name"));
    }
    found.sort_unstable();
    found
}

/// A kernel that is renamed, added, removed or moved on one side alone is found.
#[test]
fn kernels_are_those_of_the_files() {
    for (path, source) in files(&sources(), &["cu"]) {
        let module = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let known = Kernel::ALL.iter().filter(|kernel| kernel.module() == module);
        let mut known: Vec<&str> = known.map(|kernel| kernel.name()).collect();
        known.sort_unstable();
        assert_eq!(defined(&source), known, "{module}.cu");
    }
}
