//! Streams of every shape: which answers are good, which class the bad ones have, and that times go by
//! generated content.

use serde_json::Value;

use super::{Run, assert_measured, keyway_loadtest};
use crate::support::{FakeServer, PAUSE, PAUSE_MS, Script};

const ROLE: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const STOP: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// Sends `requests` one after another.
fn ask(server: &FakeServer, requests: usize, endpoint: &str) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let (url, out, requests) = (server.url(), dir.path().join("out"), requests.to_string());
    let args = ["run", "--url", &url, "--model", "fake", "--isl", "20", "--osl", "2", "--concurrency", "1"];
    let output = keyway_loadtest(&args)
        .args([
            "--requests",
            &requests,
            "--endpoint",
            endpoint,
            "--bytes-per-token",
            "4",
            "--ui",
            "none",
            "-o",
        ])
        .arg(&out)
        .output()
        .unwrap();
    let report = std::fs::read(out.join("run.json"));
    let report = report.map_or(Value::Null, |json| serde_json::from_slice(&json).unwrap());
    Run { output, report, dir }
}

/// Classes and counts of the failures.
fn failures(run: &Run) -> Vec<(String, u64)> {
    let rows = run.report["errors"].as_array().unwrap();
    let row = |row: &Value| (row["class"].as_str().unwrap().to_owned(), row["count"].as_u64().unwrap());
    let mut rows: Vec<_> = rows.iter().map(row).collect();
    rows.sort();
    rows
}

#[test]
fn errors_in_other_words_are_failures() {
    let server = FakeServer::start(|turn| match turn {
        0 => {
            Script::Said(&[TOKEN, "data: {\"object\":\"error\",\"message\":\"dead\",\"code\":500}\n\n", DONE])
        }
        1 => Script::Said(&[TOKEN, "event: error\ndata: {\"message\":\"dead\"}\n\n", DONE]),
        2 => Script::Said(&[TOKEN, "data: {\"type\":\"error\",\"error\":{\"message\":\"dead\"}}\n\n", DONE]),
        3 => Script::Said(&[TOKEN, "data: {\"error\":\"dead\"}\n\n", STOP, DONE]),
        4 => Script::Said(&[TOKEN, "data: {\"detail\":\"dead\"}\n\n", STOP, DONE]),
        5 => Script::Said(&[TOKEN, "event: error\r\ndata: dead\r\n\r\n", DONE]),
        6 => Script::Said(&[
            TOKEN,
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"abort\"}]}\n\n",
            DONE,
        ]),
        7 => Script::Said(&[
            TOKEN,
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"error\"}]}\n\n",
            DONE,
        ]),
        8 => Script::Said(&[TOKEN, USAGE, DONE]),
        9 => Script::Said(&[TOKEN, TOKEN]),
        10 => Script::Said(&[TOKEN, STOP, USAGE]),
        11 => Script::Said(&[TOKEN, STOP, "data: [DO"]),
        12 => Script::Whole("{\"error\":{\"message\":\"dead\"}}"),
        13 => Script::Whole("{\"object\":\"error\",\"message\":\"dead\"}"),
        _ => Script::Said(&[
            TOKEN,
            "data: {\"error\":null,\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n",
            STOP,
            DONE,
        ]),
    });
    let run = ask(&server, 16, "chat");
    assert_measured(&run);
    assert_eq!(run.report["requests"]["ok"], 2, "{}", run.report["errors"]);
    let want = [("aborted", 2), ("cut", 3), ("error_body", 2), ("error_event", 6), ("unfinished", 1)];
    assert_eq!(failures(&run), want.map(|(class, count)| (class.to_owned(), count)));
    let (ttft, errors) = (&run.report["response"]["ttft"], run.report["errors"].to_string());
    assert_eq!(ttft["n"], 2, "failed answers are in no latency figure");
    assert!(errors.contains("finish reason \\\"abort\\\"") && errors.contains("\"dead\""), "{errors}");
}

