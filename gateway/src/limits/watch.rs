//! Bounds of what is learned of workers and of other gateways: probes, faults, metrics, KV events, lists of
//! workers.

use std::{ops::RangeInclusive, time::Duration};

/// Time for a worker to answer a probe's `/health` or `/v1/models`.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Lines of the log about workers' faults in a minute, a sixth of them at once; of the workers beyond, one
/// line says how many.
pub const FAULT_LINES_PER_MINUTE: f64 = 60.0;

/// Time in which the workers come together that this line counts, and time from one such line to the next.
pub const FAULT_SUMMARY_AFTER: Duration = Duration::from_secs(10);

/// Time from one line that counts the workers without a line to the next ([`FAULT_SUMMARY_AFTER`]).
pub const FAULT_SUMMARY_EVERY: Duration = Duration::from_secs(60);

/// Bytes of what a worker says (a redirect's target) that are shown in a fault.
pub const MAX_FAULT_TEXT_BYTES: usize = 200;

/// How long a request without any worker waits for the first probe of one that has just joined.
pub const FIRST_PROBE_PATIENCE: Duration = Duration::from_secs(1);

/// Largest `/v1/models` answer that is read: 4,000 adapters at 500 bytes each.
pub const MAX_MODELS_BYTES: usize = 2 << 20;

/// Blocks known of one worker by its events, at about 30 bytes each: 8 million tokens of 16 a block, four
/// times what one 8-GPU node holds of a 70B model.
pub const KV_FEED_BLOCKS_MAX: usize = 512 << 10;

/// Time to connect to a worker's KV events or replays.
pub const KV_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an engine that says its load itself may say nothing: it does at least once a second.
pub const LOAD_PUSH_SILENCE: Duration = Duration::from_secs(5);

/// Time between two questions whether it does.
pub const LOAD_PUSH_ASKED_EVERY: Duration = Duration::from_secs(60);

/// Longest pause between two replies of a replay: an idle engine looks at its replay socket every 100 ms; one
/// that prefills a long prompt, after that step.
pub const KV_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Replays in a row that may be given up before the worker's events are no longer trusted.
pub const KV_REPLAY_FAILURES_MAX: u32 = 3;

/// Time after an answer that stored blocks in which its events must have come: engines publish with each
/// step.
pub const KV_SILENCE_MAX: Duration = Duration::from_secs(5);

/// Pauses before a lost connection to KV events is made anew: doubled from the first to the last.
pub const KV_RECONNECT_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Largest page of a worker's metrics that is read: vLLM's with all histograms stays below 200 KB.
pub const MAX_SCRAPE_BYTES: usize = 4 << 20;

/// Age at which what a worker's metrics said of its cache no longer counts.
pub const SCRAPE_MAX_AGE: Duration = Duration::from_secs(60);

/// Time between two looks at a file or a name that lists workers: a pod that leaves is not ready for as long
/// before.
pub const DISCOVERY_INTERVAL: Duration = Duration::from_secs(5);

/// Largest file that lists workers: 10,000 tables of 200 bytes.
pub const MAX_WORKERS_FILE_BYTES: u64 = 2 << 20;

/// Time between two words of another gateway on what it has at each worker: with 20 ms four gateways do no
/// better, with 250 ms their mean TTFT is 3 % longer than with 50
/// (`tests/external/routing/docs/several-gateways.md`).
pub const PEER_EVERY: Duration = Duration::from_millis(50);

/// The part of that time that passes between two words of requests that are sent: what is said at once is
/// short, and at 50 ms no more than 200 words a second.
pub const PEER_AT_ONCE_PART: u32 = 10;

/// What may be asked for instead.
pub const PEER_EVERY_RANGE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(1);

/// Time after which a gateway tells all again: what would be wrong for as long if a word were lost.
pub const PEER_ALL_EVERY: Duration = Duration::from_secs(1);

/// Time after which a gateway tells again how many requests it sends to each worker: that is a mean of
/// minutes.
pub const PEER_ARRIVALS_EVERY: Duration = Duration::from_secs(5);

/// Requests a second to a worker that are told, at least: one in four minutes.
pub const PEER_ARRIVALS_MIN_PER_S: f64 = 1.0 / 240.0;

/// Silence after which another gateway is taken to have nothing anywhere.
pub const PEER_SILENCE_MAX: Duration = Duration::from_secs(5);

/// Pauses before another gateway is asked again: doubled from the first to the last.
pub const PEER_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Time after which an address is asked again that was this gateway's own, or that of one that is heard
/// elsewhere.
pub const PEER_TWICE_PAUSE: Duration = Duration::from_secs(2);

/// Time in which a gateway that starts gets another one's index: 300 MiB at a gigabit a second, and some to
/// name it.
pub const PEER_INDEX_TIMEOUT: Duration = Duration::from_secs(5);

/// Owners that are remembered of each other gateway: as many as a waiting room remembers.
pub const PEER_OWNERS_MAX: usize = 4_096;

/// Longest line of another gateway: 10,000 workers at 150 bytes each, and as much of placements and of the
/// workers that these are at.
pub const MAX_PEER_LINE_BYTES: usize = 4 << 20;

/// Bytes of words on placements in one line, and one word more, which is a chain of at most 1 MiB. At 20
/// lines a second 650,000 blocks, which are ten million prompt tokens that were computed anew.
pub const PEER_PLACEMENTS_LINE_BYTES: usize = 256 << 10;

/// Bytes of words on placements that wait for other gateways: two seconds of full lines. Who is slower misses
/// the oldest.
pub const PEER_PLACEMENTS_BYTES: usize = 10 << 20;

/// Seconds after which a watch of the API server is begun anew: a connection that died silently is noticed
/// that late.
pub const KUBERNETES_WATCH_SECONDS: u32 = 60;

/// Pauses before the API server is asked again after it failed: doubled from the first to the last.
pub const KUBERNETES_PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(15));

/// How long a worker that vanished from its EndpointSlice is held back before it drains: an endpoint that
/// moves from one slice to another is in neither for the time between two writes of the API server.
pub const KUBERNETES_MOVE_TIME: Duration = Duration::from_secs(2);
/// Of that, how long it still gets requests.
pub const KUBERNETES_MOVE_GAP: Duration = Duration::from_secs(1);

/// Time between two looks at which pod is worth least. At each one a gateway without the Lease asks the API
/// server for it; the gateway that has it asks once in a third of its time, and where the mark moves.
pub const KUBERNETES_MARK_LOOK: Duration = Duration::from_secs(1);

/// Time between two changes of that mark, each of which is a write to two pods that every controller reads.
pub const KUBERNETES_MARK_INTERVAL: Duration = Duration::from_secs(60);

/// Tokens by which the marked pod must be worth more than another before the mark moves: one long prompt.
pub const KUBERNETES_MARK_MARGIN_TOKENS: f64 = 1_024.0;

/// Time for which a gateway holds a Lease that it does not renew; it renews after a third.
pub const KUBERNETES_LEASE_TIME: Duration = Duration::from_secs(15);

/// EndpointSlices of one entry of the configuration: 1,000 times Kubernetes' own 100 endpoints a slice.
pub const KUBERNETES_SLICES_MAX: usize = 1_000;
