//! What a worker's streams look like unasked, as its first one at each path shows it (`usage/ask.rs`).

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

/// The habits of one worker, by path.
#[derive(Debug, Default)]
pub struct Habits([AtomicU8; 2]);

impl Habits {
    fn at(&self, path: &str) -> Option<&AtomicU8> {
        match path {
            "/v1/chat/completions" => Some(&self.0[0]),
            "/v1/completions" => Some(&self.0[1]),
            _ => None,
        }
    }

    /// The habit at this path; `None` where streams are not asked at all.
    pub(crate) fn of(&self, path: &str) -> Option<Habit> {
        let habit = self.at(path)?.load(Relaxed);
        let known = [Habit::Silent, Habit::Nulls, Habit::Tells];
        Some(known.into_iter().find(|known| *known as u8 == habit).unwrap_or(Habit::Unknown))
    }

    /// Notes what a stream at this path was like; no effect where streams are not asked.
    pub(crate) fn learn(&self, path: &str, habit: Habit) {
        if let Some(known) = self.at(path) {
            known.store(habit as u8, Relaxed);
        }
    }

    /// Another process may come.
    pub fn forget(&self) {
        self.0.iter().for_each(|habit| habit.store(Habit::Unknown as u8, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn habits_are_by_path_and_go_with_the_process() {
        let habits = Habits::default();
        let (chat, completions) = ("/v1/chat/completions", "/v1/completions");
        habits.learn(chat, Habit::Nulls);
        habits.learn("/v1/responses", Habit::Tells);
        assert_eq!(
            [chat, completions].map(|path| habits.of(path)),
            [Some(Habit::Nulls), Some(Habit::Unknown)]
        );
        assert_eq!(habits.of("/v1/responses"), None);
        habits.forget();
        assert_eq!(habits.of(chat), Some(Habit::Unknown));
    }
}
