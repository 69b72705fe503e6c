//! What becomes of a request's items, fields and tools.

use serde_json::{Value, json};

use super::{chat, request, tools, translated};
use crate::{SystemPlace, to_chat};

#[track_caller]
fn check_turns(input: Value, messages: &Value) {
    let chat = chat(&json!({"input": input}));
    assert_eq!(&chat["messages"], messages, "{input}");
}

#[test]
fn items_in_turn_are_one_message_of_the_assistant() {
    let user = json!({"role": "user", "content": "Hi"});
    let call = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let thought = json!({"type": "reasoning", "id": "rs", "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": null});
    let text = json!({"type": "message", "role": "assistant", "id": "msg", "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}]});
    let called = json!({"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{\"a\":1}"});
    let spaced = json!({"type": "function_call", "call_id": "c2", "name": "read", "namespace": "fs",
        "arguments": ""});
    let custom = json!({"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "a\n\"b\""});
    let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "done"});
    let answered = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "done"});
    check_turns(
        json!([user, thought, text, called, spaced, output("c1"), output("c2"), thought, custom,
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"}, text, text]),
        &json!([
            user,
            {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.",
                "tool_calls": [call("c1", "look", "{\"a\":1}"), call("c2", "fs__read", "")]},
            answered("c1"), answered("c2"),
            {"role": "assistant", "reasoning_content": "Hm.",
                "tool_calls": [call("c3", "patch", "{\"input\":\"a\\n\\\"b\\\"\"}")]},
            answered("c3"),
            {"role": "assistant", "content": "I look."}, {"role": "assistant", "content": "I look."},
        ]),
    );
    let short = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]});
    check_turns(json!([short]), &json!([{"role": "assistant", "reasoning_content": "In short."}]));
}

#[test]
fn instructions_come_first_and_roles_stay() {
    let input = json!([{"role": "developer", "content": "D"}, {"type": "message", "role": "system",
        "content": [{"type": "input_text", "text": "S"}]}, {"role": "assistant", "content": "A"}]);
    let chat = chat(&json!({"instructions": "I", "input": input}));
    let messages = json!([{"role": "system", "content": "I"}, {"role": "developer", "content": "D"},
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "assistant", "content": "A"}]);
    assert_eq!(chat["messages"], messages);
    check_turns(json!(""), &json!([{"role": "user", "content": ""}]));
}

