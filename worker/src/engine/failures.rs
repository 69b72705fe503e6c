//! Steps that fail one after the other: whether a worker still serves requests, for those who ask for its
//! health.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::limits::FAILED_STEPS_MAX;

/// How many steps failed since the last one that succeeded, and why the last of them did.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<(usize, String)>);

impl Failures {
    /// Notes a failed step.
    pub(super) fn add(&self, reason: &str) {
        let mut failed = self.failed();
        *failed = (failed.0 + 1, reason.to_owned());
    }

    /// Notes a step that succeeded.
    pub(super) fn clear(&self) {
        let mut failed = self.failed();
        if failed.0 > 0 {
            *failed = (0, String::new());
        }
    }

    /// What is wrong, once so many failed that one request cannot be the reason.
    pub(super) fn lasting(&self) -> Option<String> {
        let failed = self.failed();
        let (count, reason) = &*failed;
        (*count >= FAILED_STEPS_MAX)
            .then(|| format!("the last {count} steps failed, the last one because {reason}"))
    }

    fn failed(&self) -> MutexGuard<'_, (usize, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
