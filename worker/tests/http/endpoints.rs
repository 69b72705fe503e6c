//! The endpoints beside generation: tokens, embeddings, a model's names.

use serde_json::{Value, json};

use crate::client::{chat, completion, options, post, send, worker};
use keyway_worker::{WorkerOptions, start};

#[tokio::test]
async fn text_and_conversations_become_the_ids_that_a_generation_begins_with() {
    let worker = worker().await;
    let addr = worker.addr();
    let ids = post(addr, "/tokenize", &json!({"prompt": "hé", "return_token_strs": true})).await.json();
    assert_eq!((&ids["tokens"], &ids["count"]), (&json!([104, 0xC3, 0xA9]), &json!(3)));
    assert_eq!(ids["token_strs"][0], "h");
    assert_eq!(ids["max_model_len"], 32_768);
    let back = post(addr, "/detokenize", &json!({"tokens": ids["tokens"]})).await.json();
    assert_eq!(back["prompt"], "hé");
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let chat_ids = post(addr, "/tokenize", &json!({"messages": messages})).await.json();
    let usage = post(addr, "/v1/chat/completions", &chat("Hello", 1)).await.json();
    assert_eq!(chat_ids["count"], usage["usage"]["prompt_tokens"]);
    let text = post(addr, "/detokenize", &json!({"tokens": chat_ids["tokens"]})).await.json();
    assert_eq!(text["prompt"], "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": ["a", "b"]}), "prompt"),
        ("/detokenize", json!({"tokens": [320]}), "tokens"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
    ] {
        let refused = post(addr, path, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)), "{body}");
    }
    worker.shutdown().await;
}

fn vector(answer: &Value, index: usize) -> Vec<f64> {
    let vector = answer["data"][index]["embedding"].as_array().unwrap();
    vector.iter().map(|x| x.as_f64().unwrap()).collect()
}

#[tokio::test]
async fn embeddings_have_length_1_and_depend_on_their_own_text_only() {
    let worker = worker().await;
    let addr = worker.addr();
    let embed = async |more: Value| post(addr, "/v1/embeddings", &more).await;
    let long = "A text of some length. ".repeat(30);
    let both = embed(json!({"input": ["short", &long]})).await.json();
    assert_eq!((&both["object"], &both["data"][1]["index"]), (&json!("list"), &json!(1)));
    assert_eq!(both["usage"]["prompt_tokens"], 5 + long.len());
    let (short, alone) = (vector(&both, 0), embed(json!({"input": "short"})).await.json());
    assert_eq!(short, vector(&alone, 0));
    assert_eq!(short.len(), 64);
    assert!((short.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-6);
    assert_ne!(short, vector(&both, 1));
    // Once more, now out of the cache.
    assert_eq!(vector(&embed(json!({"input": [&long]})).await.json(), 0), vector(&both, 1));
    let cut = vector(&embed(json!({"input": "short", "dimensions": 2})).await.json(), 0);
    let scale = short[0].hypot(short[1]);
    assert!(cut.len() == 2 && (cut[0] - short[0] / scale).abs() < 1e-6);
    let packed = embed(json!({"input": "short", "encoding_format": "base64"})).await.json();
    assert_eq!(packed["data"][0]["embedding"].as_str().unwrap().len(), (64 * 4_usize).div_ceil(3) * 4);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": "a", "dimensions": 65}), "dimensions"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": "a".repeat(40_000)}), "input"),
    ] {
        let refused = embed(body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)));
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn a_model_may_have_several_names() {
    let (first, aliases) = ("tiny".to_owned(), vec!["gpt-4".to_owned(), "org/other".to_owned()]);
    let options =
        WorkerOptions { served_model_name: Some(first), served_model_aliases: aliases, ..options() };
    let worker = start(options).await.unwrap();
    let addr = worker.addr();
    let models = send(addr, "GET", "/v1/models", "").await.json();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["tiny", "gpt-4", "org/other"]);
    assert_eq!(send(addr, "GET", "/v1/models/org/other", "").await.json()["root"], "tiny");
    let mut body = completion("a", 1);
    body["model"] = "gpt-4".into();
    assert_eq!(post(addr, "/v1/completions", &body).await.json()["model"], "gpt-4");
    body["model"] = "gpt-5".into();
    assert_eq!(post(addr, "/v1/completions", &body).await.status, 404);
    worker.shutdown().await;
}
