//! Patience: wait for a condition that must become true, without asserting how fast. A test fails only when
//! its patience is spent (`KEYWAY_TEST_PATIENCE_S`, 30 seconds unless set), and then says what it waited for.

use std::future::Future;
use std::time::Duration;

/// How often a condition is looked at.
pub const POLL: Duration = Duration::from_millis(10);

/// How long a test waits for something that must happen.
pub fn patience() -> Duration {
    let seconds = std::env::var("KEYWAY_TEST_PATIENCE_S").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(30))
}

/// Awaits `future`; fails the test when patience is spent.
///
/// # Panics
/// When `future` is not ready in time; the message names `what`.
pub async fn patient<T>(what: &str, future: impl Future<Output = T>) -> T {
    let patience = patience();
    let waited = tokio::time::timeout(patience, future).await;
    waited.unwrap_or_else(|_| panic!("waited {patience:?} in vain for: {what}"))
}

/// Waits until a condition holds; it may `.await`. Further arguments format a message for the failure.
#[macro_export]
macro_rules! eventually {
    ($condition:expr) => { $crate::eventually!($condition, "{}", stringify!($condition)) };
    ($condition:expr, $($message:tt)+) => {{
        let deadline = ::tokio::time::Instant::now() + $crate::eventually::patience();
        while !$condition {
            if ::tokio::time::Instant::now() >= deadline {
                panic!("never came true: {}", format_args!($($message)+));
            }
            ::tokio::time::sleep($crate::eventually::POLL).await;
        }
    }};
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn a_condition_is_looked_at_until_it_holds() {
        let looks = Cell::new(0);
        eventually!({
            looks.set(looks.get() + 1);
            looks.get() == 3
        });
        assert_eq!(looks.get(), 3);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "never came true: pigs fly")]
    async fn patience_ends() {
        eventually!(std::hint::black_box(false), "pigs fly");
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "in vain for: godot")]
    async fn a_future_that_never_ends_fails() {
        patient("godot", std::future::pending::<()>()).await;
    }
}
