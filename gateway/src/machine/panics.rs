//! Panics, each of which is a bug: counted once and logged once, wherever it is stopped. Of its text only
//! what stands in the source is logged, because what is formatted into it may be a prompt. What becomes of
//! the request is the stack's business and the body's.

use std::{
    any::Any,
    backtrace::{Backtrace, BacktraceStatus},
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook},
    sync::LazyLock,
};

use prometheus::IntCounter;

/// The process's, whichever gateway it happened to.
static COUNTED: LazyLock<Option<IntCounter>> = LazyLock::new(|| {
    IntCounter::new("keyway_panics_total", "Bugs that ended a request or a task of the gateway's process.")
        .ok()
});

/// Counts and logs all panics of this process from now on.
pub fn watch() {
    LazyLock::force(&COUNTED);
    set_hook(Box::new(note));
}

/// The count, to be shown.
pub fn counter() -> prometheus::Result<IntCounter> {
    COUNTED.clone().ok_or_else(|| prometheus::Error::Msg("panics cannot be counted".to_owned()))
}

/// Does what may panic without unwinding further; `None`: it panicked. What it had in hand must not be used
/// again.
pub fn stopped<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

fn note(panic: &PanicHookInfo<'_>) {
    if let Some(counted) = &*COUNTED {
        counted.inc();
    }
    let place = panic.location().map(ToString::to_string);
    // Only where the environment asks for it (`RUST_BACKTRACE`).
    let trace = Some(Backtrace::capture()).filter(|trace| trace.status() == BacktraceStatus::Captured);
    let trace = trace.map(|trace| trace.to_string());
    tracing::error!(place, text = text(panic.payload()), trace, "a panic, which is a bug");
}

fn text(payload: &(dyn Any + Send)) -> &'static str {
    payload.downcast_ref::<&'static str>().copied().unwrap_or("(not shown: it may hold what clients sent)")
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    fn text_of(work: impl FnOnce()) -> &'static str {
        text(&*catch_unwind(AssertUnwindSafe(work)).unwrap_err())
    }

    #[test]
    fn nothing_that_was_formatted_is_shown() {
        let prompt = "prompt of a client: ü".to_owned();
        assert!(text_of(|| assert!(prompt[..prompt.len() - 1].is_empty())).starts_with("(not shown"));
        assert!(text_of(|| panic!("{prompt}")).starts_with("(not shown"));
        assert!(text_of(|| panic_any(7)).starts_with("(not shown"));
        assert_eq!(text_of(|| panic!("by the source")), "by the source");
        let nothing = prompt.strip_prefix("something else");
        assert_eq!(
            text_of(|| assert!(nothing.unwrap().is_empty())),
            "called `Option::unwrap()` on a `None` value"
        );
    }

    #[test]
    fn what_panicked_gives_nothing() {
        assert_eq!((stopped(|| 1), stopped(|| -> u8 { panic!("as a bug would") })), (Some(1), None));
    }
}
