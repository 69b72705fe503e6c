//! A fixed number of 64-bit words, 0 at first, in huge pages where the system gives them to a process that
//! asks (`madvise`, in Linux's `transparent_hugepage/enabled`): words that are used in no order would touch
//! each small page for the first time, at some microseconds each, and later look up each page's place in
//! memory anew. What the words mean is the caller's business.

use std::alloc::{Layout, handle_alloc_error};

use memmap2::MmapMut;

/// Bytes of one word.
pub(super) const WORD_BYTES: usize = size_of::<u64>();

/// The words' memory, which neither grows nor shrinks.
pub(super) struct Words {
    memory: MmapMut,
}

impl Words {
    /// So many words. Without so much memory the process ends, as it does wherever it allocates.
    pub(super) fn zeroed(words: usize) -> Self {
        let layout = layout_of(words);
        let memory = MmapMut::map_anon(layout.size()).unwrap_or_else(|_| handle_alloc_error(layout));
        // Where there are no huge pages, small ones do.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Self { memory }
    }

    pub(super) fn len(&self) -> usize {
        self.memory.len() / WORD_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    pub(super) fn get(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.memory.as_chunks().0[at])
    }

    pub(super) fn set(&mut self, at: usize, word: u64) {
        self.memory.as_chunks_mut().0[at] = word.to_ne_bytes();
    }
}

/// Memory for so many words. More than an address can say ends the process too.
fn layout_of(words: usize) -> Layout {
    Layout::array::<u64>(words).unwrap_or_else(|_| handle_alloc_error(Layout::new::<u64>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_zero_until_they_are_set_and_then_what_they_are_set_to() {
        let mut words = Words::zeroed(100_000);
        words.set(99_999, u64::MAX - 1);
        words.set(7, 3);
        assert_eq!([0, 6, 7, 8, 99_999].map(|at| words.get(at)), [0, 0, 3, 0, u64::MAX - 1]);
        assert_eq!(words.len(), 100_000);
        assert!(Words::zeroed(0).is_empty());
    }
}
