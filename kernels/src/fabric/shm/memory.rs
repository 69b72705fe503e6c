//! The shared memory itself: where what lies in it, and the futex calls. All that is `unsafe` about the
//! transport but for when its messages may be read and written, which is `shm.rs`' business.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::fabric::{FabricError, RANKS_MAX};

/// First word of a group's memory.
const MAGIC: u32 = u32::from_ne_bytes(*b"kwx1");
/// What is written by different ranks lies this far apart, lest they take cache lines from each other; in
/// words.
const LINE: usize = 16;
/// Messages begin at pages; in words.
const PAGE: usize = 1024;

/// A group's size and the words of its longest message, from which the places follow. In lines: the head, a
/// bell for each rank, and a place's number and length for each pair of ranks, twice; then, from a page's
/// boundary on, the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) size: usize,
    pub(super) capacity: usize,
}

/// What is known of a message's place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    /// The exchange whose message it holds.
    pub(super) number: &'a AtomicU32,
    pub(super) words: &'a AtomicU32,
}

/// The mapping of a group's memory.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u32>,
    words: usize,
    layout: Layout,
}

// SAFETY: the memory is shared among processes anyway; it is reached through atomics, or under the rules of
// `shm.rs`.
#[allow(unsafe_code)]
unsafe impl Send for Memory {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for Memory {}

// === impl Layout ===

impl Layout {
    /// The number of the place for what `from` sends `to` in exchanges of this parity.
    fn index(self, from: usize, to: usize, exchange: u64) -> usize {
        (from * self.size + to) * 2 + (exchange % 2) as usize
    }

    fn bell(rank: usize) -> usize {
        LINE * (1 + rank)
    }

    fn place(self, index: usize) -> usize {
        LINE * (1 + self.size + index)
    }

    fn message(self, index: usize) -> usize {
        let heads = LINE * (1 + self.size + 2 * self.size * self.size);
        heads.next_multiple_of(PAGE) + index * self.capacity.next_multiple_of(PAGE)
    }

