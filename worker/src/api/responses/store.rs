//! The answers that are kept for a while, so that a conversation goes on by the id of its last answer, and so
//! that clients ask for one that is made in the background. In memory, and bounded: the oldest are forgotten
//! first, and are made no further.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::task::AbortHandle;

use crate::limits::{STORED_RESPONSES_BYTES_MAX, STORED_RESPONSES_MAX};

/// One answer.
#[derive(Debug, Clone)]
pub(in crate::api) struct Kept {
    /// The answer as its client got it.
    pub(in crate::api) response: Bytes,
    /// The items of the conversation up to its end, as JSON, set off by commas.
    pub(in crate::api) items: Bytes,
    /// How many bytes of them were said before the answer.
    pub(in crate::api) input_bytes: usize,
    pub(in crate::api) state: State,
}

/// Whether an answer is still made.
#[derive(Debug, Clone)]
pub(in crate::api) enum State {
    /// Its client does not wait for it. What makes it, once that has begun.
    Making(Option<AbortHandle>),
    /// It has ended, however; whether it was one that its client did not wait for.
    Ended { in_background: bool },
}

/// What has become of a wish to end an answer.
#[derive(Debug)]
pub(in crate::api) enum Cancelled {
    /// The answer as it is now: it was made, or had ended before.
    Now(Bytes),
    /// Its client waited for it.
    Foreground,
    /// It is not known.
    Unknown,
}

/// All answers that are kept.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    kept: Mutex<Shelf>,
    count_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct Shelf {
    /// By their age, the oldest first.
    answers: BTreeMap<u64, (String, Kept)>,
    ages: HashMap<String, u64>,
    next: u64,
    bytes: usize,
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self::new(STORED_RESPONSES_MAX, STORED_RESPONSES_BYTES_MAX)
    }
}

impl ResponseStore {
    /// Room for so many answers, of so many bytes together.
    fn new(count_max: usize, bytes_max: usize) -> Self {
        Self { kept: Mutex::default(), count_max, bytes_max }
    }

    /// Keeps an answer. One that alone exceeds the bounds is forgotten at once.
    pub(in crate::api) fn keep(&self, id: &str, kept: Kept) {
        let mut shelf = self.shelf();
        let age = shelf.next;
        shelf.next += 1;
        shelf.bytes += bytes_of(id, &kept);
        shelf.ages.insert(id.to_owned(), age);
        shelf.answers.insert(age, (id.to_owned(), kept));
        self.forget_the_oldest(&mut shelf);
    }

    fn forget_the_oldest(&self, shelf: &mut Shelf) {
        while shelf.answers.len() > self.count_max || shelf.bytes > self.bytes_max {
            let Some((_, (id, kept))) = shelf.answers.pop_first() else { break };
            shelf.ages.remove(&id);
            shelf.bytes -= bytes_of(&id, &kept);
            kept.state.stop();
        }
    }

    /// Notes what makes an answer; whether the answer is still wanted.
    pub(in crate::api) fn made_by(&self, id: &str, task: AbortHandle) -> bool {
        let mut shelf = self.shelf();
        let Some(kept) = shelf.find(id) else { return false };
        if let State::Making(by) = &mut kept.state {
            *by = Some(task);
        }
        true
    }

    /// Replaces an answer that is still made by what has become of it; one that was forgotten stays so.
    pub(in crate::api) fn go_on(&self, id: &str, change: impl FnOnce(&mut Kept)) {
        let mut shelf = self.shelf();
        let Some(kept) = shelf.find(id).filter(|kept| kept.state.is_making()) else { return };
        let before = bytes_of(id, kept);
        change(kept);
        let after = bytes_of(id, kept);
        shelf.bytes = shelf.bytes - before + after;
        self.forget_the_oldest(&mut shelf);
    }

    /// Ends an answer that is still made: what it is from now on is told by `cancelled`.
    pub(in crate::api) fn cancel(&self, id: &str, cancelled: impl FnOnce(&Bytes) -> Bytes) -> Cancelled {
        let mut shelf = self.shelf();
        let Some(kept) = shelf.find(id) else { return Cancelled::Unknown };
        let before = bytes_of(id, kept);
        match &kept.state {
            State::Ended { in_background: false } => return Cancelled::Foreground,
            State::Ended { in_background: true } => {}
            State::Making(_) => {
                kept.response = cancelled(&kept.response);
                std::mem::replace(&mut kept.state, State::Ended { in_background: true }).stop();
            }
        }
        let (now, after) = (kept.response.clone(), bytes_of(id, kept));
        shelf.bytes = shelf.bytes - before + after;
        Cancelled::Now(now)
    }

    pub(in crate::api) fn find(&self, id: &str) -> Option<Kept> {
        let shelf = self.shelf();
        shelf.answers.get(shelf.ages.get(id)?).map(|(_, kept)| kept.clone())
    }

