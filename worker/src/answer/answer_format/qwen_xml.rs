//! Calls as Qwen3-Coder writes them:
//! `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`, values as plain
//! text, whose types the function's schema says. A call is told when it is complete, because its arguments
//! are not JSON before.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::tag::{Search, search};
use super::{Found, Function};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Reads one answer, which comes in pieces; a call is told as a whole, once its closing tag is there.
#[derive(Debug)]
pub(crate) struct QwenXml {
    /// All choices of an answer share them: there may be very many.
    functions: Arc<[Function]>,
    buffer: String,
    in_call: bool,
    /// Bytes of a call in which its closing tag does not begin: a long call is searched once.
    searched: usize,
    calls: usize,
    /// Whether nothing but blanks came since the last call.
    after_call: bool,
}

impl QwenXml {
    pub(crate) fn new(functions: &Arc<[Function]>) -> Self {
        Self {
            functions: Arc::clone(functions),
            buffer: String::new(),
            in_call: false,
            searched: 0,
            calls: 0,
            after_call: false,
        }
    }

    pub(crate) fn push(&mut self, text: &str, found: &mut Found) {
        self.buffer.push_str(text);
        loop {
            if !self.in_call {
                if self.after_call {
                    self.buffer.drain(..self.buffer.len() - self.buffer.trim_start().len());
                    self.after_call = self.buffer.is_empty();
                }
                match search(&mut self.buffer, OPEN) {
                    Search::Open(certain) => return found.content.push_str(&certain),
                    Search::Found { before, after } => {
                        found.content.push_str(&before);
                        (self.buffer, self.in_call) = (after, true);
                    }
                }
            }
            let Some(end) = self.end_of_call() else { return };
            let after = self.buffer.split_off(end + CLOSE.len());
            let call = std::mem::replace(&mut self.buffer, after);
            self.in_call = false;
            match self.parse(&call[..end]) {
                Some((name, arguments)) => {
                    found.call(self.calls, Some(name), &arguments);
                    self.calls += 1;
                    self.after_call = true;
                }
                None => found.content.extend([OPEN, call.as_str()]),
            }
        }
    }

    /// Where the closing tag of the call at hand begins, if it has come whole.
    fn end_of_call(&mut self) -> Option<usize> {
        let rest = self.buffer.get(self.searched..).unwrap_or_default();
        if let Some(at) = rest.find(CLOSE) {
            let end = self.searched + at;
            self.searched = 0;
            return Some(end);
        }
        // The tag may have begun; a letter of several bytes is no part of it.
        let last = self.buffer.len().saturating_sub(CLOSE.len() - 1).max(self.searched);
        self.searched =
            (last..=self.buffer.len()).find(|at| self.buffer.is_char_boundary(*at)).unwrap_or(last);
        None
    }

    /// The name and the arguments of what stands between the tags.
    fn parse(&self, call: &str) -> Option<(String, String)> {
        let (_, call) = call.split_once("<function=")?;
        let (name, mut rest) = call.split_once('>')?;
        let name = name.trim();
        let function = self.functions.iter().find(|function| function.name == name);
        let mut arguments = Map::new();
        while let Some((_, parameter)) = rest.split_once("<parameter=") {
            let (key, value) = parameter.split_once('>')?;
            let (value, after) = value.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let kind = function.map(|f| &f.parameters["properties"][key.trim()]["type"]);
            arguments.insert(key.trim().to_owned(), typed(value, kind.unwrap_or(&Value::Null)));
            rest = after;
        }
        Some((name.to_owned(), Value::Object(arguments).to_string()))
    }

    pub(crate) fn finish(&mut self, found: &mut Found) {
        let rest = std::mem::take(&mut self.buffer);
        if !self.in_call {
            found.content.push_str(&rest);
        }
    }
}

/// A text as the schema's type; what is not that, and what the schema does not say, stays text.
fn typed(text: &str, kind: &Value) -> Value {
    let as_text = || Value::String(text.to_owned());
    match kind.as_str() {
        Some("integer" | "number" | "boolean" | "object" | "array" | "null") => {
            // Python's spelling too, which the template shows to the model.
            let json = match text.trim() {
                "True" => "true",
                "False" => "false",
                "None" => "null",
                other => other,
            };
            serde_json::from_str(json).unwrap_or_else(|_| as_text())
        }
        _ => as_text(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(functions: &Arc<[Function]>) -> QwenXml {
        QwenXml::new(functions)
    }

    #[test]
    fn all_choices_of_an_answer_share_its_functions() {
        let functions: Arc<[Function]> =
            (0..20_000).map(|n| Function { name: format!("f{n}"), parameters: Value::Null }).collect();
        let readers: Vec<QwenXml> = (0..128).map(|_| reader(&functions)).collect();
        assert_eq!(Arc::strong_count(&functions), 1 + readers.len());
    }

    /// Of a call that comes in many pieces only what may begin its closing tag is looked at again.
    #[test]
    fn a_long_call_is_searched_once() {
        let call =
            format!("<function=f><parameter=s>{}</tool_cal é</parameter></function>", "é<".repeat(5_000));
        let (mut reader, mut found) = (reader(&Arc::from([])), Found::default());
        reader.push(OPEN, &mut found);
        for letter in call.chars() {
            reader.push(letter.encode_utf8(&mut [0; 4]), &mut found);
            assert!(reader.buffer.len() - reader.searched < CLOSE.len(), "{}", reader.searched);
        }
        for piece in ["</tool", "_call", ">and", " <tool_call><function=g></function></tool_call>"] {
            reader.push(piece, &mut found);
        }
        reader.finish(&mut found);
        let names: Vec<_> = found.calls.iter().filter_map(|call| call.name.as_deref()).collect();
        assert_eq!((&names[..], found.content.as_str()), (&["f", "g"][..], "and"));
    }
}
