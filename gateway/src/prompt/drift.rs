//! The prompt-drift doctor: where a session's prompt stops repeating its own past, which no prefix cache
//! survives. It names the field and the place in it, in a metric, in the access log and in `/explain`; never
//! the text. A timestamp in a system message, tools in another order, or an agent that rewrites old turns
//! show up here.
//!
//! A session is what a client's header says, else the requests with one `prompt_cache_key` and one first
//! message by a user.

use std::sync::Arc;

use http::HeaderMap;
use keyway_core::sessions::{Drift, SessionTurn, Sessions};
use keyway_wire::block_hash::{Chain, HashKey};
use keyway_wire::spans::Spans;
use parking_lot::Mutex;
use serde::Serialize;

use crate::{
    limits::DRIFT_MEMORY_BYTES,
    metrics::{DriftMetrics, Metrics},
    prompt::{
        ignored::Ignored,
        request::{PromptField, RequestInfo, locate},
        session,
    },
};

/// Fields of messages that may be named; others could hold anything.
const KNOWN_FIELDS: [&str; 8] =
    ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "type"];

/// Follows sessions in a bounded memory, and says where a prompt leaves its session's past.
#[derive(Debug)]
pub struct DriftDoctor {
    sessions: Mutex<Sessions>,
    key: HashKey,
    drifts: DriftMetrics,
}

/// Where a prompt left its session's past.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// The field that changed, such as `messages[0].content`; `?` where it cannot be found.
    pub field: String,
    /// The change begins so many bytes into the field, or behind that within a block.
    pub offset: u64,
    /// Bytes of a block.
    pub within_bytes: usize,
    /// What `routing.ignore` calls the field: to be left out, if no engine sees what changes there.
    pub ignore_field: Option<String>,
    /// Bytes of the past, up to its last message, that the prompt does not repeat.
    pub lost_bytes: u64,
    /// The field's kind, as metrics have it.
    #[serde(skip)]
    kind: &'static str,
}

impl DriftDoctor {
    /// One that knows no session, and names them by `key`.
    pub fn new(key: HashKey, metrics: &Arc<Metrics>) -> Self {
        Self {
            key,
            sessions: Mutex::new(Sessions::new(DRIFT_MEMORY_BYTES)),
            drifts: metrics.caches.drift.clone(),
        }
    }

    /// Looks at a request without remembering it.
    pub fn look(
        &self,
        headers: &HeaderMap,
        (body, ignored): (&[u8], &Ignored),
        info: &RequestInfo,
    ) -> Option<Diagnosis> {
        let drift = self.sessions.lock().drift(self.session(headers, info)?, turn(info))?;
        Some(diagnosis(body, ignored, info, drift))
    }

    /// Takes a request into its session; counts it if it left that session's past. `model`: its label in
    /// metrics.
    pub fn follow(
        &self,
        headers: &HeaderMap,
        (body, ignored): (&[u8], &Ignored),
        info: &RequestInfo,
        model: &str,
    ) -> Option<Diagnosis> {
        let session = self.session(headers, info)?;
        let drift = self.sessions.lock().follow(session, turn(info));
        let found = diagnosis(body, ignored, info, drift?);
        self.drifts.prompts.with_label_values(&[model, found.kind]).inc();
        self.drifts.bytes.with_label_values(&[model]).inc_by(found.lost_bytes);
        Some(found)
    }

    /// The request's session; `None` if nothing says which, or it is no turn of one.
    fn session(&self, headers: &HeaderMap, info: &RequestInfo) -> Option<u64> {
        if !info.work.fills_cache() {
            return None;
        }
        let mut name = Chain::new(self.key, info.salt.as_bytes());
        Some(match (session::in_headers(headers), info.talk.opening) {
            (Some(id), _) => name.hash(id.as_bytes()),
            (None, Some(opening)) => {
                name.hash([info.talk.cache_key, opening].map(u64::to_le_bytes).as_flattened())
            }
            (None, None) => return None,
        })
    }
}

fn turn(info: &RequestInfo) -> SessionTurn<'_> {
    let settled = info.talk.settled_bytes as usize / info.chain.block_bytes.max(1);
    SessionTurn { chain: &info.chain.names, settled: Spans::OfText.names(settled) }
}

