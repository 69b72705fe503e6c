//! Every bound of the load tester, with its unit and where the number comes from. No logic.

/// Largest server-sent event, in bytes. A chunk of one token is under 1 KiB; one with log-probabilities of 20
/// alternatives under 16 KiB. Beyond this the stream is broken, not long.
pub const EVENT_BYTES_MAX: usize = 1 << 20;

/// Bytes read of an answer that is not a stream (model list, calibration, error). A list of 1,000 models is
/// about 200 KiB.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Sample messages kept for each class of error, and the characters kept of each.
pub const ERROR_SAMPLES_MAX: usize = 3;
/// See [`ERROR_SAMPLES_MAX`].
pub const ERROR_SAMPLE_CHARS_MAX: usize = 300;

/// Smallest text of one block, in bytes: a space and the seven letters that tell 2^32 block ids apart.
pub const BLOCK_BYTES_MIN: usize = 8;

/// Threads of the asynchronous runtime. One stream costs a few microseconds an event, so four threads carry
/// some 10^6 events a second; more would take cores from a server on the same machine.
pub const RUNTIME_THREADS_MAX: usize = 4;

/// Time between the start of the run's clock and its zero, in milliseconds: the threads start in it.
pub const LEAD_MS: u64 = 50;

/// Schedule lag p99 above the larger of this, in milliseconds, and [`LAG_TTFT_SHARE_MAX`] of the median TTFT
/// makes a measurement invalid: the load tester, not the server, was late.
pub const LAG_P99_MS_MAX: f64 = 5.0;
/// See [`LAG_P99_MS_MAX`].
pub const LAG_TTFT_SHARE_MAX: f64 = 0.02;

/// Workers of one mock. Each is a listener, a thread and its KV blocks' state (about 3 MiB for 400,000 tokens).
pub const MOCK_WORKERS_MAX: u16 = 1024;

/// Largest request body that the mock reads: a prompt of 16 million of its tokens, more than any profile holds.
pub const MOCK_BODY_BYTES_MAX: usize = 64 << 20;

/// Bytes of events in one frame of a stream: enough that a frame's own cost is lost among its 300 events.
pub const MOCK_FRAME_BYTES: usize = 64 << 10;

/// Faults that one worker remembers; each takes 64 bytes and a look at every request.
pub const MOCK_FAULTS_MAX: usize = 256;

/// Batches of KV events kept for replay: vLLM's own default.
pub const MOCK_EVENT_BATCHES_MAX: usize = 10_000;
/// Bytes of those batches: 10,000 of a long prompt each would be gigabytes.
pub const MOCK_EVENT_BYTES_MAX: usize = 64 << 20;
/// Batches on their way to the socket; one that comes on top is lost to subscribers.
pub const MOCK_EVENT_QUEUE_MAX: usize = 10_000;
