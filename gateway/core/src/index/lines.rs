//! Memory in pieces that are used in no order: lines as the processor's cache has them, or blocks. All 0 at
//! first, in huge pages where the system gives them to a process that asks (`madvise`, in Linux's
//! `transparent_hugepage/enabled`): such pieces would touch each small page for the first time, at some
//! microseconds each, and later look up each page's place in memory anew. What the bytes mean is the caller's
//! business.

use std::alloc::{Layout, handle_alloc_error};

use memmap2::MmapMut;

/// Bytes of one line.
pub(super) const LINE_BYTES: usize = 64;

/// One line's bytes. Pages are aligned, so that none lies in two of the processor's.
pub(super) type Line = [u8; LINE_BYTES];

/// So many bytes each, which neither grow nor shrink in number.
pub(super) struct Pieces<const BYTES: usize> {
    memory: MmapMut,
}

/// Pieces that are the processor's lines.
pub(super) type Lines = Pieces<LINE_BYTES>;

impl<const BYTES: usize> Pieces<BYTES> {
    /// So many pieces. Without so much memory the process ends, as it does wherever it allocates.
    pub(super) fn zeroed(count: usize) -> Self {
        let layout = layout_of::<BYTES>(count);
        let memory = MmapMut::map_anon(layout.size()).unwrap_or_else(|_| handle_alloc_error(layout));
        // Where there are no huge pages, small ones do.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Self { memory }
    }

    pub(super) fn len(&self) -> usize {
        self.memory.len() / BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> &[u8; BYTES] {
        &self.memory.as_chunks().0[at]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: usize) -> &mut [u8; BYTES] {
        &mut self.memory.as_chunks_mut().0[at]
    }
}

/// Memory for so many pieces. More than an address can say ends the process too.
fn layout_of<const BYTES: usize>(count: usize) -> Layout {
    Layout::array::<[u8; BYTES]>(count).unwrap_or_else(|_| handle_alloc_error(Layout::new::<[u8; BYTES]>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_zero_until_they_are_set_and_then_what_they_are_set_to() {
        let mut lines = Lines::zeroed(10_000);
        lines.get_mut(9_999)[63] = 255;
        lines.get_mut(7)[0] = 3;
        assert_eq!([0, 6, 7, 8, 9_999].map(|at| (lines.get(at)[0], lines.get(at)[63])), {
            [(0, 0), (0, 0), (3, 0), (0, 0), (0, 255)]
        });
        assert_eq!(lines.len(), 10_000);
        assert!(Lines::zeroed(0).is_empty());
        assert_eq!(lines.get(1).as_ptr() as usize % LINE_BYTES, 0);
    }
}