fn diagnosis(body: &[u8], ignored: &Ignored, info: &RequestInfo, drift: Drift) -> Diagnosis {
    let block_bytes = info.chain.block_bytes;
    let [common, next, end] = [drift.common, drift.common + 1, drift.common + drift.lost]
        .map(|names| Spans::OfText.blocks(names) * block_bytes);
    // Of the fields that the first changed span is cut from, the one that most of it is.
    let within_bytes = next - common;
    let middle = within_bytes as u64 / 2;
    let at = common as u64 + middle;
    let name = |place: PromptField<'_>, role: Option<&str>| {
        (name_of(place), ignore_name(place), kind_of(place, role))
    };
    let found = locate(body, ignored, at, name);
    let ((field, ignore_field, kind), offset) = found.unwrap_or_else(|| (("?".to_owned(), None, "other"), 0));
    let offset = offset.saturating_sub(middle);
    Diagnosis { field, offset, within_bytes, ignore_field, lost_bytes: (end - common) as u64, kind }
}

fn name_of(place: PromptField<'_>) -> String {
    match place {
        PromptField::Model => "model".to_owned(),
        PromptField::System => "system".to_owned(),
        PromptField::Tools => "tools".to_owned(),
        PromptField::Prompt => "prompt".to_owned(),
        PromptField::Message { index, field } => {
            let known = KNOWN_FIELDS.iter().find(|known| **known == field);
            known.map_or_else(|| format!("messages[{index}]"), |field| format!("messages[{index}].{field}"))
        }
    }
}

/// The field as `routing.ignore` has it.
fn ignore_name(place: PromptField<'_>) -> Option<String> {
    match place {
        PromptField::Model => None,
        PromptField::System | PromptField::Tools | PromptField::Prompt => Some(name_of(place)),
        PromptField::Message { field, .. } => {
            KNOWN_FIELDS.iter().find(|known| **known == field).map(|field| format!("messages.{field}"))
        }
    }
}

