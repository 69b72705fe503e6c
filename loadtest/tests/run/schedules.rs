//! The built binary's schedules and synthetic workloads against a scripted server, and comparisons of their
//! runs.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{FakeServer, Script, TEMPLATE_TOKENS};

struct Run {
    output: Output,
    report: Value,
    records: Vec<Value>,
    dir: TempDir,
}

impl Run {
    fn path(&self) -> PathBuf {
        self.dir.path().join("run.json")
    }
}

fn keyway_loadtest() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keyway-loadtest"));
    command.stdin(Stdio::null());
    command
}

fn run(server: &FakeServer, line: &str) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let output = keyway_loadtest()
        .args(["run", "--url", &server.url(), "--ui", "none", "--records", "-o"])
        .arg(dir.path())
        .args(line.split_whitespace())
        .output()
        .unwrap();
    let text = fs::read(dir.path().join("run.json")).unwrap();
    let records = fs::read_to_string(dir.path().join("requests.jsonl")).unwrap();
    let records = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    Run { output, report: serde_json::from_slice(&text).unwrap(), records, dir }
}

/// Late is as good as valid: the verdict must not depend on how busy the machine is.
#[track_caller]
fn assert_measured(run: &Run) {
    let code = run.output.status.code();
    assert!(matches!(code, Some(0 | 3)), "{code:?}: {}", String::from_utf8_lossy(&run.output.stderr));
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap()
}

