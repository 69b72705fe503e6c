//! Hazard: what only real workers show. A killed process, and answers that depend on cache or company.

use keyway_tests::openai::{CHAT, DONE};
use keyway_tests::{Cluster, End, Exchange, Next, Protocol, get, post};
use serde_json::{Value, json};

async fn model(cluster: &Cluster) -> String {
    let models = get(cluster.addr(), "/v1/models").await.json();
    models["data"][0]["id"].as_str().expect("a model").to_owned()
}

fn request(model: &str, prompt: &str, max_tokens: u32, stream: bool) -> Vec<u8> {
    let messages = json!([{ "role": "user", "content": prompt }]);
    json!({
        "model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream,
        "ignore_eos": true,
    })
    .to_string()
    .into_bytes()
}

#[tokio::test]
async fn a_worker_killed_mid_stream_ends_the_stream_honestly_and_the_other_takes_over() {
    let off = "[resume]\nenabled = false\n";
    let mut cluster = Cluster::builder().workers(2).config(off).start().await;
    let model = model(&cluster).await;
    let mut exchange =
        Exchange::post(Protocol::Http1, cluster.addr(), CHAT, &request(&model, "Count.", 20_000, true)).await;
    let Exchange::Http1(client) = &mut exchange else { unreachable!("asked for HTTP/1.1") };
    let head = client.head().await;
    assert_eq!(head.status(), 200);
    let serving = head.header("x-keyway-worker").expect("on loopback").to_owned();
    client.next_event().await.event();
    let victim = cluster.workers.iter_mut().find(|w| w.addr().to_string() == serving).expect("one of ours");
    victim.process.kill();

    let mut events = Vec::new();
    let end = loop {
        match client.next_event().await {
            Next::Event(data) => events.push(data),
            Next::End { end, torn } => break (end, torn),
        }
    };
    assert_eq!(end, (End::Aborted, false));
    assert!(events.iter().all(|e| e != DONE));
    let last: Value = serde_json::from_str(events.last().expect("an error event")).expect("JSON");
    assert!(last["error"]["message"].is_string(), "{last}");

    for i in 0..6 {
        let response = post(cluster.addr(), CHAT, &request(&model, &format!("Again {i}."), 4, false)).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        assert_ne!(response.header("x-keyway-worker"), Some(serving.as_str()));
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn greedy_answers_do_not_depend_on_cache_company_or_worker() {
    // Round-robin on purpose: each prompt meets both workers, cold and warm.
    let cluster = Cluster::builder().workers(2).policy("round-robin").start().await;
    let model = model(&cluster).await;
    let prompts: Vec<String> =
        (0..8).map(|i| format!("Prompt {i}: {}", "tell me more, ".repeat(3 + 2 * i))).collect();
    let text = |json: &Value| json["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    let ask = async |prompt: &str| {
        let response = post(cluster.addr(), CHAT, &request(&model, prompt, 24, false)).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        response.json()
    };
    let mut cold = Vec::new();
    for prompt in &prompts {
        cold.push(text(&ask(prompt).await));
    }
    let mut cached = 0;
    for _ in 0..2 {
        let batch = futures_util::future::join_all(prompts.iter().map(|p| ask(p))).await;
        for (answer, cold) in batch.iter().zip(&cold) {
            assert_eq!(&text(answer), cold);
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        }
    }
    assert!(cached > 0, "the second answers came from the prefix cache");
    for (prompt, cold) in prompts.iter().zip(&cold).rev() {
        assert_eq!(&text(&ask(prompt).await), cold);
    }
    assert!(cold.iter().any(|t| t != &cold[0]), "different prompts have different answers");
    cluster.gateway.idle().await;
}