/// The field's kind for metrics: a closed set, so that clients cannot make series.
fn kind_of(place: PromptField<'_>, role: Option<&str>) -> &'static str {
    match (place, role) {
        (PromptField::Model, _) => "model",
        (PromptField::System, _) => "system",
        (PromptField::Tools, _) => "tools",
        (PromptField::Prompt, _) => "prompt",
        (PromptField::Message { .. }, Some("system" | "developer")) => "system_message",
        (PromptField::Message { .. }, Some("user")) => "user_message",
        (PromptField::Message { .. }, Some("assistant")) => "assistant_message",
        (PromptField::Message { .. }, Some("tool")) => "tool_message",
        (PromptField::Message { .. }, _) => "message",
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use http::HeaderValue;
    use keyway_wire::block_hash::HashKey;
    use serde_json::{Value, json};

    use super::*;
    use crate::prompt::request::{self, KeyerConfig};

    struct Desk(DriftDoctor, Arc<Metrics>, Ignored);

    impl Desk {
        fn new() -> Self {
            let metrics = Arc::new(Metrics::new().unwrap());
            Self(DriftDoctor::new(HashKey::new(1), &metrics), metrics, Ignored::default())
        }

        fn ask(&self, body: &Value, session: Option<&str>) -> Option<Diagnosis> {
            let (body, mut headers) = (body.to_string(), HeaderMap::new());
            if let Some(session) = session {
                headers.insert("x-session-id", HeaderValue::from_str(session).unwrap());
            }
            let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() };
            let info = request::read_without(body.as_bytes(), config, &self.2);
            let seen = self.0.look(&headers, (body.as_bytes(), &self.2), &info);
            let followed = self.0.follow(&headers, (body.as_bytes(), &self.2), &info, "m");
            assert_eq!(seen, followed);
            followed
        }
    }

    fn talk(clock: &str, turns: usize) -> Value {
        let system = format!("{}The time is {clock}. {}", "You help. ".repeat(30), "Be brief. ".repeat(40));
        let mut messages = vec![json!({ "role": "system", "content": system })];
        for turn in 0..turns {
            messages.push(
                json!({ "role": "user", "content": format!("Question {turn}. {}", "And why? ".repeat(20)) }),
            );
            messages.push(json!({ "role": "assistant", "content": "Because. ".repeat(30) }));
        }
        messages.push(json!({ "role": "user", "content": "One more question, then, please." }));
        json!({ "model": "m", "messages": messages })
    }

    #[test]
    fn a_timestamp_in_the_system_text_is_found_and_a_steady_one_is_not() {
        for session in [None, Some("s")] {
            let desk = Desk::new();
            for turns in 1..5 {
                assert_eq!(desk.ask(&talk("12:00", turns), session), None, "{session:?}");
            }
            let found = desk.ask(&talk("12:01", 5), session).expect("drift");
            assert_eq!(found.field, "messages[0].content");
            assert_eq!(found.ignore_field.as_deref(), Some("messages.content"));
            // "12:01" stands 314 bytes into the text.
            assert!(found.offset <= 316 && 316 < found.offset + 64, "{found:?}");
            assert!(found.lost_bytes > 1500, "{found:?}");
            assert_eq!(desk.1.caches.drift.prompts.with_label_values(&["m", "system_message"]).get(), 1);
            assert_eq!(desk.ask(&talk("12:01", 6), session), None, "the new past counts");
        }
    }

    #[test]
    fn what_the_diagnosis_names_can_be_left_out_and_is_no_drift_then() {
        let mut desk = Desk::new();
        assert_eq!(desk.ask(&talk("12:00", 2), None), None);
        let field = desk.ask(&talk("12:01", 3), None).unwrap().ignore_field.unwrap();
        let rule = crate::config::IgnoreTable { field, pattern: r"The time is [\d:]+\. ".to_owned() };
        desk.2 = Ignored::new(&[rule]).unwrap();
        desk.ask(&talk("12:01", 3), None);
        assert_eq!(desk.ask(&talk("12:02", 4), None), None);
    }

    #[test]
    fn tools_in_another_order_and_a_rewritten_turn_are_told_apart() {
        let desk = Desk::new();
        let with_tools = |tools: [&str; 2]| {
            let mut body = talk("12:00", 3);
            body["tools"] = tools.iter().map(|tool| json!({ "name": tool.repeat(30) })).collect();
            body
        };
        assert_eq!(desk.ask(&with_tools(["a", "b"]), None), None);
        assert_eq!(desk.ask(&with_tools(["b", "a"]), None).unwrap().field, "tools");
        let mut rewritten = with_tools(["b", "a"]);
        rewritten["messages"][4]["content"] = json!("Because. ".repeat(20) + &"Not so. ".repeat(20));
        assert_eq!(desk.ask(&rewritten, None).unwrap().field, "messages[4].content");
    }

    #[test]
    fn other_tenants_and_other_talks_are_other_sessions() {
        let desk = Desk::new();
        let mut body = talk("12:00", 3);
        assert_eq!(desk.ask(&body, None), None);
        let mut other = talk("12:01", 3);
        other["cache_salt"] = json!("another's");
        assert_eq!(desk.ask(&other, None), None);
        other = talk("12:01", 3);
        other["prompt_cache_key"] = json!("another");
        assert_eq!(desk.ask(&other, None), None);
        // The last message again in other words is nobody's mistake.
        body["messages"][7]["content"] = json!("Something else instead, and longer than it was. ".repeat(9));
        assert_eq!(desk.ask(&body, None), None);
    }

    #[test]
    fn a_field_s_name_that_a_client_chose_is_not_repeated() {
        let desk = Desk::new();
        let body = |secret: &str| {
            let mut body = talk("12:00", 2);
            body["messages"][1]["my secret"] = json!(secret.repeat(100));
            body
        };
        desk.ask(&body("a"), Some("s"));
        let found = desk.ask(&body("b"), Some("s")).unwrap();
        assert!(found.field.starts_with("messages[1]"), "{found:?}");
        assert!(!serde_json::to_string(&found).unwrap().contains("secret"));
    }
}
