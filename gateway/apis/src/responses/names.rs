//! The functions of a request by the names that the model knows: some are a namespace's, some take free text.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

/// What separates the name of a namespace from that of a function in it, in a prompt.
const NAMESPACE_END: &str = "__";

/// Which functions are not as they seem to the model. A request may have very many, and name each.
#[derive(Debug, Default)]
pub struct ToolNames {
    /// They take free text.
    custom: HashSet<String>,
    /// Of namespaces, by the name that the model knows.
    spaced: HashMap<String, Spaced>,
    /// The name that the model knows, by the name in its namespace; `None` where several have that name.
    known: HashMap<String, Option<String>>,
}

/// A function of a namespace.
#[derive(Debug)]
struct Spaced {
    space: String,
    name: String,
}

impl ToolNames {
    /// Of the request's tools.
    pub fn of(tools: &[Value]) -> Self {
        let mut names = Self::default();
        for tool in tools {
            let Some(name) = tool["name"].as_str() else { continue };
            match tool["type"].as_str() {
                Some("custom") => drop(names.custom.insert(name.to_owned())),
                Some("namespace") => {
                    let inner = tool["tools"].as_array().map_or(&[][..], Vec::as_slice);
                    inner.iter().filter_map(|tool| tool["name"].as_str()).for_each(|of| names.add(name, of));
                }
                _ => {}
            }
        }
        names
    }

    fn add(&mut self, space: &str, name: &str) {
        let whole = in_namespace(space, name);
        let is_only = |known: &mut Option<String>| *known = None;
        self.known.entry(name.to_owned()).and_modify(is_only).or_insert_with(|| Some(whole.clone()));
        let spaced = Spaced { space: space.to_owned(), name: name.to_owned() };
        self.spaced.entry(whole).or_insert(spaced);
    }

    /// The name that the model knows of what a client names, perhaps without its namespace.
    pub fn known(&self, name: &str) -> String {
        self.known.get(name).cloned().flatten().unwrap_or_else(|| name.to_owned())
    }

    pub(super) fn is_custom(&self, name: &str) -> bool {
        self.custom.contains(name)
    }

    /// The fields of a call that say what is called.
    pub(super) fn told(&self, name: &str) -> Map<String, Value> {
        let told = match self.spaced.get(name) {
            Some(spaced) => json!({"name": spaced.name, "namespace": spaced.space}),
            None => json!({"name": name}),
        };
        if let Value::Object(told) = told { told } else { Map::new() }
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

/// The arguments of a call of a function that takes such a text.
pub(super) fn free_text_arguments(text: &str) -> String {
    json!({"input": text}).to_string()
}

/// How a function of a namespace is called in a prompt.
pub(super) fn in_namespace(space: &str, name: &str) -> String {
    format!("{space}{NAMESPACE_END}{name}")
}
