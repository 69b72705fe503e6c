//! Embeddings as load: what is sent, which answers are good, and that the report speaks of the one time they
//! have.

use std::path::Path;

use serde_json::Value;

use super::{Run, assert_measured, keyway_loadtest};
use crate::support::{FakeServer, Script};

/// Measures with `command`, then `extra`, one request after another.
fn measured(server: &FakeServer, command: &str, extra: &[&str]) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let (url, out) = (server.url(), dir.path().join("out"));
    let base = [command, "--url", &url, "--endpoint", "embeddings", "--isl", "40", "--ui", "none", "-o"];
    let output = keyway_loadtest(&base).arg(&out).args(extra).output().unwrap();
    let name = if command == "run" { "run.json" } else { "sweep.json" };
    let report = std::fs::read(out.join(name));
    let report = report.map_or(Value::Null, |json| serde_json::from_slice(&json).unwrap());
    Run { output, report, dir }
}

fn said(run: &Run) -> String {
    String::from_utf8_lossy(&[&run.output.stdout[..], &run.output.stderr[..]].concat()).into_owned()
}

fn page(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("out/report.html")).unwrap()
}

#[test]
fn texts_are_sent_as_asked_and_the_answer_s_end_is_the_one_time() {
    let server = FakeServer::start(|_| Script::Good);
    let run = measured(
        &server,
        "run",
        &["--texts", "3", "--concurrency", "1", "--requests", "20", "--slo", "e2e.p99<30s"],
    );
    assert_measured(&run);
    let bodies = server.bodies.lock().unwrap();
    // Two measured how many bytes a token has.
    let sent = &bodies[2..];
    assert_eq!(sent.len(), 20);
    let mut texts: Vec<&str> =
        sent.iter().flat_map(|body| body["input"].as_array().unwrap()).map(|t| t.as_str().unwrap()).collect();
    assert!(texts.len() == 60 && texts.iter().all(|text| text.len() == 40));
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), 60, "each text has words of its own");
    for field in ["stream", "stream_options", "temperature", "max_tokens", "ignore_eos"] {
        assert_eq!(sent[0].get(field), None, "{field}");
    }

    let report = &run.report;
    assert_eq!((&report["requests"]["ok"], &report["tokens"]["prompt"]), (&20.into(), &(60 * 41).into()));
    assert_eq!(report["tokens"]["prompt_wanted"], report["tokens"]["prompt"], "one more token for each text");
    assert_eq!(
        (&report["response"]["ttft"], &report["tpot"], &report["itl"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert!(report["response"]["e2e"]["p50"].as_f64().unwrap() > 0.0);
    assert!(report["series"]["e2e_p50"].as_array().unwrap().iter().any(Value::is_number));
    assert_eq!((&report["config"]["texts"], &report["config"]["osl"]), (&3.into(), &Value::Null));
    assert_eq!(report["goodput"]["met"], 20);
    let (said, page) = (said(&run), page(run.dir.path()));
    assert!(
        said.contains("end to end response") && said.contains("100.0 % of 20 requests keep e2e.p99"),
        "{said}"
    );
    for absent in ["TTFT", "generated", "per output token"] {
        assert!(!said.contains(absent) && !page.contains(absent), "{absent}: {said}");
    }
    assert!(page.contains("End to end, by when requests were due"));
}

#[test]
fn an_answer_that_lacks_a_vector_or_breaks_off_is_a_failure() {
    let server = FakeServer::start(|turn| match turn {
        0 => Script::Status(503),
        1 => Script::Whole(r#"{"object":"list","data":[{"embedding":[0.5]}]}"#),
        2 => Script::Whole(r#"{"error":{"message":"engine dead"}}"#),
        3 => Script::Whole(r#"{"choices":[]}"#),
        4 => Script::Said(&["data: [DONE]\n\n"]),
        _ => Script::Good,
    });
    let extra =
        ["--texts", "2", "--concurrency", "1", "--requests", "6", "--model", "m", "--bytes-per-token", "4"];
    let run = measured(&server, "run", &extra);
    let rows = run.report["errors"].as_array().unwrap();
    let mut classes: Vec<(&str, u64)> =
        rows.iter().map(|row| (row["class"].as_str().unwrap(), row["count"].as_u64().unwrap())).collect();
    classes.sort_unstable();
    assert_eq!(classes, [("error_body", 1), ("protocol", 2), ("status_503", 1), ("unfinished", 1)]);
    assert_eq!(run.report["requests"]["ok"], 1);
    let unfinished = rows.iter().find(|row| row["class"] == "unfinished").unwrap();
    assert_eq!(unfinished["samples"][0], "the answer has 1 embeddings for 2 texts");
}

#[test]
fn a_sweep_of_embeddings_speaks_of_prompts_and_ends() {
    let server = FakeServer::start(|_| Script::Good);
    let run = measured(&server, "sweep", &["--concurrencies", "1,2", "--requests", "10"]);
    let points = run.report["points"].as_array().unwrap();
    assert_eq!(points.len(), 2, "{}", said(&run));
    assert!(
        points.iter().all(|point| point["ok"] == 10 && point["prompt_tokens_per_s"].as_f64().unwrap() > 0.0)
    );
    let (said, page) = (said(&run), page(run.dir.path()));
    assert!(said.contains("prompt t/s") && said.contains("E2E p50") && !said.contains("TTFT"), "{said}");
    assert!(page.contains("Prompt tokens a second") && !page.contains("Time to first token"));
}

#[test]
fn what_has_no_sense_for_embeddings_is_said_before_anything_is_sent() {
    let server = FakeServer::start(|_| Script::Good);
    for (extra, want) in [
        (&["--slo", "ttft<5ms"] as &[&str], "embeddings have one time"),
        (&["--workload", "multi-turn", "--conversations", "3"], "embeddings follow from no answer"),
        (&["--extra-body", r#"{"input":"x"}"#], "--extra-body must not set `input`"),
    ] {
        let run = measured(&server, "run", extra);
        let said = said(&run);
        assert!(run.output.status.code() == Some(2) && said.contains(want), "{extra:?}: {said}");
    }
    let url = server.url();
    let output = keyway_loadtest(&["calibrate", "--url", &url, "--endpoint", "embeddings"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("have no first token"));
    assert!(server.bodies.lock().unwrap().is_empty());
    let output = keyway_loadtest(&["check", "--url", &url, "--endpoint", "embeddings"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("an embedding, in"), "{said}");
}
