//! Request bodies and answers in OpenAI's shape, as the tests send and script them. Nothing here is parsed or
//! validated: that is what the tests check elsewhere.

use serde_json::{Value, json};

/// The model the fake worker serves unless told otherwise.
pub const FAKE_MODEL: &str = "fake-model";
/// Path of chat completions.
pub const CHAT: &str = "/v1/chat/completions";
/// Data of the event that ends a good stream.
pub const DONE: &str = "[DONE]";

/// A chat request for the fake model.
pub fn chat(prompt: &str) -> Vec<u8> {
    chat_for(FAKE_MODEL, prompt, false)
}

/// A streamed chat request for the fake model.
pub fn chat_stream(prompt: &str) -> Vec<u8> {
    chat_for(FAKE_MODEL, prompt, true)
}

/// A chat request for `model`.
pub fn chat_for(model: &str, prompt: &str, stream: bool) -> Vec<u8> {
    crate::canary::register(prompt);
    let messages = json!([{ "role": "user", "content": prompt }]);
    json!({ "model": model, "messages": messages, "stream": stream }).to_string().into_bytes()
}

/// A unary chat answer with `usage`.
pub fn answer(text: &str, prompt_tokens: u64, cached_tokens: u64) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": FAKE_MODEL,
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": "stop" }],
        "usage": usage(prompt_tokens, cached_tokens),
    })
}

/// One chunk of a streamed chat answer.
pub fn delta(text: &str) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": FAKE_MODEL,
        "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }],
    })
}

/// The chunk that carries `usage` at the end of a stream.
pub fn usage_chunk(prompt_tokens: u64, cached_tokens: u64) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": FAKE_MODEL,
        "choices": [], "usage": usage(prompt_tokens, cached_tokens),
    })
}

fn usage(prompt_tokens: u64, cached_tokens: u64) -> Value {
    json!({
        "prompt_tokens": prompt_tokens, "completion_tokens": 3, "total_tokens": prompt_tokens + 3,
        "prompt_tokens_details": { "cached_tokens": cached_tokens },
    })
}

/// The list a worker gives at `/v1/models`: its models, and adapters with the models that they are of.
pub fn model_list(models: &[String], adapters: &[(String, String)]) -> Value {
    let model = |id: &String| json!({ "id": id, "object": "model", "created": 1, "owned_by": "tests" });
    let adapter = |(id, parent): &(String, String)| json!({ "id": id, "object": "model", "created": 1, "owned_by": "tests", "parent": parent });
    let data: Vec<Value> = models.iter().map(model).chain(adapters.iter().map(adapter)).collect();
    json!({ "object": "list", "data": data })
}