    /// Whether there was such an answer.
    pub(in crate::api) fn forget(&self, id: &str) -> bool {
        let mut shelf = self.shelf();
        let Some(age) = shelf.ages.remove(id) else { return false };
        if let Some((id, kept)) = shelf.answers.remove(&age) {
            shelf.bytes -= bytes_of(&id, &kept);
            kept.state.stop();
        }
        true
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // What is done under the lock leaves it whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn find(&mut self, id: &str) -> Option<&mut Kept> {
        self.answers.get_mut(self.ages.get(id)?).map(|(_, kept)| kept)
    }
}

impl State {
    pub(in crate::api) const fn is_making(&self) -> bool {
        matches!(self, Self::Making(_))
    }

    /// Ends what makes the answer.
    fn stop(self) {
        if let Self::Making(Some(task)) = self {
            task.abort();
        }
    }
}

/// Bytes that an answer takes, with its two places.
fn bytes_of(id: &str, kept: &Kept) -> usize {
    kept.response.len() + kept.items.len() + 2 * id.len() + size_of::<Kept>() + size_of::<(String, u64)>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(bytes: usize) -> Kept {
        let state = State::Ended { in_background: false };
        Kept { response: vec![b'r'; bytes].into(), items: Bytes::from_static(b"{}"), input_bytes: 2, state }
    }

    fn making() -> Kept {
        Kept { state: State::Making(None), ..kept(10) }
    }

    /// Something that never ends by itself, and whether it was ended.
    fn task() -> (AbortHandle, tokio::task::JoinHandle<()>) {
        let task = tokio::spawn(std::future::pending());
        (task.abort_handle(), task)
    }

    #[test]
    fn the_oldest_are_forgotten_by_number_and_by_bytes() {
        let store = ResponseStore::new(3, 10_000);
        for id in ["a", "b", "c", "d"] {
            store.keep(id, kept(10));
        }
        let found = |id: &str| store.find(id).is_some();
        assert!(!found("a") && found("b") && found("c") && found("d"));
        store.keep("e", kept(9_500));
        assert!(!found("b") && found("e"));
        store.keep("f", kept(10_001));
        assert!(["c", "d", "e", "f"].iter().all(|id| !found(id)), "nothing fits beside it, nor it");
        assert_eq!(store.shelf().bytes, 0);
    }

    #[test]
    fn what_is_forgotten_gives_its_room_back() {
        let store = ResponseStore::new(10, 1_000);
        store.keep("a", kept(800));
        assert!(store.forget("a") && !store.forget("a") && store.find("a").is_none());
        store.keep("b", kept(800));
        assert_eq!(store.find("b").map(|kept| kept.response.len()), Some(800));
    }

    #[tokio::test]
    async fn what_is_forgotten_or_cancelled_is_made_no_further() {
        for way in ["forget", "cancel", "room", "late"] {
            let store = ResponseStore::new(2, 10_000);
            let (handle, task) = task();
            store.keep("a", making());
            assert!(way == "late" || store.made_by("a", handle.clone()));
            match way {
                "forget" => assert!(store.forget("a")),
                "cancel" => {
                    let told = store.cancel("a", |_| Bytes::from_static(b"cancelled"));
                    assert!(matches!(told, Cancelled::Now(now) if now == "cancelled"));
                }
                "room" => ["b", "c"].iter().for_each(|id| store.keep(id, kept(10))),
                _ => {
                    // It was forgotten before it was known what makes it: who began that ends it.
                    store.forget("a");
                    assert!(!store.made_by("a", handle.clone()));
                    handle.abort();
                }
            }
            assert!(task.await.is_err_and(|error| error.is_cancelled()), "{way}");
            store.go_on("a", |kept| kept.response = Bytes::from_static(b"completed"));
            assert!(store.find("a").is_none_or(|kept| kept.response == "cancelled"), "{way}");
        }
    }

    #[test]
    fn an_answer_that_grows_is_counted_and_one_that_was_waited_for_is_not_cancelled() {
        let store = ResponseStore::new(5, 2_000);
        store.keep("a", kept(10));
        store.keep("b", making());
        let before = store.shelf().bytes;
        store.go_on("b", |kept| kept.response = vec![b'r'; 110].into());
        assert_eq!(store.shelf().bytes, before + 100);
        store.go_on("b", |kept| kept.state = State::Ended { in_background: true });
        assert!(matches!(store.cancel("b", |_| Bytes::new()), Cancelled::Now(now) if now.len() == 110));
        assert!(matches!(store.cancel("a", |_| Bytes::new()), Cancelled::Foreground));
        assert!(matches!(store.cancel("c", |_| Bytes::new()), Cancelled::Unknown));
    }
}
