//! What clients make of a message's events: an SDK's way of adding them up, against the whole message.

use proptest::prelude::*;

use super::*;

/// The data of each event, whose name is its type.
pub(in crate::messages) fn read(events: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(events).unwrap();
    let read = |event: &str| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    text.split_terminator("\n\n").map(read).collect()
}

/// The message that an SDK adds up, and whether it has ended.
pub(in crate::messages) fn added_up(events: &[u8]) -> (Value, bool) {
    let (mut message, mut blocks, mut json, mut has_ended) = (Value::Null, Vec::new(), String::new(), false);
    let mut open = None;
    for event in read(events) {
        assert!(!has_ended);
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!((open, &event["index"]), (None, &json!(blocks.len())));
                (open, json) = (Some(blocks.len()), String::new());
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(open, event["index"].as_u64().map(|index| index as usize));
                let (delta, block) = (&event["delta"], blocks.last_mut().unwrap());
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    _ => {
                        json += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                };
                block[field] =
                    (block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap()).into();
            }
            "content_block_stop" => {
                assert_eq!(open.take(), event["index"].as_u64().map(|index| index as usize));
                if !json.is_empty() {
                    let block: &mut Value = blocks.last_mut().unwrap();
                    block["input"] = serde_json::from_str(&json).unwrap_or(json!({}));
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = event["delta"][field].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => has_ended = true,
            other => assert_eq!(other, "ping"),
        }
    }
    message["content"] = blocks.into();
    (message, has_ended)
}

fn call(index: usize, name: Option<&str>, arguments: &str) -> CallDelta {
    CallDelta { index, id: None, name: name.map(str::to_owned), arguments: arguments.to_owned() }
}

fn says(reasoning: &str, content: &str, calls: Vec<CallDelta>) -> Said {
    Said { reasoning: reasoning.to_owned(), content: content.to_owned(), calls }
}

fn told(pieces: Vec<Said>) -> Vec<u8> {
    let (mut events, mut out) = (MessageEvents::new(MessageHead::new("m".into())), Vec::new());
    for said in pieces {
        events.begin(&mut out, Counts { prompt: 3, ..Counts::default() });
        events.say(&mut out, said);
    }
    events.end(&mut out, &Finish::Stop, Counts { prompt: 3, answer: 2, ..Counts::default() });
    out
}

#[test]
fn a_message_begins_and_ends() {
    let names = |out: &[u8]| -> Vec<String> {
        read(out).iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
    };
    let block = ["content_block_start", "content_block_stop"];
    let all = [&["message_start", "ping"][..], &block, &["message_delta", "message_stop"]].concat();
    assert_eq!(names(&told(Vec::new())), all);
    let start = &read(&told(vec![says("", "a", Vec::new())]))[0]["message"];
    assert_eq!((&start["usage"]["input_tokens"], &start["usage"]["output_tokens"]), (&json!(3), &json!(0)));
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
}

/// What comes between the parts of a call, or of another call, stands behind it.
#[test]
fn a_call_is_told_to_its_end_before_anything_else() {
    let out = told(vec![
        says("", "", vec![call(0, Some("f"), "{\"a\":"), call(1, Some("g"), "")]),
        says("", "x", vec![call(1, None, "{}")]),
        says("t", "y", vec![call(0, None, "1}")]),
        says("", "z", vec![call(2, Some("h"), ""), call(3, Some("i"), "{}")]),
    ]);
    let (message, _) = added_up(&out);
    let shown = |block: &Value| match block["type"].as_str() {
        Some("tool_use") => format!("{}{}", block["name"].as_str().unwrap(), block["input"]),
        _ => block["text"].as_str().or(block["thinking"].as_str()).unwrap().to_owned(),
    };
    let blocks: Vec<String> = message["content"].as_array().unwrap().iter().map(shown).collect();
    assert_eq!(blocks, ["f{\"a\":1}", "t", "xy", "g{}", "z", "h{}", "i{}"]);
}

#[test]
fn an_error_is_an_event() {
    let mut out = Vec::new();
    write_error(&mut out, &crate::messages::error(500, None, "Broken."));
    assert_eq!(read(&out)[0]["error"], json!({"type": "api_error", "message": "Broken."}));
}

proptest! {
    /// However it is cut into pieces, what is told in events is what is told whole.
    #[test]
    fn events_add_up_to_the_whole_message(
        (reasoning, content) in ("[a-é]{0,6}", "[a-é]{0,6}"),
        calls in prop::collection::vec(prop_oneof!["[a-é\"{]{0,5}", Just("}".to_owned())], 0..3),
        cut_at in 0..8usize,
        size in 1..4usize,
    ) {
        let head = MessageHead::new("m".into());
        let calls = calls.iter().enumerate().map(|(i, text)| {
            call(i, Some("f"), &json!({"a": text, "b": [i]}).to_string())
        });
        let mut said = says(&reasoning, &content, calls.collect());
        if let Some(last) = said.calls.last_mut() {
            let cut: String = last.arguments.chars().take(last.arguments.chars().count() - cut_at).collect();
            last.arguments = cut;
        }
        let finish = Finish::Sequence("END".into());
        let whole = head.whole(&said, &finish, Counts::default());
        let pieces = |text: &str| -> Vec<String> {
            text.chars().collect::<Vec<_>>().chunks(size).map(|piece| piece.iter().collect()).collect()
        };
        let (mut events, mut out) = (MessageEvents::new(head), Vec::new());
        events.begin(&mut out, Counts::default());
        for piece in pieces(&said.reasoning) {
            events.say(&mut out, says(&piece, "", Vec::new()));
        }
        for piece in pieces(&said.content) {
            events.say(&mut out, says("", &piece, Vec::new()));
        }
        for of in &said.calls {
            events.say(&mut out, says("", "", vec![call(of.index, Some("f"), "")]));
            for piece in pieces(&of.arguments) {
                events.say(&mut out, says("", "", vec![call(of.index, None, &piece)]));
            }
        }
        events.end(&mut out, &finish, Counts::default());
        prop_assert_eq!(added_up(&out), (whole, true));
    }
}
