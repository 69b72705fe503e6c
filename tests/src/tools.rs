//! Tools that tests need beyond Rust, as `tests/setup.sh` installs them. Without one a test is skipped with a
//! printed reason; on CI (`CI=true`) its absence is a failure.

use std::path::PathBuf;

use crate::bins::workspace_root;

/// Path of the tool `name` from the folder `tests/setup.sh` fills, or from `PATH`; `None` means: skip the
/// test.
///
/// # Panics
/// When it is absent on CI.
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::iter::once(tools_dir().join("bin"))
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join(name))
        .find(|p| p.is_file());
    if found.is_none() {
        skip(&format!("{name} is not installed"));
    }
    found
}

/// The Python of the folder `tests/setup.sh` fills; `None` means: skip the test.
///
/// # Panics
/// When it is absent on CI.
pub fn python() -> Option<PathBuf> {
    let python = tools_dir().join("bin/python");
    if python.is_file() {
        return Some(python);
    }
    skip("the Python environment is not installed");
    None
}

/// Says why a test is skipped.
///
/// # Panics
/// On CI, where nothing is skipped.
fn skip(reason: &str) {
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "{reason}, and CI skips nothing: run tests/setup.sh"
    );
    eprintln!("SKIPPED: {reason}; run tests/setup.sh");
}

fn tools_dir() -> PathBuf {
    std::env::var_os("KEYWAY_TEST_VENV").map_or_else(|| workspace_root().join(".venv"), PathBuf::from)
}
