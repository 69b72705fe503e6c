//! Hazard: nobody says what a stream's prompt cost, because its client did not ask; or the gateway asks, and
//! the client sees it.

use keyway_tests::openai::{CHAT, DONE, chat_stream, delta, usage_chunk};
use keyway_tests::{Call, Client, Cluster, Response, eventually, post};
use serde_json::{Value, json};

/// Sends a stream's request; returns the client and the call as it arrived.
async fn asked(cluster: &Cluster, body: &[u8]) -> (Client, Call) {
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, body).await;
    let mut call = cluster.fakes[0].call().await;
    call.begin_stream().await;
    (client, call)
}

/// Says these events; what the client sees of them.
async fn told(mut client: Client, mut call: Call, events: &[String]) -> Response {
    for event in events {
        call.event(event).await;
    }
    call.done().await;
    client.response().await
}

fn stream_of(events: &[String]) -> String {
    events.iter().map(|event| format!("data: {event}\n\n")).chain([format!("data: {DONE}\n\n")]).collect()
}

fn options(call: &Call) -> Value {
    serde_json::from_slice::<Value>(&call.request.body).unwrap()["stream_options"].take()
}

#[tokio::test]
async fn the_usage_is_asked_for_counted_and_not_shown() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let body = chat_stream("hi");
    let said = ["one", "two"].map(|word| delta(word).to_string());
    // The first stream shows what the worker says unasked.
    let (client, call) = asked(&cluster, &body).await;
    assert_eq!(call.request.body, body);
    assert_eq!(told(client, call, &said).await.text(), stream_of(&said));

    let (client, call) = asked(&cluster, &body).await;
    assert_eq!(options(&call), json!({ "include_usage": true }));
    let mut full: Vec<String> = said.iter().map(|event| event.replacen('{', "{\"usage\":null,", 1)).collect();
    full.push(usage_chunk(40, 32).to_string());
    assert_eq!(told(client, call, &full).await.text(), stream_of(&said));
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_prompt_tokens_total", &[]), 40.0);
    assert_eq!(metrics.sum("keyway_cached_tokens_total", &[("source", "reported")]), 32.0);

    // Who asks gets what was asked for.
    let mut own: Value = serde_json::from_slice(&body).unwrap();
    own["stream_options"] = json!({ "include_usage": true });
    let own = own.to_string().into_bytes();
    let (client, call) = asked(&cluster, &own).await;
    assert_eq!(call.request.body, own);
    assert_eq!(told(client, call, &full).await.text(), stream_of(&full));
}

#[tokio::test]
async fn a_worker_that_refuses_the_question_is_asked_no_more() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let body = chat_stream("hi");
    let said = ["one", "two"].map(|word| delta(word).to_string());
    let (client, call) = asked(&cluster, &body).await;
    assert_eq!(told(client, call, &said).await.text(), stream_of(&said));
    let error =
        json!({ "error": { "message": "stream_options is not allowed", "type": "invalid_request_error" } });
    for round in 0..3 {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &body).await;
        if round == 0 {
            let call = worker.call().await;
            assert_eq!(options(&call), json!({ "include_usage": true }));
            call.respond_json(400, &error).await;
        }
        let mut call = worker.call().await;
        assert_eq!(call.request.body, body, "as the client sent it");
        call.begin_stream().await;
        assert_eq!(told(client, call, &said).await.text(), stream_of(&said));
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_client_s_own_mistake_is_no_refusal_of_the_question() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let body = chat_stream("hi");
    let said = ["one"].map(|word| delta(word).to_string());
    let (client, call) = asked(&cluster, &body).await;
    assert_eq!(told(client, call, &said).await.text(), stream_of(&said));
    let error = json!({ "error": { "message": "no such parameter", "type": "invalid_request_error" } });
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &body).await;
    for _ in 0..2 {
        worker.call().await.respond_json(400, &error).await;
    }
    assert_eq!(client.response().await.status(), 400);
    // The next stream is asked all the same; once it is answered, a refusal is the client's own at once.
    let (client, call) = asked(&cluster, &body).await;
    assert_eq!(options(&call), json!({ "include_usage": true }));
    assert_eq!(told(client, call, &said).await.status(), 200);
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &body).await;
    worker.call().await.respond_json(400, &error).await;
    assert_eq!((client.response().await.status(), worker.try_call().is_none()), (400, true));
    cluster.gateway.idle().await;
}

