//! The role `developer` for templates that do not know it, as vLLM 0.32 has it (`renderers/hf.py`): it is
//! `system` then, and all system messages are one in front, as many templates want it there.

use crate::message::{Field, Message};

/// Whether a template's source names the role.
pub(crate) fn is_known(source: &str) -> bool {
    source.contains("'developer'") || source.contains("\"developer\"")
}

/// Turns developers' messages into the system's, if there are any.
pub(crate) fn to_system(messages: &mut Vec<Message<'_>>) {
    if !messages.iter().any(|message| has_role(message, "developer")) {
        return;
    }
    for message in messages.iter_mut().filter(|message| has_role(message, "developer")) {
        message.set("role", Field::Text("system".into()));
        message.remove("tools");
    }
    let is_system = |message: &Message<'_>| has_role(message, "system");
    if !messages.iter().skip(1).any(is_system) {
        return;
    }
    let texts: Vec<String> = messages
        .iter()
        .filter(|message| is_system(message))
        .map(text)
        .filter(|text| !text.is_empty())
        .collect();
    messages.retain(|message| !is_system(message));
    let mut first = Message::default();
    first.set("role", Field::Text("system".into()));
    first.set("content", Field::Text(texts.join("\n\n").into()));
    messages.insert(0, first);
}

fn has_role(message: &Message<'_>, role: &str) -> bool {
    matches!(message.get("role"), Some(Field::Text(of)) if of == role)
}

/// A message's text; that of its parts, a line each.
fn text(message: &Message<'_>) -> String {
    match message.get("content") {
        Some(Field::Text(text)) => text.clone().into_owned(),
        Some(parts) => {
            let text = |part: &serde_json::Value| part["text"].as_str().or(part.as_str()).map(str::to_owned);
            parts.items().unwrap_or_default().iter().filter_map(text).collect::<Vec<_>>().join("\n")
        }
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use crate::{ChatTemplate, RenderOptions};

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}{{ m.tools }}>{{ m.content }}{% endfor %}";

    fn render(source: &str, messages: Value) -> String {
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        template.render(&messages, &RenderOptions::default()).unwrap()
    }

    #[test]
    fn a_developer_is_the_system_where_the_template_knows_none() {
        let one =
            json!([{"role": "developer", "content": "a", "tools": [1]}, {"role": "user", "content": "b"}]);
        assert_eq!(render(PLAIN, one.clone()), "<system>a<user>b");
        let knows = format!("{PLAIN}{{# 'developer' #}}");
        assert_eq!(render(&knows, one), "<developer[1]>a<user>b");
    }

    #[test]
    fn several_are_one_in_front() {
        let several = json!([
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "developer", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {"role": "developer", "content": ""},
        ]);
        assert_eq!(render(PLAIN, several), "<system>a\n\nc\nd<user>b");
        // Without a developer among them they stay where they are.
        let systems = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
        assert_eq!(render(PLAIN, systems), "<user>a<system>b");
    }
}
