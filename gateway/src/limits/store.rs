//! Bounds of what is said to the store of `[store]`.

use std::time::Duration;

/// How long a request waits for the store at most: some round trips. Then its gateway goes by its own part
/// of the limit.
pub const STORE_PATIENCE: Duration = Duration::from_millis(25);

/// Time between two questions while requests come: a fifth of the time for which a gateway takes ahead.
pub const STORE_EVERY: Duration = Duration::from_millis(50);

/// Time between two signs of life while none come.
pub const STORE_SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Silence after which the store takes a gateway for dead: its slots come back, and it counts no more.
pub const STORE_SILENCE_MAX: Duration = Duration::from_secs(5);

/// Time for the store to answer, after which it counts as away.
pub const STORE_TIMEOUT: Duration = Duration::from_millis(250);

/// Time to connect to it, TLS and its password included.
pub const STORE_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pauses before it is asked again: doubled from the first to the last.
pub const STORE_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// How long a tenant's budgets are asked of after its last request.
pub const STORE_BUDGETS_FOR: Duration = Duration::from_secs(5);

/// How long the store knows what was used of a budget after its day or month: gateways' clocks may differ.
pub const STORE_BUDGETS_KEEP: Duration = Duration::from_secs(86_400);

/// Questions in one script, which the store answers without a pause: some 2 ms of its time.
pub const STORE_QUESTIONS_MAX: usize = 256;
