//! Vectors of zeros that take no memory before they are written: the system hands out zero pages at the first
//! touch. A KV cache is large and mostly unused at first. Not for small or short-lived buffers.

use std::alloc::{Layout, alloc_zeroed};
use std::ops::{Deref, DerefMut};

use crate::lanes::{LANES, Lanes};

/// A fixed number of [`Lanes`], zero until written.
#[derive(Debug)]
pub(crate) struct Zeroed {
    /// One vector more than needed, to begin at an aligned address: an allocation that asks for more than the
    /// default alignment would be zeroed by hand, which touches it.
    floats: Box<[f32]>,
    /// Index of the first aligned float.
    first: usize,
    vectors: usize,
}

#[allow(unsafe_code, clippy::cast_ptr_alignment)] // the layout is that of floats
impl Zeroed {
    /// `n` vectors; `None` if there is no memory for them.
    pub(crate) fn new(n: usize) -> Option<Self> {
        let count = n.checked_add(1)?.checked_mul(LANES)?;
        let layout = Layout::array::<f32>(count).ok()?;
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc_zeroed(layout) }.cast::<f32>();
        if start.is_null() {
            return None;
        }
        // SAFETY: the memory comes from the global allocator with the layout of `count` floats, and zeros are
        // floats.
        let floats = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, count)) };
        let first = floats.as_ptr().align_offset(align_of::<Lanes>());
        (first <= LANES).then_some(Self { floats, first, vectors: n })
    }
}

#[allow(unsafe_code, clippy::cast_ptr_alignment)] // `first` aligns it
impl Deref for Zeroed {
    type Target = [Lanes];

    #[inline(always)]
    fn deref(&self) -> &[Lanes] {
        // SAFETY: `first` aligns the address, `vectors * LANES` floats lie behind it,
        // and every float pattern is a valid `Lanes`.
        unsafe {
            std::slice::from_raw_parts(self.floats.as_ptr().add(self.first).cast::<Lanes>(), self.vectors)
        }
    }
}

#[allow(unsafe_code, clippy::cast_ptr_alignment)] // `first` aligns it
impl DerefMut for Zeroed {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Lanes] {
        // SAFETY: as above, and the floats are borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.floats.as_mut_ptr().add(self.first).cast::<Lanes>(),
                self.vectors,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_aligned_zero_and_keep_what_is_written() {
        for n in [0, 1, 2, 7, 1000] {
            let mut vectors = Zeroed::new(n).unwrap();
            assert_eq!(vectors.len(), n);
            assert!(vectors.as_ptr().is_aligned());
            assert!(vectors.iter().all(|v| v.0 == [0.0; LANES]));
            for (i, vector) in vectors.iter_mut().enumerate() {
                vector.0 = [i as f32; LANES];
            }
            assert!(vectors.iter().enumerate().all(|(i, v)| v.0 == [i as f32; LANES]));
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert!(Zeroed::new(usize::MAX).is_none());
        assert!(Zeroed::new(usize::MAX / 256).is_none());
    }
}
