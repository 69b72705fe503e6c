//! Memory for prompts that are rendered and tokenised: so many bytes for all at once. Who finds none does not
//! wait for it; its request is routed by its text.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use crate::{
    limits::{PROMPT_MEMORY_PART, PROMPT_STEP_BYTES},
    prompt::text::Unknown,
};

/// All that there is: a part of what bodies may take, on top of that.
#[derive(Debug, Clone)]
pub struct PromptMemory(Arc<All>);

#[derive(Debug)]
struct All {
    limit: AtomicUsize,
    taken: AtomicUsize,
}

impl PromptMemory {
    /// As much as fits to bodies of so many bytes.
    pub fn beside(body_bytes: usize) -> Self {
        let all = Self(Arc::new(All { limit: 0.into(), taken: 0.into() }));
        all.set_beside(body_bytes);
        all
    }

    /// Another bound of bodies from now on.
    pub fn set_beside(&self, body_bytes: usize) {
        self.0.limit.store(body_bytes / PROMPT_MEMORY_PART, Relaxed);
    }

    /// What one request takes: nothing yet.
    pub(super) fn share(&self) -> Share {
        Share { all: Arc::clone(&self.0), bytes: 0 }
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.0.taken.load(Relaxed)
    }
}

/// What one request takes of it; given back on drop.
#[derive(Debug)]
pub(super) struct Share {
    all: Arc<All>,
    bytes: usize,
}

impl Share {
    /// What comes next takes so many bytes; what came before, none any more.
    pub(super) fn needs(&mut self, bytes: usize) -> Result<(), Unknown> {
        self.give_back();
        let bytes = bytes.next_multiple_of(PROMPT_STEP_BYTES);
        let limit = self.all.limit.load(Relaxed);
        if bytes > limit {
            return Err(Unknown::TooLarge);
        }
        let more = |taken: usize| Some(taken + bytes).filter(|taken| *taken <= limit);
        self.all.taken.fetch_update(Relaxed, Relaxed, more).map_err(|_| Unknown::Overflow)?;
        self.bytes = bytes;
        Ok(())
    }

    fn give_back(&mut self) {
        self.all.taken.fetch_sub(std::mem::take(&mut self.bytes), Relaxed);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_together_take_no_more_than_there_is_and_give_it_back() {
        let memory = PromptMemory::beside(8 * PROMPT_STEP_BYTES * PROMPT_MEMORY_PART);
        let (mut first, mut second) = (memory.share(), memory.share());
        assert_eq!(first.needs(6 * PROMPT_STEP_BYTES), Ok(()));
        assert_eq!(first.needs(5 * PROMPT_STEP_BYTES + 1), Ok(()), "what it had counts no more");
        assert_eq!(second.needs(3 * PROMPT_STEP_BYTES), Err(Unknown::Overflow));
        assert_eq!(second.needs(9 * PROMPT_STEP_BYTES), Err(Unknown::TooLarge));
        assert_eq!((second.needs(1), memory.taken()), (Ok(()), 7 * PROMPT_STEP_BYTES));
        drop(first);
        assert_eq!(second.needs(8 * PROMPT_STEP_BYTES), Ok(()));
        memory.set_beside(PROMPT_STEP_BYTES);
        assert_eq!(second.needs(2 * PROMPT_STEP_BYTES), Err(Unknown::TooLarge));
        drop(second);
        assert_eq!(memory.taken(), 0);
    }
}
