//! One call as a JSON object, `{"name": …, "arguments": {…}}`, read character by character: the arguments are
//! told as they come, as soon as the name is known. `parameters` is another name for `arguments` (Llama 3).

use super::Found;

/// How far the reading of one call is; each call of an answer has a new one.
#[derive(Debug)]
pub(super) struct JsonCall {
    index: usize,
    state: State,
    /// All characters so far, until the call has begun: what to show if it is none.
    raw: String,
    key: String,
    /// The value at hand, unless it is told as it comes.
    value: String,
    nesting: Nesting,
    name: Option<String>,
    /// Arguments that came before the name, or as a string.
    arguments: Option<String>,
    /// Whether the call's beginning was told.
    begun: bool,
}

/// Where in the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    /// Before a key, or the end.
    BeforeKey,
    Key,
    Colon,
    BeforeValue,
    Value,
    /// The value was a scalar or is closed.
    AfterValue,
}

/// How deep in a value.
#[derive(Debug, Default)]
struct Nesting {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// What came of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The object is closed.
    Done,
    /// This is no call; nothing of it was told.
    NoCall,
    /// What began as a call is no JSON.
    Broken,
}

impl JsonCall {
    /// The call number `index` of an answer.
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            state: State::Start,
            raw: String::new(),
            key: String::new(),
            value: String::new(),
            nesting: Nesting::default(),
            name: None,
            arguments: None,
            begun: false,
        }
    }

    /// The text taken, where it turned out to be no call.
    pub(super) fn into_raw(self) -> String {
        self.raw
    }

    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Step {
        if !self.begun {
            self.raw.push(c);
        }
        match self.state {
            State::Start | State::BeforeKey | State::Colon | State::BeforeValue if c.is_whitespace() => {}
            State::Start if c == '{' => self.state = State::BeforeKey,
            State::BeforeKey if c == '"' => {
                self.key.clear();
                self.state = State::Key;
            }
            State::BeforeKey if c == '}' => return self.close(found),
            State::Key if c == '"' => {
                if !self.begun && !is_known(&self.key) {
                    return Step::NoCall;
                }
                self.state = State::Colon;
            }
            State::Key => self.key.push(c),
            State::Colon if c == ':' => self.state = State::BeforeValue,
            State::BeforeValue => return self.begin_value(c, found),
            State::Value => return self.value(c, found),
            State::AfterValue => return self.after_value(c, found),
            _ => return self.refuse(),
        }
        Step::More
    }

    fn refuse(&self) -> Step {
        if self.begun { Step::Broken } else { Step::NoCall }
    }

    fn begin_value(&mut self, c: char, found: &mut Found) -> Step {
        if matches!(c, ',' | '}' | ']' | ':') {
            return self.refuse();
        }
        self.state = State::Value;
        self.nesting = Nesting::default();
        self.value.clear();
        if is_arguments(&self.key) && c == '{' && !self.begun {
            self.begin(found);
        }
        self.value(c, found)
    }

    /// Whether the value at hand is told as it comes.
    fn is_told(&self) -> bool {
        self.begun && is_arguments(&self.key) && self.value.is_empty() && self.arguments.is_none()
    }

    fn value(&mut self, c: char, found: &mut Found) -> Step {
        let scalar = self.nesting.depth == 0 && !self.nesting.in_string;
        if scalar && !self.value.is_empty() && (matches!(c, ',' | '}') || c.is_whitespace()) {
            // A number, true, false or null ends without a mark of its own.
            return match self.end_value() {
                Step::More => self.after_value(c, found),
                refused => refused,
            };
        }
        let closed = self.nesting.take(c);
        if self.is_told() {
            found.call(self.index, None, c.encode_utf8(&mut [0; 4]));
            if closed {
                self.state = State::AfterValue;
                // Nothing else may be told.
                self.arguments = Some(String::new());
            }
            return Step::More;
        }
        self.value.push(c);
        if closed { self.end_value() } else { Step::More }
    }

    /// Takes a value that was not told as it came.
    fn end_value(&mut self) -> Step {
        self.state = State::AfterValue;
        let value = std::mem::take(&mut self.value);
        if self.key == "name" && self.name.is_none() {
            match serde_json::from_str::<String>(&value) {
                Ok(name) if !name.is_empty() => self.name = Some(name),
                _ => return self.refuse(),
            }
        } else if is_arguments(&self.key) && self.arguments.is_none() {
            // Some models write the arguments' JSON as a string, or null for none.
            let text = serde_json::from_str::<String>(&value).unwrap_or(value);
            self.arguments = Some(if text == "null" { "{}".to_owned() } else { text });
        }
        Step::More
    }

    fn after_value(&mut self, c: char, found: &mut Found) -> Step {
        match c {
            ',' => self.state = State::BeforeKey,
            '}' => return self.close(found),
            c if c.is_whitespace() => {}
            _ => return self.refuse(),
        }
        Step::More
    }

    /// Tells the call's beginning, if its name is known and its arguments are not there yet.
    fn begin(&mut self, found: &mut Found) {
        if self.arguments.is_none()
            && let Some(name) = &self.name
        {
            found.call(self.index, Some(name.clone()), "");
            self.begun = true;
        }
    }

    fn close(&mut self, found: &mut Found) -> Step {
        if self.begun {
            return Step::Done;
        }
        let Some(name) = self.name.take() else { return Step::NoCall };
        let arguments = self.arguments.take().unwrap_or_else(|| "{}".to_owned());
        found.call(self.index, Some(name), &arguments);
        Step::Done
    }
}

impl Nesting {
    /// Takes a character of a value; whether it closes the value.
    fn take(&mut self, c: char) -> bool {
        if self.in_string {
            let closes = c == '"' && !self.escaped;
            self.escaped = c == '\\' && !self.escaped;
            self.in_string = !closes;
            return closes && self.depth == 0;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

fn is_arguments(key: &str) -> bool {
    matches!(key, "arguments" | "parameters")
}

/// Keys that a call may have; another one first says that an object is none.
fn is_known(key: &str) -> bool {
    is_arguments(key) || matches!(key, "name" | "type" | "id")
}
