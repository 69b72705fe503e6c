//! Calls as the whole answer: `{"name": …, "parameters": {…}}`, several one after the other or set off by
//! `;`, perhaps behind `<|python_tag|>` (Llama 3). An answer that begins otherwise has none.

use super::Found;
use super::hermes::object;
use super::json_call::{JsonCall, Step};

const TAG: &str = "<|python_tag|>";

/// Reads one answer, which comes in pieces: calls if it begins with one, else nothing but content.
#[derive(Debug, Default)]
pub(crate) struct PlainJson {
    /// Blanks and what may be the tag, before the first call.
    buffer: String,
    state: State,
    calls: usize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Start,
    Call(Box<JsonCall>),
    /// Behind a complete call, where another one may follow.
    Between,
    Text,
}

impl PlainJson {
    pub(crate) fn push(&mut self, text: &str, found: &mut Found) {
        let mut rest = text.to_owned();
        while let Some(more) = self.take(rest, found).filter(|more| !more.is_empty()) {
            rest = more;
        }
    }

    /// Takes text as far as one state goes; returns what is left for the next.
    fn take(&mut self, text: String, found: &mut Found) -> Option<String> {
        match &mut self.state {
            State::Start => {
                self.buffer.push_str(&text);
                self.start()
            }
            State::Call(call) => {
                let (step, at) = object(call, &text, found)?;
                let state = if step == Step::Done { State::Between } else { State::Text };
                let ended = std::mem::replace(&mut self.state, state);
                if let (Step::NoCall, State::Call(call)) = (step, ended) {
                    found.content.push_str(&self.buffer);
                    found.content.push_str(&call.into_raw());
                }
                self.buffer.clear();
                self.calls += usize::from(step != Step::NoCall);
                // Behind a call that broke off in the middle nothing has a meaning.
                (step != Step::Broken).then(|| text[at..].to_owned())
            }
            State::Between => {
                let rest = text.trim_start_matches(|c: char| c.is_whitespace() || c == ';' || c == ',');
                if rest.is_empty() {
                    return None;
                }
                self.state = if rest.starts_with('{') {
                    State::Call(Box::new(JsonCall::new(self.calls)))
                } else {
                    State::Text
                };
                Some(rest.to_owned())
            }
            State::Text => {
                found.content.push_str(&text);
                None
            }
        }
    }

    /// Decides whether the answer begins with a call.
    fn start(&mut self) -> Option<String> {
        let begun = self.buffer.trim_start();
        let begun = begun.strip_prefix(TAG).unwrap_or(begun).trim_start();
        if begun.is_empty() || TAG.starts_with(begun) {
            return None;
        }
        let blanks = self.buffer.len() - begun.len();
        if begun.starts_with('{') {
            self.state = State::Call(Box::new(JsonCall::new(0)));
            return Some(self.buffer.split_off(blanks));
        }
        self.state = State::Text;
        Some(std::mem::take(&mut self.buffer))
    }

    pub(crate) fn finish(&mut self, found: &mut Found) {
        if matches!(self.state, State::Start) {
            found.content.push_str(&std::mem::take(&mut self.buffer));
        }
    }
}