    /// `None` if that is more than there can be.
    fn words(self) -> Option<usize> {
        let messages = 2 * self.size * self.size;
        let room = self.capacity.checked_next_multiple_of(PAGE)?.checked_mul(messages)?;
        self.message(0).checked_add(room).filter(|words| *words <= isize::MAX as usize / 4)
    }
}

#[allow(unsafe_code)]
pub(super) fn create(layout: Layout) -> io::Result<OwnedFd> {
    let words =
        layout.words().ok_or_else(|| io::Error::other("the group's memory is more than there can be"))?;
    // SAFETY: the name is a C string; a descriptor that comes back is this caller's alone.
    let file = unsafe {
        let fd = libc::memfd_create(c"keyway-experts".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let file = File::from(file);
    file.set_len(words as u64 * 4)?;
    let memory = Memory::map_words(file.as_fd(), words, layout)?;
    for (i, word) in [MAGIC, layout.size as u32, layout.capacity as u32].into_iter().enumerate() {
        memory.word(i).store(word, Ordering::Release);
    }
    Ok(file.into())
}

// === impl Memory ===

impl Memory {
    /// Maps what [`create`] made.
    pub(super) fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        let bytes = File::from(file.try_clone_to_owned()?).metadata()?.len();
        let words = usize::try_from(bytes / 4).map_err(io::Error::other)?;
        if words < 3 {
            return Err(io::Error::other("this is not a group's shared memory"));
        }
        let mut memory = Self::map_words(file, words, Layout { size: 0, capacity: 0 })?;
        let [magic, size, capacity] = [0, 1, 2].map(|i| memory.word(i).load(Ordering::Acquire));
        let layout = Layout { size: size as usize, capacity: capacity as usize };
        if magic != MAGIC || !(1..=RANKS_MAX).contains(&layout.size) || layout.words() != Some(words) {
            return Err(io::Error::other("this is not a group's shared memory"));
        }
        memory.layout = layout;
        Ok(memory)
    }

    #[allow(unsafe_code)]
    fn map_words(file: BorrowedFd<'_>, words: usize, layout: Layout) -> io::Result<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping, at an address of the system's choice; the file is as long as the mapping,
        // and no process makes it shorter.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), words * 4, access, kind, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { start, words, layout })
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Which rank is at fault, as [`FabricError::blame`] says it; 0: none.
    pub(super) fn fault(&self) -> &AtomicU32 {
        self.word(3)
    }

    /// Tells all ranks who is at fault. The first one to do so counts.
    pub(super) fn blame(&self, error: &FabricError) {
        let _ = self.fault().compare_exchange(0, error.blame(), Ordering::SeqCst, Ordering::SeqCst);
        for rank in 0..self.layout.size {
            self.ring(rank);
        }
    }

    pub(super) fn place(&self, from: usize, to: usize, exchange: u64) -> Place<'_> {
        let place = self.layout.place(self.layout.index(from, to, exchange));
        Place { number: self.word(place), words: self.word(place + 1) }
    }

    /// How often a rank's bell was rung, to be asked before looking whether there is a reason to sleep.
    pub(super) fn rung(&self, rank: usize) -> u32 {
        self.word(Layout::bell(rank)).load(Ordering::SeqCst)
    }

    /// Wakes a rank, if it sleeps.
    pub(super) fn ring(&self, rank: usize) {
        let bell = self.word(Layout::bell(rank));
        bell.fetch_add(1, Ordering::SeqCst);
        if self.word(Layout::bell(rank) + 1).load(Ordering::SeqCst) != 0 {
            futex(bell, libc::FUTEX_WAKE, 1, None);
        }
    }

    /// Sleeps until the rank's bell is rung once more than `rung` times, for `at_most` this long; or for no
    /// reason.
    pub(super) fn sleep(&self, rank: usize, rung: u32, at_most: Duration) {
        let sleeps = self.word(Layout::bell(rank) + 1);
        sleeps.store(1, Ordering::SeqCst);
        // A rank that rings from here on wakes this one; after one that rang before, the number has changed
        // and the call returns at once.
        futex(self.word(Layout::bell(rank)), libc::FUTEX_WAIT, rung, Some(at_most));
        sleeps.store(0, Ordering::SeqCst);
    }

    #[allow(unsafe_code)]
    fn word(&self, i: usize) -> &AtomicU32 {
        assert!(i < self.words, "shm: no such word");
        // SAFETY: the word lies in the mapping, which lives as long as `self`, and is only ever reached as an
        // atomic: heads and messages lie apart.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(i)) }
    }

    fn message_start(&self, from: usize, to: usize, exchange: u64, words: usize) -> usize {
        let start = self.layout.message(self.layout.index(from, to, exchange));
        let inside = words <= self.layout.capacity && start + words <= self.words;
        assert!(inside && from < self.layout.size && to < self.layout.size, "shm: no such message");
        start
    }

    /// The first `words` of a message.
    ///
    /// # Safety
    /// Nothing writes it while the reference lives.
    #[allow(unsafe_code)]
    pub(super) unsafe fn message(&self, from: usize, to: usize, exchange: u64, words: usize) -> &[u32] {
        let start = self.message_start(from, to, exchange, words);
        // SAFETY: the words lie in the mapping; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), words) }
    }

    /// The same, to be written.
    ///
    /// # Safety
    /// Nothing else reads or writes it while the reference lives.
    #[allow(unsafe_code, clippy::mut_from_ref)] // shared memory: the caller answers for who writes
    pub(super) unsafe fn message_mut(
        &self,
        from: usize,
        to: usize,
        exchange: u64,
        words: usize,
    ) -> &mut [u32] {
        let start = self.message_start(from, to, exchange, words);
        // SAFETY: the words lie in the mapping; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(start), words) }
    }
}

impl Drop for Memory {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference into it outlives it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.words * 4) };
    }
}

/// The system call; whatever it answers, the caller looks again.
#[allow(unsafe_code, clippy::cast_lossless)] // c_long has 32 bits elsewhere
fn futex(word: &AtomicU32, operation: libc::c_int, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is alive and aligned, the timeout null or alive for the call; not private, as
    // processes share it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout) };
}
