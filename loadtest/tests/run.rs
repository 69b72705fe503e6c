//! The built binary against a scripted server: what it sends, counts, reports and exits with.

#![expect(clippy::unwrap_used, reason = "a test's helpers may")]

#[path = "run/conversations.rs"]
mod conversations;
#[path = "run/embeddings.rs"]
mod embeddings;
#[path = "run/live.rs"]
mod live;
#[path = "run/schedules.rs"]
mod schedules;
#[path = "run/searches.rs"]
mod searches;
#[path = "run/streams.rs"]
mod streams;
mod support;

use std::{
    collections::HashSet,
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use support::{FakeServer, Script, TEMPLATE_TOKENS};
use tempfile::TempDir;

const BLOCK: u64 = 512;

/// A command line of the binary.
fn keyway_loadtest(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keyway-loadtest"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Forty requests in bursts of four: all share block 0, each burst a second block; output of 4 scaled tokens.
fn trace_file(dir: &Path) -> String {
    let mut text = String::new();
    for i in 0..40u64 {
        let (burst, input) = (i / 4, 3 * BLOCK + 10);
        let ids = format!("[0, {}, {}, {}]", 100 + burst, 1000 + i, 2000 + i);
        writeln!(
            text,
            r#"{{"timestamp": {}, "input_length": {input}, "output_length": 128, "hash_ids": {ids}}}"#,
            burst * 3000
        )
        .unwrap();
    }
    let path = dir.join("trace.jsonl");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

struct Run {
    output: Output,
    report: Value,
    dir: TempDir,
}

/// Replays the trace in well under a second.
fn run(server: &FakeServer, extra: &[&str]) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let (trace, out) = (trace_file(dir.path()), dir.path().join("out"));
    let (url, out_text) = (server.url(), out.to_str().unwrap());
    let base =
        ["run", "--url", &url, "--trace", &trace, "--scale-len", "0.03125", "--ui", "none", "-o", out_text];
    let pace: &[&str] =
        if extra.contains(&"--rate") { &[] } else { &["--time-scale", "100", "--spread-bursts"] };
    let output = keyway_loadtest(&base).args(pace).args(extra).output().unwrap();
    let report =
        fs::read(out.join("run.json")).map_or(Value::Null, |json| serde_json::from_slice(&json).unwrap());
    Run { output, report, dir }
}

/// The verdict must not depend on how busy the machine is: late is as good as valid for these tests.
fn assert_measured(run: &Run) {
    let code = run.output.status.code();
    assert!(matches!(code, Some(0 | 3)), "{code:?}: {}", String::from_utf8_lossy(&run.output.stderr));
    // A run that chose its words may find them in caches.
    let status = run.report["verdict"]["status"].as_str().unwrap();
    assert!(
        if code == Some(0) { ["valid", "warm"].contains(&status) } else { status == "invalid" },
        "{status}"
    );
}

#[test]
fn a_good_run_counts_everything() {
    let server = FakeServer::start(|_| Script::Good);
    let run = run(&server, &["--oracle-blocks", "1000", "--records"]);
    assert_measured(&run);
    let report = &run.report;
    assert_eq!(report["requests"]["ok"], 40);
    assert_eq!(report["requests"]["failed"], 0);
    assert_eq!(report["config"]["model"], "fake");
    assert_eq!(report["calibration"]["bytes_per_token"], 1.0);
    assert_eq!(report["calibration"]["overhead_tokens"], TEMPLATE_TOKENS);
    assert_eq!(report["workload"]["distinct_blocks"], 1 + 10 + 80);
    // Three whole blocks of 16, and a last one of ten tokens scaled to one.
    let prompt = 40 * (3 * 16 + 1 + TEMPLATE_TOKENS as u64);
    assert_eq!(report["tokens"]["prompt"], prompt);
    assert_eq!(report["tokens"]["prompt_wanted"], prompt);
    assert_eq!(report["tokens"]["completion"], 40 * 4);
    assert_eq!(report["tokens"]["per_event"], 1.0);
    for view in ["response", "service"] {
        assert_eq!(report[view]["ttft"]["n"], 40, "{view}");
        assert!(report[view]["e2e"]["p50"].as_f64() >= report[view]["ttft"]["p50"].as_f64());
    }
    assert_eq!(report["itl"]["n"], 40 * 3);
    assert_eq!(report["schedule_lag"]["lag"]["n"], 40);
    assert_eq!(report["workers"]["list"].as_array().unwrap().len(), 4);
    assert_eq!(report["workers"]["max_over_mean"], 1.0);
    let table = String::from_utf8(run.output.stdout.clone()).unwrap();
    assert!(table.contains("40 ok, 0 failed") && table.contains("TTFT response"), "{table}");

    let lines = fs::read_to_string(run.dir.path().join("out/requests.jsonl")).unwrap();
    let rows: HashSet<_> =
        lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["row"].as_u64().unwrap()).collect();
    assert_eq!(rows, (0..40).collect());
}

#[test]
fn the_cached_share_equals_the_best_possible_on_a_server_with_one_cache() {
    let server = FakeServer::start(|_| Script::Good);
    let run = run(&server, &["--oracle-blocks", "1000", "--endpoint", "completions", "--rate", "200"]);
    assert_measured(&run);
    let cache = &run.report["cache"];
    // All but the first reuse block 0, three of each burst's four their burst's block too, in whatever order.
    let reused = 39 * 16 + 30 * 16_u32;
    assert_eq!(cache["cached_tokens"], reused);
    let share = f64::from(reused) / (40.0 * 49.0);
    for key in ["achieved", "possible", "pooled_lru"] {
        assert_eq!(cache[key].as_f64(), Some(share), "{key}");
    }
    assert_eq!((cache["of_possible"].as_f64(), cache["of_pooled_lru"].as_f64()), (Some(1.0), Some(1.0)));
}

#[test]
fn each_way_to_fail_has_its_class() {
    let server = FakeServer::start(|turn| match turn {
        0..3 => Script::Cut,
        3..5 => Script::NoDone,
        5 => Script::ErrorEvent,
        6 => Script::Status(503),
        7 => Script::Json,
        8 => Script::Hang,
        _ => Script::Good,
    });
    let run = run(&server, &["--timeout", "4s"]);
    assert_measured(&run);
    assert_eq!(run.report["requests"]["ok"], 31);
    assert_eq!(run.report["requests"]["failed"], 9);
    assert_eq!(run.report["response"]["ttft"]["n"], 31);
    let errors = run.report["errors"].as_array().unwrap();
    let count =
        |class: &str| errors.iter().find(|e| e["class"] == class).map_or(0, |e| e["count"].as_u64().unwrap());
    let classes = ["cut", "error_event", "status_503", "protocol", "timeout"];
    assert_eq!(classes.map(count), [5, 1, 1, 1, 1], "{errors:?}");
    let text = run.report["errors"].to_string();
    for message in
        ["without its last event", "scripted error event", "scripted status 503", "not an event stream"]
    {
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn equal_seeds_send_equal_bytes_from_two_processes() {
    let server = FakeServer::start(|_| Script::Good);
    let hash = |extra: &[&str]| {
        let run = run(&server, extra);
        assert_measured(&run);
        run.report["workload"]["body_hash"].as_str().unwrap().to_owned()
    };
    let first = hash(&["--text-seed", "5"]);
    assert_eq!(first, hash(&["--text-seed", "5", "--rate", "150"]));
    assert_ne!(first, hash(&["--text-seed", "6"]));
    assert_ne!(first, hash(&["--text-seed", "5", "--requests", "39"]));

    let bodies = server.bodies.lock().unwrap();
    assert_eq!(bodies.len(), 40 * 3 + 39);
    let sorted = |range: std::ops::Range<usize>| {
        let mut texts: Vec<_> = bodies[range].iter().map(Value::to_string).collect();
        texts.sort();
        texts
    };
    assert_eq!(sorted(0..40), sorted(40..80));
    assert_eq!(bodies[0]["ignore_eos"], true);
    assert_eq!(bodies[0]["max_tokens"], 4);
}

#[test]
fn a_run_in_which_nothing_succeeds_exits_with_1() {
    let server = FakeServer::start(|_| Script::Status(500));
    let run = run(&server, &[]);
    assert_eq!(run.output.status.code(), Some(1));
    assert_eq!(run.report["verdict"]["status"], "failed");
    assert_eq!(run.report["response"]["ttft"], Value::Null);
}

#[test]
fn a_server_that_is_not_there_exits_with_1_and_one_line() {
    let dir = tempfile::tempdir().unwrap();
    // Bound and dropped: nobody listens there.
    let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (url, trace) = (format!("http://{addr}"), trace_file(dir.path()));
    let output = keyway_loadtest(&["run", "--url", &url, "--trace", &trace]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.contains(&url) && stderr.contains("refused"), "{stderr}");
}

#[test]
fn bad_input_exits_with_2_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let trace = trace_file(dir.path());
    let missing = dir.path().join("missing");
    let missing = missing.to_str().unwrap();
    let base = ["run", "--url", "http://127.0.0.1:1"];
    for (args, want) in [
        (&["--trace", missing] as &[&str], "cannot read the trace"),
        (&["--trace", &trace, "--slice", "9h.."], "holds no requests"),
        (&["--trace", &trace, "--api-key-file", missing], "--api-key-file"),
        (&["--trace", &trace, "--header", "x"], "--header x: write `Name: value`"),
        (&["--rate", "5", "--duration", "1ms"], "--duration ends before the first request is due"),
        (
            &["--requests", "5", "--rate", "5", "--prefix-groups", "0", "--workload", "shared-prefix"],
            "must be 1",
        ),
        (&["--trace", &trace, "--rate", "0"], "not a number above 0"),
        (&["--trace", &trace, "--url", "https://h"], "cannot be used multiple times"),
        (&["--trace", &trace, "--workload", "noise"], "possible values: trace"),
    ] {
        let output = keyway_loadtest(&base).args(args).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(want), "{stderr}");
    }
    let output = keyway_loadtest(&["mock", "--fault", "3:die"]).output().unwrap();
    let want = "keyway-loadtest: --fault 3:die@0s..: there are only 1 workers, counted from 0\n";
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(2), want));
    let server = FakeServer::start(|_| Script::Good);
    let run = run(&server, &["--bytes-per-token", "0.25"]);
    assert_eq!(run.output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&run.output.stderr).contains("raise --scale-len"));
}

