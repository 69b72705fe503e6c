//! `search` and `sweep` of the built binary against a scripted server: which loads they try and how they end.
//! That a search finds a known knee is tested in virtual time, in `knee/tests.rs`.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::support::{FakeServer, Script};

fn tool(server: &FakeServer, command: &str, line: &str, dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_keyway-loadtest"))
        .args([command, "--url", &server.url(), "--ui", "none", "--isl", "20", "--osl", "2", "-o"])
        .arg(dir)
        .args(line.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_search_grows_to_its_limit_when_the_objective_always_holds() {
    let server = FakeServer::start(|_| Script::Good);
    let dir = tempfile::tempdir().unwrap();
    let line = "--over concurrency --from 1 --to 6 --slo ttft<60s --requests 10";
    let output = tool(&server, "search", line, dir.path());
    // Late sending ends a search with 3; on an idle machine it ends with 0.
    if output.status.code() == Some(3) {
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&dir.path().join("search.json"));
    let loads: Vec<_> =
        report["probes"].as_array().unwrap().iter().map(|p| p["load"].as_f64().unwrap()).collect();
    assert_eq!(loads, [1.0, 2.0, 4.0, 6.0]);
    assert_eq!((&report["result"], &report["load"]), (&"above-all".into(), &6.0.into()));
    assert!(String::from_utf8_lossy(&output.stdout).contains("raise --to"));
    // Each probe has prompts of its own.
    let bodies = server.bodies.lock().unwrap();
    assert_ne!(bodies[0]["messages"], bodies[10]["messages"]);
}

#[test]
fn a_search_goes_down_ends_early_and_says_when_no_load_will_do() {
    let server = FakeServer::start(|_| Script::Status(503));
    let dir = tempfile::tempdir().unwrap();
    let line = "--over concurrency --from 4 --slo ttft.p50<60s --requests 500";
    let output = tool(&server, "search", line, dir.path());
    if output.status.code() == Some(3) {
        return;
    }
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let report = json(&dir.path().join("search.json"));
    assert_eq!(report["result"], "below-all");
    let probes = report["probes"].as_array().unwrap();
    assert_eq!(probes.last().unwrap()["load"], 1.0);
    // 500 requests may miss 250; after twice that and 20, all 500 have been sent.
    assert!(probes.iter().all(|p| p["ended_early"] == false && p["of"] == 500));

    let strict = tool(&server, "search", "--over concurrency --slo ttft.p99<60s --requests 500", dir.path());
    assert!([4, 3].contains(&strict.status.code().unwrap()));
    if strict.status.code() == Some(4) {
        let report = json(&dir.path().join("search.json"));
        let probe = &report["probes"][0];
        assert!(probe["ended_early"] == true && probe["of"].as_u64() < Some(60), "{probe}");
    }
}

#[test]
fn no_point_of_a_sweep_finds_the_prompts_of_another_not_even_with_words_that_were_chosen() {
    let server = FakeServer::start(|_| Script::Good);
    for words in ["", " --text-seed 5"] {
        let dir = tempfile::tempdir().unwrap();
        let line = format!("--concurrencies 1,2,3 --requests 20{words}");
        let output = tool(&server, "sweep", &line, dir.path());
        assert!([Some(0), Some(3)].contains(&output.status.code()), "{output:?}");
        let report = json(&dir.path().join("sweep.json"));
        for point in report["points"].as_array().unwrap() {
            assert_ne!(point["status"], "warm", "{point}");
            assert!(point["cached"].as_f64().unwrap() < 0.2, "{point}");
        }
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.lines().next().unwrap().trim_end().ends_with("cached"), "{text}");
    }
}

#[test]
fn a_search_says_what_it_needs() {
    let server = FakeServer::start(|_| Script::Good);
    let dir = tempfile::tempdir().unwrap();
    for (line, want) in [
        ("--requests 5", "--slo"),
        ("--slo ttft<1s", "how long"),
        ("--slo ttft<1s --requests 5 --rate 3", "chooses the load"),
        ("--slo ttft<1s --requests 5 --from 9 --to 3", "must not be above"),
    ] {
        let output = tool(&server, "search", line, dir.path());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && text.contains(want), "{line}: {text}");
    }
}

#[test]
fn a_sweep_measures_every_combination() {
    let server = FakeServer::start(|_| Script::Good);
    let dir = tempfile::tempdir().unwrap();
    let output = tool(&server, "sweep", "--concurrencies 1,3 --isl-osl 16/2,32/4 --requests 12", dir.path());
    assert!([Some(0), Some(3)].contains(&output.status.code()), "{output:?}");
    let report = json(&dir.path().join("sweep.json"));
    let points = report["points"].as_array().unwrap();
    let shown: Vec<_> =
        points.iter().map(|p| (p["isl"].as_str().unwrap(), p["concurrency"].as_u64().unwrap())).collect();
    assert_eq!(shown, [("16", 1), ("16", 3), ("32", 1), ("32", 3)]);
    assert!(points.iter().all(|p| p["ok"] == 12));
    let last = json(&dir.path().join("4/run.json"));
    assert_eq!((&last["config"]["isl"], &last["tokens"]["completion"]), (&"32".into(), &48.into()));
}
