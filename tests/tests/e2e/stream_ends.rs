//! Hazard: a stream ends, or says that it failed, in another way than the gateway expects: half an answer
//! looks whole, an error is taken for content, an answer that another worker could have given is lost, or
//! what is no content counts as a first token.

use keyway_tests::openai::CHAT;
use keyway_tests::{Call, Client, Cluster, End, Exchange, FakeWorker, Next, Protocol, Response, eventually};
use serde_json::Value;

/// An API, as a worker streams it.
struct Api {
    path: &'static str,
    request: &'static str,
    /// What is said before there is content.
    opening: &'static str,
    content: &'static str,
    /// What ends it well.
    end: &'static str,
}

const APIS: [Api; 4] = [
    Api {
        path: CHAT,
        request: r#"{"model":"fake-model","stream":true,"messages":[{"role":"user","content":"hi"}]}"#,
        opening: ": ping\n\ndata: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
        content: "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n",
        end: "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
    },
    Api {
        path: "/v1/completions",
        request: r#"{"model":"fake-model","stream":true,"prompt":"hi"}"#,
        opening: "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":null}]}\n\n",
        content: "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n",
        end: "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n",
    },
    Api {
        path: "/v1/responses",
        request: r#"{"model":"fake-model","stream":true,"input":"hi"}"#,
        opening: "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r1\",\"error\":null}}\n\n",
        content: "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
        end: "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r1\",\"error\":null}}\n\n",
    },
    Api {
        path: "/v1/messages",
        request: r#"{"model":"fake-model","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hi"}]}"#,
        opening: "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m1\",\"stop_reason\":null}}\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n",
        content: "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n",
        end: "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    },
];

/// How a stream's bytes end.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// By its last chunk.
    Whole,
    /// The connection breaks.
    Cut,
}

const HALF: &str = "data: {\"half\":\"of";
/// What a worker says last when it fails, and how its bytes end then.
const FAILURES: [(&str, How); 10] = [
    ("", How::Cut),
    ("", How::Whole),
    (HALF, How::Whole),
    (HALF, How::Cut),
    (
        "data: {\"error\":{\"message\":\"EngineCore encountered an issue\",\"type\":\"InternalServerError\",\"code\":500}}\n\ndata: [DONE]\n\n",
        How::Whole,
    ),
    ("data:{\"error\":\"engine dead\"}\r\n\r\n", How::Cut),
    ("data: {\"object\":\"error\",\"message\":\"engine dead\",\"code\":503}\n\ndata: [DONE]\n\n", How::Whole),
    (
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"x\"}}\n\n",
        How::Whole,
    ),
    ("event:error\r\ndata:{\"message\":\"engine dead\"}\r\n\r\n", How::Whole),
    ("data: {\"detail\":\"engine dead\"}\n\n", How::Whole),
];
const ABORT: &str = "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{},\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n";

async fn two_workers(config: &str) -> Cluster {
    let cluster = Cluster::builder().fakes(2).config(config).start().await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    cluster
}

async fn any_call(cluster: &Cluster) -> Call {
    tokio::select! { call = cluster.fakes[0].call() => call, call = cluster.fakes[1].call() => call }
}

async fn streams(mut call: Call, parts: &[&str], how: How) {
    call.begin_stream().await;
    for part in parts.iter().filter(|part| !part.is_empty()) {
        call.chunk(part.as_bytes()).await;
    }
    match how {
        How::Whole => call.end().await,
        How::Cut => call.cut(),
    }
}

/// What the client of a request gets whose first worker streams these parts, and any other one a whole
/// answer.
async fn asked(cluster: &Cluster, api: &Api, first: &[&str], how: How) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.post(api.path, api.request.as_bytes()).await;
    streams(any_call(cluster).await, first, how).await;
    let answered = async {
        loop {
            streams(any_call(cluster).await, &[api.opening, api.content, api.end], How::Whole).await;
        }
    };
    tokio::select! { response = client.response() => response, () = answered => unreachable!("it goes on for ever") }
}

