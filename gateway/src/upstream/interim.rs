//! Interim answers (1xx), which no client is told: a worker may send some while it makes its answer, and not
//! without end.

use crate::limits::{INTERIM_ANSWER_BYTES_MIN, INTERIM_ANSWERS_BYTES};

/// What one request's worker may still send of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interim {
    left_bytes: u32,
}

impl Interim {
    /// Before the first.
    pub(super) fn new() -> Self {
        Self { left_bytes: INTERIM_ANSWERS_BYTES as u32 }
    }

    /// Counts one of so many bytes; whether it may come.
    pub(super) fn may_come(&mut self, bytes: usize) -> bool {
        let left = (self.left_bytes as usize).checked_sub(bytes.max(INTERIM_ANSWER_BYTES_MIN));
        self.left_bytes = left.unwrap_or(0) as u32;
        left.is_some()
    }
}
