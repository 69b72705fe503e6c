//! Sampling, log probabilities and several answers: what changes the tokens, and what is told of them.

use serde_json::{Value, json};

use crate::client::{Answer, chat, completion, post, with, worker};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn text(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The number at `pointer`.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[tokio::test]
async fn several_answers_are_those_of_seeds_that_follow_and_compute_the_prompt_once() {
    let worker = worker().await;
    let addr = worker.addr();
    let base = with(completion("Once upon a time ".repeat(8), 12), json!({"temperature": 1.0}));
    let several = post(addr, COMPLETIONS, &with(base.clone(), json!({"seed": 5, "n": 3}))).await.json();
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        let alone = post(addr, COMPLETIONS, &with(base.clone(), json!({"seed": 5 + i}))).await;
        assert_eq!(choice["text"], text(&alone));
    }
    // 136 tokens of prompt, counted once, computed once.
    assert_eq!(several["usage"]["prompt_tokens"], 136);
    assert_eq!(several["usage"]["completion_tokens"], 36);
    assert_eq!(several["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let cached = crate::client::metric(addr, "keyway_worker_cached_tokens_total").await;
    assert_eq!(cached, 128.0 * (2.0 + 3.0), "all but the first of all six share eight blocks");
    let streamed = with(base, json!({"seed": 5, "n": 3, "stream": true}));
    let mut texts = vec![String::new(); 3];
    for event in post(addr, COMPLETIONS, &streamed).await.events() {
        let choice = &event["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert!(choices.iter().zip(&texts).all(|(choice, text)| choice["text"] == *text));
    worker.shutdown().await;
}

#[tokio::test]
async fn biases_penalties_and_ends_change_the_tokens() {
    let worker = worker().await;
    let addr = worker.addr();
    let say = async |more: Value| text(&post(addr, COMPLETIONS, &with(completion("abc", 12), more)).await);
    assert_eq!(say(json!({"logit_bias": {"97": 100}})).await, "a".repeat(12));
    // Each one makes the next one less likely.
    let tired = json!({"logit_bias": {"122": 12}, "frequency_penalty": 2.0, "max_tokens": 24});
    let tired = say(tired).await;
    assert!(tired.starts_with("zz") && tired != "z".repeat(24), "{tired}");
    let repeated = say(json!({"logit_bias": {"122": 100}, "repetition_penalty": 100})).await;
    assert!(repeated.starts_with('z') && repeated != "z".repeat(12), "{repeated}");
    let present = say(json!({"logit_bias": {"122": 100, "121": 98.5}, "presence_penalty": 2.0})).await;
    assert!(present.contains('z') && present.contains('y'), "{present}");
    let plain = say(json!({})).await;
    let stop_token = with(completion("abc", 12), json!({"stop_token_ids": [plain.as_bytes()[3]]}));
    let stopped = post(addr, COMPLETIONS, &stop_token).await.json();
    let end = plain.as_bytes().iter().position(|b| *b == plain.as_bytes()[3]).unwrap();
    assert_eq!(stopped["choices"][0]["text"], plain[..end]);
    assert_eq!(stopped["choices"][0]["stop_reason"], plain.as_bytes()[3]);
    let shown = json!({"stop": &plain[4..6], "include_stop_str_in_output": true});
    let end = plain.find(&plain[4..6]).unwrap() + 2;
    assert_eq!(say(shown.clone()).await, plain[..end]);
    assert!(say(with(shown, json!({"min_tokens": 12}))).await.len() >= 12);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_chats_log_probabilities_are_of_its_tokens() {
    let worker = worker().await;
    let body = with(chat("Hello", 6), json!({"logprobs": true, "top_logprobs": 3}));
    let answer = post(worker.addr(), CHAT, &body).await.json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 6);
    let said: String = content.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(answer["choices"][0]["message"]["content"], said);
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), token["bytes"].as_array().unwrap().len()), (3, 1));
        assert!(number(&top[0]["logprob"]) >= number(&token["logprob"]) && number(&token["logprob"]) < 0.0);
    }
    let streamed = post(worker.addr(), CHAT, &with(body, json!({"stream": true}))).await.events();
    let told = streamed.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten();
    assert!(told.eq(content), "a stream tells the same");
    worker.shutdown().await;
}

#[tokio::test]
async fn an_echo_tells_the_prompts_log_probabilities_cached_or_not() {
    let worker = worker().await;
    let addr = worker.addr();
    let prompt = "The quick brown fox jumps over the lazy dog, and again over the dog.";
    let scored = with(completion(prompt, 4), json!({"echo": true, "logprobs": 2}));
    let cold = post(addr, COMPLETIONS, &scored).await.json();
    let warm = post(addr, COMPLETIONS, &scored).await.json();
    assert_eq!(cold["choices"], warm["choices"]);
    assert_eq!(warm["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "scores must be computed");
    let choice = &cold["choices"][0];
    let whole = choice["text"].as_str().unwrap();
    assert!(whole.starts_with(prompt) && whole.len() == prompt.len() + 4);
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), prompt.len() + 4);
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    let offsets: Vec<u64> =
        logprobs["text_offset"].as_array().unwrap().iter().map(|o| o.as_u64().unwrap()).collect();
    assert!(offsets.iter().copied().eq(0..offsets.len() as u64), "each byte is a token");

    // Each of the prompt's scores is what a generation from the text before it would say.
    for at in [1, 17, 40, prompt.len() - 1] {
        let bias =
            json!({"logprobs": 20, "max_tokens": 1, "logit_bias": {prompt.as_bytes()[at].to_string(): 100}});
        let forced = post(addr, COMPLETIONS, &with(completion(&prompt[..at], 1), bias)).await.json();
        assert_eq!(forced["choices"][0]["text"], prompt[at..=at]);
        assert_eq!(forced["choices"][0]["logprobs"]["token_logprobs"][0], logprobs["token_logprobs"][at]);
    }

    let alone = with(scored, json!({"max_tokens": 0, "echo": true, "prompt_logprobs": 1}));
    let alone = post(addr, COMPLETIONS, &alone).await.json();
    assert_eq!(alone["choices"][0]["text"], prompt);
    assert_eq!(alone["usage"]["completion_tokens"], 0);
    let scores = alone["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((scores.len(), &scores[0]), (prompt.len(), &Value::Null));
    let id = prompt.as_bytes()[9].to_string();
    assert_eq!(scores[9][&id]["logprob"], logprobs["token_logprobs"][9]);
    worker.shutdown().await;
}

#[tokio::test]
async fn ids_and_usage_come_with_every_chunk_if_asked_for() {
    let worker = worker().await;
    let more = json!({"return_token_ids": true, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = post(worker.addr(), COMPLETIONS, &with(completion("abc", 5), more)).await.events();
    let ids: Vec<u64> = events
        .iter()
        .filter_map(|e| e["choices"][0]["token_ids"].as_array())
        .flatten()
        .map(|id| id.as_u64().unwrap())
        .collect();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert!(ids.iter().copied().eq(text.bytes().map(u64::from)));
    let counts: Vec<u64> = events.iter().map(|e| e["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&5), "{counts:?}");
    let whole = with(completion("abc", 5), json!({"return_token_ids": true}));
    let whole = post(worker.addr(), COMPLETIONS, &whole).await.json();
    assert_eq!(whole["choices"][0]["token_ids"], json!(ids));
    assert_eq!(whole["choices"][0]["prompt_token_ids"], json!([97, 98, 99]));
    worker.shutdown().await;
}
