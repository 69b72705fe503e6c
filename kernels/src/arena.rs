//! Memory for weights: filled once, read by every step. Where it is large it begins at a huge page's boundary
//! and the system is asked for huge pages, which spares a stream through it the walks of page tables (a tenth
//! of the time on virtual machines).

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Size of a huge page on x86-64 and, with pages of 4 KiB, on aarch64.
const HUGE_PAGE: usize = 2 << 20;

/// A slice that owns its memory.
pub(crate) struct Arena<T: Copy> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: an arena owns its elements as a `Vec` does.
#[allow(unsafe_code)]
unsafe impl<T: Copy + Send> Send for Arena<T> {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Arena<T> {}

impl<T: Copy> Arena<T> {
    /// `len` times `value`.
    ///
    /// # Panics
    /// If that is more than an address space.
    #[allow(unsafe_code)]
    pub(crate) fn filled(value: T, len: usize) -> Self {
        let Some(layout) = Self::layout(len) else { panic_too_large() };
        if layout.size() == 0 {
            return Self { start: NonNull::dangling(), len };
        }
        // SAFETY: the layout is not empty.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }.cast::<T>()) else {
            handle_alloc_error(layout)
        };
        if layout.align() == HUGE_PAGE {
            ask_for_huge_pages(start.cast(), layout.size());
        }
        for i in 0..len {
            // SAFETY: `i` is below `len`, for which there is memory.
            unsafe { start.add(i).write(value) };
        }
        Self { start, len }
    }

    /// `None` if that is more than an address space.
    fn layout(len: usize) -> Option<Layout> {
        let layout = Layout::array::<T>(len).ok()?;
        if layout.size() < HUGE_PAGE {
            return Some(layout);
        }
        Some(layout.align_to(HUGE_PAGE).ok()?.pad_to_align())
    }
}

#[allow(clippy::panic, reason = "as for a `Vec` of that length")]
fn panic_too_large() -> ! {
    panic!("arena: the memory is more than an address space")
}

/// Asks; a system that has none to give goes on with small pages.
#[allow(unsafe_code)]
fn ask_for_huge_pages(start: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the range is this arena's own memory, whole pages of it; the advice changes no content.
    unsafe {
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

impl<T: Copy> Deref for Arena<T> {
    type Target = [T];

    #[inline(always)]
    #[allow(unsafe_code)]
    fn deref(&self) -> &[T] {
        // SAFETY: `filled` wrote `len` elements there.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Copy> DerefMut for Arena<T> {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and the reference is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Copy> Drop for Arena<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len)
            && layout.size() > 0
        {
            // SAFETY: `filled` took the memory with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

impl<T: Copy> Clone for Arena<T> {
    fn clone(&self) -> Self {
        let Some(first) = self.first() else { return Self { start: NonNull::dangling(), len: 0 } };
        let mut clone = Self::filled(*first, self.len);
        clone.copy_from_slice(self);
        clone
    }
}

impl<T: Copy> fmt::Debug for Arena<T> {
    /// Weights are not for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_slice_of_any_length() {
        for len in [0, 1, 1000, HUGE_PAGE / 8 - 1, HUGE_PAGE / 8, HUGE_PAGE / 8 + 1] {
            let mut arena = Arena::filled(7_u64, len);
            assert!(arena.iter().all(|value| *value == 7) && arena.len() == len);
            if let Some(last) = arena.last_mut() {
                *last = 8;
            }
            let clone = arena.clone();
            drop(arena);
            assert!(clone.last().is_none_or(|last| *last == 8) && clone.len() == len);
        }
    }

    #[test]
    fn large_memory_begins_at_a_huge_page() {
        let arena = Arena::filled(0_u8, HUGE_PAGE + 1);
        assert!(arena.as_ptr().addr().is_multiple_of(HUGE_PAGE));
    }
}
