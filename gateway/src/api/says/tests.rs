//! Events of each API, as its documents and engines write them, and what they say.

use super::*;
use crate::sse::events;

fn said(api: Api, event: &str) -> Said {
    Said::of(api, &events(event.as_bytes()).next().unwrap())
}

const TOKEN: Said =
    Said { generated: true, binds: true, end: None, fault: None, aborts: false, raises: false };

#[test]
fn content_in_any_shape_is_a_token() {
    for delta in [
        r#"{"content":"a"}"#,
        r#"{"role":"assistant","content":"a"}"#,
        r#"{"content":null,"reasoning":"hm"}"#,
        r#"{"reasoning_content":"hm"}"#,
        r#"{"refusal":"no"}"#,
        r#"{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}"#,
        r#"{"function_call":{"name":"f"}}"#,
        r#"{"audio":{"data":"AAAA"}}"#,
        r#"{"content":[{"type":"text","text":"a"}]}"#,
    ] {
        let event = format!(
            "data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":null}}]}}\n\n"
        );
        assert_eq!(said(Api::Chat, &event), TOKEN, "{event}");
    }
    for (api, event) in [
        (Api::Completions, r#"{"choices":[{"text":" a","finish_reason":null}]}"#),
        (Api::Completions, r#"{"choices":[{"text":"","token_ids":[7]}]}"#),
        (Api::Chat, r#"{"choices":[{"delta":{}},{"index":1,"delta":{"content":"b"}}]}"#),
        (Api::Responses, r#"{"type":"response.output_text.delta","delta":"hi"}"#),
        (Api::Responses, r#"{"type":"response.reasoning_text.delta","delta":"hm"}"#),
        (Api::Responses, r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#),
        (Api::Responses, r#"{"type":"response.output_item.added","item":{}}"#),
        (Api::Messages, r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#),
        (Api::Messages, r#"{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}"#),
        (
            Api::Messages,
            r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}"#,
        ),
        (
            Api::Messages,
            r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"f","input":{}}}"#,
        ),
        (Api::Other, r#"{"type":"speech.audio.delta","audio":"AAAA"}"#),
        (Api::Other, "plain"),
    ] {
        assert_eq!(said(api, &format!("data: {event}\n\n")), TOKEN, "{event}");
    }
}

#[test]
fn what_only_says_that_an_answer_was_begun_is_none() {
    for (api, event) in [
        (Api::Chat, ": keep-alive"),
        (Api::Chat, "data:"),
        (
            Api::Chat,
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        ),
        (Api::Chat, r#"data: {"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[]}}]}"#),
        (Api::Chat, r#"data: {"choices":[],"usage":{"prompt_tokens":3},"error":null}"#),
        (Api::Chat, r#"data: {"choices":[],"prompt_filter_results":[{}]}"#),
        (Api::Completions, r#"data: {"choices":[{"text":"","finish_reason":null}]}"#),
        (Api::Responses, r#"data: {"type":"response.created","response":{"error":null,"output":[]}}"#),
        (Api::Responses, r#"data: {"type":"response.in_progress","response":{"id":"r"}}"#),
        (Api::Responses, r#"data: {"type":"response.output_text.delta","delta":""}"#),
        (Api::Messages, r#"data: {"type":"message_start","message":{"content":[],"stop_reason":null}}"#),
        (Api::Messages, r#"data: {"type":"ping"}"#),
        (Api::Messages, r#"data: {"type":"content_block_start","content_block":{"type":"text","text":""}}"#),
        (Api::Other, "event: ping"),
    ] {
        let said = said(api, &format!("{event}\n\n"));
        assert_eq!((said.generated, said.end, said.fault), (false, None, None), "{event}");
        let binds = ["output_text", "content_block"].iter().any(|word| event.contains(word));
        assert_eq!(said.binds, binds, "{event}");
    }
}

#[test]
fn each_api_says_its_end() {
    let end = |api, data: &str| said(api, &format!("data: {data}\n\n")).end;
    assert_eq!(end(Api::Chat, "[DONE]"), Some(End::Done));
    assert_eq!(end(Api::Responses, " [DONE] "), Some(End::Done));
    assert_eq!(end(Api::Chat, r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#), Some(End::Finished));
    assert_eq!(
        end(Api::Completions, r#"{"choices":[{"text":"x","finish_reason":"length"}]}"#),
        Some(End::Finished)
    );
    assert_eq!(
        end(Api::Messages, r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#),
        Some(End::Finished)
    );
    assert_eq!(end(Api::Messages, r#"{"type":"message_delta","delta":{"stop_reason":null}}"#), None);
    assert_eq!(end(Api::Messages, r#"{"type":"message_stop"}"#), Some(End::Done));
    assert_eq!(
        end(Api::Responses, r#"{"type":"response.completed","response":{"error":null}}"#),
        Some(End::Done)
    );
    assert_eq!(end(Api::Responses, r#"{"type":"response.incomplete","response":{}}"#), Some(End::Done));
    assert_eq!(end(Api::Responses, r#"{"type":"response.output_text.done","text":"x"}"#), None);
}

#[test]
fn an_error_in_any_words_is_one_and_says_whose() {
    for (api, event, fault) in [
        (
            Api::Chat,
            r#"data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}"#,
            AtFault::Worker,
        ),
        (
            Api::Chat,
            r#"data:{"error":{"message":"bad","type":"BadRequestError","code":400}}"#,
            AtFault::Request,
        ),
        (Api::Chat, r#"data: {"error":{"message":"x","code":"engine_stopped"}}"#, AtFault::Worker),
        (Api::Chat, r#"data: {"error":{"message":"x","code":"invalid_grammar"}}"#, AtFault::Request),
        (Api::Chat, r#"data: {"error":"engine dead"}"#, AtFault::Worker),
        (Api::Chat, r#"data: {"object":"error","message":"engine dead","code":500}"#, AtFault::Worker),
        (Api::Chat, r#"data: {"object":"error","message":"too long","code":400}"#, AtFault::Request),
        (Api::Chat, "event: error\ndata: {\"message\":\"engine dead\"}", AtFault::Worker),
        (Api::Chat, r#"data: {"detail":"engine dead"}"#, AtFault::Worker),
        (Api::Chat, r#"data: {"choices":[],"error":{"message":"engine dead"}}"#, AtFault::Worker),
        (
            Api::Chat,
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":"abort"}]}"#,
            AtFault::Worker,
        ),
        (Api::Completions, r#"data: {"choices":[{"text":"","finish_reason":"error"}]}"#, AtFault::Worker),
        (
            Api::Messages,
            r#"data: {"type":"error","error":{"type":"overloaded_error","message":"x"}}"#,
            AtFault::Worker,
        ),
        (
            Api::Messages,
            r#"data: {"type":"error","error":{"type":"invalid_request_error"}}"#,
            AtFault::Request,
        ),
        (Api::Responses, r#"data: {"type":"error","code":"server_error","message":"x"}"#, AtFault::Worker),
        (
            Api::Responses,
            r#"data: {"type":"response.failed","response":{"error":{"code":"server_error"}}}"#,
            AtFault::Worker,
        ),
        (Api::Other, r#"data: {"error":{"message":"rate","code":429}}"#, AtFault::Worker),
    ] {
        let said = said(api, &format!("{event}\n\n"));
        assert_eq!((said.fault, said.end), (Some(fault), None), "{event}");
    }
}

#[test]
fn clients_raise_on_the_words_of_their_api_alone() {
    let raises = |api, event: &str| {
        let said = said(api, &format!("{event}\n\n"));
        assert!(said.fault.is_some(), "{event}");
        said.raises
    };
    let (openai, anthropic) =
        (r#"data: {"error":{"message":"x"}}"#, r#"data: {"type":"error","error":{"type":"api_error"}}"#);
    assert!(raises(Api::Chat, openai) && raises(Api::Completions, openai) && raises(Api::Responses, openai));
    let bare = r#"data: {"error":"engine dead"}"#;
    assert!(!raises(Api::Chat, bare) && !raises(Api::Responses, bare), "it has no message to tell");
    assert!(!raises(Api::Messages, openai), "without its name, the event is not heard");
    assert!(!raises(Api::Messages, anthropic));
    assert!(raises(Api::Messages, &format!("event: error\n{anthropic}")));
    for silent in [
        r#"data: {"object":"error","message":"x"}"#,
        "event: error\ndata: {\"message\":\"x\"}",
        r#"data: {"detail":"x"}"#,
    ] {
        assert!(!raises(Api::Chat, silent), "{silent}");
    }
    assert!(!raises(Api::Chat, r#"data: {"choices":[{"delta":{},"finish_reason":"abort"}]}"#));
    assert!(raises(Api::Responses, r#"data: {"type":"response.failed","response":{}}"#));
    assert!(!raises(Api::Responses, r#"data: {"type":"error","message":"x"}"#));
}
