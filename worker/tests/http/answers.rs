//! Whole answers and the other endpoints.

use serde_json::{Value, json};

use crate::client::{chat, client, completion, metric, post, send, send_by, with, worker};

#[tokio::test]
async fn a_chat_has_openais_shape() {
    let worker = worker().await;
    let answer = post(worker.addr(), "/v1/chat/completions", &chat("Hello", 8)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(answer.headers["x-request-id"].len(), 32);
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "keyway-random");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-") && body["created"].is_u64());
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!((choice["finish_reason"].as_str(), &choice["logprobs"]), (Some("length"), &Value::Null));
    // Each id the random model may say is one ASCII character, or an end of sequence without text.
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(text.len() <= 8 && text.bytes().all(|b| b == b'\n' || (32..127).contains(&b)), "{text:?}");
    // ChatML: <|im_start|> u s e r \n H e l l o <|im_end|> \n <|im_start|> a s s i s t a n t \n
    let usage = json!({"prompt_tokens": 24, "completion_tokens": 8, "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(body["usage"], usage);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_request_that_names_no_model_means_the_one_served() {
    let worker = worker().await;
    let mut body = chat("Hello", 1);
    body.as_object_mut().unwrap().remove("model");
    let answer = post(worker.addr(), "/v1/chat/completions", &body).await;
    assert_eq!((answer.status, answer.json()["model"].as_str()), (200, Some("keyway-random")));
    worker.shutdown().await;
}

#[tokio::test]
async fn prompts_come_as_text_texts_or_token_ids() {
    let worker = worker().await;
    let addr = worker.addr();
    let texts = |body: &Value| {
        let choices = body["choices"].as_array().unwrap().iter();
        choices
            .map(|c| (c["index"].as_u64().unwrap(), c["text"].as_str().unwrap().to_owned()))
            .collect::<Vec<_>>()
    };
    let one = post(addr, "/v1/completions", &completion("abc", 6)).await.json();
    assert_eq!(one["object"], "text_completion");
    let a = texts(&one)[0].1.clone();
    let b = texts(&post(addr, "/v1/completions", &completion("xyz", 6)).await.json())[0].1.clone();
    assert_ne!(a, b);
    let ids = post(addr, "/v1/completions", &completion(json!([97, 98, 99]), 6)).await.json();
    assert_eq!(texts(&ids), [(0, a.clone())]);
    for prompts in [json!(["abc", "xyz"]), json!([[97, 98, 99], [120, 121, 122]])] {
        let two = post(addr, "/v1/completions", &completion(prompts, 6)).await.json();
        assert_eq!(texts(&two), [(0, a.clone()), (1, b.clone())]);
        assert_eq!(two["usage"]["prompt_tokens"], 6);
        assert_eq!(two["usage"]["completion_tokens"], 12);
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn the_same_long_prompt_again_is_cached_unless_the_salt_differs() {
    let worker = worker().await;
    let addr = worker.addr();
    let prompt = "A long prompt. ".repeat(40);
    let cached = async |more: Value| {
        let body = with(completion(prompt.as_str(), 4), more);
        let body = post(addr, "/v1/completions", &body).await.json();
        (body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(), body["choices"].clone())
    };
    let cold = cached(json!({})).await;
    let warm = cached(json!({})).await;
    assert_eq!((cold.0, warm.0), (0, 592)); // 600 tokens: 37 blocks
    assert_eq!(cold.1, warm.1);
    assert_eq!(cached(json!({"cache_salt": "tenant"})).await.0, 0);
    assert_eq!(cached(json!({"cache_salt": "tenant"})).await.0, 592);
    assert_eq!(metric(addr, "keyway_worker_cached_tokens_total").await, 2.0 * 592.0);
    assert_eq!(metric(addr, "keyway_worker_prompt_tokens_total").await, 2400.0);
    worker.shutdown().await;
}

#[tokio::test]
async fn content_comes_as_text_or_as_text_parts() {
    let worker = worker().await;
    let plain = post(worker.addr(), "/v1/chat/completions", &chat("a\nb", 6)).await.json();
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let body = with(chat("", 6), json!({"messages": [{"role": "user", "content": parts}]}));
    let in_parts = post(worker.addr(), "/v1/chat/completions", &body).await.json();
    assert_eq!(plain["choices"], in_parts["choices"]);
    worker.shutdown().await;
}

#[tokio::test]
async fn parameters_that_ask_for_nothing_are_taken() {
    let worker = worker().await;
    let more = json!({
        "user": "u", "metadata": {"a": "b"}, "store": false, "n": 1, "logprobs": false, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "stop": null, "seed": -1, "top_p": 1, "top_k": -1, "stream": false, "parallel_tool_calls": true,
        "modalities": ["text"], "max_completion_tokens": 3, "best_of": null, "min_p": 0.0, "chat_template_kwargs": {"x": 1},
    });
    let answer = post(worker.addr(), "/v1/chat/completions", &with(chat("a", 9), more)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 3, "the newer name wins");
    worker.shutdown().await;
}

#[tokio::test]
async fn a_seed_repeats_and_another_does_not() {
    let worker = worker().await;
    let text = async |more: Value| {
        let body = with(with(completion("seeded", 24), json!({"temperature": 1.0})), more);
        post(worker.addr(), "/v1/completions", &body).await.json()["choices"][0]["text"].clone()
    };
    let first = text(json!({"seed": 7})).await;
    assert_eq!(first, text(json!({"seed": 7})).await);
    assert_ne!(first, text(json!({"seed": 8})).await);
    assert_ne!(text(json!({})).await, text(json!({})).await);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it() {
    let worker = worker().await;
    let post = async |more: Value| {
        let body = with(completion("Stop me", 40), more);
        post(worker.addr(), "/v1/completions", &body).await.json()
    };
    let whole = post(json!({})).await["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop = &whole[10..13];
    let cut = &whole[..whole.find(stop).unwrap()];
    for stops in [json!(stop), json!(["never \u{1F600}", stop])] {
        let body = post(json!({"stop": stops})).await;
        assert_eq!(body["choices"][0]["text"], cut);
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert!(body["usage"]["completion_tokens"].as_u64().unwrap() < 40);
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn models_health_version_and_metrics() {
    let worker = worker().await;
    let addr = worker.addr();
    let models = send(addr, "GET", "/v1/models", "").await.json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("keyway-random")));
    assert_eq!(send(addr, "GET", "/v1/models/keyway-random", "").await.json(), models["data"][0]);
    assert_eq!(send(addr, "GET", "/health", "").await.status, 200);
    assert_eq!(send(addr, "HEAD", "/health", "").await.text, "");
    let version = send(addr, "GET", "/version", "").await.json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(version["numerics_id"], models["data"][0]["numerics_id"]);
    post(addr, "/v1/chat/completions", &chat("a", 3)).await;
    assert_eq!(metric(addr, "keyway_worker_requests_total{outcome=\"length\"}").await, 1.0);
    assert_eq!(metric(addr, "keyway_worker_generation_tokens_total").await, 3.0);
    assert_eq!(metric(addr, "keyway_worker_time_to_first_token_seconds_count").await, 1.0);
    assert_eq!(metric(addr, "keyway_worker_inter_token_latency_seconds_count").await, 2.0);
    assert_eq!(metric(addr, "keyway_worker_kv_blocks").await, 2048.0);
    let info = "keyway_worker_cache_config_info{block_size=\"16\",num_blocks=\"2048\"}";
    assert_eq!(metric(addr, info).await, 1.0);
    worker.shutdown().await;
}

#[tokio::test]
async fn http2_without_tls_and_a_clients_request_id() {
    let worker = worker().await;
    let body = chat("Hello", 8).to_string();
    let path = "/v1/chat/completions";
    let h1 = send_by(&client(false), worker.addr(), "POST", path, &body).await;
    let h2 = send_by(&client(true), worker.addr(), "POST", path, &body).await;
    assert_eq!(h1.json()["choices"], h2.json()["choices"]);
    let request =
        http::Request::get(format!("http://{}/health", worker.addr())).header("x-request-id", "mine");
    let answer = client(true).request(request.body(http_body_util::Full::default()).unwrap()).await.unwrap();
    assert_eq!(answer.headers()["x-request-id"], "mine");
    worker.shutdown().await;
}