#[test]
fn an_open_loop_of_random_prompts() {
    let server = FakeServer::start(|_| Script::Good);
    let run =
        run(&server, "--rate 200 --requests 60 --isl uniform(20,40) --osl 3 --warmup 10 --slo ttft<60s");
    assert_measured(&run);
    let report = &run.report;
    assert_eq!((&report["requests"]["ok"], &report["requests"]["warmup"]), (&50.into(), &10.into()));
    assert_eq!(report["response"]["ttft"]["n"], 50);
    assert_eq!(report["ttst"]["n"], 50);
    assert_eq!(report["itl"]["n"], 100);
    assert_eq!(report["tokens"]["prompt"], report["tokens"]["prompt_wanted"]);
    assert_eq!((&report["goodput"]["met"], &report["goodput"]["of"]), (&50.into(), &50.into()));
    assert_eq!(report["cache"]["possible"], 0.0);
    assert_eq!(
        report["series"]["due"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>(),
        50
    );
    assert!(report["histograms"]["response_ttft"].as_str().unwrap().starts_with("HISTFAAA"));
    let bodies = server.bodies.lock().unwrap();
    let lengths = bodies.iter().map(|body| body["messages"][0]["content"].as_str().unwrap().len());
    assert!(lengths.clone().all(|length| (20..=40).contains(&length)) && lengths.min() < Some(25));
}

#[test]
fn shared_prefixes_are_reused_as_much_as_possible() {
    let server = FakeServer::start(|_| Script::Good);
    // Six groups in two levels, 64 tokens of prefix, one request at a time so that order is that of the
    // oracle.
    let line = "--workload shared-prefix --prefix-groups 6 --prefix-len 64 --prefix-depth 2 --zipf 1 --isl 20 --osl 2 \
                --concurrency 1 --requests 40 --endpoint completions --oracle-blocks 10000";
    let run = run(&server, line);
    assert_measured(&run);
    let cache = &run.report["cache"];
    assert!(number(cache, "possible") > 0.5, "{cache}");
    assert_eq!(
        (cache["achieved"].as_f64(), cache["pooled_lru"].as_f64()),
        (cache["possible"].as_f64(), cache["possible"].as_f64())
    );
}

#[test]
fn a_closed_loop_keeps_its_number_and_users_never_overlap_themselves() {
    let server = FakeServer::start(|_| Script::Good);
    let closed = run(&server, "--concurrency 3 --requests 60 --isl 30 --osl 5");
    assert_measured(&closed);
    let mut edges: Vec<(f64, i32)> = Vec::new();
    for record in &closed.records {
        edges.push((number(record, "sent_ms"), 1));
        edges.push((number(record, "end_ms"), -1));
    }
    edges.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let peak = edges.iter().scan(0, |level, edge| {
        *level += edge.1;
        Some(*level)
    });
    assert_eq!(peak.max(), Some(3));

    let users = run(&server, "--users 4 --user-rate 100 --requests 40 --isl 30 --osl 5");
    assert_measured(&users);
    for user in 0..4 {
        let mut own: Vec<_> =
            users.records.iter().filter(|r| r["row"].as_u64().unwrap() % 4 == user).collect();
        own.sort_by_key(|record| record["row"].as_u64());
        assert_eq!(own.len(), 10);
        for pair in own.windows(2) {
            assert!((number(pair[1], "intended_ms") - number(pair[0], "intended_ms") - 40.0).abs() < 1e-3);
            assert!(number(pair[1], "sent_ms") >= number(pair[0], "end_ms"));
        }
    }
}

#[test]
fn requests_over_the_maximum_wait_or_are_dropped() {
    let server = FakeServer::start(|turn| if turn == 0 { Script::Hang } else { Script::Good });
    let line = "--rate 1000 --arrival constant --requests 20 --isl 30 --osl 2 --max-concurrency 1";
    let queued = run(&server, &format!("{line} --timeout 1s"));
    assert_eq!(
        (&queued.report["requests"]["ok"], &queued.report["requests"]["failed"]),
        (&19.into(), &1.into())
    );
    // All waited for the first one's second, and `response` says so; the schedule's lag does not.
    let after: Vec<_> = queued.records.iter().filter(|r| r["outcome"] == "ok").collect();
    assert!(after.iter().all(|r| number(r, "queued_ms") > 900.0));
    assert!(number(&queued.report["response"]["ttft"], "p50") > 900.0);
    assert!(number(&queued.report["schedule_lag"]["lag"], "p50") < 900.0);

    let server = FakeServer::start(|_| Script::Hang);
    let dropped = run(&server, &format!("{line} --timeout 1s --overload drop"));
    assert_eq!(dropped.output.status.code(), Some(1));
    assert_eq!(dropped.report["errors"][0]["class"], "dropped");
    assert_eq!(dropped.report["errors"][0]["count"], 19);
}

#[test]
fn equal_seeds_send_equal_bytes_whatever_the_threads_and_the_pace() {
    let server = FakeServer::start(|_| Script::Good);
    let hash = |line: &str| {
        let run = run(
            &server,
            &format!(
                "--workload shared-prefix --prefix-len 50 --isl exp(30) --osl 2 --requests 40 --text-seed 5 {line}"
            ),
        );
        assert_measured(&run);
        run.report["workload"]["body_hash"].as_str().unwrap().to_owned()
    };
    let first = hash("--rate 300 --threads 1");
    for same in [
        "--rate 300 --threads 4",
        "--rate 700 --arrival constant",
        "--concurrency 5",
        "--users 8 --user-rate 500",
    ] {
        assert_eq!(first, hash(same), "{same}");
    }
    assert_ne!(first, hash("--rate 300 --seed 43"));
}

#[test]
fn an_objective_on_a_percentile_decides_the_exit_code() {
    let server = FakeServer::start(|turn| if turn % 5 == 0 { Script::Status(503) } else { Script::Good });
    let line = "--concurrency 2 --requests 50 --isl 20 --osl 2 --slo";
    let code = |slo: &str| run(&server, &format!("{line} {slo}")).output.status.code().unwrap();
    assert!([0, 3].contains(&code("ttft.p75<60s")));
    // A fifth of the requests fail, and a failure keeps no bound.
    assert!([4, 3].contains(&code("ttft.p90<60s")));
    assert!([0, 3].contains(&code("ttft<60s")));
}

fn compare(base: &Run, new: &Run, extra: &[&str]) -> (i32, String) {
    let output =
        keyway_loadtest().arg("compare").args([base.path(), new.path()]).args(extra).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

#[test]
fn comparisons() {
    let server = FakeServer::start(|_| Script::Good);
    let line = "--concurrency 2 --requests 120 --isl 20 --osl 4";
    let (a, other) = (run(&server, line), run(&server, "--concurrency 3 --requests 120 --isl 20 --osl 4"));
    let (code, text) = compare(&a, &a, &[]);
    assert_eq!(code, 0);
    assert!(
        text.contains("request by request") && !text.contains("WORSE") && !text.contains("better "),
        "{text}"
    );
    assert!(text.contains("needs 500 requests a side"), "{text}");

    // Everything takes a fifth longer: the report's own samples, with each time stretched.
    let mut slow = run(&server, line);
    slow.report = serde_json::from_slice(&fs::read(a.path()).unwrap()).unwrap();
    for column in ["ttft_us", "e2e_us", "tpot_us"] {
        for time in slow.report["samples"][column].as_array_mut().unwrap() {
            *time = (time.as_u64().unwrap() * 6 / 5).into();
        }
    }
    fs::write(slow.path(), slow.report.to_string()).unwrap();
    let (code, text) = compare(&a, &slow, &["--fail-on", "ttft.p50>+5%", "--fail-on", "e2e.p90>+50%"]);
    assert_eq!(code, 4, "{text}");
    assert!(text.contains("FAILED     ttft.p50>+5%") && !text.contains("FAILED     e2e"), "{text}");
    let (code, text) = compare(&slow, &a, &["--fail-on", "ttft.p50>+5%", "--md"]);
    assert!([0, 3].contains(&code) && text.contains("better"), "{text}");

    let (code, text) = compare(&a, &other, &[]);
    assert_eq!(code, 2);
    assert!(text.contains("different workloads (concurrency: 2 and 3)"), "{text}");
    assert!([0, 3].contains(&compare(&a, &other, &["--force"]).0));
    for (gate, want) in
        [("ttft.p98>+5%", "no such figure"), ("ttft.p99>+5%", "ttft.p99 needs 500 requests a side")]
    {
        let (code, text) = compare(&a, &a, &["--fail-on", gate]);
        assert!(code == 2 && text.contains(want), "{text}");
    }
}

#[test]
fn each_run_has_prompts_of_its_own_and_runs_of_one_seed_are_compared_request_by_request() {
    let server = FakeServer::start(|_| Script::Good);
    let line = "--concurrency 2 --requests 60 --isl uniform(40,80) --osl 4";
    let (a, b) = (run(&server, line), run(&server, line));
    for run in [&a, &b] {
        assert_measured(run);
        assert!(number(&run.report["cache"], "achieved") < 0.2, "{}", run.report["cache"]);
    }
    assert_ne!(a.report["workload"]["body_hash"], b.report["workload"]["body_hash"]);
    assert_ne!(a.report["config"]["text_seed"], b.report["config"]["text_seed"]);
    assert_eq!(a.report["workload"]["prompt_tokens"], b.report["workload"]["prompt_tokens"]);
    let (_, text) = compare(&a, &b, &[]);
    assert!(text.contains("request by request") && !text.contains("warm"), "{text}");
}

#[test]
fn a_run_that_finds_its_prompts_in_caches_is_warm_and_no_comparison_believes_it() {
    let server = FakeServer::start(|_| Script::Good);
    let line = "--concurrency 2 --requests 60 --isl 64 --osl 4 --text-seed 5";
    let (cold, warm) = (run(&server, line), run(&server, line));
    assert_measured(&cold);
    let late = |run: &Run| run.report["verdict"]["status"] == "invalid";
    if !late(&warm) {
        assert_eq!(warm.report["verdict"]["status"], "warm");
        let reason = warm.report["verdict"]["reason"].as_str().unwrap();
        assert!(reason.contains("beyond what this run can have left there"), "{reason}");
        assert_eq!(warm.output.status.code(), Some(0), "its words were chosen");
        let (code, text) = compare(&cold, &warm, &["--fail-on", "ttft.p50>+5000%"]);
        assert!(code == 3 && text.contains("WARNING    the new run is warm"), "{text}");
    }
    // What was said of a server in an older report is seen in its figures.
    let mut old = run(&server, line);
    if !late(&old) {
        old.report["verdict"]["status"] = "valid".into();
        fs::write(old.path(), old.report.to_string()).unwrap();
        assert!(compare(&cold, &old, &[]).1.contains("the new run is warm"));
    }
}

#[test]
fn a_file_s_prompts_are_new_ones_unless_they_shall_stay_as_they_are() {
    let server = FakeServer::start(|_| Script::Good);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("own.jsonl");
    fs::write(&file, format!("{{\"prompt\": \"{}\"}}\n", "what one asks ".repeat(10))).unwrap();
    let line = format!("--workload custom --file {} --osl 2 --concurrency 1", file.display());
    let sent = |extra: &str| {
        assert_measured(&run(&server, &format!("{line} {extra}")));
        let bodies = server.bodies.lock().unwrap();
        bodies.last().unwrap()["messages"][0]["content"].as_str().unwrap().to_owned()
    };
    let (first, second, as_it_is) = (sent(""), sent(""), sent("--text-seed 0"));
    assert_eq!((&first[8..], &second[8..], as_it_is.as_str()), (&*as_it_is, &*as_it_is, &*as_it_is));
    assert_ne!(first[..8], second[..8]);
    assert_eq!(sent("--text-seed 9"), sent("--text-seed 9"));
}

#[test]
fn prompts_have_the_template_that_was_measured() {
    let server = FakeServer::start(|_| Script::Good);
    let run = run(&server, "--rate 500 --requests 4 --isl 32 --osl 1");
    assert_eq!(run.report["tokens"]["prompt"], 4 * (32 + TEMPLATE_TOKENS));
}
