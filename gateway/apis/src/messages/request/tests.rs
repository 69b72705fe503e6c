//! Requests and the chats that they become.

use serde_json::{Value, json};

use super::*;

/// A request with these fields besides what each must have.
fn with(more: &Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 4000, "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn translated(body: &Value) -> (Value, Vec<String>) {
    let Translated { chat, ignored, .. } =
        to_chat(body.to_string().as_bytes(), SystemPlace::Anywhere).unwrap();
    (serde_json::from_slice(&chat).unwrap(), ignored)
}

/// The fields of a chat besides those of the request that has no more than it must.
fn more_of(more: &Value) -> (Value, Vec<String>) {
    let (mut chat, ignored) = translated(&with(more));
    for name in ["model", "messages", "max_tokens"] {
        assert!(chat.as_object_mut().unwrap().shift_remove(name).is_some());
    }
    (chat, ignored)
}

fn messages_of(more: &Value) -> (Value, Vec<String>) {
    let (mut chat, ignored) = translated(&with(more));
    (chat["messages"].take(), ignored)
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

fn tool(name: &str) -> Value {
    json!({"name": name, "input_schema": {"type": "object"}})
}

#[test]
fn each_field_has_its_place_in_the_chat() {
    let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
    for (request, chat) in [
        (json!({}), json!({})),
        (
            json!({"temperature": 0.5, "top_p": 1, "top_k": 5, "stop_sequences": ["a", "b"]}),
            json!({"temperature": 0.5, "top_p": 1, "top_k": 5, "stop": ["a", "b"]}),
        ),
        (json!({"stop_sequences": [], "stream": false, "system": null}), json!({"stream": false})),
        (json!({"stream": true}), json!({"stream": true, "stream_options": {"include_usage": true}})),
        (json!({"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}), json!({"user": "u"})),
        (
            json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
            json!({"reasoning_effort": "max"}),
        ),
        (
            json!({"thinking": {"type": "disabled"}}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
        ),
        (
            json!({"thinking": {"type": "disabled"},
                "chat_template_kwargs": {"a": 1, "enable_thinking": true}}),
            json!({"chat_template_kwargs": {"a": 1, "enable_thinking": true}}),
        ),
        (
            json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
            json!({"response_format": {"type": "json_schema",
                "json_schema": {"name": "json_schema", "schema": schema}}}),
        ),
        (
            json!({"cache_salt": "s", "priority": -1, "min_p": 0.1, "chat_template_kwargs": {"a": 1}}),
            json!({"cache_salt": "s", "priority": -1, "min_p": 0.1, "chat_template_kwargs": {"a": 1}}),
        ),
        (json!({"tools": [], "tool_choice": {"type": "auto"}, "mcp_servers": []}), json!({})),
        (
            json!({"tools": [tool("f")], "tool_choice": {"type": "any"}}),
            json!({"tools": [function("f")], "tool_choice": "required"}),
        ),
        (
            json!({"tools": [tool("f")],
                "tool_choice": {"type": "none", "disable_parallel_tool_use": false}}),
            json!({"tools": [function("f")], "tool_choice": "none"}),
        ),
        (
            json!({"tools": [tool("f")], "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
            json!({"tools": [function("f")], "tool_choice": "auto", "parallel_tool_calls": false}),
        ),
        (
            json!({"tools": [tool("f")], "tool_choice": {"type": "tool", "name": "f"}}),
            json!({"tools": [function("f")], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ),
        (
            json!({"tools": [{"type": "custom", "name": "f", "description": "d",
                "input_schema": {"a": 1}, "strict": true,
                "defer_loading": false, "cache_control": {"type": "ephemeral"}}]}),
            json!({"tools": [{"type": "function", "function": {"name": "f", "description": "d",
                "parameters": {"a": 1, "type": "object"}, "strict": true, "defer_loading": false}}]}),
        ),
    ] {
        let (got, ignored) = more_of(&request);
        assert_eq!((got, ignored), (chat, Vec::<String>::new()), "{request}");
    }
}

#[test]
fn what_nobody_acts_on_is_named() {
    let server = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 3});
    for (request, names) in [
        (
            json!({"service_tier": "auto", "context_management": {}, "a b": 1, "n": null}),
            &["context_management", "service_tier"][..],
        ),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}),
            &["thinking.budget_tokens", "thinking.display"],
        ),
        (
            json!({"thinking": {"type": "disabled"}, "output_config": {"effort": "low", "task_budget": 1}}),
            &["output_config.effort", "output_config.task_budget"],
        ),
        (json!({"metadata": {"trace": "t"}}), &["metadata.trace"]),
        (json!({"tools": [server, tool("f")]}), &["tools.web_search"]),
        (
            json!({"tools": [{"name": "f", "input_schema": {}, "eager_input_streaming": true}]}),
            &["tools.eager_input_streaming"],
        ),
        (
            json!({"response_format": {},
                "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
            &["response_format"],
        ),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "a", "citations": [{}], "cache_control": {}}]}, {"role": "user", "id": 1,
            "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": true,
                "content": [{"type": "document"}]}]}]}),
            &[
                "messages.content.redacted_thinking",
                "messages.content.citations",
                "messages.content.is_error",
                "messages.content.content.document",
                "messages.id",
            ],
        ),
    ] {
        assert_eq!(translated(&with(&request)).1, names, "{request}");
    }
}

