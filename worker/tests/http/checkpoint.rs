//! A Hugging Face checkpoint directory, served: its tokenizer, chat template, generation defaults and name.

use std::path::Path;

use serde_json::{Value, json};

use crate::client::{options, post, send};
use keyway_worker::model::ModelSource;
use keyway_worker::{StartError, WorkerOptions, start};

/// The 256 stand-ins for bytes in byte-level BPE: printable characters for themselves, the rest from U+0100
/// on.
fn byte_characters() -> Vec<char> {
    let printable =
        |b: u32| (0x21..=0x7E).contains(&b) || (0xA1..=0xAC).contains(&b) || (0xAE..=0xFF).contains(&b);
    let mut next = 0x100..;
    (0..256).map(|b| char::from_u32(if printable(b) { b } else { next.next().unwrap() }).unwrap()).collect()
}

/// A tokenizer of 256 bytes and an end token for the 512 ids of the model.
pub(crate) fn tokenizer() -> Value {
    let vocab: serde_json::Map<String, Value> =
        byte_characters().iter().enumerate().map(|(i, c)| (c.to_string(), json!(i))).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": 256, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

fn write(dir: &Path, name: &str, content: &Value) {
    std::fs::write(dir.join(name), content.to_string()).unwrap();
}

/// A small Llama checkpoint named `tiny-llama`, with what the server needs beside the weights.
fn checkpoint(root: &Path) -> std::path::PathBuf {
    let dir = root.join("tiny-llama");
    std::fs::create_dir(&dir).unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llama");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(data.join(name), dir.join(name)).unwrap();
    }
    write(&dir, "tokenizer.json", &tokenizer());
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if messages[0].role == 'tool' %}\
        {{ raise_exception('No tools here.') }}{% endif %}";
    write(&dir, "tokenizer_config.json", &json!({"eos_token": "<end>", "chat_template": template}));
    // Only the ids of lower-case letters may come.
    let suppress: Vec<u32> = (0..512).filter(|id| !(97..123).contains(id)).collect();
    write(&dir, "generation_config.json", &json!({"max_new_tokens": 5, "suppress_tokens": suppress}));
    dir
}

#[tokio::test]
async fn a_checkpoint_is_served_by_its_own_rules() {
    let root = tempfile::tempdir().unwrap();
    let dir = checkpoint(root.path());
    let model = ModelSource::Dir(dir);
    let worker = start(WorkerOptions { model, max_model_len: Some(64), ..options() }).await.unwrap();
    let addr = worker.addr();
    assert_eq!(worker.model_name(), "tiny-llama");
    assert_eq!(send(addr, "GET", "/v1/models", "").await.json()["data"][0]["max_model_len"], 64);
    let chat = async |role: &str| {
        let body =
            json!({"model": "tiny-llama", "messages": [{"role": role, "content": "hé"}], "temperature": 0});
        post(addr, "/v1/chat/completions", &body).await
    };
    let answer = chat("user").await.json();
    assert_eq!(answer["usage"]["prompt_tokens"], "[user]hé".len());
    assert_eq!(answer["usage"]["completion_tokens"], 5, "max_new_tokens is the checkpoint's");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.len() == 5 && text.bytes().all(|b| b.is_ascii_lowercase()), "{text:?}");
    let refused = chat("tool").await;
    assert_eq!(refused.status, 400);
    assert!(
        refused.text.contains("the model's chat template rejects these messages: No tools here."),
        "{}",
        refused.text
    );
    worker.shutdown().await;
}

#[tokio::test]
async fn what_a_checkpoint_lacks_is_named() {
    let root = tempfile::tempdir().unwrap();
    let dir = checkpoint(root.path());
    let error = async || {
        let model = ModelSource::Dir(dir.clone());
        match start(WorkerOptions { model, ..options() }).await {
            Err(error) => error,
            Ok(_) => panic!("it must not start"),
        }
    };
    write(&dir, "generation_config.json", &json!({"max_new_tokens": "many"}));
    let message = error().await.to_string();
    assert!(message.contains("generation_config.json"), "{message}");
    std::fs::remove_file(dir.join("generation_config.json")).unwrap();
    std::fs::remove_file(dir.join("tokenizer.json")).unwrap();
    let lacking = error().await;
    assert!(
        matches!(lacking, StartError::Text(_)) && lacking.to_string().contains("tokenizer.json"),
        "{lacking}"
    );
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    assert!(matches!(error().await, StartError::Model(_)));
}
