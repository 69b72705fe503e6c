//! Answers of a given form, and calls of functions: with a model that knows neither, so that only what
//! enforces and reads them can be right.

use serde_json::{Value, json};

use crate::client::{Answer, chat, completion, post, with, worker};

const CHAT: &str = "/v1/chat/completions";

/// Short strings: the quote is likely, so that a model of random weights comes to an end.
fn brief() -> Value {
    json!({"logit_bias": {"34": 6, "125": 6}, "temperature": 1.0, "seed": 3, "ignore_eos": false})
}

fn message(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["choices"][0]["message"].clone()
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"enum": [7, 8]}},
        "required": ["name", "age"], "additionalProperties": false})
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"], "additionalProperties": false});
    let other = json!({"type": "object", "properties": {}, "additionalProperties": false});
    json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now", "parameters": other}}])
}

#[tokio::test]
async fn an_answer_has_the_form_that_is_asked_for() {
    let worker = worker().await;
    let base = with(chat("Who?", 900), brief());
    let formats = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema()}}}),
        json!({"guided_json": schema()}),
        json!({"guided_json": schema().to_string()}),
        json!({"structured_outputs": {"json": schema()}}),
    ];
    for format in formats {
        let answer = post(worker.addr(), CHAT, &with(base.clone(), format)).await;
        let content = message(&answer)["content"].as_str().unwrap().to_owned();
        let value: Value = serde_json::from_str(&content).unwrap_or_else(|e| panic!("{e}: {content}"));
        assert!(value["name"].is_string() && [json!(7), json!(8)].contains(&value["age"]), "{content}");
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop", "what is complete ends");
    }
    let object = json!({"response_format": {"type": "json_object"}});
    let content = message(&post(worker.addr(), CHAT, &with(base.clone(), object)).await)["content"].clone();
    assert!(serde_json::from_str::<Value>(content.as_str().unwrap()).unwrap().is_object());
    let choice = json!({"guided_choice": ["yes", "no"]});
    let said = message(&post(worker.addr(), CHAT, &with(base.clone(), choice)).await)["content"].clone();
    assert!(said == "yes" || said == "no", "{said}");
    let regex = with(completion("x", 40), json!({"guided_regex": "[ab]{3}c"}));
    let said = post(worker.addr(), "/v1/completions", &regex).await.json()["choices"][0]["text"].clone();
    assert!(said.as_str().is_some_and(|s| s.len() == 4 && s.ends_with('c')), "{said}");
    worker.shutdown().await;
}

#[tokio::test]
async fn what_is_no_form_is_refused_with_the_reason() {
    let worker = worker().await;
    let refused = async |more: Value| {
        let answer = post(worker.addr(), CHAT, &with(chat("x", 4), more)).await;
        assert_eq!(answer.status, 400, "{}", answer.text);
        answer.json()["error"].clone()
    };
    let error = refused(json!({"guided_regex": "a("})).await;
    assert_eq!(error["code"], "invalid_grammar");
    assert!(error["message"].as_str().unwrap().contains("unclosed"), "{error}");
    let unknown =
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "flower"}}}});
    assert_eq!(refused(unknown).await["code"], "invalid_grammar");
    assert_eq!(refused(json!({"response_format": {"type": "xml"}})).await["param"], "response_format");
    assert_eq!(refused(json!({"guided_choice": []})).await["param"], "guided_choice");
    let two = json!({"guided_choice": ["a"], "guided_regex": "a"});
    assert!(refused(two).await["message"].as_str().unwrap().contains("Only one of"));
    let resumed = json!({"guided_regex": "ab", "keyway": {"output_ids": [97]}});
    assert_eq!(refused(resumed).await["code"], "not_resumable");
    worker.shutdown().await;
}

#[tokio::test]
async fn a_call_that_is_required_is_made_whole_and_in_pieces() {
    let worker = worker().await;
    let base = with(with(chat("Weather?", 900), brief()), json!({"tools": tools()}));
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (choice, parallel) in [(json!("required"), true), (json!("required"), false), (named.clone(), true)] {
        let body = with(base.clone(), json!({"tool_choice": choice, "parallel_tool_calls": parallel}));
        let answer = post(worker.addr(), CHAT, &body).await;
        let message = message(&answer);
        let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("no calls: {message}"));
        assert_eq!(message["content"], Value::Null);
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "tool_calls");
        assert!(parallel && choice == "required" || calls.len() == 1);
        for call in calls {
            assert!(call["type"] == "function" && call["id"].as_str().unwrap().starts_with("call_"));
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert!(call["function"]["name"] == "now" || arguments["city"].is_string(), "{call}");
            assert!(choice == "required" || call["function"]["name"] == "weather");
        }
        streams_the_same(worker.addr(), &body, calls).await;
    }
    worker.shutdown().await;
}

