//! Every bound of the load tester, with its unit and where the number comes from. No logic.

use std::time::Duration;

/// Largest server-sent event, in bytes. A chunk of one token is under 1 KiB; one with log-probabilities of 20
/// alternatives under 16 KiB. Beyond this the stream is broken, not long.
pub const EVENT_BYTES_MAX: usize = 1 << 20;

/// Bytes read of an answer that is not a stream (model list, calibration, error). A list of 1,000 models is
/// about 200 KiB.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Headers of an answer, as many as hyper takes.
pub const ANSWER_HEADERS_MAX: usize = 100;
/// Bytes of an answer's head, as many as hyper takes.
pub const ANSWER_HEAD_BYTES_MAX: usize = 8192 + 100 * 4096;

/// Bytes read of a connection at a time; one such space a thread. More would not fit into a core's second
/// cache with what is made of them.
pub const READ_BYTES: usize = 64 << 10;

/// Bytes of a request's body that are copied behind its head, which takes less than to send two pieces.
pub const SENT_TOGETHER_BYTES: usize = 4096;

/// Space that a connection keeps for the head of its next answer and what comes with it.
pub const AHEAD_KEPT_BYTES: usize = 2048;

/// How long a connection waits for another request: servers close idle ones, few before this.
pub const IDLE_CONNECTION_MAX: Duration = Duration::from_secs(20);

/// Bytes read of an answer with embeddings: 2,048 texts of 4,096 numbers, 20 characters each, are 160 MiB.
pub const EMBEDDINGS_BYTES_MAX: usize = 256 << 20;

/// Texts in one request of embeddings: as many as OpenAI's API takes.
pub const TEXTS_MAX: u32 = 2048;

/// Sample messages kept for each class of error, and the characters kept of each.
pub const ERROR_SAMPLES_MAX: usize = 3;
/// Characters kept of a failure's message; the rest is cut off. See [`ERROR_SAMPLES_MAX`].
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
/// Requests at a time, where a command line says nothing of the load.
pub const DEFAULT_CONCURRENCY: u32 = 8;
/// Seconds that a run lasts, where a command line says nothing of its length.
pub const DEFAULT_DURATION_S: u64 = 30;
/// Share of prompt tokens by which what caches gave may pass what was possible, which is counted in the
/// tokens that prompts were made to have: more makes a run a warm one.
pub const CACHE_BEYOND_POSSIBLE_MAX: f64 = 0.02;
/// Share of the median TTFT that lag p99 may reach, where it is more than [`LAG_P99_MS_MAX`].
pub const LAG_TTFT_SHARE_MAX: f64 = 0.02;

/// Workers of one mock. Each is a listener, a thread and its KV blocks' state (about 3 MiB for 400,000
/// tokens).
pub const MOCK_WORKERS_MAX: u16 = 1024;

/// Largest request body that the mock reads: a prompt of 16 million of its tokens, more than any profile
/// holds.
pub const MOCK_BODY_BYTES_MAX: usize = 64 << 20;

/// Largest request body that the mock reads where it serves.
pub const MOCK_READING_INLINE_BYTES: usize = 128 << 10;

/// Bytes of events in one frame of a stream: enough that a frame's own cost is lost among its 300 events.
pub const MOCK_FRAME_BYTES: usize = 64 << 10;

/// Prompts that were computed for another worker, and not fetched: 16 bytes each.
pub const MOCK_KEPT_MAX: u64 = 1 << 16;

/// Faults that one worker remembers; each takes 64 bytes and a look at every request.
pub const MOCK_FAULTS_MAX: usize = 256;

/// Batches of KV events kept for replay: vLLM's own default.
pub const MOCK_EVENT_BATCHES_MAX: usize = 10_000;
/// Bytes of those batches: 10,000 of a long prompt each would be gigabytes.
pub const MOCK_EVENT_BYTES_MAX: usize = 64 << 20;
/// Batches on their way to the socket; one that comes on top is lost to subscribers.
pub const MOCK_EVENT_QUEUE_MAX: usize = 10_000;
/// Subscribers to one worker's KV events at once, and those who ask it for a replay.
pub const MOCK_SUBSCRIBERS_MAX: usize = 256;
/// Connections at once that may ask one worker for a replay. See [`MOCK_SUBSCRIBERS_MAX`].
pub const MOCK_ASKERS_MAX: usize = 64;
/// How long a subscriber may take nothing, and one who asked no whole reply, before it is disconnected.
pub const MOCK_PEER_STALL_MAX: Duration = Duration::from_secs(60);
/// Longest prompt or answer of a synthetic workload, in tokens: four times the longest context window sold.
pub const LENGTH_TOKENS_MAX: u32 = 4 << 20;

/// Pieces of `--rate-shape`: a week in steps of ten minutes.
pub const RATE_PIECES_MAX: usize = 1008;

/// Requests of one precomputed schedule: 16 bytes each make 320 MB, and at 1,000 requests a second it lasts
/// 5.5 h.
pub const SCHEDULE_REQUESTS_MAX: usize = 20_000_000;

/// Groups of `--workload shared-prefix`: 8 bytes each.
pub const PREFIX_GROUPS_MAX: usize = 1_000_000;
/// Levels of the tree of their prefixes.
pub const PREFIX_DEPTH_MAX: usize = 16;

/// Users or slots of a closed loop: each is a connection, and a client has fewer than 65,536 ports.
pub const USERS_MAX: usize = 60_000;

/// Requests whose own figures run.json keeps for `compare`: about 150 bytes each, so at most 3 MB. Of longer
/// runs a share is kept that only the request's number decides, the same in every run.
pub const SAMPLES_MAX: usize = 20_000;

/// Points of a run's time series. A longer run gets wider points.
pub const SERIES_POINTS_MAX: usize = 600;

/// Probes after which a search stops repeating at its edge: growth over 2^20 and bisection to 1 % take under
/// 30.
pub const SEARCH_PROBES_MAX: usize = 60;
/// Attempts at one probe of a search: a moment in which the machine was busy must not end an hour's work.
pub const SEARCH_ATTEMPTS_MAX: usize = 4;
/// How far below its first load a search goes down.
pub const SEARCH_SHRINK_MIN: f64 = 1.0 / 256.0;
/// Runs of one sweep.
pub const SWEEP_RUNS_MAX: usize = 1000;

/// Size of a file of prompts: ShareGPT's cleaned set is 670 MB, and all of it is held.
pub const TEXT_FILE_BYTES_MAX: usize = 2 << 30;

/// Metrics of one server that `--scrape` watches: a gateway of 1,000 workers has about 20,000 without
/// buckets, 100 bytes each.
pub const SCRAPED_NAMES_MAX: usize = 50_000;
/// Of those, kept in run.json: with [`SCRAPED_POINTS_MAX`] points about 600 KB.
pub const SCRAPED_SERIES_MAX: usize = 400;
/// Points of each; a longer run keeps every second, fourth, …
pub const SCRAPED_POINTS_MAX: usize = 240;

/// Records that a run takes in at a time, 300 bytes each.
pub const RECORDS_AT_ONCE: usize = 8192;
