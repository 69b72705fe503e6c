//! Bounds of what is kept of who has used how much.

use std::time::Duration;

/// Days for which usage is kept unless the configuration says otherwise: a year, and a month to ask about it.
pub const USAGE_KEEP_DAYS: u32 = 400;

/// Days for which it is kept by the hour: a month, and some days to ask about it.
pub const USAGE_HOURLY_DAYS: u32 = 35;

/// Rows of one hour unless the configuration says otherwise: a hundred keys with a hundred models. A row
/// takes some 300 bytes of memory in its hour, and as many in the file for as long as it is kept.
pub const USAGE_SERIES: usize = 10_000;

/// The most that a configuration may ask for: 300 MB in an hour.
pub const USAGE_SERIES_MAX: usize = 1_000_000;

/// Hours of rows that are held where the file cannot be written; of later ones only sums are.
pub const USAGE_HELD_HOURS: usize = 4;

/// Time between two writes: so much is lost at most when the process is killed.
pub const USAGE_WRITE_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two tries at a file that cannot be written.
pub const USAGE_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// How long the end of the process waits for the last write: a disk that hangs must not hold it up.
pub const USAGE_LAST_WRITE_PATIENCE: Duration = Duration::from_secs(10);

/// How long it waits before that for requests whose connections are closed: some turns of a loop.
pub const USAGE_LAST_REQUESTS_PATIENCE: Duration = Duration::from_secs(1);

/// How often it looks meanwhile.
pub const USAGE_LOOK: Duration = Duration::from_millis(10);

/// Rows that are moved or removed in one write as they grow old: some ten milliseconds.
pub const USAGE_SWEEP_ROWS: usize = 5_000;

/// Memory for pages of the file.
pub const USAGE_CACHE_BYTES: usize = 8 << 20;

/// Rows of one answer: 20 MB of JSON.
pub const USAGE_ANSWER_ROWS: usize = 50_000;

/// Prices in the configuration: one for each of a thousand models.
pub const PRICES_MAX: usize = 1_000;