/// As SGLang does: with tools its chunks say that there is no usage, and without them they say nothing.
#[tokio::test]
async fn what_one_kind_of_stream_says_unasked_is_not_taken_for_another_s() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let plain = chat_stream("hi");
    let mut tools: Value = serde_json::from_slice(&plain).unwrap();
    tools["tools"] = json!([{ "type": "function", "function": { "name": "look" } }]);
    let tools = tools.to_string().into_bytes();
    let said = ["one", "two"].map(|word| delta(word).to_string());
    let nulls = said.each_ref().map(|event| event.replacen('{', "{\"usage\":null,", 1));
    // Unasked, then twice asked.
    for round in 0..3 {
        for (body, unasked) in [(&plain, &said), (&tools, &nulls)] {
            let (client, call) = asked(&cluster, body).await;
            assert_eq!(options(&call).is_null(), round == 0);
            let mut full = if round == 0 { unasked.to_vec() } else { nulls.to_vec() };
            full.extend((round > 0).then(|| usage_chunk(40, 32).to_string()));
            assert_eq!(told(client, call, &full).await.text(), stream_of(unasked), "{round}");
        }
    }
}

#[tokio::test]
async fn it_is_asked_for_in_whatever_the_request_is_written() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let body = chat_stream("hi");
    let said = [delta("one").to_string()];
    let (client, call) = asked(&cluster, &body).await;
    told(client, call, &said).await;
    let units = String::from_utf8(body).unwrap();
    let utf16: Vec<u8> = units.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (body, kind) in [
        ([b"\xff\xfe", &utf16[..]].concat(), "application/json; charset=utf-16"),
        (utf16, "application/json"),
        ([b"\xef\xbb\xbf", units.as_bytes()].concat(), "application/json; charset=utf-8"),
    ] {
        let mut client = Client::connect(cluster.addr()).await;
        client.request("POST", CHAT, &[("content-type", kind)], &body).await;
        let mut call = cluster.fakes[0].call().await;
        call.begin_stream().await;
        assert_eq!(options(&call), json!({ "include_usage": true }), "{kind}");
        assert_eq!(call.request.head.header("content-type"), Some("application/json"));
        let full = [said[0].clone(), usage_chunk(40, 32).to_string()];
        assert_eq!(told(client, call, &full).await.text(), stream_of(&said));
    }
}

#[tokio::test]
async fn switched_off_nothing_is_asked() {
    let config = "[routing]\nask_usage = false\n";
    let file = keyway_tests::cluster::config_file(config);
    let cluster =
        Cluster::builder().fakes(1).args(&["--config", file.path().to_str().unwrap()]).start().await;
    cluster.fakes[0].manual();
    let body = chat_stream("hi");
    for _ in 0..3 {
        let (client, call) = asked(&cluster, &body).await;
        assert_eq!(call.request.body, body);
        told(client, call, &[delta("x").to_string()]).await;
    }
}

/// What the events of a stream say, but for what differs between any two.
fn shape(response: &Response) -> Vec<String> {
    let text = response.text();
    let events = text.split_inclusive("\n\n").map(|event| {
        let Some(data) = event.strip_prefix("data: {") else { return event.to_owned() };
        let mut data: serde_json::Map<String, Value> = serde_json::from_str(&format!("{{{data}")).unwrap();
        data.remove("id");
        data.remove("created");
        // In the order in which it was written.
        format!("{:?}", data.iter().collect::<Vec<_>>())
    });
    events.collect()
}

