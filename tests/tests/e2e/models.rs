//! Hazard: a request reaches a worker that does not serve its model. The gateway's list is the fleet's, and
//! each request goes where its model is, however its body is written; where that cannot be known it is
//! refused, not left to chance.

use std::io::Write as _;

use flate2::{
    Compression,
    write::{DeflateEncoder, GzEncoder, ZlibEncoder},
};
use keyway_tests::openai::{CHAT, FAKE_MODEL, chat_for};
use keyway_tests::{Client, Cluster, Response, eventually, get, post};

async fn two_models() -> Cluster {
    Cluster::builder().fake_with(&["alpha", "common"]).fake_with(&["beta", "common"]).start().await
}

#[tokio::test]
async fn the_list_is_the_union_of_the_workers_lists() {
    let cluster = two_models().await;
    let list = get(cluster.addr(), "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let mut ids: Vec<&str> =
        list["data"].as_array().unwrap().iter().filter_map(|m| m["id"].as_str()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["alpha", "beta", "common"]);
    assert_eq!(list["data"][0]["owned_by"], "tests", "entries are as the worker gives them");
}

#[tokio::test]
async fn each_model_goes_to_a_worker_that_serves_it() {
    let cluster = two_models().await;
    for i in 0..6 {
        for (model, worker) in [("alpha", 0), ("beta", 1)] {
            let body = chat_for(model, &format!("prompt {i}"), false);
            let response = post(cluster.addr(), CHAT, &body).await;
            assert_eq!(cluster.served_by(&response), worker, "{model}");
        }
        assert_eq!(
            post(cluster.addr(), CHAT, &chat_for("common", &format!("{i}"), false)).await.status(),
            200
        );
    }
}

#[tokio::test]
async fn one_models_description_comes_from_a_worker_that_has_it() {
    let cluster = two_models().await;
    for (model, worker) in [("alpha", 0), ("beta", 1), ("alpha", 0), ("beta", 1)] {
        let response = get(cluster.addr(), &format!("/v1/models/{model}")).await;
        assert_eq!(cluster.served_by(&response), worker, "{model}");
    }
    assert_eq!(
        get(cluster.addr(), "/v1/models/org%2Fgamma").await.json()["error"]["code"],
        "model_not_found"
    );
}

/// Anthropic's clients list models in a form of their own, a page at a time.
#[tokio::test]
async fn the_list_has_the_form_of_the_api_that_its_client_speaks() {
    let fleet = Cluster::builder().fake_with(&["alpha", "common"]).fake_with(&["beta"]);
    let cluster = fleet.config("[[model]]\nname = \"alpha\"\naliases = [\"claude\"]\n").start().await;
    let version = [("anthropic-version", "2023-06-01")];
    let mut path = "/v1/models?limit=3".to_owned();
    let mut pages = Vec::new();
    loop {
        let response = send_head(&cluster, &path, &version).await;
        assert_eq!(response.header("request-id"), response.header("x-request-id"));
        let page = response.json();
        let ids: Vec<String> =
            page["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect();
        let ends = (page["first_id"].as_str(), page["last_id"].as_str());
        assert_eq!(ends, (ids.first().map(String::as_str), ids.last().map(String::as_str)));
        path = format!("/v1/models?limit=3&after_id={}", ids.last().unwrap());
        pages.push(ids);
        if page["has_more"] == false {
            break;
        }
    }
    assert_eq!(pages, [vec!["alpha", "beta", "claude"], vec!["common"]]);
    for (path, status, param) in [
        ("/v1/models/claude", 200, "model"),
        ("/v1/models/none", 404, "error"),
        ("/v1/models?limit=0", 400, "error"),
    ] {
        let response = send_head(&cluster, path, &version).await;
        assert_eq!((response.status(), response.json()["type"].as_str()), (status, Some(param)), "{path}");
        assert!(response.header("request-id").is_some());
    }
    let without = get(cluster.addr(), "/v1/models?limit=1").await;
    assert_eq!((without.json()["object"].as_str(), without.header("request-id")), (Some("list"), None));
    assert_eq!(cluster.fakes.iter().map(keyway_tests::FakeWorker::request_count).sum::<usize>(), 0);
}

async fn send_head(cluster: &Cluster, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request("GET", path, headers, b"").await;
    client.response().await
}

#[tokio::test]
async fn an_unknown_model_is_refused_by_name_and_reaches_no_worker() {
    let cluster = two_models().await;
    let response = post(cluster.addr(), CHAT, &chat_for("gamma", "hi", true)).await;
    assert_eq!(response.status(), 404);
    let error = &response.json()["error"];
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    assert!(error["message"].as_str().is_some_and(|m| m.contains("gamma")), "{error}");
    assert_eq!(cluster.fakes.iter().map(keyway_tests::FakeWorker::request_count).sum::<usize>(), 0);
}

#[tokio::test]
async fn a_model_whose_worker_is_gone_is_not_retried_on_workers_without_it() {
    let cluster = two_models().await;
    cluster.fakes[0].stop().await;
    let body = chat_for("alpha", "hi", false);
    eventually!(post(cluster.addr(), CHAT, &body).await.status() == 503, "alpha is unavailable, not unknown");
    assert_eq!(cluster.fakes[1].request_count(), 0);
    assert_eq!(post(cluster.addr(), CHAT, &chat_for("beta", "hi", false)).await.status(), 200);
}

const TRANSCRIPTIONS: &str = "/v1/audio/transcriptions";

async fn send(cluster: &Cluster, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", path, headers, body).await;
    client.response().await
}

/// A form with a file of some size before or behind its model.
fn form(model: &str, boundary: &str, file_first: bool) -> Vec<u8> {
    let field = format!(
        "--{boundary}\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n"
    );
    let mut file =
        format!("--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n")
            .into_bytes();
    file.extend((0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8));
    file.extend(b"\r\n");
    let parts = if file_first { [file, field.into()] } else { [field.into(), file] };
    [&parts.concat(), format!("--{boundary}--\r\n").as_bytes()].concat()
}

fn utf16(text: &str, big: bool) -> Vec<u8> {
    text.encode_utf16().flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() }).collect()
}

