//! Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>` among text. Blanks around calls belong to
//! them.

use super::Found;
use super::json_call::{JsonCall, Step};
use super::tag::{Search, search};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Tells the calls between `<tool_call>` and `</tool_call>` in one answer, which comes in pieces, from its
/// content.
#[derive(Debug, Default)]
pub(crate) struct Hermes {
    /// Text that is not yet certain.
    buffer: String,
    state: State,
    calls: usize,
    /// Whether nothing but blanks came since the last call.
    after_call: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    /// In a call's object.
    Call(Box<JsonCall>),
    /// Behind it, before the closing tag.
    Close,
    /// In what began as a call and is none any more: lost up to the closing tag.
    Broken,
}

impl Hermes {
    pub(crate) fn push(&mut self, text: &str, found: &mut Found) {
        let mut rest = text.to_owned();
        while let Some(more) = self.take(rest, found) {
            rest = more;
        }
    }

    /// Takes text as far as one state goes; returns what is left for the next.
    fn take(&mut self, text: String, found: &mut Found) -> Option<String> {
        match &mut self.state {
            State::Text => {
                self.buffer.push_str(&text);
                if self.after_call {
                    self.buffer.drain(..self.buffer.len() - self.buffer.trim_start().len());
                    self.after_call = self.buffer.is_empty();
                }
                match search(&mut self.buffer, OPEN) {
                    Search::Open(certain) => {
                        found.content.push_str(&certain);
                        None
                    }
                    Search::Found { before, after } => {
                        found.content.push_str(&before);
                        self.state = State::Call(Box::new(JsonCall::new(self.calls)));
                        Some(after)
                    }
                }
            }
            State::Call(call) => {
                let (step, at) = object(call, &text, found)?;
                let state = match step {
                    Step::NoCall => State::Text,
                    Step::Broken => State::Broken,
                    Step::More | Step::Done => State::Close,
                };
                let ended = std::mem::replace(&mut self.state, state);
                if let (Step::NoCall, State::Call(call)) = (step, ended) {
                    found.content.push_str(OPEN);
                    found.content.push_str(&call.into_raw());
                } else {
                    self.calls += 1;
                }
                Some(text[at..].to_owned())
            }
            State::Close => {
                self.buffer.push_str(&text);
                let rest = self.buffer.trim_start();
                let after = match rest.strip_prefix(CLOSE) {
                    Some(after) => after.to_owned(),
                    None if CLOSE.starts_with(rest) => return None,
                    // The tag was forgotten.
                    None => rest.to_owned(),
                };
                Some(self.text(after))
            }
            State::Broken => {
                self.buffer.push_str(&text);
                let Search::Found { after, .. } = search(&mut self.buffer, CLOSE) else { return None };
                Some(self.text(after))
            }
        }
    }

    /// Goes on with the text behind a call.
    fn text(&mut self, after: String) -> String {
        self.buffer.clear();
        (self.state, self.after_call) = (State::Text, true);
        after
    }

    pub(crate) fn finish(&mut self, found: &mut Found) {
        let rest = std::mem::take(&mut self.buffer);
        if matches!(self.state, State::Text) {
            found.content.push_str(&rest);
        }
    }
}

/// Feeds a call until it ends; how, and behind which byte.
pub(super) fn object(call: &mut JsonCall, text: &str, found: &mut Found) -> Option<(Step, usize)> {
    text.char_indices().find_map(|(at, c)| match call.push(c, found) {
        Step::More => None,
        step => Some((step, at + c.len_utf8())),
    })
}
