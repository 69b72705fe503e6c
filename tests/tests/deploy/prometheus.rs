//! Hazard: a rule, an alert, a dashboard or an autoscaler asks for a metric that nobody has any more, and is
//! silent for ever. A real Prometheus scrapes a gateway and its workers under load, and is asked everything
//! that the files ask.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fmt::Write as _, fs};

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::openai::{CHAT, chat_for};
use keyway_tests::process::Process;
use keyway_tests::{Client, Gateway, Metrics, eventually, get, ports, post, tools};
use serde_json::Value;

fn deploy() -> PathBuf {
    workspace_root().join("deploy")
}

#[test]
fn every_alert_is_tested_and_the_tests_pass() {
    let Some(promtool) = tools::tool("promtool") else { return };
    let folder = deploy().join("prometheus");
    for args in [["check", "config", "prometheus.yml"], ["test", "rules", "tests.yml"]] {
        let output = Command::new(&promtool).args(args).current_dir(&folder).output().expect("promtool runs");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{args:?}: {said}");
    }
    let (alerts, tests) = (read("prometheus/alerts.yml"), read("prometheus/tests.yml"));
    let runbook = read("README.md");
    let links: BTreeMap<String, String> =
        values(&alerts, "- alert: ").into_iter().zip(values(&alerts, "runbook: deploy/")).collect();
    for name in values(&alerts, "- alert: ") {
        // In a test that expects it, and in one, or at a time, that does not.
        let here: Vec<&str> = tests
            .split("alertname: ")
            .filter(|t| t.starts_with(&format!("{name}\n")) || t.starts_with(&format!("{name},")))
            .collect();
        let silent = here
            .iter()
            .filter(|test| {
                test.contains("exp_alerts: []")
                    && !test.split("exp_alerts").nth(1).unwrap_or_default().contains("exp_labels")
            })
            .count();
        assert!(here.len() > silent && silent > 0, "{name}: {} tests, {silent} of them silent", here.len());
        let (page, heading) = links[&name].split_once('#').expect("a page and its heading");
        assert_eq!(heading, name.to_lowercase(), "{name} links elsewhere");
        assert!(read(page).contains(&format!("### {name}\n")), "{name} is not in {page}");
        assert!(runbook.contains(&format!("]({page}#{heading})")), "{name} is not in the overview");
    }
}

fn read(name: &str) -> String {
    let path = deploy().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What stands behind `key` on each line that has it.
fn values(text: &str, key: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(key)).map(|v| v.trim().to_owned()).collect()
}

/// Every metric that a text names.
fn names_in(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c: char| !is_part(c));
    let named = words.filter(|word| word.starts_with("keyway_") || word.starts_with("keyway:"));
    named.map(|word| word.trim_end_matches([':', '_']).to_owned()).filter(|name| name.len() > 8).collect()
}

/// A fleet under load with Prometheus beside it.
struct Watched {
    gateway: Gateway,
    prometheus: SocketAddr,
    _mock: Process,
    _server: Process,
    _folder: tempfile::TempDir,
}

async fn watched() -> Option<Watched> {
    let server = tools::tool("prometheus")?;
    let mut command = Command::new(bin("keyway-loadtest"));
    let mock = Process::spawn(
        "mock",
        command
            .args(["mock", "--workers", "2", "--base-port", "0", "--time-scale", "50", "--kv-events"])
            .args(["--kv-events-base-port", "0", "--kv-replay-base-port", "0"]),
    );
    mock.announced("ready on ").await;
    let urls = || -> Vec<String> {
        let log = mock.log().join("\n");
        let found = log.split("ready on ").skip(1);
        found.map(|rest| rest.split([' ', '\n', ',']).next().unwrap_or_default().to_owned()).collect()
    };
    eventually!(urls().len() == 2, "two mock workers; {:?}", mock.log());
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("workers.toml");
    let quoted: Vec<String> = urls().iter().map(|url| format!("{url:?}")).collect();
    fs::write(&list, format!("worker = [{}]", quoted.join(", "))).unwrap();
    let config = format!(
        "[discovery]\nfile = \"{}\"\n[scale]\nwait_seconds = 1.0\n[[scale.model]]\nname = \"absent\"\n",
        list.display()
    );
    let gateway = Gateway::builder().config(&config).start().await;
    gateway.wait_ready(2).await;
    // Prometheus takes none of its own choice that it would tell.
    let prometheus = ports::free_addr();
    let workers: Vec<String> =
        urls().iter().map(|url| url.trim_start_matches("http://").to_owned()).collect();
    configure(folder.path(), gateway.admin, &workers);
    let mut command = Command::new(server);
    command
        .arg(format!("--config.file={}", folder.path().join("prometheus.yml").display()))
        .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
        .arg(format!("--web.listen-address={prometheus}"));
    let server = Process::spawn("prometheus", &mut command);
    server.announced("Server is ready").await;
    Some(Watched { gateway, prometheus, _mock: mock, _server: server, _folder: folder })
}

