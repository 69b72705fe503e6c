//! Thoughts between `<think>` and `</think>` at the beginning of an answer, apart from what follows. Blanks
//! around both tags belong to them.

use super::tag::{Search, search};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Splits one answer, which comes in pieces, into thoughts and what is said after them.
#[derive(Debug)]
pub(crate) struct ThinkSplitter {
    state: State,
    buffer: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but blanks and perhaps the beginning of the tag.
    Undecided,
    /// Inside; `begun` once there was something but blanks.
    Thinking { begun: bool },
    /// Behind the closing tag, before anything but blanks.
    Closed,
    /// In the answer itself.
    Saying,
}

impl ThinkSplitter {
    /// For an answer that begins inside the thoughts, or does not.
    pub(crate) fn new(open: bool) -> Self {
        let state = if open { State::Thinking { begun: false } } else { State::Undecided };
        Self { state, buffer: String::new() }
    }

    /// Whether a prompt ends inside the thoughts.
    pub(crate) fn is_open(prompt_end: &str) -> bool {
        prompt_end.trim_end().ends_with(OPEN)
    }

    /// Whether the thoughts have begun and not ended.
    pub(crate) const fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking { .. })
    }

    /// Takes more text; returns the thoughts and the answer in it that are certain.
    pub(crate) fn push(&mut self, text: &str) -> (String, String) {
        if self.state == State::Saying {
            return (String::new(), text.to_owned());
        }
        self.buffer.push_str(text);
        if self.state == State::Undecided {
            let begun = self.buffer.trim_start();
            if let Some(rest) = begun.strip_prefix(OPEN) {
                (self.buffer, self.state) = (rest.to_owned(), State::Thinking { begun: false });
            } else if OPEN.starts_with(begun) {
                return Default::default();
            } else {
                self.state = State::Saying;
                return (String::new(), std::mem::take(&mut self.buffer));
            }
        }
        let thoughts =
            if let State::Thinking { begun } = self.state { self.think(begun) } else { String::new() };
        (thoughts, self.say())
    }

    fn think(&mut self, begun: bool) -> String {
        let (thoughts, after) = match search(&mut self.buffer, CLOSE) {
            Search::Found { before, after } => (before, Some(after)),
            Search::Open(certain) => (certain, None),
        };
        let thoughts = if begun { thoughts } else { thoughts.trim_start().to_owned() };
        self.state = State::Thinking { begun: begun || !thoughts.is_empty() };
        if let Some(after) = after {
            (self.buffer, self.state) = (after, State::Closed);
        }
        thoughts
    }

    /// What follows the closing tag, from the first character that is no blank.
    fn say(&mut self) -> String {
        if self.state != State::Closed || self.buffer.trim_start().is_empty() {
            return String::new();
        }
        self.state = State::Saying;
        std::mem::take(&mut self.buffer).trim_start().to_owned()
    }

    /// What was withheld, when no text will follow.
    pub(crate) fn finish(&mut self) -> (String, String) {
        let rest = std::mem::take(&mut self.buffer);
        match self.state {
            State::Undecided => (String::new(), rest),
            State::Thinking { begun: true } => (rest.trim_end().to_owned(), String::new()),
            State::Thinking { begun: false } => (rest.trim().to_owned(), String::new()),
            State::Closed | State::Saying => Default::default(),
        }
    }
}