#[test]
fn what_is_wrong_is_refused_by_its_name() {
    let said = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let changes = |block: Value| json!({"messages": [{"role": "system", "content": [block]}]});
    for (request, param) in [
        (json!({"model": 1}), "model"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [1]}), "messages.0"),
        (json!({"messages": [{"role": "tool", "content": ""}]}), "messages.0.role"),
        (json!({"messages": [{"role": "user"}]}), "messages.0.content"),
        (said(json!(1)), "messages.0.content"),
        (said(json!([{"text": "a"}])), "messages.0.content.0.type"),
        (said(json!([{"type": "text", "text": 1}])), "messages.0.content.0.text"),
        (said(json!([{"type": "document", "source": {}}])), "messages.0.content.0.type"),
        (said(json!([{"type": "image"}])), "messages.0.content.0.source"),
        (
            said(json!([{"type": "image", "source": {"type": "file", "file_id": "f"}}])),
            "messages.0.content.0.source.type",
        ),
        (said(json!([{"type": "image", "source": {"type": "base64"}}])), "messages.0.content.0.source.data"),
        (said(json!([{"type": "tool_use", "name": "f"}])), "messages.0.content.0.id"),
        (
            said(json!([{"type": "tool_use", "id": "i", "name": "f", "input": []}])),
            "messages.0.content.0.input",
        ),
        (said(json!([{"type": "tool_result", "content": "x"}])), "messages.0.content.0.tool_use_id"),
        (said(json!([{"type": "tool_addition", "tool": {}}])), "messages.0.content.0.type"),
        (
            changes(json!({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}})),
            "messages.0.content.0.tool.name",
        ),
        (
            changes(json!({"type": "tool_removal", "tool": {"type": "tool_definition"}})),
            "messages.0.content.0.tool.type",
        ),
        (json!({"system": 1}), "system"),
        (json!({"system": [{"type": "image"}]}), "system.0.type"),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"stream": 1}), "stream"),
        (json!({"stop_sequences": [1]}), "stop_sequences.0"),
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [{"name": "f"}]}), "tools.0.input_schema"),
        (json!({"tools": [{"name": "f", "input_schema": true}]}), "tools.0.input_schema"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "tool", "name": "g"}}), "tool_choice.name"),
        (json!({"thinking": {"type": "deep"}}), "thinking.type"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 4000}}), "thinking.budget_tokens"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema"),
        (json!({"metadata": {"user_id": 1}}), "metadata.user_id"),
        (json!({"mcp_servers": [{"url": "u"}]}), "mcp_servers"),
        (json!({"container": "c"}), "container"),
        (json!({"thread": {"type": "continue"}}), "thread"),
        (json!({"compaction": {"type": "auto"}}), "compaction"),
    ] {
        let refusal = to_chat(with(&request).to_string().as_bytes(), SystemPlace::Anywhere).unwrap_err();
        assert_eq!(refusal.param.as_deref(), Some(param), "{request}");
        assert!(refusal.message.contains(param) && refusal.message.len() > 20, "{refusal}");
    }
    assert!(to_chat(b"{\"a\"", SystemPlace::Anywhere).unwrap_err().message.contains("JSON"));
}

#[test]
fn what_the_system_says_is_a_message_where_it_stands() {
    let bill = "x-anthropic-billing-header: cch=1;";
    let system = |text: &str| json!({"role": "system", "content": text});
    let user = json!({"role": "user", "content": "Hi"});
    let block = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    for (request, chat) in [
        (json!({"system": "S"}), json!([system("S"), user])),
        (json!({"system": ""}), json!([user])),
        (json!({"system": [block(bill), block("a"), block(""), block("b")]}), json!([system("ab"), user])),
        (json!({"system": format!("{bill}\nS")}), json!([system(&format!("{bill}\nS")), user])),
        (
            json!({"system": "S", "messages": [user, system("T"),
                {"role": "system", "content": [block("U")]}, user]}),
            json!([system("S"), user, system("T"), system("U"), user]),
        ),
        (
            json!({"messages": [user, system(bill), system(""),
                {"role": "system", "content": [block(bill)]}]}),
            json!([user]),
        ),
    ] {
        assert_eq!(messages_of(&request), (chat, Vec::new()), "{request}");
    }
}

