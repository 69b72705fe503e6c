//! More of an answer, whoever said it: an engine of our own, or one whose chat is turned back.

/// More of an answer. Where the order counts, the reasoning comes first, the calls last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    /// What the model thinks.
    pub reasoning: String,
    /// What it says.
    pub content: String,
    /// Functions that it calls.
    pub calls: Vec<CallDelta>,
}

/// More of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallDelta {
    /// Which call of the answer.
    pub index: usize,
    /// Its id, where the call begins and who said it has one.
    pub id: Option<String>,
    /// The function, where the call begins.
    pub name: Option<String>,
    /// More of the arguments' JSON.
    pub arguments: String,
}

/// Tokens of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of the prompt, those that were cached among them.
    pub prompt: u64,
    /// Of the prompt, found in a cache.
    pub cached: u64,
    /// Of the answer, its reasoning among them.
    pub answer: u64,
    /// Of the answer's reasoning.
    pub reasoning: u64,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// By itself.
    Stop,
    /// By a stop sequence, where it is known which.
    Sequence(String),
    /// It had all the tokens that it might have.
    Length,
    /// It waits for what its calls give.
    Calls,
    /// What it said may not be said.
    Filtered,
}

impl Said {
    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.calls.is_empty()
    }
}
