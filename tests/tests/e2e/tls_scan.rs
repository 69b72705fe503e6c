//! Hazard: a listener that speaks a TLS that nobody should. `sslscan` tries every version and suite; that its
//! finds are seen here is shown with a server that has them. Certificates are `tls.rs`.

use std::path::Path;
use std::process::{Command, Stdio};

use keyway_tests::process::Process;
use keyway_tests::tls::Authority;
use keyway_tests::tools::tool;
use keyway_tests::{FakeWorker, Gateway};

/// What a scan found.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Versions that are spoken, such as `tls 1.2`.
    versions: Vec<String>,
    /// Suites that were agreed on.
    suites: Vec<String>,
    /// What should not be.
    weak: Vec<String>,
}

impl Found {
    /// Reads the XML of `sslscan`: one element a line, all that matters in attributes.
    fn read(xml: &str) -> Self {
        let mut found = Self::default();
        for line in xml.lines().map(str::trim) {
            let says = |name: &str| attribute(line, name).unwrap_or_default();
            let no_weaker = match line.trim_start_matches('<').split(' ').next().unwrap_or_default() {
                "protocol" if says("enabled") == "1" => {
                    let version = format!("{} {}", says("type"), says("version"));
                    found.versions.push(version.clone());
                    ["tls 1.2", "tls 1.3"].contains(&version.as_str())
                }
                "cipher" => {
                    let suite = says("cipher");
                    found.suites.push(suite.to_owned());
                    // The three kinds of encryption that authenticate what they encrypt.
                    ["GCM", "CHACHA20", "CCM"].iter().any(|kind| suite.contains(kind))
                }
                "renegotiation" | "compression" => says("supported") == "0",
                "heartbleed" => says("vulnerable") == "0",
                _ => true,
            };
            if !no_weaker {
                found.weak.push(line.to_owned());
            }
        }
        found
    }

    fn complains_of(&self, part: &str) -> bool {
        self.weak.iter().any(|line| line.contains(part))
    }
}

fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_once(&format!(" {name}=\""))?.1.split('"').next()
}

async fn scan(sslscan: &Path, addr: &str) -> Found {
    let mut command = tokio::process::Command::new(sslscan);
    command.args(["--no-colour", "--no-groups", "--xml=-", addr]).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.expect("sslscan runs");
    let xml = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(xml.contains("<renegotiation") && xml.contains("</document>"), "a whole scan: {xml}");
    Found::read(&xml)
}

#[tokio::test]
async fn a_scanner_finds_the_two_newest_versions_with_good_suites_and_no_old_hole() {
    let Some(sslscan) = tool("sslscan") else { return };
    let (worker, authority) = (FakeWorker::start().await, Authority::new());
    let identity = authority.sign("gateway");
    let toml = format!(
        "worker = [\"http://{}\"]\n[tls]\ncert_file = {:?}\nkey_file = {:?}\n",
        worker.addr(),
        identity.cert_file,
        identity.key_file
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    let found = scan(&sslscan, &gateway.addr.to_string()).await;
    assert_eq!(found.weak, [""; 0]);
    assert_eq!(found.versions, ["tls 1.2", "tls 1.3"]);
    for suite in ["TLS_AES_128_GCM_SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"] {
        assert!(found.suites.iter().any(|one| one == suite), "{suite} is among {:?}", found.suites);
    }
}

#[tokio::test]
async fn of_a_weak_server_the_scan_complains() {
    let (Some(sslscan), Some(openssl)) = (tool("sslscan"), tool("openssl")) else { return };
    let authority = Authority::new();
    let identity = authority.sign("weak");
    let mut command = Command::new(openssl);
    command
        .args(["s_server", "-www", "-accept", "127.0.0.1:0", "-min_protocol", "TLSv1"])
        .args(["-cipher", "DEFAULT:@SECLEVEL=0", "-client_renegotiation", "-cert"])
        .arg(&identity.cert_file)
        .arg("-key")
        .arg(&identity.key_file);
    let server = Process::spawn("openssl", &mut command);
    let found = scan(&sslscan, &server.announced("ACCEPT ").await).await;
    for weakness in ["version=\"1.0\"", "version=\"1.1\"", "ECDHE-ECDSA-AES128-SHA", "<renegotiation"] {
        assert!(found.complains_of(weakness), "{weakness} is among {:?}", found.weak);
    }
    assert!(!found.complains_of("GCM"), "{:?}", found.weak);
}

/// Holes that no server of today has any more, as `sslscan` would tell of them.
#[test]
fn a_told_hole_is_read() {
    for hole in [
        r#"<heartbleed sslversion="TLSv1.2" vulnerable="1" />"#,
        r#"<compression supported="1" />"#,
        r#"<protocol type="ssl" version="3" enabled="1" />"#,
    ] {
        assert_eq!(Found::read(hole).weak, [hole]);
        assert!(Found::read(&hole.replace("=\"1\"", "=\"0\"")).weak.is_empty());
    }
}