#[test]
fn images_sounds_and_files_keep_their_data() {
    for (part, told) in [
        (
            json!({"type": "input_image", "image_url": "data:x", "detail": "low"}),
            json!({"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}),
        ),
        (
            json!({"type": "input_image", "image_url": "https://e/x.png"}),
            json!({"type": "image_url", "image_url": {"url": "https://e/x.png"}}),
        ),
        (
            json!({"type": "input_file", "filename": "a.pdf", "file_data": "data:y"}),
            json!({"type": "file", "file": {"file_data": "data:y", "filename": "a.pdf"}}),
        ),
        (
            json!({"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}}),
            json!({"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}}),
        ),
        (json!({"type": "refusal", "refusal": "No."}), json!({"type": "text", "text": "No."})),
    ] {
        check_turns(
            json!([{"role": "user", "content": [part]}]),
            &json!([{"role": "user", "content": [told]}]),
        );
        let output = json!({"type": "function_call_output", "call_id": "c", "output": [part]});
        check_turns(json!([output]), &json!([{"role": "tool", "tool_call_id": "c", "content": [told]}]));
    }
}

#[test]
fn fields_have_a_chats_names_or_are_named_as_ignored() {
    for (more, sent, ignored) in [
        (json!({"max_output_tokens": 9, "max_tool_calls": 2}), json!({"max_tokens": 9}), ""),
        (
            json!({"temperature": 0.5, "top_p": null, "user": "u", "prompt_cache_key": "k"}),
            json!({"temperature": 0.5, "user": "u", "prompt_cache_key": "k"}),
            "",
        ),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": false}}),
            json!({"stream": true, "stream_options": {"include_usage": true}}),
            "",
        ),
        (json!({"stream": false}), json!({}), ""),
        (
            json!({"reasoning": {"effort": "low", "summary": "auto"}}),
            json!({"reasoning_effort": "low"}),
            "reasoning.summary",
        ),
        (
            json!({"chat_template_kwargs": {"a": 1}, "cache_salt": "s", "priority": 3, "top_k": 2}),
            json!({"chat_template_kwargs": {"a": 1}, "cache_salt": "s", "priority": 3, "top_k": 2}),
            "",
        ),
        (
            json!({"text": {"verbosity": "low", "format": {"type": "json_schema", "name": "n", "strict": true,
                "schema": {"z": 1, "a": 2}}}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n",
                "schema": {"z": 1, "a": 2}, "strict": true}}}),
            "text.verbosity",
        ),
        (
            json!({"text": {"format": {"type": "json_object"}}}),
            json!({"response_format": {"type": "json_object"}}),
            "",
        ),
        (
            json!({"metadata": {"a": "b"}, "service_tier": "flex", "store": true, "safety_identifier": "s",
                "truncation": "auto", "background": false, "include": ["reasoning.encrypted_content"],
                "previous_response_id": null, "max_tokens": 3, "odd field": 1}),
            json!({}),
            "truncation,service_tier,store,include,max_tokens",
        ),
        (
            json!({"input": [{"role": "assistant", "content": "A", "status": "incomplete"}]}),
            json!({"add_generation_prompt": false, "continue_final_message": true}),
            "",
        ),
    ] {
        let mut chat = chat(&more).as_object().unwrap().clone();
        assert!(chat.remove("messages").is_some() && chat.remove("model").is_some_and(|model| model == "m"));
        // Of a schema the order counts, too: it may be part of the prompt.
        let form = |chat: &Value| chat["response_format"].to_string();
        let chat = Value::Object(chat);
        assert_eq!((&chat, form(&chat)), (&sent, form(&sent)), "{more}");
        assert_eq!(translated(&more).unwrap().ignored.join(","), ignored, "{more}");
    }
}

#[test]
fn tools_are_functions_in_the_clients_order() {
    let translated = translated(&json!({"tools": tools(), "parallel_tool_calls": false})).unwrap();
    assert_eq!(translated.ignored, ["tools.web_search"]);
    let chat: Value = serde_json::from_slice(&translated.chat).unwrap();
    assert_eq!(chat["parallel_tool_calls"], false);
    let functions = chat["tools"].as_array().unwrap().iter().map(|tool| &tool["function"]);
    let functions: Vec<String> = functions.map(Value::to_string).collect();
    let text = json!({"type": "string", "description": "The freeform text payload for this tool."});
    let patch = json!({"name": "patch", "description": "Patches.", "parameters": {"type": "object",
        "properties": {"input": text}, "required": ["input"], "additionalProperties": false}});
    let expected = [
        r#"{"name":"look","parameters":{"type":"object","properties":{"z":{},"a":{}}},"strict":true}"#,
        &patch.to_string(),
        r#"{"name":"fs__read","parameters":{}}"#,
        r#"{"name":"fs__stat"}"#,
    ];
    assert_eq!(functions, expected);
}

#[test]
fn a_choice_of_tools_is_one_of_functions() {
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let all = ["look", "patch", "fs__read", "fs__stat"];
    for (choice, told, names) in [
        (json!("auto"), json!("auto"), &all[..]),
        (json!("none"), json!("none"), &all),
        (json!("required"), json!("required"), &all),
        (json!({"type": "function", "name": "look"}), named("look"), &all),
        (json!({"type": "function", "name": "read"}), named("fs__read"), &all),
        (json!({"type": "custom", "name": "patch"}), named("patch"), &all),
        (
            json!({"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "function", "name": "stat"}, {"type": "custom", "name": "patch"}]}),
            json!("required"),
            &["patch", "fs__stat"],
        ),
    ] {
        let chat = chat(&json!({"tools": tools(), "tool_choice": choice}));
        assert_eq!(chat["tool_choice"], told);
        let offered = chat["tools"].as_array().unwrap().iter();
        let offered: Vec<&str> = offered.map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(offered, names, "{choice}");
    }
    // A function of no namespace comes before one of that name in a namespace.
    let mut more = tools();
    more.as_array_mut().unwrap().push(json!({"type": "function", "name": "read"}));
    let chat = super::chat(&json!({"tools": more, "tool_choice": {"type": "function", "name": "read"}}));
    assert_eq!(chat["tool_choice"], named("read"));
    // Engines refuse a choice among nothing.
    for tools in [json!([]), json!([{"type": "web_search"}])] {
        let chat = super::chat(&json!({"tools": tools, "tool_choice": "auto", "parallel_tool_calls": true}));
        assert!(["tools", "tool_choice", "parallel_tool_calls"].iter().all(|name| chat.get(name).is_none()));
    }
}

#[test]
fn what_cannot_be_done_is_refused_by_its_field() {
    let item = |item: Value| json!({"input": [item]});
    let part_refused =
        |what: Value, param: &'static str| (json!({"input": [{"role": "user", "content": [what]}]}), param);
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": {"id": "c"}}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"background": true}), "background"),
        (json!({"keyway": {}}), "keyway"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"model": 1}), "model"),
        (json!({"input": null}), "input"),
        (json!({"input": 1}), "input"),
        (json!({"instructions": []}), "instructions"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"truncation": "perhaps"}), "truncation"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "regex"}}}), "text.format.type"),
        (json!({"reasoning": {"effort": 3}}), "reasoning.effort"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [{"name": "a"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "a", "parameters": []}]}), "tools[0].parameters"),
        (
            json!({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}),
            "tools[0].tools[0].name",
        ),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "name": "other"}}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "web_search"}}), "tool_choice"),
        (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "perhaps"}), "tool_choice"),
        (json!({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}), "tool_choice"),
        (item(json!(1)), "input[0]"),
        (item(json!({"type": "web_search_call"})), "input[0].type"),
        (item(json!({"type": "item_reference", "id": "msg"})), "input[0].id"),
        (item(json!({"id": "msg"})), "input[0].id"),
        (item(json!({"role": "tool", "content": ""})), "input[0].role"),
        (item(json!({"role": "user"})), "input[0].content"),
        (item(json!({"role": "assistant", "content": []})), "input[0].content[0]"),
        (item(json!({"type": "function_call", "name": "a", "arguments": "{}"})), "input[0].call_id"),
        (item(json!({"type": "function_call_output", "call_id": "a"})), "input[0].output"),
        (
            item(json!({"type": "reasoning", "summary": [], "encrypted_content": "x"})),
            "input[0].encrypted_content",
        ),
        part_refused(json!({"type": "input_text"}), "input[0].content[0].text"),
        part_refused(json!({"type": "input_image", "file_id": "f"}), "input[0].content[0].file_id"),
        part_refused(json!({"type": "input_file", "file_url": "u"}), "input[0].content[0].file_url"),
        part_refused(json!({"type": "computer_screenshot"}), "input[0].content[0].type"),
    ] {
        let refusal = translated(&more).expect_err(&more.to_string());
        assert_eq!(refusal.param.as_deref(), Some(param), "{more}: {refusal}");
        assert!(refusal.message.starts_with(&format!("'{param}' ")), "{refusal}");
    }
    for body in ["", "[]", "{\"input\":"] {
        assert!(to_chat(crate::Api::Responses, body.as_bytes(), SystemPlace::Anywhere).is_err(), "{body}");
    }
}