/// The deployed configuration with these targets, and rates over seconds where it has minutes.
fn configure(folder: &Path, gateway: SocketAddr, workers: &[String]) {
    let workers: Vec<String> = workers.iter().map(|worker| format!("{worker:?}")).collect();
    let text = read("prometheus/prometheus.yml")
        .replace("\"127.0.0.1:9090\"", &format!("\"{gateway}\""))
        .replace("\"127.0.0.1:8000\", \"127.0.0.1:8001\"", &workers.join(", "))
        .replace("5s", "1s");
    fs::write(folder.join("prometheus.yml"), text).unwrap();
    for name in ["rules.yml", "alerts.yml"] {
        fs::write(folder.join(name), read(&format!("prometheus/{name}"))).unwrap();
    }
}

async fn query(server: SocketAddr, promql: &str) -> Value {
    let encoded = promql.bytes().fold(String::new(), |mut encoded, byte| {
        let _ = write!(encoded, "%{byte:02X}"); // a string takes all
        encoded
    });
    let response = get(server, &format!("/api/v1/query?query={encoded}")).await;
    let answer = response.json();
    assert_eq!(answer["status"], "success", "{promql}\n{answer}");
    answer["data"].clone()
}

/// One of each thing that leaves a mark in a metric.
async fn load(fleet: &Watched) {
    let model =
        get(fleet.gateway.addr, "/v1/models").await.json()["data"][0]["id"].as_str().unwrap().to_owned();
    let shared = "The same beginning. ".repeat(60);
    for i in 0..12 {
        for stream in [true, false] {
            let prompt = format!("{shared} {}", i % 4);
            let body = String::from_utf8(chat_for(&model, &prompt, stream)).unwrap();
            let body =
                body.replacen('{', "{\"max_tokens\": 8, \"stream_options\": {\"include_usage\": true},", 1);
            assert_eq!(post(fleet.gateway.addr, CHAT, body.as_bytes()).await.status(), 200);
        }
    }
    assert_eq!(post(fleet.gateway.addr, CHAT, &chat_for("nothing", "hi", false)).await.status(), 404);
    // Leaves while it waits for a first worker, and one that waits in vain.
    let mut client = Client::connect(fleet.gateway.addr).await;
    client.post(CHAT, &chat_for("absent", "hi", false)).await;
    assert_eq!(post(fleet.gateway.addr, CHAT, &chat_for("absent", "hi", false)).await.status(), 503);
    drop(client);
}

/// Families that this fleet leaves without series: it has no events that go wrong, no tokenizer, no second
/// attempts.
const SILENT: [&str; 46] = [
    "keyway_oidc_tokens_total",
    "keyway_oidc_keys",
    "keyway_oidc_keys_fetched_timestamp_seconds",
    "keyway_oidc_fetches_total",
    "keyway_ttft_objectives_total",
    "keyway_store_up",
    "keyway_store_gateways",
    "keyway_store_refusals_total",
    "keyway_prefill_legs_total",
    "keyway_prompt_ways_total",
    "keyway_kv_pulls_total",
    "keyway_kv_pull_seconds_per_token",
    "keyway_kv_pull_each_seconds",
    "keyway_kv_transfer_seconds_per_token",
    "keyway_kv_transfer_handover_seconds",
    "keyway_prefill_asked_share",
    "keyway_model_fallbacks_total",
    "keyway_model_splits_total",
    "keyway_worker_refusals_total",
    "keyway_probe_failures_total",
    "keyway_certificate_start_timestamp_seconds",
    "keyway_certificate_expiry_timestamp_seconds",
    "keyway_prediction_misses_total",
    "keyway_predictions_uncounted_total",
    "keyway_prompt_drifts_total",
    "keyway_prompt_drift_bytes_total",
    "keyway_external_scaler_calls_total",
    "keyway_trace_spans_total",
    "keyway_tenant_requests_total",
    "keyway_tenant_tokens_total",
    "keyway_tenant_budget_used",
    "keyway_tenant_budget_allowed",
    "keyway_tenant_budget_warn_from",
    "keyway_tenant_budget_crossings_total",
    "keyway_worker_ejections_total",
    "keyway_retries_total",
    "keyway_token_keyer_requests_total",
    "keyway_decision_log_lines_total",
    "keyway_kv_events_trusted",
    "keyway_kv_event_lag_seconds",
    "keyway_kv_event_batches_total",
    "keyway_kv_event_problems_total",
    "keyway_kv_replays_total",
    "keyway_prediction_error_tokens_total",
    "keyway_ttft_prediction_seconds_total",
    "keyway_ttft_prediction_error_seconds_total",
];