#[test]
fn turns_with_calls_thoughts_and_images_become_messages_of_a_chat() {
    let png =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
    let far = json!({"type": "image", "source": {"type": "url", "url": "https://a/b"}});
    let (png_part, far_part) = (
        json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}),
        json!({"type": "image_url", "image_url": {"url": "https://a/b"}}),
    );
    let request = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "See"}, png, {"type": "text", "text": ""},
            far]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "H", "signature": "s"}, {"type": "thinking", "thinking": "m"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": [1.50]}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]},
        {"role": "user", "content": [
            {"type": "text", "text": "before"},
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"},
                {"type": "text", "text": "y"}, png, {"type": "tool_reference", "tool_name": "late"}]},
            {"type": "tool_result", "tool_use_id": "t2"}]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3", "content": "z"}]},
        {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t4", "content": "w"}]},
    ]});
    let call = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let want = json!([
        {"role": "user", "content": [{"type": "text", "text": "See"}, png_part, far_part]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm",
            "tool_calls": [call("t1", "f", r#"{"b":1,"a":[1.5]}"#), call("t2", "g", "{}")]},
        {"role": "tool", "content": "x\ny", "tool_call_id": "t1"},
        {"role": "user", "content": [png_part]},
        {"role": "tool", "content": [{"type": "tool_reference", "name": "late"}], "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": "before"},
        {"role": "assistant"},
        {"role": "tool", "content": "z", "tool_call_id": "t3"},
        {"role": "assistant", "content": "Tool result: w"},
    ]);
    assert_eq!(messages_of(&request), (want, Vec::new()));
}

#[test]
fn tools_change_in_the_course_of_a_conversation() {
    let late = json!({"name": "late", "input_schema": {"type": "object"}, "defer_loading": true});
    let refer = |of: &str, name: &str| json!({"type": of, "tool": {"type": "tool_reference", "name": name}});
    let new =
        json!({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("new")}});
    let mut deferred = function("late");
    deferred["function"]["defer_loading"] = true.into();
    for (changes, tools) in [
        (json!([]), json!([function("f"), deferred])),
        (json!([refer("tool_addition", "late")]), json!([function("f"), function("late")])),
        (json!([refer("tool_removal", "f"), new]), json!([deferred, function("new")])),
        (json!([refer("tool_removal", "f"), refer("tool_addition", "f")]), json!([function("f"), deferred])),
    ] {
        let request = json!({"tools": [tool("f"), late], "messages": [{"role": "user", "content": "Hi"},
            {"role": "system", "content": changes}]});
        assert_eq!(translated(&with(&request)).0["tools"], tools, "{changes}");
    }
}

/// What a client wrote goes on as it wrote it: a number that is read and written again may be another text.
#[test]
fn schemas_and_arguments_are_passed_on_byte_for_byte() {
    let odd = r#"{"type": "object",  "z": 1.50e2, "a": 123456789012345678901234567890}"#;
    let body = format!(
        r#"{{"max_tokens": 1, "tools": [{{"name": "f", "input_schema": {odd}}}], "top_p": 1.0e0,
        "messages": [{{"role": "assistant", "content": [
            {{"type": "tool_use", "id": "t", "name": "f", "input": {odd}}}]}}]}}"#
    );
    let chat = String::from_utf8(to_chat(body.as_bytes(), SystemPlace::Anywhere).unwrap().chat).unwrap();
    assert!(chat.contains(odd) && chat.contains("\"top_p\":1.0e0"), "{chat}");
    let read: Value = serde_json::from_str(&chat).unwrap();
    assert_eq!(read["messages"][0]["tool_calls"][0]["function"]["arguments"], odd);
    assert!(read.get("model").is_none());
    let deep = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(to_chat(body.replace(odd, &deep).as_bytes(), SystemPlace::Anywhere).is_ok());
}

#[test]
fn a_prompt_is_counted_without_what_only_an_answer_needs() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "compaction": {}});
    let chat: Value =
        serde_json::from_slice(&to_counted_chat(body.to_string().as_bytes(), SystemPlace::Anywhere).unwrap())
            .unwrap();
    assert_eq!(chat["messages"], json!([{"role": "user", "content": "Hi"}]));
    assert_eq!(
        to_counted_chat(b"{\"model\":\"m\"}", SystemPlace::Anywhere).unwrap_err().param.as_deref(),
        Some("messages")
    );
}
