//! Hazard: a tenant with a limit of tokens has more than it allows: by another API, by a path written in
//! another way, by leaving before the usage, by asking for it in two ways, or by many requests at once. Or it
//! has less, as what nobody had is charged.
//!
//! A limit of six a minute lets one token come at once and one more in ten seconds, so what a tenant owes can
//! be read from `retry-after`, however slow the machine is.

use keyway_tests::openai::{CHAT, delta, usage_chunk};
use keyway_tests::{Call, Client, FakeWorker, Response, eventually};
use serde_json::{Value, json};

use crate::tenants::{Setup, setup, table};

/// Lets one token come at once, and one more in ten seconds.
const SIX: &str = "tokens_per_minute = 6.0";

/// What each worker here says that an answer has taken, in all.
const TAKEN: f64 = 5_300.0;

/// This many tenants `t0`, `t1`, … with keys of the same names.
async fn tenants(n: usize, limits: &str) -> Setup {
    let tables: String = (0..n).map(|i| table(&format!("t{i}"), &format!("t{i}"), limits)).collect();
    let setup = setup(1, &tables, "isolate = false\n").await;
    setup.workers[0].manual();
    setup
}

async fn send(setup: &Setup, tenant: &str, path: &str, kind: &str, body: &[u8]) -> Client {
    let bearer = format!("Bearer {tenant}");
    let mut client = Client::connect(setup.gateway.addr).await;
    let headers = [("authorization", bearer.as_str()), ("content-type", kind), ("accept-encoding", "gzip")];
    client.request("POST", path, &headers, body).await;
    client
}

async fn post(setup: &Setup, tenant: &str, path: &str, body: &Value) -> Client {
    send(setup, tenant, path, "application/json", body.to_string().as_bytes()).await
}

/// What a tenant owes, in tokens; 0 or less: nothing. Asked where no worker has to answer.
async fn owes(setup: &Setup, tenant: &str) -> f64 {
    let answer = post(setup, tenant, "/nowhere", &json!({})).await.response().await;
    match answer.status() {
        429 => answer.header("retry-after").unwrap().parse::<f64>().unwrap() / 10.0 - 1.0,
        _ => 0.0,
    }
}

/// Waits until a tenant owes so much, but for the few tokens that come meanwhile.
async fn must_owe(setup: &Setup, tenant: &str, tokens: std::ops::RangeInclusive<f64>, what: &str) {
    let last = std::cell::Cell::new(0.0);
    let is_owed = async || {
        last.set(owes(setup, tenant).await);
        (tokens.start() - 8.0..=*tokens.end()).contains(&last.get())
    };
    eventually!(is_owed().await, "{what}: {} tokens are owed, not {tokens:?}", last.get());
}

/// A prompt of about a hundred tokens.
fn prompt() -> String {
    "some words that are of no use here ".repeat(12)
}

fn chat(stream: bool) -> Value {
    json!({"model": "fake-model", "stream": stream, "messages": [{"role": "user", "content": prompt()}]})
}

fn named(name: &str, mut data: Value) -> String {
    data["type"] = json!(name);
    format!("event: {name}\ndata: {data}\n\n")
}

async fn say(mut call: Call, events: &[String]) {
    call.begin_stream().await;
    for event in events {
        call.chunk(event.as_bytes()).await;
    }
    call.end().await;
}

