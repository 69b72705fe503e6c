//! Text that changes from turn to turn and that no engine sees: a time, a request's own id, a field that the
//! chat template drops. Routing by text would take each turn for a new prompt; patterns of the operator's
//! leave it out of the hash. Prompts that are tokenised do not need them: there the template itself has
//! dropped it. What an engine does see must not be left out: it computes the prompt anew, and the truth loop
//! would show each prediction as too high.
//!
//! Patterns are searched in time linear in the text (the `regex` crate's promise), whatever clients send.

use std::borrow::Cow;

use regex::{Regex, RegexBuilder};

use crate::{
    config::{ConfigError, IgnoreTable},
    limits::{IGNORE_PATTERN_BYTES, IGNORE_PATTERNS_MAX},
    prompt::request::PromptField,
};

/// What is left out.
#[derive(Debug, Clone, Default)]
pub struct Ignored {
    rules: Vec<(String, Regex)>,
}

impl Ignored {
    /// Reads the patterns. The error names the one that is wrong.
    pub fn new(tables: &[IgnoreTable]) -> Result<Self, ConfigError> {
        if tables.len() > IGNORE_PATTERNS_MAX {
            return Err(ConfigError(format!("routing.ignore has more than {IGNORE_PATTERNS_MAX} patterns")));
        }
        let rule = |table: &IgnoreTable| {
            let field = table.field.as_str();
            let of_message = field.strip_prefix("messages.").is_some_and(|name| !name.is_empty());
            if !of_message && !["system", "tools", "prompt"].contains(&field) {
                let why = "use system, tools, prompt, or messages.FIELD such as messages.content";
                return Err(ConfigError(format!("routing.ignore: field {field}: {why}")));
            }
            let regex = RegexBuilder::new(&table.pattern).size_limit(IGNORE_PATTERN_BYTES).build();
            let wrong = |error: regex::Error| {
                // The parser draws the place over several lines; its last one says what is wrong.
                let text = error.to_string();
                let why = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                ConfigError(format!("routing.ignore: pattern {:?} of {field}: {why}", table.pattern))
            };
            regex.map(|regex| (table.field.clone(), regex)).map_err(wrong)
        };
        Ok(Self { rules: tables.iter().map(rule).collect::<Result<_, _>>()? })
    }

    /// A field's text without what is left out.
    pub fn strip<'a>(&self, place: PromptField<'_>, text: Cow<'a, str>) -> Cow<'a, str> {
        let mut text = text;
        for (_, pattern) in self.rules.iter().filter(|(field, _)| names(field, place)) {
            if let Cow::Owned(rest) = pattern.replace_all(&text, "") {
                text = Cow::Owned(rest);
            }
        }
        text
    }
}

impl PartialEq for Ignored {
    fn eq(&self, other: &Self) -> bool {
        let texts = |ignored: &Self| -> Vec<(String, String)> {
            ignored
                .rules
                .iter()
                .map(|(field, pattern)| (field.clone(), pattern.as_str().to_owned()))
                .collect()
        };
        texts(self) == texts(other)
    }
}

fn names(field: &str, place: PromptField<'_>) -> bool {
    match place {
        PromptField::Model => false,
        PromptField::System => field == "system",
        PromptField::Tools => field == "tools",
        PromptField::Prompt => field == "prompt",
        PromptField::Message { field: name, .. } => field.strip_prefix("messages.") == Some(name),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use keyway_wire::block_hash::{BlockHash, HashKey};
    use serde_json::{Value, json};

    use super::*;
    use crate::prompt::request::{self, KeyerConfig};

    fn ignored(rules: &[(&str, &str)]) -> Result<Ignored, ConfigError> {
        let table = |(field, pattern): &(&str, &str)| IgnoreTable {
            field: (*field).to_owned(),
            pattern: (*pattern).to_owned(),
        };
        Ignored::new(&rules.iter().map(table).collect::<Vec<_>>())
    }

    fn blocks(body: &Value, ignored: &Ignored) -> Vec<BlockHash> {
        let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
        request::read_without(body.to_string().as_bytes(), config, ignored).chain.names.to_vec()
    }

    fn turn(clock: &str, id: &str) -> Value {
        json!({ "model": "m", "messages": [
            { "role": "system", "id": id, "content": format!("[time: {clock}] You help people who ask about whales.") },
            { "role": "user", "id": id, "content": format!("It is {clock}, so tell me about whales, at some length.") },
        ] })
    }

    #[test]
    fn what_is_left_out_makes_no_difference_and_everything_else_does() {
        let rules =
            ignored(&[("messages.content", r"^\[time: \d+:\d+\] "), ("messages.id", "(?s).*")]).unwrap();
        let shared = |a: &Value, b: &Value, rules: &Ignored| {
            blocks(a, rules).iter().zip(blocks(b, rules)).take_while(|(a, b)| *a == b).count()
        };
        let (noon, later) = (turn("12:00", "a"), turn("12:01", "b"));
        assert_eq!(shared(&noon, &later, &Ignored::default()), 1);
        // All up to the time in the second message, which does not begin with it.
        assert!(shared(&noon, &later, &rules) >= 6);
        assert!(shared(&noon, &later, &rules) < blocks(&noon, &rules).len());
        assert_eq!(shared(&noon, &turn("12:00", "b"), &rules), blocks(&noon, &rules).len());
    }

    #[test]
    fn a_field_or_pattern_that_is_none_is_named() {
        for (field, pattern, word) in [
            ("messages", "x", "messages.content"),
            ("model", "x", "model"),
            ("system", "(", "unclosed group"),
        ] {
            let error = ignored(&[(field, pattern)]).unwrap_err().to_string();
            assert!(error.contains(word) && !error.contains('\n'), "{error}");
        }
        assert!(ignored(&[("system", &r"\w{1000}".repeat(20))]).is_err(), "a pattern too large");
        let many = vec![("system", "x"); IGNORE_PATTERNS_MAX + 1];
        assert!(ignored(&many).unwrap_err().to_string().contains("more than"));
    }
}