#[tokio::test]
async fn a_real_prometheus_knows_every_metric_that_the_files_name_and_answers_what_they_ask() {
    let Some(fleet) = watched().await else { return };
    load(&fleet).await;
    let at = fleet.prometheus;
    // A rate needs two scrapes around what it counts.
    let counted = async || {
        let found = query(at, "keyway:requests:rate5m{outcome=\"complete\"} > 0").await;
        let scaled = query(at, "keyway:desired_workers").await;
        !found["result"].as_array().unwrap().is_empty() && !scaled["result"].as_array().unwrap().is_empty()
    };
    for _ in 0..40 {
        if counted().await {
            break;
        }
        load(&fleet).await;
    }
    eventually!(counted().await);

    let reference = read("METRICS.md");
    let declared = names_in(&reference);
    let recorded: BTreeSet<String> =
        values(&read("prometheus/rules.yml"), "- record: ").into_iter().collect();
    let scraped: BTreeSet<String> = get(at, "/api/v1/label/__name__/values").await.json()["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    for name in declared.iter().filter(|name| !SILENT.contains(&name.as_str())) {
        let there = scraped.contains(name) || scraped.contains(&format!("{name}_count"));
        assert!(there, "{name} is declared and Prometheus has it not; it has {scraped:?}");
    }
    let family = |name: &str| {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        declared.contains(name) || base.is_some_and(|base| declared.contains(base))
    };
    for (file, text) in files() {
        for name in names_in(&text) {
            let known = family(&name) || recorded.contains(&name) || name.starts_with("keyway_worker_");
            assert!(known, "{file} names {name}, which nobody has");
        }
    }
    every_query_is_answered(at, &declared).await;
    assert!(
        get(at, "/api/v1/rules").await.json()["data"]["groups"]
            .as_array()
            .unwrap()
            .iter()
            .all(|group| { group["rules"].as_array().unwrap().iter().all(|rule| rule["health"] != "err") })
    );
    let text = Metrics::fetch(fleet.gateway.admin).await;
    assert!(text.sum("keyway_scale_waits_total", &[]) >= 1.0);
}

/// Every file that names metrics.
fn files() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![deploy()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| ["yml", "yaml", "json", "md"].iter().any(|k| e == *k))
            {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path.display().to_string(), text);
            }
        }
    }
    assert!(found.len() > 8);
    found
}

/// A dashboard's query with every choice at "All".
fn filled_in(promql: &str) -> String {
    let asked = ["$job", "$instance", "$model", "$worker"]
        .iter()
        .fold(promql.replace("$__rate_interval", "1m"), |asked, choice| asked.replace(choice, ".*"));
    assert!(!asked.contains('$'), "{asked}");
    asked
}

/// What dashboards ask: each is a vector, and one with samples unless it is about what did not happen here.
async fn every_query_is_answered(at: SocketAddr, declared: &BTreeSet<String>) {
    let mut empty = Vec::new();
    let mut uids = BTreeSet::new();
    for name in ["service", "routing", "workers"] {
        let dashboard: Value = serde_json::from_str(&read(&format!("grafana/{name}.json"))).unwrap();
        assert!(uids.insert(dashboard["uid"].to_string()), "{name}: its uid is taken");
        let mut places: Vec<(u64, u64, u64, u64)> = Vec::new();
        let mut ids = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            let title = &panel["title"];
            assert!(ids.insert(panel["id"].as_u64()), "{name}: {title}: its id is taken");
            let side = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            let (x, y, w, h) = (side("x"), side("y"), side("w"), side("h"));
            let overlaps =
                places.iter().any(|p| x < p.0 + p.2 && p.0 < x + w && y < p.1 + p.3 && p.1 < y + h);
            assert!(!overlaps && x + w <= 24, "{name}: {title} lies on another panel");
            places.push((x, y, w, h));
            if panel["type"] == "row" {
                continue;
            }
            assert!(panel["description"].as_str().is_some_and(|text| text.len() > 5), "{name}: {title}");
            for target in panel["targets"].as_array().unwrap() {
                let promql = target["expr"].as_str().unwrap();
                let asked = filled_in(promql);
                let data = query(at, &asked).await;
                assert_eq!(data["resultType"], "vector", "{asked}");
                let quiet = names_in(promql).iter().any(|metric| SILENT.contains(&metric.as_str()));
                if data["result"].as_array().unwrap().is_empty() && !quiet {
                    empty.push(format!("{name}: {title}: {asked}"));
                }
            }
        }
        // What marks the plots; most of it has not happened here.
        for mark in dashboard["annotations"]["list"].as_array().unwrap() {
            query(at, &filled_in(mark["expr"].as_str().unwrap())).await;
        }
        assert!(names_in(&dashboard.to_string()).iter().any(|metric| declared.contains(metric)));
    }
    assert!(empty.is_empty(), "no answer to:\n{}", empty.join("\n"));
}