#[tokio::test]
async fn the_usage_of_every_api_is_charged_at_whatever_path() {
    let openai = json!({"prompt_tokens": 5_000, "completion_tokens": 300, "total_tokens": 5_300});
    let of_responses = json!({"input_tokens": 5_000, "output_tokens": 300, "total_tokens": 5_300, "input_tokens_details": {"cached_tokens": 4_000}});
    let of_messages = json!({"input_tokens": 1_000, "cache_read_input_tokens": 3_000, "cache_creation_input_tokens": 1_000, "output_tokens": 300});
    let answer = |usage: &Value| json!({"id": "x", "usage": usage});
    let choices = json!({"id": "c", "choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}], "usage": openai});
    let cases: Vec<(&str, Value)> = vec![
        ("/v1/chat/completions", choices.clone()),
        ("/v1/completions", answer(&openai)),
        ("/v1/responses", answer(&of_responses)),
        ("/v1/messages", answer(&of_messages)),
        ("/v1/messages", answer(&json!({"input_tokens": 5_000, "output_tokens": 300}))),
        (
            "/v1/embeddings",
            answer(&json!({"prompt_tokens": 5_300, "total_tokens": 5_300, "completion_tokens": null})),
        ),
        ("/v1/rerank", answer(&json!({"total_tokens": 5_300}))),
        (
            "/v1/audio/transcriptions",
            answer(&json!({"type": "tokens", "input_tokens": 5_000, "output_tokens": 300})),
        ),
        ("/v1/images/generations", answer(&of_responses)),
        ("/generate", json!({"text": "a", "meta_info": {"prompt_tokens": 5_000, "completion_tokens": 300}})),
        ("/v1/cha%74/completions", choices.clone()),
        ("/v1/%63hat/completions", choices.clone()),
        ("/v1//messages", answer(&of_messages)),
        ("/v1/messages/", answer(&of_messages)),
        ("/v1/respon%73es?x=/v1/models", answer(&of_responses)),
        ("/v1/nobody/knows/this", answer(&openai)),
    ];
    let setup = tenants(cases.len(), SIX).await;
    for (i, (path, answer)) in cases.iter().enumerate() {
        let tenant = format!("t{i}");
        let mut client = post(&setup, &tenant, path, &chat(false)).await;
        let call = setup.workers[0].call().await;
        assert_eq!(call.request.head.header("accept-encoding"), Some("identity"), "{path}");
        call.respond_json(200, answer).await;
        let response = client.response().await;
        assert_eq!((response.status(), response.json()), (200, answer.clone()), "{path}");
        must_owe(&setup, &tenant, TAKEN - 1.0..=TAKEN, path).await;
        let refused = post(&setup, &tenant, path, &chat(false)).await.response().await;
        assert_eq!(refused.status(), 429, "{path}");
    }
    assert_eq!(setup.workers[0].request_count(), cases.len());
    setup.gateway.idle().await;
}

#[tokio::test]
async fn the_usage_of_every_api_s_stream_is_charged() {
    let openai = json!({"prompt_tokens": 5_000, "completion_tokens": 300, "total_tokens": 5_300});
    let of_responses = json!({"input_tokens": 5_000, "output_tokens": 300});
    let token = format!("data: {}\n\n", delta("one"));
    let done = "data: [DONE]\n\n".to_owned();
    let finish =
        format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}));
    let last = format!("data: {}\n\n", json!({"choices": [], "usage": openai}));
    let text = named("response.output_text.delta", json!({"delta": "one"}));
    let created = named("response.created", json!({"response": {"id": "r", "usage": null}}));
    let end_of = |name: &str| {
        named(
            name,
            json!({"response": {"id": "r", "output": [{"content": [{"text": "one"}]}], "usage": of_responses}}),
        )
    };
    let start = named(
        "message_start",
        json!({"message": {"content": [], "usage": {"input_tokens": 1_000, "cache_read_input_tokens": 4_000, "output_tokens": 1}}}),
    );
    let block =
        named("content_block_delta", json!({"index": 0, "delta": {"type": "text_delta", "text": "one"}}));
    let stop = named(
        "message_delta",
        json!({"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 300}}),
    );
    let over = named("message_stop", json!({}));
    let heard = named(
        "transcript.text.done",
        json!({"text": "one", "usage": {"type": "tokens", "input_tokens": 5_000, "output_tokens": 300}}),
    );
    let cases: Vec<(&str, Value, Vec<String>)> = vec![
        (
            CHAT,
            json!({"include_usage": true}),
            vec![token.clone(), finish.clone(), last.clone(), done.clone()],
        ),
        ("/v1/responses", Value::Null, vec![created.clone(), text.clone(), end_of("response.completed")]),
        ("/v1/responses", Value::Null, vec![created.clone(), text.clone(), end_of("response.incomplete")]),
        ("/v1/responses", Value::Null, vec![created, text, end_of("response.failed")]),
        ("/v1/messages", Value::Null, vec![start.clone(), block.clone(), stop.clone(), over.clone()]),
        ("/v1/messages", Value::Null, vec![[start, block, stop, over].concat()]),
        ("/v1/audio/transcriptions", Value::Null, vec![heard]),
        ("/v1/chat/completion%73", json!({"include_usage": true}), vec![token, finish, last, done]),
    ];
    let setup = tenants(cases.len(), SIX).await;
    for (i, (path, options, events)) in cases.iter().enumerate() {
        let (tenant, mut body) = (format!("t{i}"), chat(true));
        body["stream_options"] = options.clone();
        let mut client = post(&setup, &tenant, path, &body).await;
        say(setup.workers[0].call().await, events).await;
        assert_eq!(client.response().await.text(), events.concat(), "{path}");
        must_owe(&setup, &tenant, TAKEN - 1.0..=TAKEN, path).await;
    }
    setup.gateway.idle().await;
}

#[tokio::test]
async fn a_stream_that_is_left_is_charged_by_what_passed() {
    let many = |n: usize| vec![format!("data: {}\n\n", delta("one")); n];
    let start = named(
        "message_start",
        json!({"message": {"content": [], "usage": {"input_tokens": 5_000, "output_tokens": 1}}}),
    );
    let block =
        named("content_block_delta", json!({"index": 0, "delta": {"type": "text_delta", "text": "one"}}));
    let part = named("response.output_text.delta", json!({"delta": "one"}));
    let long = format!("data: {}\n\n", delta(&"twelve bytes".repeat(100)));
    let thought =
        json!({"choices": [{"index": 0, "delta": {"reasoning_content": "one"}, "finish_reason": null}]});
    // What passes, and what is charged beside the prompt of some hundred tokens.
    let cases: Vec<(&str, Vec<String>, f64)> = vec![
        (CHAT, vec![], 0.0),
        (CHAT, many(30), 30.0),
        (CHAT, vec![many(30).concat()], 30.0),
        (CHAT, vec![long], 300.0),
        (CHAT, vec![format!("data: {thought}\n\n"); 30], 30.0),
        (CHAT, many(900), 900.0),
        ("/v1/responses", vec![part; 30], 30.0),
        ("/v1/messages", std::iter::once(start).chain(vec![block; 30]).collect(), 4_930.0),
        ("/v1/cha%74/completions", many(30), 30.0),
    ];
    let setup = tenants(cases.len(), SIX).await;
    for (i, (path, events, passed)) in cases.iter().enumerate() {
        let tenant = format!("t{i}");
        let mut client = post(&setup, &tenant, path, &chat(true)).await;
        let mut call = setup.workers[0].call().await;
        call.begin_stream().await;
        assert_eq!(client.head().await.status(), 200);
        for event in events {
            call.chunk(event.as_bytes()).await;
        }
        let seen = events.concat().matches("\n\n").count();
        for _ in 0..seen {
            client.next_event().await;
        }
        drop(client);
        call.must_be_aborted().await;
        must_owe(&setup, &tenant, 100.0 + passed..=160.0 + passed, &format!("{path} after {seen} events"))
            .await;
    }
    setup.gateway.idle().await;
}

#[tokio::test]
async fn what_ends_in_other_ways_is_charged_by_what_its_client_had() {
    let setup = tenants(7, SIX).await;
    let worker = &setup.workers[0];
    // A whole stream without a usage: its worker was not asked for one.
    let mut client = post(&setup, "t0", CHAT, &chat(true)).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    for _ in 0..20 {
        call.say("one").await;
    }
    call.event(r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#).await;
    call.done().await;
    assert!(client.response().await.text().ends_with("[DONE]\n\n"));
    must_owe(&setup, "t0", 120.0..=180.0, "a whole stream without usage").await;
    // The next one is asked, and its client sees nothing of that.
    let mut client = post(&setup, "t1", CHAT, &chat(true)).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    call.say("one").await;
    call.event(&usage_chunk(5_297, 0).to_string()).await;
    call.event(r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#).await;
    call.done().await;
    assert!(!client.response().await.text().contains("usage"));
    must_owe(&setup, "t1", TAKEN - 1.0..=TAKEN, "a stream whose usage is hidden").await;
    // An answer that says no usage, and one that is no JSON.
    let mut client = post(&setup, "t2", CHAT, &chat(false)).await;
    let text = "twelve bytes".repeat(100);
    worker
        .call()
        .await
        .respond_json(200, &json!({"choices": [{"message": {"role": "assistant", "content": text}}]}))
        .await;
    assert_eq!(client.response().await.status(), 200);
    must_owe(&setup, "t2", 400.0..=460.0, "an answer without usage").await;
    let mut client = post(&setup, "t3", "/v1/audio/transcriptions", &chat(false)).await;
    worker.call().await.respond(200, &[("content-type", "text/plain")], text.as_bytes()).await;
    assert_eq!(client.response().await.status(), 200);
    must_owe(&setup, "t3", 400.0..=460.0, "an answer in plain text").await;
    // A client that leaves while its worker computes.
    let client = post(&setup, "t4", "/v1/responses", &chat(false)).await;
    let call = worker.call().await;
    drop(client);
    call.must_be_aborted().await;
    must_owe(&setup, "t4", 100.0..=160.0, "left before an answer").await;
    // Its worker goes on without its client.
    let mut body = chat(false);
    (body["background"], body["max_output_tokens"]) = (json!(true), json!(5_000));
    let mut client = post(&setup, "t5", "/v1/responses", &body).await;
    worker
        .call()
        .await
        .respond_json(200, &json!({"id": "r", "status": "queued", "output": [], "usage": null}))
        .await;
    assert_eq!(client.response().await.status(), 200);
    must_owe(&setup, "t5", 5_100.0..=5_160.0, "in the background").await;
    // A worker that breaks off in the middle.
    let mut client = post(&setup, "t6", "/v1/messages", &chat(true)).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    for _ in 0..40 {
        call.chunk(
            named("content_block_delta", json!({"delta": {"type": "text_delta", "text": "one"}})).as_bytes(),
        )
        .await;
    }
    for _ in 0..40 {
        client.next_event().await;
    }
    call.cut();
    client.body().await;
    must_owe(&setup, "t6", 140.0..=200.0, "a worker that broke off").await;
    setup.gateway.idle().await;
}

#[tokio::test]
async fn who_had_nothing_is_charged_nothing() {
    let setup = tenants(4, SIX).await;
    let worker = &setup.workers[0];
    let left = |response: &Response| response.header("x-ratelimit-remaining-tokens").unwrap().to_owned();
    let next = async |tenant: &str| {
        let mut client = post(&setup, tenant, CHAT, &chat(false)).await;
        worker.call().await.respond_json(400, &json!({"error": {"message": "no"}})).await;
        client.response().await.status()
    };
    // Refused by its worker, with whatever status: it may come again at once, though it would have taken all.
    for status in [400, 404, 422] {
        let mut client = post(&setup, "t0", CHAT, &chat(false)).await;
        worker.call().await.respond_json(status, &json!({"error": {"message": "no"}})).await;
        assert_eq!(client.response().await.status(), status);
        eventually!(owes(&setup, "t0").await == 0.0);
    }
    assert_eq!(next("t0").await, 400);
    // An answer that is an error, whatever its status says, and a stream that is nothing else.
    let mut client = post(&setup, "t1", CHAT, &chat(false)).await;
    worker.call().await.respond_json(200, &json!({"error": {"message": "no"}})).await;
    client.response().await;
    eventually!(owes(&setup, "t1").await == 0.0);
    let mut client = post(&setup, "t1", CHAT, &chat(true)).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    call.event(r#"{"error":{"message":"no","code":400}}"#).await;
    call.done().await;
    client.response().await;
    eventually!(owes(&setup, "t1").await == 0.0);
    // To count tokens takes none.
    let mut client = post(&setup, "t2", "/v1/messages/count_tokens", &chat(false)).await;
    worker.call().await.respond_json(200, &json!({"input_tokens": 5_000})).await;
    client.response().await;
    eventually!(owes(&setup, "t2").await == 0.0);
    // Nor does to look at what was computed before.
    let mut client = Client::connect(setup.gateway.addr).await;
    client.request("GET", "/v1/nobody/knows/this", &[("authorization", "Bearer t2")], b"").await;
    worker.call().await.respond_json(200, &json!({"id": "c1", "usage": {"prompt_tokens": 5_000}})).await;
    assert_eq!(client.response().await.status(), 200);
    eventually!(owes(&setup, "t2").await == 0.0);
    // Its worker fails.
    let mut client = post(&setup, "t2", CHAT, &chat(false)).await;
    worker.call().await.respond_json(500, &json!({"error": {"message": "no"}})).await;
    assert_eq!(client.response().await.status(), 500);
    eventually!(owes(&setup, "t2").await == 0.0);
    // No worker is there: the answer says that all of the limit is.
    worker.stop().await;
    eventually!(setup.gateway.ready_workers().await == 0);
    let refused = post(&setup, "t3", CHAT, &chat(false)).await.response().await;
    assert_eq!((refused.status(), left(&refused)), (503, "1".to_owned()));
}

#[tokio::test]
async fn what_is_in_flight_counts_and_one_request_larger_than_the_limit_is_served() {
    let setup = tenants(1, "tokens_per_minute = 60.0").await;
    let worker = &setup.workers[0];
    let mut body = chat(false);
    body["max_tokens"] = json!(500);
    let mut first = post(&setup, "t0", CHAT, &body).await;
    let call = worker.call().await;
    for path in [CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/cha%74/completions"] {
        for _ in 0..4 {
            let refused = post(&setup, "t0", path, &body).await.response().await;
            assert_eq!(refused.status(), 429, "{path}");
            let after: f64 = refused.header("retry-after").unwrap().parse().unwrap();
            assert!(
                (400.0..=650.0).contains(&after),
                "{after}: six hundred tokens are in flight, at one a second"
            );
        }
    }
    call.respond_json(200, &json!({"usage": {"prompt_tokens": 4, "completion_tokens": 1}})).await;
    assert_eq!(first.response().await.status(), 200);
    // What it did not take has come back.
    let mut second = post(&setup, "t0", CHAT, &body).await;
    worker.call().await.respond_json(200, &json!({"usage": {"prompt_tokens": 900}})).await;
    assert_eq!(second.response().await.status(), 200);
    assert_eq!(worker.request_count(), 2);
}

#[tokio::test]
async fn a_stream_that_grows_beyond_its_estimate_is_charged_while_it_passes() {
    let setup = tenants(1, "tokens_per_minute = 6000.0").await;
    let mut client = post(&setup, "t0", CHAT, &chat(true)).await;
    let mut call = setup.workers[0].call().await;
    call.begin_stream().await;
    assert_eq!(client.head().await.status(), 200);
    let piece = delta(&"twelve bytes".repeat(10_000)).to_string();
    for _ in 0..20 {
        call.event(&piece).await;
        client.next_event().await;
    }
    // It has not ended yet.
    assert_eq!(post(&setup, "t0", CHAT, &chat(false)).await.response().await.status(), 429);
    drop(client);
    call.must_be_aborted().await;
}

#[tokio::test]
async fn options_that_can_be_read_in_two_ways_are_refused_to_who_has_a_limit_of_tokens() {
    let tables = table("metered", "metered", "tokens_per_minute = 60000.0")
        + &table("free", "free", "requests_per_minute = 60000.0");
    let setup = setup(1, &tables, "isolate = false\n").await;
    let worker = &setup.workers[0];
    let bodies = [
        r#"{"model":"fake-model","stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":false}}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":{},"\u0073tream_options":{"include_usage":false}}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":{"include_usage":true,"include_usage":false}}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":{"include_usage":true,"\u0069nclude_usage":false}}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":{"include_usage":"no"}}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":{"include_usage":0}}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":[["include_usage",true]]}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":"none"}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":false}"#,
        r#"{"model":"fake-model","stream":false,"stream":true}"#,
        r#"{"model":"fake-model","stream":"yes"}"#,
        r#"{"model":"fake-model","stream":1}"#,
    ];
    for path in [CHAT, "/v1/completions", "/v1/cha%74/completions", "/v1/messages"] {
        for body in bodies {
            let refused =
                send(&setup, "metered", path, "application/json", body.as_bytes()).await.response().await;
            let said = refused.json();
            assert_eq!(refused.status(), 400, "{path} {body}");
            assert_eq!(said["error"]["code"], "unclear_option", "{said}");
            let message = said["error"]["message"].as_str().unwrap();
            assert!(message.contains("field stream"), "{message}");
        }
    }
    assert_eq!(worker.request_count(), 0);
    let plain = [
        r#"{"model":"fake-model","stream":true,"stream_options":null}"#,
        r#"{"model":"fake-model","stream":true,"stream_options":{"include_usage":true,"x":[]}}"#,
        r#"{"model":"fake-model","stream":false,"messages":[{"role":"user","content":"\"stream_options\":[]","stream":7}]}"#,
    ];
    for body in plain {
        let answer =
            send(&setup, "metered", CHAT, "application/json", body.as_bytes()).await.response().await;
        assert_eq!(answer.status(), 200, "{body}");
    }
    for (i, body) in bodies.iter().enumerate() {
        let answer = send(&setup, "free", CHAT, "application/json", body.as_bytes()).await.response().await;
        assert_eq!(answer.status(), 200, "{body}");
        assert_eq!(worker.requests()[plain.len() + i].body, body.as_bytes());
    }
}

/// The headers of limits in an answer, by the beginning of their names.
fn of_limits(response: &Response, prefix: &str) -> Vec<(String, String)> {
    let rest =
        |(name, value): &(String, String)| Some((name.strip_prefix(prefix)?.to_owned(), value.clone()));
    let mut headers: Vec<_> = response.head.headers.iter().filter_map(rest).collect();
    headers.sort_unstable();
    headers
}

/// Headers of a worker's own, which a tenant's limits take the place of.
const OF_WORKER: [(&str, &str); 4] = [
    ("content-type", "application/json"),
    ("x-ratelimit-limit-requests", "1234"),
    ("x-ratelimit-limit-tokens", "1234"),
    ("x-ratelimit-remaining-tokens", "1234"),
];

/// Names, and values in the order of the names, of headers that begin alike.
fn names_and_values(headers: &[(String, String)]) -> (Vec<&str>, Vec<&str>) {
    headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).unzip()
}

const OPENAI: [&str; 6] = [
    "limit-requests",
    "limit-tokens",
    "remaining-requests",
    "remaining-tokens",
    "reset-requests",
    "reset-tokens",
];
const ANTHROPIC: [&str; 6] = [
    "requests-limit",
    "requests-remaining",
    "requests-reset",
    "tokens-limit",
    "tokens-remaining",
    "tokens-reset",
];

#[tokio::test]
async fn answers_say_how_the_limits_stand_that_a_tenant_has() {
    let both = "requests_per_minute = 6000.0\ntokens_per_minute = 60.0";
    let tables = table("both", "both", both)
        + &table("one", "one", "requests_per_minute = 60.0")
        + &table("none", "none", "");
    let setup = setup(1, &tables, "isolate = false\n").await;
    let worker = &setup.workers[0];
    worker.manual();
    let ask = async |tenant: &str, path: &str| {
        let mut client = post(&setup, tenant, path, &chat(false)).await;
        worker.call().await.respond(200, &OF_WORKER, br#"{"usage":{"prompt_tokens":1}}"#).await;
        client.response().await
    };
    let good = of_limits(&ask("both", CHAT).await, "x-ratelimit-");
    let (names, values) = names_and_values(&good);
    assert_eq!((&names[..], values[0], values[1], values[3]), (&OPENAI[..], "6000", "60", "0"));
    assert!(values[4].ends_with('s') && values[5].contains('m'), "{values:?}");
    eventually!(owes(&setup, "both").await == 0.0);
    let by_anthropic = ask("both", "/v1/messages").await;
    assert_eq!(names_and_values(&of_limits(&by_anthropic, "anthropic-ratelimit-")).0, ANTHROPIC);
    assert!(of_limits(&by_anthropic, "x-ratelimit-").is_empty());
    // What a tenant has no limit of is its worker's to say.
    let one = of_limits(&ask("one", CHAT).await, "x-ratelimit-");
    assert_eq!(names_and_values(&one).1[..2], ["60", "1234"]);
    assert_eq!(of_limits(&ask("none", CHAT).await, "x-ratelimit-").len(), 3);
    // Nor is any worker needed for it.
    let nowhere = post(&setup, "one", "/nowhere", &json!({})).await.response().await;
    assert_eq!((nowhere.status(), of_limits(&nowhere, "x-ratelimit-").len()), (404, 3));
}

#[tokio::test]
async fn refusals_say_how_the_limits_stand_and_the_log_whose_they_are() {
    let setup = tenants(2, "requests_per_minute = 6000.0\ntokens_per_minute = 6.0").await;
    let mut client = post(&setup, "t0", CHAT, &chat(false)).await;
    let large = json!({"usage": {"prompt_tokens": 50_000}});
    setup.workers[0].call().await.respond_json(200, &large).await;
    assert_eq!(client.response().await.status(), 200);
    let by_openai = post(&setup, "t0", CHAT, &chat(false)).await.response().await;
    let said = of_limits(&by_openai, "x-ratelimit-");
    let (names, values) = names_and_values(&said);
    assert_eq!((by_openai.status(), &names[..], values[3]), (429, &OPENAI[..], "0"));
    assert!(by_openai.header("retry-after").is_some());
    assert_eq!(by_openai.json()["error"]["type"], "rate_limit_error");
    let by_anthropic = post(&setup, "t0", "/v1/messages", &chat(false)).await.response().await;
    let said = of_limits(&by_anthropic, "anthropic-ratelimit-");
    let (names, values) = names_and_values(&said);
    assert_eq!((by_anthropic.status(), &names[..], values[4]), (429, &ANTHROPIC[..], "0"));
    assert!(values[2].ends_with('Z') && values[5].len() == "2026-11-26T07:08:05Z".len(), "{values:?}");
    assert!(by_anthropic.header("retry-after").is_some());
    let error = by_anthropic.json();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("rate_limit_error")));
    setup.gateway.idle().await;
    let refusals = || {
        let log = setup.gateway.process.log();
        log.into_iter().filter(|line| line.contains("outcome=\"rate_limit_exceeded\"")).collect::<Vec<_>>()
    };
    eventually!(refusals().len() == 2);
    assert!(refusals().iter().all(|line| line.contains("tenant=\"t0\"")), "{:?}", refusals());
}

#[tokio::test]
async fn a_tenant_without_a_limit_is_not_touched() {
    let tables = table("free", "free", "max_in_flight = 100");
    let setup = setup(1, &tables, "isolate = false\n").await;
    let worker: &FakeWorker = &setup.workers[0];
    for path in [CHAT, "/v1/messages", "/v1/nobody/knows/this"] {
        let body = chat(false).to_string();
        let answer = send(&setup, "free", path, "application/json", body.as_bytes()).await.response().await;
        assert_eq!(answer.status(), 200);
        assert!(of_limits(&answer, "x-ratelimit-").is_empty() && of_limits(&answer, "anthropic-").is_empty());
    }
    // Where nothing is charged, what a path is unknown for passes as it came.
    assert_eq!(worker.requests()[2].head.header("accept-encoding"), Some("gzip"));
}
