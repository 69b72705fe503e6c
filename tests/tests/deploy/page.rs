//! Hazard: the operators' page is there and does not work: it loads something from elsewhere, stands still,
//! dies with the gateway's restart, throws, or cannot be used without a mouse. A real browser looks at it.

use std::process::Command;

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::tools;

#[test]
fn in_a_browser_it_works_offline_follows_explains_and_survives_a_restart() {
    let (Some(python), Some(chromium)) = (tools::python(), tools::tool("chromium")) else { return };
    let shots = tempfile::tempdir().unwrap();
    let script = workspace_root().join("tests/python/page.py");
    let mut command = Command::new(python);
    command.arg(script).args([bin("keyway"), bin("keyway-loadtest"), chromium]).arg(shots.path());
    let output = command.output().expect("Python runs");
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success() && said.contains("page: all well"), "{said}");
}