#[tokio::test]
async fn a_stream_that_fails_before_its_content_is_another_worker_s_answer() {
    let cluster = two_workers("").await;
    for api in &APIS {
        let aborted = matches!(api.path, CHAT | "/v1/completions").then_some((ABORT, How::Whole));
        for (last, how) in FAILURES.into_iter().chain(aborted) {
            for opening in ["", api.opening] {
                cluster.gateway.wait_ready(2).await;
                let whole = [api.opening, api.content, api.end].concat();
                let response = asked(&cluster, api, &[opening, last], how).await;
                let what = format!("{} after {opening:?}, {last:?}, {how:?}", api.path);
                assert_eq!((response.status(), response.end), (200, End::Complete), "{what}");
                // A comment may come from each of them.
                let said = |text: String| text.replace(": ping\n\n", "");
                assert_eq!(said(response.text()), said(whole), "{what}");
                // Nobody is out because of this: a good answer lies between two failures of a worker.
                for _ in 0..5 {
                    asked(&cluster, api, &[api.opening, api.content, api.end], How::Whole).await;
                }
            }
        }
    }
    cluster.gateway.idle().await;
}

/// What a worker says that holds the request at fault; one that is set up wrongly says so of any.
const BLAMES: [&str; 4] = [
    "data: {\"error\":{\"message\":\"The model `m` does not exist.\",\"type\":\"NotFoundError\",\"code\":404}}\n\ndata: [DONE]\n\n",
    "data:{\"error\":{\"message\":\"Unauthorized\",\"code\":\"401\"}}\r\n\r\n",
    "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"not_found_error\",\"message\":\"m\"}}\n\n",
    "data: {\"object\":\"error\",\"message\":\"no template\",\"type\":\"BadRequestError\",\"code\":400}\n\n",
];

#[tokio::test]
async fn a_stream_that_begins_by_blaming_its_request_is_another_worker_s_answer() {
    let cluster = two_workers("").await;
    for api in &APIS {
        for blame in BLAMES {
            cluster.gateway.wait_ready(2).await;
            let response = asked(&cluster, api, &[api.opening, blame], How::Whole).await;
            let whole = [api.opening, api.content, api.end].concat();
            let said = |text: String| text.replace(": ping\n\n", "");
            assert_eq!(said(response.text()), said(whole), "{} after {blame:?}", api.path);
            for _ in 0..5 {
                asked(&cluster, api, &[api.opening, api.content, api.end], How::Whole).await;
            }
        }
    }
}

#[tokio::test]
async fn what_every_worker_blames_a_request_for_is_its_own_fault_and_is_asked_once_then() {
    for (api, blame) in [(&APIS[0], BLAMES[0]), (&APIS[1], BLAMES[0]), (&APIS[3], BLAMES[2])] {
        let cluster = two_workers("").await;
        let mut client = Client::connect(cluster.addr()).await;
        // Both are asked at first, then one.
        for calls in [2, 1, 1] {
            client.post(api.path, api.request.as_bytes()).await;
            for _ in 0..calls {
                streams(any_call(&cluster).await, &[blame], How::Whole).await;
            }
            let response = client.response().await;
            assert_eq!((response.text(), response.end), (blame.to_owned(), End::Complete), "{}", api.path);
        }
        // It says nothing of the workers: another client's request is served by either.
        cluster.gateway.wait_ready(2).await;
        for _ in 0..4 {
            let response = asked(&cluster, api, &[api.opening, api.content, api.end], How::Whole).await;
            assert_eq!(response.end, End::Complete);
        }
    }
}

#[tokio::test]
async fn what_workers_say_that_they_failed_at_is_no_client_s_fault_and_is_asked_elsewhere_each_time() {
    let cluster = two_workers("").await;
    let mut client = Client::connect(cluster.addr()).await;
    let (failed, how) = FAILURES[4];
    for _ in 0..3 {
        client.post(CHAT, APIS[0].request.as_bytes()).await;
        for _ in 0..2 {
            streams(any_call(&cluster).await, &[failed], how).await;
        }
        assert_eq!(client.response().await.text(), failed);
        cluster.gateway.wait_ready(2).await;
    }
}