/// A stream's deltas, put together as OpenAI's clients do it: id and name once, then pieces of the arguments.
async fn streams_the_same(addr: std::net::SocketAddr, body: &Value, calls: &[Value]) {
    let events = post(addr, CHAT, &with(body.clone(), json!({"stream": true}))).await.events();
    let mut joined: Vec<(String, String)> = Vec::new();
    for delta in events.iter().map(|event| &event["choices"][0]["delta"]) {
        assert!(delta["content"].as_str().is_none_or(str::is_empty), "no call is shown as content");
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                assert!(call["index"] == joined.len() && call["id"].is_string());
                joined.push((name.to_owned(), String::new()));
            }
            let index = call["index"].as_u64().unwrap() as usize;
            joined[index].1 += call["function"]["arguments"].as_str().unwrap();
        }
    }
    let expected: Vec<(String, String)> = calls
        .iter()
        .map(|call| {
            let text = |name: &str| call["function"][name].as_str().unwrap().to_owned();
            (text("name"), text("arguments"))
        })
        .collect();
    assert_eq!(joined, expected);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn tools_and_earlier_calls_are_checked_and_shown_to_the_model() {
    let worker = worker().await;
    let addr = worker.addr();
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{\"a\": 1}"}});
    let history = json!([{"role": "user", "content": "When?"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"}]);
    let answer = post(addr, CHAT, &with(chat("", 4), json!({"messages": history, "tools": tools()}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    for (more, param) in [
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
        (json!({"tools": tools(), "tool_choice": "maybe"}), "tool_choice"),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
            "messages[0].tool_calls[0].function",
        ),
    ] {
        let refused = post(addr, CHAT, &with(chat("x", 4), more)).await;
        assert_eq!(
            (refused.status, &refused.json()["error"]["param"]),
            (400, &json!(param)),
            "{}",
            refused.text
        );
    }
    worker.shutdown().await;
}

/// Forms that overflowed a stack, or multiplied, before they were bounded.
#[tokio::test]
async fn no_form_ends_the_worker_or_holds_it_up() {
    let worker = worker().await;
    let many = |count: usize| {
        let property = |i: usize| (format!("p{i}"), json!({"type": "string", "pattern": "^(a|b)*c{1,100}$"}));
        json!({"type": "object", "properties": (0..count).map(property).collect::<serde_json::Map<_, _>>()})
    };
    let chain = |length: usize| {
        let next = |i: usize| json!({"$ref": format!("#/$defs/d{}", (i + 1) % length)});
        let defs: serde_json::Map<_, _> = (0..length).map(|i| (format!("d{i}"), next(i))).collect();
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    };
    let rules = (0..3_000).fold(String::new(), |all, i| all + &format!("r{i}: r{}\n", i + 1));
    let grammar = format!("start: r0\n{rules}r3000: \"a\"");
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": many(8_000)}});
    let patterns: Vec<_> = (0..30).map(|i| json!({"pattern": format!("(a|b){{{}}}.*", i + 1)})).collect();
    // Each with what it must come to: an answer, a refusal, or either.
    for (form, statuses) in [
        (format(many(7_000)), &[400][..]),
        (format(chain(1_000)), &[200, 400]),
        (format(json!({"type": "string", "allOf": patterns})), &[400]),
        (json!({"guided_json": many(8_000).to_string()}), &[400]),
        (json!({"guided_grammar": grammar}), &[200]),
        (json!({"guided_choice": (0..1_001).map(|i| i.to_string()).collect::<Vec<_>>()}), &[400]),
        (json!({"guided_choice": (0..1_000).map(|i| i.to_string()).collect::<Vec<_>>()}), &[200]),
        (json!({"guided_grammar": format!("start: T\nT: {}", vec!["/(.|\\n)*a/"; 30].join(" & "))}), &[400]),
        (
            json!({"tools": [tool.clone()], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            &[400],
        ),
        (json!({"tools": [tool.clone()], "tool_choice": "required"}), &[400]),
        (json!({"tools": [tool]}), &[200]),
    ] {
        // The function's text alone would be longer than the model's context.
        let template = json!({"chat_template_kwargs": {}, "messages": [{"role": "user", "content": "x"}]});
        let body = with(with(chat("x", 2), form), template);
        let answer = post(worker.addr(), CHAT, &body).await;
        let is_too_long = answer.text.contains("context");
        assert!(
            statuses.contains(&answer.status) || is_too_long,
            "{statuses:?}: {} {}",
            answer.status,
            answer.text
        );
        assert!(!answer.text.contains("backtrace"), "{}", answer.text);
    }
    let after = post(worker.addr(), CHAT, &chat("still there", 2)).await;
    assert_eq!(after.status, 200, "{}", after.text);
    worker.shutdown().await;
}
