//! What is found out of a template by rendering: what vLLM finds out before it turns Anthropic's requests
//! into chats (`_detect_merge_inline_system` and `_probe_disabled_thinking_effort` in
//! `vllm/entrypoints/anthropic/serving.py`), and whether it shows what is said late.

use serde_json::{Map, Value, json};

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
    /// It shows where it stands what the system says late.
    pub(crate) shows_late_systems: bool,
    /// The same of developers.
    pub(crate) shows_late_developers: bool,
}

impl TemplateTraits {
    pub(crate) fn of(template: &ChatTemplate) -> Self {
        Self {
            system_comes_first: template.refuses_later_systems(),
            effort_without_thinking: effort_without_thinking(template),
            shows_late_systems: shows_late(template, "system"),
            shows_late_developers: shows_late(template, "developer"),
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

/// Whether what a role says late is shown between what users say: some templates refuse it, drop it or show
/// it elsewhere.
fn shows_late(template: &ChatTemplate, role: &str) -> bool {
    let said = [("system", "aaa"), ("user", "bbb"), (role, "ccc"), ("user", "ddd")];
    let said: Vec<Value> = said.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
    let said = Value::from(said);
    // Templates for tools may be others.
    [None, Some(json!([]))].into_iter().all(|tools| {
        let options = RenderOptions { tools, now_unix_seconds: Some(0), ..RenderOptions::default() };
        let text = template.render(&said, &options).unwrap_or_default();
        let behind = text.split_once("bbb").map(|(_, behind)| behind);
        behind.is_some_and(|behind| behind.split_once("ddd").is_some_and(|(late, _)| late.contains("ccc")))
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_shows_late_words_refuses_drops_or_moves_them() {
        let each = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let refuses = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                       {{ raise_exception('first') }}{% endif %}{{ m.content }}{% endfor %}";
        let drops = "{{ messages[0].content }}{% for m in messages %}{% if m.role == 'user' %}\
                     {{ m.content }}{% endif %}{% endfor %}";
        let moves = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}\
                     {% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}";
        let knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}\
                     {{ m.content }}{% endfor %}";
        let only_without_tools = format!("{{% if tools is none %}}{each}{{% endif %}}");
        for (source, systems, developers) in [
            (each, true, false),
            (refuses, false, false),
            (drops, false, false),
            (moves, false, false),
            (knows, true, true),
            (&only_without_tools, false, false),
        ] {
            let template = ChatTemplate::from_source(source, Map::new()).unwrap();
            let late = (shows_late(&template, "system"), shows_late(&template, "developer"));
            assert_eq!(late, (systems, developers), "{source}");
        }
    }
}