#[tokio::test]
async fn the_one_worker_there_is_has_the_last_word_and_stays() {
    let cluster = Cluster::builder().fakes(1).start().await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let mut client = Client::connect(cluster.addr()).await;
    for blame in [BLAMES[0], BLAMES[1], BLAMES[0], BLAMES[1], BLAMES[0], BLAMES[1]] {
        client.post(CHAT, APIS[0].request.as_bytes()).await;
        streams(worker.call().await, &[blame], How::Whole).await;
        let response = client.response().await;
        assert_eq!((response.text(), response.end), (blame.to_owned(), End::Complete));
        cluster.gateway.wait_ready(1).await;
    }
}

/// What an API's clients raise an error on: the error's message.
fn raised(api: &Api, text: &str) -> Option<String> {
    let text = text.replace("\r\n", "\n");
    let event = text.trim_end().rsplit("\n\n").next()?;
    let named = event.strip_prefix("event: error\n");
    let data = named.unwrap_or(event).strip_prefix("data:")?.trim();
    let data: Value = serde_json::from_str(data).ok()?;
    let error = match api.path {
        "/v1/messages" => named.filter(|_| data["type"] == "error").map(|_| &data["error"])?,
        "/v1/responses" => Some(&data["error"]).filter(|_| data["type"] == "error")?,
        _ => &data["error"],
    };
    Some(error["message"].as_str()?.to_owned())
}

#[tokio::test]
async fn a_stream_that_fails_behind_its_content_ends_by_an_error_that_its_api_s_clients_raise() {
    let cluster = two_workers("").await;
    for api in &APIS {
        for (last, how) in FAILURES {
            cluster.gateway.wait_ready(2).await;
            let response = asked(&cluster, api, &[api.opening, api.content, last], how).await;
            let (text, what) = (response.text(), format!("{} after {last:?}, {how:?}", api.path));
            assert!(text.starts_with(&[api.opening, api.content].concat()), "{what}: {text}");
            assert!(!text.contains(HALF), "{what}: whole events only: {text}");
            let own_words = last.contains("\"error\":") && response.end == End::Complete;
            if own_words {
                // The worker's own error, in the words of its API, passes as it came.
                assert!(text.ends_with(last), "{what}: {text}");
            } else {
                let message = raised(api, &text).unwrap_or_else(|| panic!("{what}: {text}"));
                assert!(!message.is_empty() && !text.contains("[DONE]"), "{what}: {text}");
                assert_eq!(response.end, End::Aborted, "{what}");
            }
            for _ in 0..2 {
                asked(&cluster, api, &[api.opening, api.content, api.end], How::Whole).await;
            }
        }
    }
    let metrics = cluster.gateway.metrics().await;
    let whole = metrics.sum("keyway_requests_total", &[("outcome", "complete")]);
    assert_eq!(whole, (2 * APIS.len() * FAILURES.len()) as f64, "none that failed counts as whole");
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn an_output_that_its_engine_aborts_is_no_whole_answer() {
    let cluster = two_workers("").await;
    for api in &APIS[..2] {
        cluster.gateway.wait_ready(2).await;
        let response = asked(&cluster, api, &[api.content, ABORT], How::Whole).await;
        let text = response.text();
        assert_eq!(response.end, End::Aborted, "{text}");
        assert!(raised(api, &text).is_some() && !text.contains("\"abort\""), "{text}");
    }
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "worker_aborted")]), 2.0);
}

#[tokio::test]
async fn a_stream_that_has_said_its_end_is_whole_however_its_bytes_end() {
    let cluster = two_workers("").await;
    for api in &APIS {
        let ends = [(api.end, How::Whole), (api.end, How::Cut), (api.end.trim_end(), How::Whole)];
        let done = matches!(api.path, CHAT | "/v1/completions").then_some(("data: [DONE]\n", How::Whole));
        for (end, how) in ends.into_iter().chain(done) {
            let response = asked(&cluster, api, &[api.opening, api.content, end], how).await;
            assert_eq!(response.end, End::Complete, "{} {end:?} {how:?}", api.path);
            assert_eq!(response.text(), [api.opening, api.content, end].concat());
        }
    }
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(
        metrics.sum("keyway_requests_total", &[("outcome", "complete")]),
        metrics.sum("keyway_requests_total", &[])
    );
}

