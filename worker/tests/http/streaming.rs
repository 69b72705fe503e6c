//! Streamed answers: their events' shapes, and that they say the same as whole ones.

use serde_json::{Value, json};

use crate::client::{chat, completion, post, with, worker};

#[tokio::test]
async fn a_chat_stream_says_what_the_whole_answer_says() {
    let worker = worker().await;
    let whole = post(worker.addr(), "/v1/chat/completions", &chat("Stream", 12)).await.json();
    let body = with(chat("Stream", 12), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let answer = post(worker.addr(), "/v1/chat/completions", &body).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    let events = answer.events();
    let [first, middle @ .., last, usage] = &events[..] else { panic!("{events:?}") };
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String = middle.iter().map(|e| e["choices"][0]["delta"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"]);
    assert_eq!(
        (&last["choices"][0]["delta"], &last["choices"][0]["finish_reason"]),
        (&json!({}), &json!("length"))
    );
    assert!(events[..events.len() - 1].iter().all(|e| e["usage"].is_null() && e.get("usage").is_some()));
    assert!(middle.iter().all(|e| e["choices"][0]["finish_reason"].is_null()));
    assert!(events.iter().all(|e| e["object"] == "chat.completion.chunk" && e["id"] == first["id"]));
    assert_eq!(usage["choices"], json!([]));
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(usage["usage"][count], whole["usage"][count]);
    }
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    worker.shutdown().await;
}

#[tokio::test]
async fn without_include_usage_no_chunk_mentions_it() {
    let worker = worker().await;
    let body = with(chat("Stream", 3), json!({"stream": true}));
    let events = post(worker.addr(), "/v1/chat/completions", &body).await.events();
    assert!(events.iter().all(|e| e.get("usage").is_none()));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    worker.shutdown().await;
}

#[tokio::test]
async fn a_completion_stream_interleaves_its_choices() {
    let worker = worker().await;
    let prompts = json!(["one", "two", "three"]);
    let whole = post(worker.addr(), "/v1/completions", &completion(prompts.clone(), 9)).await.json();
    let body = with(completion(prompts, 9), json!({"stream": true}));
    let events = post(worker.addr(), "/v1/completions", &body).await.events();
    for index in 0..3 {
        let mine: Vec<&Value> =
            events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).collect();
        let text: String = mine.iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(text, whole["choices"][index]["text"]);
        let ends: Vec<_> = mine.iter().filter(|c| !c["finish_reason"].is_null()).collect();
        assert_eq!(ends.len(), 1);
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn a_stop_string_is_never_shown_not_even_in_part() {
    let worker = worker().await;
    let whole = post(worker.addr(), "/v1/completions", &completion("Stop", 40)).await.json();
    let whole = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop = &whole[12..16];
    let body = with(completion("Stop", 40), json!({"stream": true, "stop": stop}));
    let events = post(worker.addr(), "/v1/completions", &body).await.events();
    let text: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole[..whole.find(stop).unwrap()]);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    worker.shutdown().await;
}
