//! Requests as chats, and the chats' answers back.

mod answers;
mod odd;
mod requests;

use serde_json::{Value, json};

use crate::{Refusal, SystemPlace, Translated, to_chat};

/// A request to say hello, with these fields, too.
fn request(more: &Value) -> Value {
    let mut body = json!({"model": "m", "input": "Hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn translated(more: &Value) -> Result<Translated, Refusal> {
    to_chat(crate::Api::Responses, request(more).to_string().as_bytes(), SystemPlace::Anywhere)
}

/// The chat that a request becomes.
fn chat(more: &Value) -> Value {
    let chat = translated(more).unwrap_or_else(|refusal| panic!("{more}: {refusal}")).chat;
    serde_json::from_slice(&chat).unwrap()
}

/// A function, a tool of free text, two functions in a namespace and a tool of the provider.
fn tools() -> Value {
    json!([
        {"type": "function", "name": "look", "strict": true,
            "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
        {"type": "custom", "name": "patch", "description": "Patches."},
        {"type": "namespace", "name": "fs", "tools": [
            {"type": "function", "name": "read", "parameters": {}}, {"type": "function", "name": "stat"},
        ]},
        {"type": "web_search"},
    ])
}