#[test]
fn whatever_the_standard_allows_is_a_good_answer() {
    let server = FakeServer::start(|turn| match turn {
        0 => Script::Said(&[
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\r\n\r\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\r\n\r",
            "\ndata: [DONE]\r\n\r\n",
        ]),
        1 => Script::Said(&[
            "\u{feff}data:{\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata:{\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}]}\n\n",
            "data:{\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\ndata:[DONE]\n\n",
        ]),
        2 => Script::Said(&[
            ": hi\n\nid: 7\nevent: message\ndata: {\"choices\":\ndata: [{\"delta\":{\"content\":\"a\"}}]}\n\n: hi\n\n",
            TOKEN,
            STOP,
            USAGE,
            DONE,
        ]),
        _ => Script::Said(&[
            "data: {\"choices\":[{\"delta\":{\"reasoning\":\"a\"}}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n",
            "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\"}}]}}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n",
            STOP,
            DONE,
        ]),
    });
    let run = ask(&server, 4, "chat");
    assert_measured(&run);
    assert_eq!(run.report["requests"]["ok"], 4, "{}", run.report["errors"]);
    assert_eq!(
        (&run.report["tokens"]["prompt"], &run.report["tokens"]["completion"]),
        (&28.into(), &8.into())
    );
    assert_eq!((&run.report["itl"]["n"], &run.report["tokens"]["per_event"]), (&4.into(), &1.0.into()));
}

#[test]
fn the_first_token_is_the_first_generated_content_in_every_api() {
    for (endpoint, choose) in [
        (
            "chat",
            (|_| Script::Said(&[": hi\n\n", ROLE, PAUSE, TOKEN, TOKEN, STOP, USAGE, DONE]))
                as fn(usize) -> Script,
        ),
        ("completions", |_| {
            Script::Said(&[
                "data: {\"choices\":[{\"text\":\"\"}]}\n\n",
                PAUSE,
                "data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
                "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\n",
                USAGE,
                DONE,
            ])
        }),
        ("responses", |_| {
            Script::Said(&[
                "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\",\"error\":null}}\n\n",
                "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"response\":{}}\n\n",
                PAUSE,
                "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
                "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"b\"}\n\n",
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"usage\":{\"input_tokens\":7,\"output_tokens\":2}}}\n\n",
            ])
        }),
        ("messages", |_| {
            Script::Said(&[
                "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[],\"usage\":{\"input_tokens\":7,\"output_tokens\":0}}}\n\n",
                "event: ping\ndata: {\"type\":\"ping\"}\n\n",
                PAUSE,
                "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
                "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n",
                "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"b\"}}\n\n",
                "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":2}}\n\n",
                "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
            ])
        }),
    ] {
        let server = FakeServer::start(choose);
        let run = ask(&server, 3, endpoint);
        assert_measured(&run);
        let report = &run.report;
        assert_eq!(report["requests"]["ok"], 3, "{endpoint}: {}", report["errors"]);
        let first_ms = report["service"]["ttft"]["p50"].as_f64().unwrap();
        assert!(first_ms >= PAUSE_MS as f64, "{endpoint}: {first_ms}");
        assert_eq!(report["itl"]["n"], 3, "{endpoint}: two tokens, one time between them");
        let counts = (&report["tokens"]["prompt"], &report["tokens"]["completion"]);
        assert_eq!(counts, (&21.into(), &6.into()), "{endpoint}");
    }
}

#[test]
fn an_answer_without_content_has_its_end_for_a_first_token() {
    let server = FakeServer::start(|_| Script::Said(&[ROLE, PAUSE, STOP, DONE]));
    let run = ask(&server, 2, "chat");
    assert_measured(&run);
    assert_eq!((&run.report["requests"]["ok"], &run.report["itl"]), (&2.into(), &Value::Null));
    assert!(run.report["service"]["ttft"]["p50"].as_f64().unwrap() >= PAUSE_MS as f64);
}
