//! The answers that are kept for a while, so that a conversation goes on by the id of its last answer. In
//! memory, and bounded: the oldest are forgotten first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::limits::{STORED_RESPONSES_BYTES_MAX, STORED_RESPONSES_MAX};

/// One answer.
#[derive(Debug, Clone)]
pub(in crate::api) struct Kept {
    /// The answer as its client got it.
    pub(in crate::api) response: Bytes,
    /// The items of the conversation up to its end, as JSON, set off by commas.
    pub(in crate::api) items: Bytes,
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
        while shelf.answers.len() > self.count_max || shelf.bytes > self.bytes_max {
            let Some((_, (id, kept))) = shelf.answers.pop_first() else { break };
            shelf.ages.remove(&id);
            shelf.bytes -= bytes_of(&id, &kept);
        }
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
        }
        true
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // What is done under the lock leaves it whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
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
        Kept { response: vec![b'r'; bytes].into(), items: Bytes::from_static(b"{}") }
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
}
