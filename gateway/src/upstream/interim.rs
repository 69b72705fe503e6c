//! Interim answers (1xx), which no client is told: a worker may send some while it makes its answer, and not
//! without end.

use crate::limits::{INTERIM_ANSWER_BYTES_MIN, INTERIM_ANSWERS_BYTES};

/// What one request's worker may still send of them, in units of [`INTERIM_ANSWER_BYTES_MIN`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Interim {
    left: u8,
}

impl Interim {
    /// All that one request's worker may send, before its first one.
    pub(super) fn new() -> Self {
        const { assert!(INTERIM_ANSWERS_BYTES / INTERIM_ANSWER_BYTES_MIN <= u8::MAX as usize) };
        Self { left: (INTERIM_ANSWERS_BYTES / INTERIM_ANSWER_BYTES_MIN) as u8 }
    }

    /// Counts one of so many bytes; whether it may come.
    pub(super) fn may_come(&mut self, bytes: usize) -> bool {
        let units = u8::try_from(bytes.div_ceil(INTERIM_ANSWER_BYTES_MIN).max(1)).ok();
        let left = units.and_then(|units| self.left.checked_sub(units));
        self.left = left.unwrap_or(0);
        left.is_some()
    }
}