#[tokio::test]
async fn line_ends_and_a_mark_in_front_make_no_difference() {
    let cluster = two_workers("").await;
    for api in &APIS {
        for (from, to) in [("\n", "\r\n"), ("\n", "\r"), ("data: ", "data:"), ("\n\n", "\nid: 7\n\n")] {
            let all = [api.opening, api.content, api.end].map(|part| part.replace(from, to));
            let parts = all.each_ref().map(String::as_str);
            let response = asked(&cluster, api, &parts, How::Whole).await;
            assert_eq!(
                (response.text(), response.end),
                (parts.concat(), End::Complete),
                "{} {to:?}",
                api.path
            );
            // Restarts are within the retry budget: a fifth of the requests.
            for _ in 0..5 {
                asked(&cluster, api, &parts, How::Whole).await;
            }
            // Cut behind its content, it is seen as cut; cut before, another worker answers.
            let response = asked(&cluster, api, &parts[..2], How::Whole).await;
            assert_eq!(response.end, End::Aborted, "{} {to:?}", api.path);
            let response = asked(&cluster, api, &parts[..1], How::Whole).await;
            assert_eq!(response.end, End::Complete, "{} {to:?}", api.path);
            assert!(response.text().ends_with(&[api.content, api.end].concat()), "{}", response.text());
        }
    }
    let marked = ["\u{feff}", APIS[0].content, APIS[0].end].concat();
    let response = asked(&cluster, &APIS[0], &[&marked], How::Whole).await;
    assert_eq!((response.text(), response.end), (marked, End::Complete));
}

#[tokio::test]
async fn the_first_token_is_a_generated_one() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let count = async || cluster.gateway.metrics().await.sum("keyway_time_to_first_token_seconds_count", &[]);
    for (i, api) in APIS.iter().enumerate() {
        let mut exchange =
            Exchange::post(Protocol::Http1, cluster.addr(), api.path, api.request.as_bytes()).await;
        let mut call = cluster.fakes[0].call().await;
        call.begin_stream().await;
        call.chunk(api.opening.as_bytes()).await;
        exchange.status().await;
        exchange.next_event().await.event();
        assert_eq!(count().await, i as f64, "{}: an opening is none", api.path);
        call.chunk(api.content.as_bytes()).await;
        eventually!(count().await == (i + 1) as f64, "{}: content is one", api.path);
        call.chunk(api.end.as_bytes()).await;
        call.end().await;
        while !matches!(exchange.next_event().await, Next::End { .. }) {}
    }
}

#[tokio::test]
async fn an_event_that_is_too_large_is_held_against_no_worker() {
    let cluster = two_workers("[limits]\nmax_event_bytes = 5000\n").await;
    // More than is read at once: what comes as a whole is never held.
    let large = format!("{{\"x\":\"{}\"}}", "a".repeat(400_000));
    for api in &APIS {
        for _ in 0..6 {
            let mut client = Client::connect(cluster.addr()).await;
            client.post(api.path, api.request.as_bytes()).await;
            let mut call = any_call(&cluster).await;
            call.begin_stream().await;
            call.chunk(api.content.as_bytes()).await;
            // It is given up somewhere in the middle.
            call.try_event(&large).await;
            let response = client.response().await;
            let message = raised(api, &response.text()).unwrap_or_else(|| panic!("{}", response.text()));
            assert!(message.contains("5000") && message.contains("limits.max_event_bytes"), "{message}");
        }
    }
    assert_eq!(cluster.gateway.ready_workers().await, 2);
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "event_too_large")]), 24.0);
    assert_eq!(metrics.sum("keyway_ejections_total", &[]), 0.0);
    // One below the limit passes, in whatever pieces.
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, APIS[0].request.as_bytes()).await;
    let mut call = any_call(&cluster).await;
    call.begin_stream().await;
    let fits = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "a".repeat(4_000));
    for piece in fits.as_bytes().chunks(999) {
        call.chunk(piece).await;
    }
    call.done().await;
    assert!(client.response().await.text().contains(&fits));
}

