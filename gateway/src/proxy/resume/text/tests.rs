//! An engine whose answer is known, cut at any event, once and again: the client sees the answer of one that
//! was not cut.

use std::sync::Arc;

use prometheus::IntGauge;
use serde_json::json;

use super::*;
use crate::proxy::resume::memory::Memory;

/// What the engine says to anything, one token each.
const ANSWER: [&str; 9] = [" One", "  two", "\n\n", "three", " fo\u{fc}r", " ", "\u{3000}", "six", " end."];

fn room() -> Reservation {
    Arc::new(Memory::new(1 << 20, IntGauge::new("g", "g").unwrap())).reserve(0).unwrap()
}

/// How the engine tells of its usage.
#[derive(Clone, Copy, PartialEq)]
enum Usage {
    Last,
    Every,
}

/// The events of its answer to a request: of the whole one, or what follows the text that it is given.
fn engine(request: &Bytes, id: &str, usage: Usage) -> Vec<String> {
    let body: Json = serde_json::from_slice(request).unwrap();
    let chat = body.get("messages").is_some();
    let so_far = if chat {
        assert_eq!(body.get("continue_final_message"), body["messages"].get(1).map(|_| &Json::Bool(true)));
        body["messages"].get(1).map_or("", |last| last["content"].as_str().unwrap()).to_owned()
    } else {
        body["prompt"].as_str().unwrap().strip_prefix("Count:").unwrap().to_owned()
    };
    assert_eq!(so_far, so_far.trim_end(), "templates cut it off");
    // As a tokenizer would: the longest beginning of the answer that the text is, white space at its end left
    // out.
    let known = (0..=ANSWER.len()).find(|n| ANSWER[..*n].concat().trim_end() == so_far).expect("a beginning");
    let most = body["max_tokens"].as_u64().map_or(usize::MAX, |most| usize::try_from(most).unwrap());
    let rest: Vec<&str> = ANSWER[known..].iter().copied().take(most).collect();
    let prompt = 5 + known as u64;
    let counts = |n: usize| json!({"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n as u64});
    let finish = if known + rest.len() == ANSWER.len() { "stop" } else { "length" };
    let mut events = Vec::new();
    let mut say = |choices: Json, n: Option<usize>| {
        let mut chunk = json!({"id": id, "created": id.len(), "model": "m", "choices": choices});
        if let Some(n) = n.filter(|_| usage == Usage::Every || choices == json!([])) {
            chunk["usage"] = counts(n);
        }
        events.push(format!("data: {chunk}\n\n"));
    };
    if chat {
        say(json!([{"index": 0, "delta": {"role": "assistant", "content": ""}}]), Some(0));
    }
    for (i, token) in rest.iter().enumerate() {
        let choice = if chat {
            json!({"index": 0, "delta": {"content": token}})
        } else {
            json!({"index": 0, "text": token})
        };
        say(json!([choice]), Some(i + 1));
    }
    let last = if chat {
        json!({"delta": {}, "finish_reason": finish})
    } else {
        json!({"text": "", "finish_reason": finish})
    };
    say(json!([last]), Some(rest.len()));
    say(json!([]), Some(rest.len()));
    events.push("data: [DONE]\n\n".to_owned());
    events
}

/// What a client makes of events.
#[derive(Debug, Default, PartialEq)]
struct Client {
    text: String,
    names: Vec<String>,
    roles: usize,
    finish: Vec<String>,
    usage: Vec<Json>,
    done: usize,
}

impl Client {
    fn sees(&mut self, bytes: &[u8]) {
        for event in std::str::from_utf8(bytes).unwrap().split_terminator("\n\n") {
            let data = event.strip_prefix("data: ").unwrap();
            if data == "[DONE]" {
                self.done += 1;
                continue;
            }
            let chunk: Json = serde_json::from_str(data).unwrap();
            let name = format!("{} {}", chunk["id"], chunk["created"]);
            if !self.names.contains(&name) {
                self.names.push(name);
            }
            if chunk["usage"].is_object() && chunk["choices"] == json!([]) {
                self.usage.push(chunk["usage"].clone());
            }
            let choice = &chunk["choices"][0];
            self.roles += usize::from(choice["delta"]["role"].is_string());
            self.text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
            self.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
    }
}

fn requests() -> Vec<(Bytes, bool)> {
    let chat = json!({"messages": [{"role": "user", "content": "Count"}], "temperature": 0});
    let mut short = chat.clone();
    short["max_tokens"] = 4.into();
    short["min_tokens"] = 3.into();
    let completion = json!({"prompt": "Count:", "max_tokens": 8});
    let unbounded = json!({"prompt": "Count:"});
    [(chat, true), (short, true), (completion, false), (unbounded, false)]
        .into_iter()
        .map(|(body, chat)| (Bytes::from(body.to_string()), chat))
        .collect()
}

#[test]
fn a_stream_cut_anywhere_twice_is_the_stream_that_was_not() {
    for (request, chat) in requests() {
        for usage in [Usage::Last, Usage::Every] {
            let whole = engine(&request, "first", usage);
            let mut uncut = Client::default();
            for event in &whole {
                uncut.sees(event.as_bytes());
            }
            for first in 0..whole.len() {
                for second in 0..whole.len() {
                    let mut history = TextHistory::new(request.clone(), chat, room());
                    let mut client = Client::default();
                    let mut rest = request.clone();
                    for (id, cut) in [("first", first), ("second", second), ("last", usize::MAX)] {
                        let events = engine(&rest, id, usage);
                        for event in events.iter().take(cut) {
                            client.sees(&history.tell(&Bytes::from(event.clone())));
                        }
                        if client.done > 0 {
                            break;
                        }
                        rest = history.rest().unwrap();
                        if history.has_begun() {
                            history.goes_on();
                        }
                    }
                    // Whoever was first to be seen.
                    assert_eq!(client.names.len(), 1);
                    client.names.clone_from(&uncut.names);
                    assert_eq!(client, uncut, "cut at {first} and {second}");
                }
            }
        }
    }
}

#[test]
fn before_a_seam_nothing_is_written_anew() {
    let mut history = TextHistory::new(requests()[0].0.clone(), true, room());
    let event = Bytes::from_static(b": ping\n\ndata:{ \"choices\" : [{\"delta\":{\"content\":\"a\"}}] }\n\n");
    assert_eq!(history.tell(&event).as_ptr(), event.as_ptr());
    let rest: Json = serde_json::from_slice(&history.rest().unwrap()).unwrap();
    assert_eq!(rest["messages"][1], json!({"role": "assistant", "content": "a"}));
    assert_eq!(rest["add_generation_prompt"], false);
}

#[test]
fn what_cannot_be_said_as_text_is_not_continued() {
    let ids = Bytes::from_static(br#"{"prompt":[1,2]}"#);
    for (delta, obstacle) in [
        (json!({"reasoning_content": "hm"}), Obstacle::Thoughts),
        (json!({"reasoning": "hm"}), Obstacle::Thoughts),
        (json!({"tool_calls": [{"index": 0}]}), Obstacle::Tools),
    ] {
        let mut history = TextHistory::new(requests()[0].0.clone(), true, room());
        let chunk = json!({"choices": [{"delta": delta}]});
        history.tell(&Bytes::from(format!("data: {chunk}\n\n")));
        assert_eq!(history.rest(), Err(obstacle));
    }
    let mut history = TextHistory::new(ids, false, room());
    history.tell(&Bytes::from_static(b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n"));
    assert_eq!(history.rest(), Err(Obstacle::PromptIds));
    let mut history = TextHistory::new(requests()[0].0.clone(), true, room());
    history.tell(&Bytes::from_static(b"data: {\"cho\n\n"));
    assert_eq!(history.rest(), Err(Obstacle::Unreadable));
}

#[test]
fn text_takes_room_and_without_it_is_not_kept() {
    let memory = Arc::new(Memory::new(TEXT_STEP, IntGauge::new("g", "g").unwrap()));
    let mut history = TextHistory::new(requests()[0].0.clone(), true, memory.reserve(0).unwrap());
    let event =
        format!("data: {}\n\n", json!({"choices": [{"delta": {"content": "x".repeat(TEXT_STEP - 1)}}]}));
    history.tell(&Bytes::from(event.clone()));
    assert!(history.rest().is_ok());
    history.tell(&Bytes::from(event));
    assert_eq!(history.rest(), Err(Obstacle::Memory));
}
