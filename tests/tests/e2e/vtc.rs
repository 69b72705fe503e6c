//! Hazard: on one connection to a worker, bytes of one exchange are taken for another's, or what was refused
//! gets through. The conversations are scripts of `varnishtest` (`tests/vtc/`), with the client and the
//! worker in one file; each runs with a gateway of its own in between.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use keyway_tests::bins::workspace_root;
use keyway_tests::openai::chat;
use keyway_tests::tools::tool;
use keyway_tests::{Gateway, ProbeShield, eventually};
use tempfile::TempDir;

/// How a request begins that a script writes by hand; its headers and body follow.
const POST: &str = r"POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\n";

/// What hides behind such a one. It, and [`MARK`] anywhere, may never be passed to a worker.
const HIDDEN: &str = r"GET /v1/smuggled HTTP/1.1\r\nhost: k\r\n\r\n";

const MARK: &str = "smuggled";

/// With one core there is one pool of connections, which all clients' requests share.
const LIMITS: &str = "[limits]\nbody_idle_ms = 500\nheader_read_ms = 2000\nmax_cores = 1\n";

fn scripts() -> Vec<PathBuf> {
    let folder = std::fs::read_dir(workspace_root().join("tests/vtc")).expect("the scripts");
    let mut scripts: Vec<PathBuf> = folder.map(|entry| entry.expect("an entry").path()).collect();
    scripts.sort();
    scripts
}

/// Runs a script, whose worker says in a file where it listens, and who learns by another that a connection
/// of it has ended; what was wrong.
async fn run(varnishtest: &Path, script: &Path) -> Option<String> {
    let (shield, dir) = (ProbeShield::start().await, TempDir::new().expect("a folder"));
    let gateway = Gateway::builder().worker(shield.addr()).config(LIMITS).start().await;
    gateway.wait_ready(1).await;
    let (port_file, ended_file) = (dir.path().join("port"), dir.path().join("ended"));
    let body = String::from_utf8(chat("a scripted one")).expect("text");
    let mut command = tokio::process::Command::new(varnishtest);
    for (name, value) in [
        ("keyway", gateway.addr.to_string()),
        ("port_file", port_file.display().to_string()),
        ("ended_file", ended_file.display().to_string()),
        ("post", POST.to_owned()),
        ("hidden", HIDDEN.to_owned()),
        // Within quotes, as the rest.
        ("chat", body.replace('"', "\\\"")),
        ("chat_length", body.len().to_string()),
    ] {
        command.args(["-D", &format!("{name}={value}")]);
    }
    command.arg("-v").arg(script).env("TMPDIR", dir.path()).stdin(Stdio::null()).kill_on_drop(true);
    let told = async {
        eventually!(port(&port_file).is_some(), "the script's worker listens");
        shield.pass_to(([127, 0, 0, 1], port(&port_file).expect("just seen")).into());
        let _ = shield.ended().wait_for(|&connections| connections > 0).await; // the shield lives as long
        std::fs::write(&ended_file, "one").expect("write");
        std::future::pending::<Infallible>().await
    };
    let output = tokio::select! {
        output = command.output() => output.expect("varnishtest runs"),
        never = told => match never {},
    };
    gateway.idle().await;
    let (said, passed) = (String::from_utf8_lossy(&output.stdout), shield.passed());
    let passed = String::from_utf8_lossy(&passed);
    let is_well = output.status.success() && port(&port_file).is_some() && !passed.contains(MARK);
    (!is_well).then(|| format!("{}:\n{said}\nThe worker was sent:\n{passed}", script.display()))
}

fn port(file: &Path) -> Option<u16> {
    std::fs::read_to_string(file).ok()?.strip_suffix('\n')?.parse().ok()
}

#[tokio::test]
async fn every_script_passes() {
    let Some(varnishtest) = tool("varnishtest") else { return };
    let scripts = scripts();
    assert!(scripts.len() > 8, "{scripts:?}");
    let mut faults = Vec::new();
    for script in scripts {
        faults.extend(run(&varnishtest, &script).await);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
