//! Bounds of traces and of their way to the collector.

use std::time::Duration;

/// Requests whose spans wait to be sent: at most 8 KB each (ten spans with texts as long as below), so 16 MB;
/// a second of 2,000 requests.
pub const MAX_QUEUED_TRACES: usize = 2_048;

/// Spans in one message to the collector, half a megabyte; what OpenTelemetry's own exporters take.
pub const MAX_TRACE_BATCH: usize = 512;

/// Longest time that spans wait for their batch.
pub const TRACE_BATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Time for one try to send a batch, and for the last one at the end.
pub const TRACE_EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Tries for each batch; meanwhile the queue fills and then drops.
pub const TRACE_EXPORT_TRIES: u32 = 3;

/// Pause after the first try that failed; doubled for the next.
pub const TRACE_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Attempts of one request that have a span; of more the oldest have none.
pub const MAX_TRACED_ATTEMPTS: usize = 8;

/// Bytes of a client's text in a span, such as an unknown path.
pub const MAX_TRACE_TEXT_BYTES: usize = 256;

/// Largest `tracestate` that is passed on: what the standard wants at least.
pub const MAX_TRACE_STATE_BYTES: usize = 512;
