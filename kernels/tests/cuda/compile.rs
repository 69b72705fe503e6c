//! C++ that stands in for a device, compiled with the machine's compiler once for each state of the sources.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Contraction is off, so that sums are what the source says; tests must not depend on the compiler's taste.
const FLAGS: [&str; 5] = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-pthread"];

/// What is made of a source in `emulate/`.
pub(crate) struct Product<'a> {
    /// In a folder of its own, which has this name and a hash of all sources.
    pub(crate) folder: &'a str,
    pub(crate) file: &'a str,
    /// From the kernels' crate.
    pub(crate) source: &'a str,
    pub(crate) flags: &'a [&'a str],
}

impl Product<'_> {
    /// The file, compiled unless its sources are unchanged; `None`, with the reason printed, where no
    /// compiler is.
    pub(crate) fn build(&self) -> Option<PathBuf> {
        // Tests of one process would write to the same partial file.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let root = root();
        let compiler = ["c++", "g++", "clang++"].into_iter().find(|c| runs(c));
        let Some(compiler) = compiler else {
            assert!(std::env::var_os("CI").is_none(), "CI needs a C++ compiler to check the CUDA kernels");
            println!("SKIPPED: no C++ compiler (c++, g++ or clang++) to emulate the CUDA kernels with");
            return None;
        };
        let mut hasher = DefaultHasher::new();
        FLAGS.hash(&mut hasher);
        self.flags.hash(&mut hasher);
        sources(&root.join("emulate"), &mut hasher);
        sources(&root.join("src"), &mut hasher);
        // target/debug/deps/TEST: unit tests are not told the folder for temporary files.
        let test = std::env::current_exe().expect("a test knows where it lies");
        let folder = test.ancestors().nth(3).expect("cargo's folders").join("tmp");
        let folder = folder.join(format!("{}-{:016x}", self.folder, hasher.finish()));
        fs::create_dir_all(&folder).expect("a folder is made");
        let product = folder.join(self.file);
        if !product.exists() {
            // Compiled aside and renamed, so that another test's process never sees half a program.
            let partial = product.with_extension(std::process::id().to_string());
            let done = Command::new(compiler)
                .args(FLAGS)
                .args(self.flags)
                .arg("-o")
                .arg(&partial)
                .arg(self.source)
                .current_dir(root)
                .status()
                .expect("the compiler starts");
            assert!(done.success(), "the kernels compile for the CPU");
            fs::rename(&partial, &product).expect("a file is renamed");
        }
        Some(product)
    }
}

/// The kernels' crate, from itself and from those beside it, whose tests include this file.
pub(crate) fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    root.canonicalize().expect("the kernels' folder is there")
}

fn runs(compiler: &str) -> bool {
    Command::new(compiler).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Adds every C++ and CUDA file below `folder` to the hash.
fn sources(folder: &Path, hasher: &mut DefaultHasher) {
    let entries = fs::read_dir(folder).expect("a readable folder");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            sources(&path, hasher);
        } else if path
            .extension()
            .and_then(|e| e.to_str())
            .is_some_and(|e| ["cu", "cuh", "h", "cpp"].contains(&e))
        {
            fs::read(&path).expect("a readable file").hash(hasher);
        }
    }
}