#[tokio::test]
async fn an_unstreamed_answer_that_ends_with_its_connection_is_whole_only_as_json() {
    let cluster = two_workers("").await;
    let whole = r#"{"id":"c1","choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"error":null}"#;
    for (body, end) in [
        (whole, End::Complete),
        (&whole[..40], End::Aborted),
        (&whole[..1], End::Aborted),
        ("", End::Complete),
    ] {
        cluster.gateway.wait_ready(2).await;
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, br#"{"model":"fake-model","messages":[]}"#).await;
        let mut call = any_call(&cluster).await;
        call.head(200, &[("content-type", "application/json"), ("connection", "close")]).await;
        call.raw(body.as_bytes()).await;
        client.head().await;
        call.cut();
        assert_eq!(client.body().await.1, end, "{body}");
    }
}

#[tokio::test]
async fn an_unstreamed_answer_that_is_an_error_is_no_success_and_null_is_none() {
    let cluster = two_workers("").await;
    for (body, outcome) in [
        (r#"{"error":{"message":"engine dead","code":500}}"#, "worker_error_event"),
        (r#"{"object":"error","message":"engine dead"}"#, "worker_error_event"),
        (r#"{"id":"r1","object":"response","error":null,"output":[{"text":"say \"error\""}]}"#, "complete"),
    ] {
        let of = async |outcome| {
            cluster.gateway.metrics().await.sum("keyway_requests_total", &[("outcome", outcome)])
        };
        let before = of(outcome).await;
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, br#"{"model":"fake-model","messages":[]}"#).await;
        any_call(&cluster).await.respond(200, &[("content-type", "application/json")], body.as_bytes()).await;
        assert_eq!(client.response().await.text(), body);
        eventually!(of(outcome).await == before + 1.0, "{body}");
    }
}

#[tokio::test]
async fn the_gateway_s_own_refusals_are_in_the_shape_of_the_api() {
    let cluster = two_workers("").await;
    let refused = async |path: &str| {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(path, br#"{"model":"nobody-has-this","messages":[]}"#).await;
        client.response().await.json()
    };
    let messages = refused("/v1/messages").await;
    assert_eq!((&messages["type"], &messages["error"]["type"]), (&"error".into(), &"not_found_error".into()));
    let chat = refused(CHAT).await;
    assert_eq!((&chat["type"], &chat["error"]["code"]), (&Value::Null, &"model_not_found".into()));
}

#[tokio::test]
async fn what_is_silent_at_a_worker_whose_port_is_closed_is_lost_there() {
    let cluster = Cluster::builder().fakes(2).policy("round-robin").start().await;
    let [leaving, staying] = &cluster.fakes[..] else { panic!("two workers") };
    leaving.manual();
    let api = &APIS[0];
    // What each of three requests has from the worker that leaves: not even a head, an opening, content.
    let (mut clients, mut calls) = (Vec::new(), Vec::new());
    for said in [None, Some([api.opening, ""]), Some([api.opening, api.content])] {
        let (client, mut call) = loop {
            let mut client = Client::connect(cluster.addr()).await;
            client.post(api.path, api.request.as_bytes()).await;
            // Every other one is served at once.
            tokio::select! {
                call = leaving.call() => break (client, call),
                _ = client.response() => {}
            }
        };
        if let Some(said) = said {
            call.begin_stream().await;
            call.chunk(said.concat().as_bytes()).await;
        }
        clients.push(client);
        calls.push(call);
    }
    // Its calls stay open, in this test's hands, as an engine leaves them that was told to end.
    leaving.stop().await;
    let mut answers = Vec::new();
    for mut client in clients {
        answers.push(client.response().await);
    }
    for answer in &answers[..2] {
        assert_eq!((answer.status(), &answer.end), (200, &End::Complete), "{}", answer.text());
        assert!(answer.text().contains("three") && answer.text().contains("[DONE]"), "{}", answer.text());
    }
    assert_eq!(answers[2].end, End::Aborted);
    assert!(raised(api, &answers[2].text()).is_some(), "{}", answers[2].text());
    for call in calls {
        call.must_be_aborted().await;
    }
    assert!(staying.request_count() >= 2);
    cluster.gateway.idle().await;
}
