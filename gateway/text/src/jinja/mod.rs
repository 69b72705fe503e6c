//! Jinja2 as chat templates use it: the language, filters, tests and methods of Jinja2 3.1 in its immutable
//! sandbox, with Python's values, so that a template renders to the very text that Hugging Face's
//! `apply_chat_template` gives it. Not here: inheritance, includes, HTML escaping, whatever no chat template
//! can use.
//!
//! Why not a library: a template's text is a prompt's tokens, so "nearly" is wrong. minijinja 3.0.5, with
//! formatter, filters and methods replaced, still differed in one of 125 published templates and in 25 of the
//! 172 constructs of `tests/data/templates.jsonl` (`%`, `safe`, macro defaults, comparisons that must
//! refuse), needed templates rewritten before parsing, and gives no bound on the memory of a hostile one.
//!
//! Read in this order: `lexer.rs`, `parser.rs`, `parse_expr.rs` (text to `ast.rs`); `value.rs`, `repr.rs`
//! (what templates compute with); `eval.rs`, `ops.rs`, `call.rs` (how); `filters.rs`, `checks.rs`,
//! `methods.rs`, `format.rs` (the library).

mod ast;
mod call;
mod checks;
mod content_parts;
mod eval;
mod filters;
mod format;
mod lexer;
mod methods;
mod ops;
mod parse_expr;
mod parser;
mod repr;
mod sequences;
mod value;

use std::iter;

use value::Value;

use crate::message::Message;

/// Why a template cannot be compiled or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub(crate) struct Error {
    pub(crate) message: String,
    /// Line of the template, from 1; 0 while it is not known.
    pub(crate) line: u32,
    /// Whether the template itself said so, with `raise_exception`.
    pub(crate) raised: bool,
    /// Whether the text became longer than it may.
    pub(crate) too_long: bool,
}

impl Error {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), line: 0, raised: false, too_long: false }
    }

    /// A text became longer than it may.
    fn too_long() -> Self {
        Self { too_long: true, ..Self::new("the template makes too long a text") }
    }

    fn syntax(message: String, line: u32) -> Self {
        Self { line, ..Self::new(message) }
    }
}

/// A template read once, to be rendered for any number of conversations.
#[derive(Debug)]
pub(crate) struct Template {
    body: ast::Body,
}

impl Template {
    /// Reads `source`, without rendering it. An error says in which line the template is wrong.
    pub(crate) fn new(source: &str) -> Result<Self, Error> {
        Ok(Self { body: parser::parse(source)? })
    }

    /// Whether it goes through the parts of a message's content.
    pub(crate) fn goes_through_parts(&self) -> bool {
        content_parts::goes_through_parts(&self.body)
    }

    /// Whether it renders this conversation with no variable and without the functions that transformers
    /// adds.
    pub(crate) fn renders_bare(&self, messages: &[Message<'_>], bytes_max: usize) -> bool {
        let added = ["raise_exception", "strftime_now"].map(|name| (name.into(), Value::undefined(name)));
        let context = iter::once(("messages".into(), Value::from_messages(messages)));
        let context = context.chain([("add_generation_prompt".into(), Value::Bool(false))]).chain(added);
        eval::Interpreter::new(context.collect(), 0, bytes_max).render(&self.body).is_ok()
    }

    /// The text, given the conversation and the template's other variables; the first of equal names counts.
    /// `now` is what `strftime_now` takes for the time, in seconds since 1970. No text on the way has more
    /// than `bytes_max` bytes.
    pub(crate) fn render<'a>(
        &self,
        messages: &[Message<'_>],
        variables: impl IntoIterator<Item = (&'a str, &'a serde_json::Value)>,
        now: u64,
        bytes_max: usize,
    ) -> Result<String, Error> {
        let messages = ("messages".into(), Value::from_messages(messages));
        let variables = variables.into_iter().map(|(name, json)| (name.into(), Value::from_json(json)));
        let context = iter::once(messages).chain(variables).collect();
        eval::Interpreter::new(context, now, bytes_max).render(&self.body)
    }
}

#[cfg(test)]
mod tests;