#[test]
fn an_api_key_is_sent_and_shown_nowhere() {
    let server = FakeServer::start(|_| Script::Good);
    let dir = tempfile::tempdir().unwrap();
    let key_file = dir.path().join("key");
    fs::write(&key_file, "sk-secret\n").unwrap();
    let run = run(&server, &["--api-key-file", key_file.to_str().unwrap()]);
    assert_measured(&run);
    assert_eq!(*server.keys.lock().unwrap(), HashSet::from(["Bearer sk-secret".to_owned()]));
    let shown = [run.output.stdout, run.output.stderr, run.report.to_string().into_bytes()].concat();
    assert!(!String::from_utf8(shown).unwrap().contains("sk-secret"));
}

#[test]
fn an_interrupt_leaves_a_partial_report() {
    let server = FakeServer::start(|_| Script::Hang);
    let dir = tempfile::tempdir().unwrap();
    let (trace, out, url) = (trace_file(dir.path()), dir.path().join("out"), server.url());
    let args = ["run", "--url", &url, "--trace", &trace, "--spread-bursts", "--ui", "none"];
    let child = keyway_loadtest(&args)
        .arg("-o")
        .arg(&out)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The first streamed request shows that the run has begun.
    server.arrivals.recv().unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    let report: Value = serde_json::from_slice(&fs::read(out.join("run.json")).unwrap()).unwrap();
    assert_eq!(report["verdict"]["status"], "interrupted");
    assert_eq!(report["requests"]["ok"], 0);
    assert_eq!(report["requests"]["cancelled"], report["requests"]["sent"]);
    assert!(report["requests"]["sent"].as_u64() < Some(40));
}

#[test]
fn trace_info_as_json_and_as_text() {
    let dir = tempfile::tempdir().unwrap();
    let trace = trace_file(dir.path());
    let output =
        keyway_loadtest(&["trace", "info", &trace, "--slice", "0s..15s", "--scale-len", "0.03125", "--json"])
            .output();
    let info: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    assert_eq!((&info["requests"], &info["distinct_blocks"]), (&Value::from(20), &Value::from(1 + 5 + 40)));
    let output = keyway_loadtest(&["trace", "info", &trace]).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("160 of 512 tokens, 91 distinct"));
}

#[test]
fn help_version_and_completions() {
    for (args, want) in [
        (&["--version"] as &[&str], env!("CARGO_PKG_VERSION")),
        (&["--help"], "Exit codes:"),
        (&["run", "--help"], "Examples:"),
        (&["completions", "bash"], "complete -F"),
    ] {
        let output = keyway_loadtest(args).output().unwrap();
        assert!(output.status.success());
        assert!(String::from_utf8(output.stdout).unwrap().contains(want), "{args:?}");
    }
}
