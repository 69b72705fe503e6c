//! The functions of a request by the names that the model knows: some are a namespace's, some take free text.

use serde_json::{Map, Value, json};

/// What separates the name of a namespace from that of a function in it, in a prompt.
const NAMESPACE_END: &str = "__";

/// Which functions are not as they seem to the model.
#[derive(Debug, Default)]
pub(in crate::api) struct ToolNames {
    /// They take free text.
    custom: Vec<String>,
    spaced: Vec<Spaced>,
}

/// A function of a namespace.
#[derive(Debug)]
struct Spaced {
    whole: String,
    space: String,
    name: String,
}

impl ToolNames {
    /// Of the request's tools.
    pub(super) fn of(tools: &[Value]) -> Self {
        let mut names = Self::default();
        for tool in tools {
            let Some(name) = tool["name"].as_str() else { continue };
            match tool["type"].as_str() {
                Some("custom") => names.custom.push(name.to_owned()),
                Some("namespace") => {
                    let inner = tool["tools"].as_array().map_or(&[][..], Vec::as_slice);
                    names.spaced.extend(inner.iter().filter_map(|tool| Spaced::of(name, tool)));
                }
                _ => {}
            }
        }
        names
    }

    /// The name that the model knows of what a client names, perhaps without its namespace.
    pub(super) fn known(&self, name: &str) -> String {
        let mut inner = self.spaced.iter().filter(|spaced| spaced.name == name);
        match (inner.next(), inner.next()) {
            (Some(only), None) => only.whole.clone(),
            _ => name.to_owned(),
        }
    }

    pub(super) fn is_custom(&self, name: &str) -> bool {
        self.custom.iter().any(|custom| custom == name)
    }

    /// The fields of a call that say what is called.
    pub(super) fn told(&self, name: &str) -> Map<String, Value> {
        let told = match self.spaced.iter().find(|spaced| spaced.whole == name) {
            Some(spaced) => json!({"name": spaced.name, "namespace": spaced.space}),
            None => json!({"name": name}),
        };
        if let Value::Object(told) = told { told } else { Map::new() }
    }
}

impl Spaced {
    fn of(space: &str, tool: &Value) -> Option<Self> {
        let name = tool["name"].as_str()?.to_owned();
        Some(Self { whole: format!("{space}{NAMESPACE_END}{name}"), space: space.to_owned(), name })
    }
}

/// The text of a call whose arguments hold nothing else; as it is, where it is no such call.
pub(super) fn free_text(arguments: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(arguments).ok();
    match parsed.as_ref().and_then(|parsed| parsed["input"].as_str()) {
        Some(text) => text.to_owned(),
        None => arguments.to_owned(),
    }
}
