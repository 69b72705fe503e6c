//! Memory of the grammars of all answers under way. What a grammar takes becomes more as it is used, by its
//! lexer's states, so each is counted again after each mask. New ones leave some to those that grow; where
//! even that is gone, the answer ends whose grammar asks for more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// All that there is.
#[derive(Debug, Clone)]
pub(super) struct GrammarMemory(Arc<All>);

#[derive(Debug)]
struct All {
    limit: usize,
    /// Of it, what new ones leave.
    left: usize,
    taken: AtomicUsize,
}

/// What one grammar takes; given back on drop.
#[derive(Debug)]
pub(super) struct Share {
    all: Arc<All>,
    bytes: AtomicUsize,
}

impl GrammarMemory {
    /// So many bytes, of which new grammars leave some.
    pub(super) fn new(limit: usize, left: usize) -> Self {
        Self(Arc::new(All { limit, left, taken: AtomicUsize::new(0) }))
    }

    /// The share of a new grammar; `None` if the others have too much.
    pub(super) fn share(&self, bytes: usize) -> Option<Share> {
        let most = self.0.limit - self.0.left;
        self.0.take(bytes, most).then(|| Share { all: Arc::clone(&self.0), bytes: AtomicUsize::new(bytes) })
    }
}

impl All {
    fn take(&self, bytes: usize, most: usize) -> bool {
        let more = |taken: usize| Some(taken.saturating_add(bytes)).filter(|taken| *taken <= most);
        self.taken.fetch_update(Relaxed, Relaxed, more).is_ok()
    }
}

impl Share {
    /// Makes it so large, if it is less; `false`, and nothing taken, if there is not so much.
    pub(super) fn grow_to(&self, bytes: usize) -> bool {
        // Several choices of one request share a grammar, each on a thread of its own.
        let before = self.bytes.fetch_max(bytes, Relaxed);
        let more = bytes.saturating_sub(before);
        let may = more == 0 || self.all.take(more, self.all.limit);
        if !may {
            self.bytes.fetch_sub(more, Relaxed);
        }
        may
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.all.taken.fetch_sub(self.bytes.load(Relaxed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_ones_leave_some_to_those_that_grow_and_all_is_given_back() {
        let memory = GrammarMemory::new(100, 25);
        let taken = || memory.0.taken.load(Relaxed);
        let (first, second) = (memory.share(40).unwrap(), memory.share(35).unwrap());
        assert!(memory.share(1).is_none());
        assert!(first.grow_to(60) && first.grow_to(50), "it never becomes less");
        assert_eq!(taken(), 95);
        assert!(!second.grow_to(41));
        assert_eq!(taken(), 95, "what was refused is not taken");
        assert!(second.grow_to(40) && memory.share(0).is_none());
        drop(first);
        assert_eq!(taken(), 40);
        drop(second);
        assert_eq!(taken(), 0);
    }
}