#[test]
fn what_is_lost_of_an_item_is_named() {
    for (item, ignored) in [
        (
            json!({"role": "assistant", "content": [{"type": "output_text", "text": "a"},
                {"type": "output_text", "text": "b"}]}),
            "input.content",
        ),
        (
            json!({"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {}}]}),
            "input.content.cache_control",
        ),
        (
            json!({"role": "assistant", "content": "a", "id": "msg", "status": "completed", "phase": "f"}),
            "input.phase",
        ),
    ] {
        assert_eq!(translated(&json!({"input": [item]})).unwrap().ignored, [ignored]);
    }
}

#[test]
fn a_choice_among_very_many_is_no_search_for_each() {
    let functions: Vec<Value> =
        (0..40_000).map(|i| json!({"type": "function", "name": format!("f{i}"), "parameters": {}})).collect();
    let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": functions[1..]});
    let body = json!({"model": "m", "input": "Hi", "tools": functions, "tool_choice": choice});
    let chat = chat(&body);
    assert_eq!(chat["tools"].as_array().map(Vec::len), Some(39_999));
}

/// Codex says things as the developer in mid-conversation.
#[test]
fn late_developers_are_heard_where_they_stand() {
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let parts = json!({"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]});
    let output = json!({"type": "function_call_output", "call_id": "c", "output": "None."});
    let input = json!([
        said("developer", "Obey."),
        said("user", "Hi"),
        said("assistant", "Yes?"),
        output,
        parts,
        said("user", "Go.")
    ]);
    let body = request(&json!({"instructions": "Write.", "input": input})).to_string();
    let result = |text: &str| json!({"role": "tool", "tool_call_id": "c", "content": text});
    let reminded = "None.\n\n<system-reminder>\nBe brief.\n</system-reminder>";
    let text = json!([{"type": "text", "text": "Be brief."}]);
    let late = |role: &str| json!({"role": role, "content": text});
    let first = said("system", "Write.\n\nObey.");
    let front = [said("system", "Write."), said("developer", "Obey.")];
    for (place, leading, rest) in [
        (SystemPlace::Anywhere, &front[..], vec![result("None."), late("developer")]),
        (SystemPlace::NoDevelopers, std::slice::from_ref(&first), vec![result("None."), late("system")]),
        (SystemPlace::InFront, std::slice::from_ref(&first), vec![result(reminded)]),
    ] {
        let chat = to_chat(crate::Api::Responses, body.as_bytes(), place).unwrap().chat;
        let chat: Value = serde_json::from_slice(&chat).unwrap();
        let between = vec![said("user", "Hi"), said("assistant", "Yes?")];
        let all = [leading.to_vec(), between, rest, vec![said("user", "Go.")]].concat();
        assert_eq!(chat["messages"], Value::from(all), "{place:?}");
    }
}
