//! What launches and kernels must agree on is written in both, in Rust and in CUDA: threads, tiles, rows,
//! words. Here both sides' sources are read, and compared.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test by panicking")]

use std::path::{Path, PathBuf};

use keyway_kernels::cuda::Kernel;

/// A constant of Rust in `src/cuda`, and what it is called in which file of `src`.
type Pair = (&'static str, &'static str, &'static str, &'static str);

const PAIRS: &[Pair] = &[
    ("elementwise.rs", "THREADS", "elementwise.cu", "THREADS"),
    ("gather.rs", "THREADS", "gather.cu", "THREADS"),
    ("matmul.rs", "GROUP", "codes.cuh", "GROUP_TILES * TILE_K"),
    ("matmul.rs", "TILE", "codes.cuh", "TILE_K"),
    ("matmul.rs", "TILE", "codes.cuh", "TILE_N"),
    ("matmul.rs", "TILE", "pipeline_sm90.cuh", "TILE_K"),
    ("moe.rs", "EXPERTS_MAX", "choice.cuh", "EXPERTS_MAX"),
    ("moe.rs", "WARP", "choice.cuh", "LANES"),
    ("paged_attention.rs", "CHUNK", "attention.cuh", "CHUNK"),
    ("paged_attention.rs", "FEW_ROWS", "attention_decode.cuh", "ROWS"),
    ("paged_attention.rs", "LATENT_ROWS", "attention_latent_sm90.cuh", "PAIR"),
    ("paged_attention.rs", "MERGE_THREADS", "attention.cu", "MERGE_THREADS"),
    ("paged_attention.rs", "PIPELINED_THREADS", "attention_sm90.cuh", "THREADS"),
    ("paged_attention.rs", "PIPELINED_THREADS", "attention_latent_sm90.cuh", "THREADS"),
    ("peer.rs", "SHARED_WORDS", "peer.cuh", "SHARED_WORDS"),
    ("peer.rs", "WARP", "peer.cuh", "LANES"),
    ("peer/layout.rs", "CONTROL_BYTES", "peer.cuh", "CONTROL_BYTES"),
    ("peer/layout.rs", "TOP_MAX", "peer.cuh", "LANES"),
    ("../fabric.rs", "RANKS_MAX", "peer.cuh", "RANKS_MAX"),
    ("pipeline.rs", "THREADS", "pipeline_sm90.cuh", "THREADS"),
    ("probe.rs", "THREADS", "probe.cu", "THREADS"),
    ("rms_norm.rs", "THREADS_MAX", "rms_norm.cu", "THREADS_MAX"),
    ("rope.rs", "THREADS", "rope.cu", "THREADS"),
    ("rules.rs", "THREADS", "rules.cu", "THREADS"),
    ("sample.rs", "BINS", "sample_row.cuh", "BINS"),
    ("sample.rs", "CHUNKS", "sample_work.cuh", "CHUNKS"),
    ("sample.rs", "GATHERED", "sample_block.cuh", "GATHERED"),
    ("sample.rs", "THREADS", "sample_row.cuh", "THREADS"),
    ("sample.rs", "WARPS", "sample_row.cuh", "WARPS"),
];

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn read(path: &str) -> String {
    let path = sources().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What stands behind `NAME =` where constants are made, in either language.
fn definition<'a>(source: &'a str, name: &str) -> &'a str {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let definitions = source.match_indices(name).filter_map(|(at, _)| {
        let rest = &source[at + name.len()..];
        // In Rust a type stands between.
        let rest = match rest.strip_prefix(": ") {
            Some(typed) => typed.trim_start_matches(is_word),
            None => rest,
        };
        let line = source[..at].rsplit(['{', '}', ';']).next().unwrap_or_default();
        let is_made = line.contains("constexpr ") || line.contains("const ");
        let value = rest.strip_prefix(" = ").filter(|_| is_made && !source[..at].ends_with(is_word))?;
        Some(&value[..value.find([',', ';']).unwrap_or(value.len())])
    });
    let all: Vec<&str> = definitions.collect();
    let [one] = all[..] else { panic!("{name} is defined {} times", all.len()) };
    one
}

/// The value of sums, products and quotients of numbers and other constants of the source.
fn value(source: &str, expression: &str) -> u64 {
    let of = |operator: &str| expression.rsplit_once(operator);
    if let Some((left, right)) = of(" + ") {
        return value(source, left) + value(source, right);
    }
    if let Some((left, right)) = of(" << ") {
        return value(source, left) << value(source, right);
    }
    if let Some((left, right)) = of(" * ") {
        return value(source, left) * value(source, right);
    }
    if let Some((left, right)) = of(" / ") {
        return value(source, left) / value(source, right);
    }
    let one = expression.trim();
    one.replace('_', "").parse().unwrap_or_else(|_| value(source, definition(source, one)))
}

#[test]
fn launches_and_kernels_agree() {
    for (rust, name, cuda, there) in PAIRS {
        let [here, other] = [read(&format!("cuda/{rust}")), read(cuda)];
        let (here, other) = (value(&here, name), value(&other, there));
        assert_eq!(here, other, "{name} of {rust} and {there} of {cuda}");
    }
}

/// With types and without, in lists, made of each other.
#[test]
fn constants_are_read_in_both_languages() {
    let source = "static constexpr int WARPS = 4, ROWS = 16 * WARPS;\npub(super) const WORDS: usize = 1 << 10;\n\
        let x = ROWS;";
    assert_eq!(
        [value(source, "ROWS"), value(source, "WORDS / WARPS"), value(source, "1_000")],
        [64, 256, 1000]
    );
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
    for entry in std::fs::read_dir(sources()).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let module = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let known = Kernel::ALL.iter().filter(|kernel| kernel.module() == module);
        let mut known: Vec<&str> = known.map(|kernel| kernel.name()).collect();
        known.sort_unstable();
        assert_eq!(defined(&read(&format!("{module}.cu"))), known, "{module}.cu");
    }
}