#[tokio::test]
async fn a_form_s_model_is_read_and_its_bytes_are_not_touched() {
    let cluster = two_models().await;
    for (kind, boundary) in
        [("multipart/form-data; boundary=x-X", "x-X"), ("Multipart/Form-Data; boundary=\"a b\"", "a b")]
    {
        for (model, worker) in [("alpha", 0), ("beta", 1), ("alpha", 0), ("beta", 1)] {
            for file_first in [false, true] {
                let body = form(model, boundary, file_first);
                for path in [TRANSCRIPTIONS, "/v1/audio/translations", "/v1/images/edits", "/v1/of/tomorrow"]
                {
                    let response = send(&cluster, path, &[("content-type", kind)], &body).await;
                    assert_eq!(cluster.served_by(&response), worker, "{kind} {model} {path}");
                    assert_eq!(cluster.fakes[worker].requests().last().unwrap().body, body);
                }
            }
        }
    }
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let response = send(&cluster, TRANSCRIPTIONS, &form, b"a=b&model=b%65ta").await;
    assert_eq!(cluster.served_by(&response), 1);
}

#[tokio::test]
async fn a_model_is_read_in_every_encoding_that_engines_read_and_goes_on_as_it_came() {
    let cluster = two_models().await;
    for (model, worker) in [("alpha", 0), ("beta", 1), ("alpha", 0), ("beta", 1), ("alpha", 0)] {
        let json = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"hé 😀"}}]}}"#);
        for body in [
            [b"\xef\xbb\xbf", json.as_bytes()].concat(),
            [b"\xff\xfe", &utf16(&json, false)[..]].concat(),
            [b"\xfe\xff", &utf16(&json, true)[..]].concat(),
            utf16(&json, false),
            utf16(&json, true),
            json.chars().flat_map(|char| u32::from(char).to_le_bytes()).collect(),
            format!(r#"{{"model":"{model}","temperature":NaN,"x":[Infinity,-Infinity]}}"#).into_bytes(),
            format!(r#"{{"\ud83d":1,"model":"{model}","messages":"\udc00"}}"#).into_bytes(),
            format!(r#"{{"model":"none","mod\u0065l":"{model}"}}"#).into_bytes(),
            [b"{\"model\":\"", model.as_bytes(), b"\",\"x\":\"\xed\xa0\xbd\"}"].concat(),
        ] {
            let response = post(cluster.addr(), CHAT, &body).await;
            assert_eq!(cluster.served_by(&response), worker, "{:?}", String::from_utf8_lossy(&body));
            assert_eq!(cluster.fakes[worker].requests().last().unwrap().body, body);
        }
    }
}

/// A body in each coding that is undone.
fn compressed(body: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(body).unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
    zlib.write_all(body).unwrap();
    let mut raw = DeflateEncoder::new(Vec::new(), Compression::best());
    raw.write_all(body).unwrap();
    // One block, stored.
    let block = (body.len() as u32) << 3 | 1;
    let zstd = [&[0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x58][..], &block.to_le_bytes()[..3], body].concat();
    vec![
        ("gzip", gzip.finish().unwrap()),
        ("deflate", zlib.finish().unwrap()),
        ("Deflate", raw.finish().unwrap()),
        ("zstd", zstd),
    ]
}

#[tokio::test]
async fn a_compressed_body_goes_to_its_model_s_worker_plain() {
    let cluster = two_models().await;
    for (model, worker) in [("alpha", 0), ("beta", 1), ("alpha", 0)] {
        for length in [1, 3_000] {
            let body = chat_for(model, &"hello ".repeat(length), false);
            for (coding, compressed) in compressed(&body) {
                let headers = [("content-encoding", coding), ("content-type", "application/json")];
                let response = send(&cluster, CHAT, &headers, &compressed).await;
                assert_eq!(cluster.served_by(&response), worker, "{coding} {model}");
                let seen = cluster.fakes[worker].requests().pop().unwrap();
                assert_eq!(
                    (seen.body, seen.head.header("content-encoding")),
                    (body.clone(), None),
                    "{coding}"
                );
            }
        }
    }
}

#[tokio::test]
async fn what_stands_for_far_more_than_it_is_reaches_no_worker() {
    let cluster = two_models().await;
    let bomb = chat_for("alpha", &" ".repeat(16 << 20), false);
    for (coding, compressed) in compressed(&bomb).into_iter().filter(|(coding, _)| *coding != "zstd") {
        let response = send(&cluster, CHAT, &[("content-encoding", coding)], &compressed).await;
        assert_eq!(response.status(), 400, "{coding}");
        assert_eq!(response.json()["error"]["code"], "body_unreadable");
    }
    assert_eq!(cluster.fakes.iter().map(keyway_tests::FakeWorker::request_count).sum::<usize>(), 0);
}

#[tokio::test]
async fn what_names_no_model_or_cannot_be_read_is_refused_where_it_would_be_a_lottery() {
    let cluster = two_models().await;
    let whisper = [("content-type", "multipart/form-data; boundary=x")];
    let gzip = [("content-encoding", "gzip")];
    for (path, headers, body) in [
        (CHAT, &[][..], &br#"{"messages":[]}"#[..]),
        (CHAT, &[], br#"{"model":"","messages":[]}"#),
        (CHAT, &[], b"{\"model\":\"alpha\""),
        (CHAT, &[], b""),
        (CHAT, &gzip, b"no gzip"),
        ("/v1/embeddings", &[], b"\xff\xfe\xfd"),
        (TRANSCRIPTIONS, &whisper, b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\n\r\n--x--"),
    ] {
        let response = send(&cluster, path, headers, body).await;
        assert_eq!(response.status(), 400, "{path} {body:?}");
        let error = &response.json()["error"];
        assert_eq!((&error["code"], &error["param"]), (&"model_required".into(), &"model".into()));
        assert!(
            error["message"].as_str().is_some_and(|said| said.contains("alpha, beta, common")),
            "{error}"
        );
    }
    let response = send(&cluster, CHAT, &[("content-encoding", "br")], b"\x0b\x02\x80").await;
    assert_eq!((response.status(), response.header("accept-encoding")), (415, Some("gzip, deflate, zstd")));
    assert_eq!(response.json()["error"]["code"], "content_encoding_unsupported");
    assert_eq!(cluster.fakes.iter().map(keyway_tests::FakeWorker::request_count).sum::<usize>(), 0);
    // An engine that undoes no gzip reads what is none.
    let response = send(&cluster, CHAT, &gzip, br#"{"model":"beta"}"#).await;
    assert_eq!(cluster.served_by(&response), 1);
    // What is for no model is for anybody.
    assert_eq!(send(&cluster, "/v1/files", &whisper, b"--x--").await.status(), 200);
}

#[tokio::test]
async fn where_one_model_is_served_what_cannot_be_read_is_the_engine_s_to_judge() {
    let cluster = Cluster::builder().fakes(2).start().await;
    for (headers, body) in [
        (&[("content-encoding", "br")][..], &b"\x0b\x02\x80"[..]),
        (&[("content-encoding", "gzip")], b"no gzip"),
        (&[], br#"{"messages":[]}"#),
        (&[], b"nonsense"),
    ] {
        assert_eq!(send(&cluster, CHAT, headers, body).await.status(), 200, "{body:?}");
        let seen =
            cluster.fakes.iter().flat_map(keyway_tests::FakeWorker::requests).find(|seen| seen.body == body);
        let coding = headers.first().map(|(_, coding)| *coding);
        assert_eq!(seen.unwrap().head.header("content-encoding"), coding, "it came as it was sent");
    }
}

#[tokio::test]
async fn a_fleet_may_answer_what_names_no_model_if_it_is_told_to() {
    let fleet = Cluster::builder().fake_with(&["alpha"]).fake_with(&[FAKE_MODEL]);
    let cluster = fleet.config("[routing]\nrequire_model = false\n").start().await;
    for body in [&br#"{"messages":[]}"#[..], b"nonsense"] {
        assert_eq!(post(cluster.addr(), CHAT, body).await.status(), 200);
    }
}
