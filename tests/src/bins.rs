//! Finds the project's binaries: builds them first, so that no test ever runs a stale one, or takes them as
//! they are from `KEYWAY_BIN_DIR`. Same profile and target folder as the running test, so what is built is
//! reused.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Path of the binary `name`, built.
///
/// # Panics
/// When the workspace's binaries do not build; cargo's errors are in the message.
pub fn bin(name: &str) -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let dir = DIR.get_or_init(|| std::env::var_os("KEYWAY_BIN_DIR").map_or_else(build, PathBuf::from));
    let path = dir.join(name);
    assert!(path.is_file(), "no binary {}", path.display());
    path
}

/// The repository's root.
pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").to_owned()
}

/// Builds all binaries; one test process at a time, the others wait and then find everything fresh.
fn build() -> PathBuf {
    let exe = std::env::current_exe().expect("own path");
    let profile_dir = exe.ancestors().nth(2).expect("target/PROFILE/deps/TEST").to_owned();
    let target_dir = profile_dir.parent().expect("target/PROFILE");
    let profile = match profile_dir.file_name().and_then(|n| n.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let lock =
        File::create(profile_dir.join(".keyway-tests.lock")).expect("a lock file in the target folder");
    lock.lock().expect("the lock");
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--workspace", "--bins", "--profile", profile])
        .env("CARGO_TARGET_DIR", target_dir)
        .current_dir(workspace_root())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "the binaries do not build:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    profile_dir
}
