//! The built binary against the mock fleet: metrics beside the run, pages, several runs on a side, traces
//! made and remade, calibration. Engines take no time unless a test says otherwise.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::{fs, path::Path, process::Command};

use keyway_loadtest::{
    engine_model::named,
    mock::{First, Fleet, Names, Options},
};
use serde_json::Value;
use tokio::runtime::Runtime;

/// A fleet of one worker and the runtime that serves it.
struct Mock {
    fleet: Fleet,
    _runtime: Runtime,
}

impl Mock {
    fn start(profile: &str, time_scale: f64) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let options = Options {
            host: "127.0.0.1".into(),
            workers: 1,
            base_port: 0,
            model: "mock".into(),
            profile: named(profile).unwrap(),
            time_scale,
            output_tokens: 5,
            image_tokens: 0,
            metrics: Names::Vllm,
            render: false,
            first: First::None,
            kv_transfer: None,
            prefill: 0,
            faults: Vec::new(),
            kv_events: None,
        };
        let fleet = runtime.block_on(Fleet::start(&options)).unwrap();
        Self { fleet, _runtime: runtime }
    }

    fn url(&self) -> &str {
        &self.fleet.addresses[0].url
    }
}

/// Runs the binary; gives its exit code and what it said.
fn run(line: &str) -> (i32, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_keyway-loadtest")).args(line.split_whitespace()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

/// Late is as good as valid: the verdict must not depend on how busy the machine is.
#[track_caller]
fn measured(line: &str) -> String {
    let (code, text) = run(line);
    assert!([0, 3].contains(&code), "{code}: {text}");
    text
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

const SHORT: &str = "--isl 64 --osl 4 --bytes-per-token 4 --ui none";

#[test]
fn a_server_s_metrics_stand_beside_the_run() {
    let mock = Mock::start("instant", 1.0);
    let dir = tempfile::tempdir().unwrap();
    let (url, out) = (mock.url(), dir.path().display());
    measured(&format!(
        "run --url {url} {SHORT} --concurrency 2 --requests 50 --scrape {url} --scrape-interval 100ms -o {out}"
    ));
    let report = json(&dir.path().join("run.json"));
    let series = report["scraped"][0]["series"].as_array().unwrap();
    let added = |name: &str| {
        let metric = series.iter().find(|metric| metric["name"].as_str().unwrap().starts_with(name));
        metric.unwrap_or_else(|| panic!("{name} in {series:?}"))["added"].as_f64().unwrap()
    };
    assert_eq!(added("vllm:generation_tokens_total"), 200.0);
    assert_eq!(added("vllm:request_success_total"), 50.0);
    assert_eq!(added("vllm:prompt_tokens_total"), report["tokens"]["prompt"].as_f64().unwrap());
    let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
    assert!(page.contains("Metrics of http://127") && page.contains("vllm:generation_tokens_total"));
    let (code, text) =
        run(&format!("run --url {url} {SHORT} --concurrency 2 --requests 5 --scrape {url}/nowhere"));
    assert!(code == 1 && text.contains("--scrape"), "{code}: {text}");
}

#[test]
fn sweeps_searches_and_comparisons_have_a_page() {
    let mock = Mock::start("instant", 1.0);
    let dir = tempfile::tempdir().unwrap();
    let (url, out) = (mock.url(), dir.path().display());
    let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    measured(&format!("sweep --url {url} {SHORT} --concurrencies 1,4 --requests 40 -o {out}/sweep"));
    assert!(page("sweep/report.html").contains("<svg") && page("sweep/1/report.html").contains("<svg"));
    measured(&format!(
        "search --url {url} {SHORT} --over concurrency --slo ttft.p90<60s --to 4 --requests 40 --repeats 1 -o {out}/search"
    ));
    assert!(page("search/report.html").contains("kept at the highest load allowed"));

    for (i, seed) in [1, 2, 3, 4].iter().enumerate() {
        measured(&format!(
            "run --url {url} {SHORT} --concurrency 2 --requests 60 --seed {seed} -o {out}/{i}"
        ));
    }
    let text =
        measured(&format!("compare {out}/0 {out}/2 --base {out}/1 --new {out}/3 --html {out}/compare.html"));
    assert!(text.contains("120 of 2 runs and 120 of 2 runs good answers, compared as two samples"), "{text}");
    assert!(page("compare.html").contains("120 of 2 runs") && page("compare.html").contains("ttft.p50"));
}

#[test]
fn runs_of_several_processes_are_merged() {
    let mock = Mock::start("instant", 1.0);
    let dir = tempfile::tempdir().unwrap();
    let (url, out) = (mock.url(), dir.path().display());
    let line = |name: &str| format!("run --url {url} {SHORT} --rate 50 --requests 100 -o {out}/{name}");
    let (a, b) = (line("a"), line("b"));
    std::thread::scope(|scope| {
        scope.spawn(|| measured(&a));
        measured(&b);
    });
    let text = measured(&format!("merge {out}/a {out}/b -o {out}/both"));
    assert!(text.contains("200 scheduled, 200 sent, 200 ok") && text.contains("merged     2 runs"), "{text}");
    let [a, b, both] = ["a", "b", "both"].map(|name| json(&dir.path().join(name).join("run.json")));
    let sum =
        |path: &str| a.pointer(path).unwrap().as_f64().unwrap() + b.pointer(path).unwrap().as_f64().unwrap();
    for path in
        ["/requests/ok", "/tokens/prompt", "/response/ttft/n", "/throughput/requests_per_s", "/config/rate"]
    {
        assert!((both.pointer(path).unwrap().as_f64().unwrap() - sum(path)).abs() < 1e-6, "{path}");
    }
    assert!(fs::read_to_string(dir.path().join("both/report.html")).unwrap().contains("<svg"));
    let (code, text) = run(&format!("merge {out}/a {out}/a"));
    assert!(code == 2 && text.contains("it is the same run as"), "{code}: {text}");
    // A merged run is a run: it can be compared, and merged with others of its kind.
    assert!(measured(&format!("compare {out}/both {out}/both")).contains("200 and 200 good answers"));
}

#[test]
fn traces_are_checked_remade_and_made() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display();
    let slice = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl");
    let (code, text) = run(&format!("trace validate {slice}"));
    assert!(code == 0 && text.contains("mooncake: 798 rows can be replayed, 0 lines cannot"), "{text}");
    fs::write(dir.path().join("bad.jsonl"), "{}\n").unwrap();
    assert_eq!(run(&format!("trace validate {out}/bad.jsonl")).0, 2);

    assert_eq!(run(&format!("trace slice {slice} --slice 60s..120s -o {out}/part.jsonl")).0, 0);
    let (code, text) = run(&format!("trace convert {out}/part.jsonl --to vllm-timed -o {out}/small.jsonl"));
    assert!(code == 0 && text.contains("rows written"), "{text}");
    let info = |name: &str| -> Value {
        serde_json::from_str(&run(&format!("trace info {out}/{name} --json")).1).unwrap()
    };
    let (part, small) = (info("part.jsonl"), info("small.jsonl"));
    assert_eq!((&part["requests"], &part["prompt_tokens"]), (&small["requests"], &small["prompt_tokens"]));
    assert_eq!((part["first_s"].as_f64(), &small["block_tokens"]), (Some(0.0), &16.into()));

    let synth = "--workload shared-prefix --prefix-groups 2 --prefix-len 256 --isl 64 --osl 4 --rate 200 --requests 30";
    assert_eq!(run(&format!("trace synth {synth} -o {out}/synth.jsonl")).0, 0);
    let (code, text) = run(&format!("trace oracle {out}/synth.jsonl --blocks 1,1000 --json"));
    let caches = serde_json::from_str::<Value>(&text).unwrap()["caches"].clone();
    assert_eq!(
        (code, &caches[1]["reused_tokens"], &caches[2]["reused_tokens"]),
        (0, &(28 * 256).into(), &(28 * 256).into())
    );
    // It can be replayed, and the server finds what the oracle promised.
    let mock = Mock::start("instant", 1.0);
    let url = mock.url();
    measured(&format!(
        "run --url {url} --trace {out}/synth.jsonl --bytes-per-token 4 --ui none -o {out}/run"
    ));
    let report = json(&dir.path().join("run/run.json"));
    assert_eq!(report["requests"]["ok"], 30);
    assert!(report["cache"]["of_possible"].as_f64().unwrap() > 0.9, "{}", report["cache"]);
}

/// The mock's prefill takes the time that its profile says, to which calibration must come close.
#[test]
fn calibration_finds_the_speed_of_the_engine() {
    let mock = Mock::start("l4-8b", 1.0);
    let (code, text) =
        run(&format!("calibrate --url {} --lengths 1024,4096,8192 --osl 2 --samples 2 --json", mock.url()));
    assert_eq!(code, 0, "{text}");
    let speed: Value = serde_json::from_str(&text).unwrap();
    let found = speed["prefill_tokens_per_s"].as_f64().unwrap();
    let profile = named("l4-8b").unwrap();
    // A busy machine can only add time.
    let (low, high) = (profile.prefill_rate(8192) * 0.5, profile.prefill_rate(1024) * 1.3);
    assert!((low..high).contains(&found), "{found} of {low} to {high}");
    assert!(speed["lengths"][2]["repeated_cached"].as_f64().unwrap() > 0.9, "{text}");
}

#[test]
fn users_hold_conversations() {
    let mock = Mock::start("instant", 1.0);
    let dir = tempfile::tempdir().unwrap();
    let (url, out) = (mock.url(), dir.path().display());
    measured(&format!(
        "run --url {url} {SHORT} --workload multi-turn --turns 3 --users 4 --user-rate 200 --conversations 8 -o {out}"
    ));
    let report = json(&dir.path().join("run.json"));
    assert_eq!((&report["requests"]["ok"], &report["requests"]["scheduled"]), (&24.into(), &24.into()));
    // Two of three turns begin with what was said before.
    assert!(report["cache"]["achieved"].as_f64().unwrap() > 0.4, "{}", report["cache"]);
}
