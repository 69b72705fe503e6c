//! The committed fatbins belong to the committed sources: found out by hashes alone, without the CUDA
//! compiler.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

/// Files below `folder` with this ending, by their path from the crate's root.
fn files(folder: &str, ending: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(&folder)).expect("a folder") {
            let entry = entry.expect("an entry");
            let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                folders.push(path);
            } else if Path::new(&path).extension().is_some_and(|e| e == ending) {
                found.insert(path);
            }
        }
    }
    found
}

fn digest(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut hex = String::new();
    for byte in Sha256::digest(bytes) {
        write!(hex, "{byte:02x}").expect("a string grows");
    }
    hex
}

#[test]
fn the_committed_fatbins_belong_to_the_committed_sources() {
    let manifest = include_str!("../../bin/MANIFEST");
    let mut listed = BTreeSet::new();
    for line in manifest.lines() {
        let mut words = line.split(' ');
        let (Some(kind @ ("fatbin" | "source")), Some(name), Some(hash)) =
            (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let path = if kind == "fatbin" { format!("bin/{name}") } else { name.to_owned() };
        assert_eq!(digest(&path), hash, "{path} changed: run kernels/build");
        listed.insert(path);
    }
    for path in files("src", "cu").union(&files("bin", "fatbin")) {
        assert!(listed.contains(path), "{path} is not in bin/MANIFEST: run kernels/build");
    }
}

/// Only builds for a GPU hold the fatbins, so the source is what can be looked at everywhere.
#[test]
fn every_fatbin_goes_into_the_binary() {
    let carried = include_str!("../../src/cuda/gpu/modules.rs");
    for path in files("bin", "fatbin") {
        let name = path.trim_start_matches("bin/").trim_end_matches(".fatbin");
        assert!(carried.contains(&format!("\"{name}\"")), "src/cuda/gpu/modules.rs does not carry {path}");
    }
}
