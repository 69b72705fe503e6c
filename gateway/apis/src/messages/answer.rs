//! A message as Anthropic's clients read it, whole; `events.rs` has it in events.

use serde_json::{Map, Value, json};

use super::arguments::Arguments;
use crate::{Counts, Finish, Said};

/// What is known of a message before it is said.
#[derive(Debug)]
pub struct MessageHead {
    /// In its id, its signatures and the ids of its calls.
    random: String,
    model: String,
}

/// The calls of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Calls {
    None,
    Complete,
    /// The last one's arguments have no end.
    CutOff,
}

/// Why a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending<'a> {
    reason: &'static str,
    /// The stop sequence, where one ended it.
    sequence: Option<&'a str>,
}

impl MessageHead {
    /// Of a message by this model, with an id of its own.
    pub fn new(model: String) -> Self {
        Self { random: format!("{:032x}", fastrand::u128(..)), model }
    }

    /// The message that says all this.
    pub fn whole(&self, said: &Said, finish: &Finish, counts: Counts) -> Value {
        let calls = match said.calls.last() {
            None => Calls::None,
            Some(last) if Arguments::of(&last.arguments).are_complete() => Calls::Complete,
            Some(_) => Calls::CutOff,
        };
        self.message(&self.content(said), Some(Ending::of(finish, calls)), counts)
    }

    /// The message with this content.
    pub(super) fn message(&self, content: &[Value], ending: Option<Ending<'_>>, counts: Counts) -> Value {
        json!({
            "id": format!("msg_{}", self.random), "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": ending.map(|ending| ending.reason),
            "stop_sequence": ending.and_then(|ending| ending.sequence), "usage": usage(counts),
        })
    }

    /// At least one block: clients look at the first.
    fn content(&self, said: &Said) -> Vec<Value> {
        let mut content = Vec::new();
        if !said.reasoning.is_empty() {
            let signature = self.signature();
            content.push(json!({"type": "thinking", "thinking": said.reasoning, "signature": signature}));
        }
        if !said.content.is_empty() || said.reasoning.is_empty() && said.calls.is_empty() {
            content.push(json!({"type": "text", "text": said.content}));
        }
        content.extend(said.calls.iter().map(|call| {
            let id = self.call_id(call.id.as_deref(), call.index);
            let name = call.name.as_deref().unwrap_or_default();
            json!({"type": "tool_use", "id": id, "name": name, "input": input(&call.arguments)})
        }));
        content
    }

    /// Stands for a proof that a thought is the model's own: nothing here asks for one.
    pub(super) fn signature(&self) -> &str {
        &self.random
    }

    /// The id of a call; one of the message's own, where the call has none.
    pub(super) fn call_id(&self, of_engine: Option<&str>, index: usize) -> String {
        of_engine.map_or_else(|| format!("toolu_{}{index:02x}", &self.random[..20]), str::to_owned)
    }
}

/// A call's arguments. Those of a call that was cut off are no object.
fn input(arguments: &str) -> Map<String, Value> {
    serde_json::from_str(arguments).unwrap_or_default()
}

impl<'a> Ending<'a> {
    /// Who calls functions waits for what they give, whatever followed the calls. A call that a stop sequence
    /// cut off must not be made.
    pub(super) fn of(finish: &'a Finish, calls: Calls) -> Self {
        let (reason, sequence) = match finish {
            Finish::Length => ("max_tokens", None),
            Finish::Filtered => ("refusal", None),
            Finish::Sequence(sequence) if calls != Calls::Complete => {
                ("stop_sequence", Some(sequence.as_str()))
            }
            Finish::Calls => ("tool_use", None),
            _ if calls != Calls::None => ("tool_use", None),
            _ => ("end_turn", None),
        };
        Self { reason, sequence }
    }

    /// As the event of the message's end tells it.
    pub(super) fn delta(self) -> Value {
        json!({"stop_reason": self.reason, "stop_sequence": self.sequence})
    }
}

/// Token counts: what was cached does not count as input once more.
pub(super) fn usage(counts: Counts) -> Value {
    json!({
        "input_tokens": counts.prompt.saturating_sub(counts.cached), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached, "output_tokens": counts.answer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CallDelta;

    fn call(arguments: &str) -> CallDelta {
        CallDelta { index: 0, id: Some("c1".into()), name: Some("f".into()), arguments: arguments.into() }
    }

    #[test]
    fn a_message_has_its_thoughts_its_text_and_its_calls_in_blocks() {
        let said =
            Said { reasoning: "Hm.".into(), content: "Look.".into(), calls: vec![call("{\"b\":1,\"a\":2}")] };
        let counts = Counts { prompt: 9, cached: 4, answer: 2, reasoning: 0 };
        let head = MessageHead::new("m".into());
        let message = head.whole(&said, &Finish::Calls, counts);
        let want = json!({
            "id": message["id"], "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": head.signature()},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": 1, "a": 2}},
            ],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                "output_tokens": 2},
        });
        assert_eq!(message.to_string(), want.to_string());
        assert!(message["id"].as_str().is_some_and(|id| id.len() == 36 && id.starts_with("msg_")));
        let silent = head.whole(&Said::default(), &Finish::Stop, counts);
        assert_eq!(silent["content"], json!([{"type": "text", "text": ""}]));
        let own = Said { calls: vec![CallDelta { id: None, ..call("") }], ..Said::default() };
        let own = &head.whole(&own, &Finish::Calls, counts)["content"][0];
        assert!(own["id"].as_str().is_some_and(|id| id.starts_with("toolu_")) && own["input"] == json!({}));
    }

    #[test]
    fn the_end_has_its_reason() {
        let sequence = Finish::Sequence("END".into());
        for (finish, arguments, reason, told) in [
            (&Finish::Stop, None, "end_turn", None),
            (&Finish::Stop, Some("{}"), "tool_use", None),
            (&Finish::Stop, Some(""), "tool_use", None),
            (&Finish::Calls, None, "tool_use", None),
            (&Finish::Length, Some("{\"a"), "max_tokens", None),
            (&Finish::Filtered, Some("{}"), "refusal", None),
            (&sequence, None, "stop_sequence", Some("END")),
            (&sequence, Some("{\"a\": \""), "stop_sequence", Some("END")),
            (&sequence, Some("{\"a\": 1}"), "tool_use", None),
        ] {
            let said = Said { calls: arguments.map(call).into_iter().collect(), ..Said::default() };
            let message = MessageHead::new("m".into()).whole(&said, finish, Counts::default());
            assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &json!(told)));
        }
    }
}
