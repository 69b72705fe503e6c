//! What vLLM finds out of a template before it turns Anthropic's requests into chats
//! (`_detect_merge_inline_system` and `_probe_disabled_thinking_effort` in
//! `vllm/entrypoints/anthropic/serving.py`).

use serde_json::{Map, json};

use crate::{ChatTemplate, Message, RenderOptions};

/// How much a model is told to reason where it is told how much.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// What decides how a template is given Anthropic's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TemplateTraits {
    /// It takes what the system says in front alone.
    pub(crate) system_comes_first: bool,
    /// The effort that stands for no thinking at all.
    pub(crate) effort_without_thinking: &'static str,
}

impl TemplateTraits {
    pub(crate) fn of(template: &ChatTemplate) -> Self {
        Self {
            system_comes_first: template.refuses_later_systems(),
            effort_without_thinking: effort_without_thinking(template),
        }
    }
}

/// `low`, where the template refuses `none` or makes nothing else of it than of another effort.
fn effort_without_thinking(template: &ChatTemplate) -> &'static str {
    let rendered = |effort: &str| {
        let variables = json!({ "enable_thinking": effort != "none", "reasoning_effort": effort });
        let options = RenderOptions {
            variables: variables.as_object().cloned().unwrap_or_else(Map::new),
            now_unix_seconds: Some(0),
            ..RenderOptions::default()
        };
        template.render(&json!([{ "role": "user", "content": "Hi" }]), &options).ok()
    };
    let Some(none) = rendered("none") else { return "low" };
    if EFFORTS.iter().any(|effort| rendered(effort).as_ref() == Some(&none)) { "low" } else { "none" }
}

/// The conversation that tells whether a template takes a system's later words.
pub(crate) fn later_system() -> Vec<Message<'static>> {
    let said = |role: &'static str| {
        let mut message = Message::default();
        message.set("role", crate::Field::Text(role.into()));
        message.set("content", crate::Field::Text("t".into()));
        message
    };
    ["system", "user", "system", "user"].map(said).into()
}