#[tokio::test]
async fn a_real_worker_s_stream_is_the_same_asked_and_unasked() {
    let cluster = Cluster::builder().workers(1).start().await;
    let prompt = "Some words to be cached, and then some more. ".repeat(8);
    let body = json!({ "model": "keyway-random", "messages": [{ "role": "user", "content": prompt }],
        "max_tokens": 12, "temperature": 0, "stream": true });
    let mut seen = Vec::new();
    for _ in 0..3 {
        let response = post(cluster.addr(), CHAT, body.to_string().as_bytes()).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        assert!(!response.text().contains("usage"), "{}", response.text());
        seen.push(shape(&response));
    }
    assert!(seen[0].len() > 3 && seen[1..].iter().all(|other| *other == seen[0]), "{seen:?}");
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert!(metrics.sum("keyway_cached_tokens_total", &[("source", "reported")]) > 100.0);
    assert_eq!(metrics.sum("keyway_predictions_total", &[]), 2.0, "all but the first were asked");
}

/// Answers whose usage is no word on what was predicted: nothing is learned from them, and each is counted by
/// why.
#[tokio::test]
async fn what_tells_nothing_of_a_prediction_is_not_taken_for_a_wrong_one() {
    let cluster = Cluster::builder().workers(1).start().await;
    let prompt = "Some words to be cached, and then some more. ".repeat(8);
    let send = async |more: Value| {
        let mut body =
            json!({ "model": "keyway-random", "prompt": prompt, "max_tokens": 2, "temperature": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(cluster.addr(), "/v1/completions", body.to_string().as_bytes()).await;
        assert_eq!(response.status(), 200, "{}", response.text());
    };
    for _ in 0..2 {
        send(json!({})).await;
    }
    for _ in 0..2 {
        send(json!({ "n": 2 })).await;
        send(json!({ "prompt": [prompt, prompt] })).await;
    }
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    let uncounted = |cause| metrics.sum("keyway_predictions_uncounted_total", &[("cause", cause)]);
    assert_eq!((uncounted("samples"), uncounted("batch"), uncounted("not_reported")), (2.0, 2.0, 0.0));
    let of = |result| metrics.sum("keyway_predictions_total", &[("result", result)]);
    assert_eq!(
        [of("right"), of("over"), of("under")],
        [2.0, 0.0, 0.0],
        "{:?}",
        cluster.gateway.process.log()
    );
}

/// vLLM as it is started by default: no answer says what was cached. It is told once, and its own counter
/// stands in.
#[tokio::test]
async fn a_worker_that_does_not_report_what_was_cached_is_told_of_and_its_metrics_are_read() {
    let cluster = Cluster::builder().fakes(1).start().await;
    cluster.fakes[0].manual();
    let hits = |tokens: u64| {
        let size = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"500\"} 1\n";
        let page =
            format!("{size}vllm:prefix_cache_hits_total{{engine=\"0\",model_name=\"m\"}} {tokens}.0\n");
        cluster.fakes[0].set_metrics(&page);
    };
    hits(1_000);
    eventually!(cluster.gateway.workers().await[0]["cache_capacity_tokens"] == 8_000);
    let words = "so and so on, ".repeat(60);
    let body =
        json!({ "model": "fake-model", "messages": [{ "role": "user", "content": words }] }).to_string();
    for _ in 0..20 {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, body.as_bytes()).await;
        let call = cluster.fakes[0].call().await;
        let usage = json!({ "prompt_tokens": 220, "completion_tokens": 1, "prompt_tokens_details": null });
        let answer = json!({ "object": "chat.completion", "choices": [], "usage": usage });
        call.respond_json(200, &answer).await;
        assert_eq!(client.response().await.status(), 200);
    }
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    let uncounted = metrics.sum("keyway_predictions_uncounted_total", &[("cause", "not_reported")]);
    assert_eq!((uncounted, metrics.sum("keyway_predictions_total", &[])), (20.0, 0.0));
    let told = || {
        let log = cluster.gateway.process.log();
        log.iter().filter(|line| line.contains("--enable-prompt-tokens-details")).count()
    };
    eventually!(told() > 0);
    assert_eq!(told(), 1);
    hits(5_000);
    let reported =
        async || cluster.gateway.metrics().await.sum("keyway_cached_tokens_total", &[("source", "reported")]);
    eventually!(reported().await == 4_000.0);
}
