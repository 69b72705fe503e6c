//! What a worker's streams look like unasked, as its first one of each kind shows it, and whether it takes
//! the question for their usage (`usage/ask.rs`).

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// What a worker's streams say of their usage where they were not asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Habit {
    /// Not seen yet, or forgotten since a connection to the worker failed.
    Unknown,
    /// Nothing: no event of a whole stream had a `usage`.
    Silent,
    /// That there is none: `"usage":null` in chunks.
    Nulls,
    /// The usage itself with its counts, so that it need not be asked for.
    Tells,
}

/// What a worker made of the question for a stream's usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Question {
    /// It has not been asked, or its refusal may have been for something else.
    Open,
    /// It has answered a stream that asked.
    Taken,
    /// It refused a stream that asked, and answered the same one that did not.
    Refused,
}

/// Kinds of streams that are asked for their usage; engines write the chunks of each by code of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// Chat completions.
    Chat,
    /// Those that may call tools: SGLang's mostly say `"usage":null` then, and nothing otherwise.
    ChatWithTools,
    /// Completions.
    Completions,
}

/// The habits of one worker, by kind of stream.
#[derive(Debug, Default)]
pub struct Habits {
    unasked: [AtomicU8; 3],
    questions: [AtomicU8; 3],
}

impl StreamKind {
    /// That of a request to this path; `None` where streams are not asked at all.
    pub(crate) fn of(path: &str, has_tools: bool) -> Option<Self> {
        match path {
            "/v1/chat/completions" if has_tools => Some(Self::ChatWithTools),
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            _ => None,
        }
    }
}

impl Habits {
    /// The habit of streams of this kind.
    pub(crate) fn of(&self, kind: StreamKind) -> Habit {
        let habit = self.unasked[kind as usize].load(Relaxed);
        let known = [Habit::Silent, Habit::Nulls, Habit::Tells];
        known.into_iter().find(|known| *known as u8 == habit).unwrap_or(Habit::Unknown)
    }

    /// Notes what a stream of this kind was like.
    pub(crate) fn learn(&self, kind: StreamKind, habit: Habit) {
        self.unasked[kind as usize].store(habit as u8, Relaxed);
    }

    /// What it made of the question in streams of this kind.
    pub(crate) fn question(&self, kind: StreamKind) -> Question {
        let question = self.questions[kind as usize].load(Relaxed);
        let known = [Question::Taken, Question::Refused];
        known.into_iter().find(|known| *known as u8 == question).unwrap_or(Question::Open)
    }

    /// Notes what it made of the question.
    pub(crate) fn answered(&self, kind: StreamKind, question: Question) {
        self.questions[kind as usize].store(question as u8, Relaxed);
    }

    /// Another process may come.
    pub fn forget(&self) {
        // Both begin with 0.
        self.unasked.iter().chain(&self.questions).for_each(|habit| habit.store(0, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn habits_are_by_kind_of_stream_and_go_with_the_process() {
        let habits = Habits::default();
        let chat = StreamKind::of("/v1/chat/completions", false).unwrap();
        let with_tools = StreamKind::of("/v1/chat/completions", true).unwrap();
        let completions = StreamKind::of("/v1/completions", true).unwrap();
        habits.learn(with_tools, Habit::Nulls);
        habits.learn(completions, Habit::Tells);
        let all = || [chat, with_tools, completions].map(|kind| habits.of(kind));
        assert_eq!(all(), [Habit::Unknown, Habit::Nulls, Habit::Tells]);
        assert_eq!(StreamKind::of("/v1/responses", false), None);
        habits.answered(chat, Question::Taken);
        habits.answered(with_tools, Question::Refused);
        let questions = || [chat, with_tools, completions].map(|kind| habits.question(kind));
        assert_eq!(questions(), [Question::Taken, Question::Refused, Question::Open]);
        habits.forget();
        assert_eq!((all(), questions()), ([Habit::Unknown; 3], [Question::Open; 3]));
    }
}
