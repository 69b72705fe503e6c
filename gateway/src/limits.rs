//! Every bound of the gateway, with its unit and how the number was derived. Values that operators set are
//! defaults here and fields of [`crate::config::Config`]; the rest are fixed.

mod clients;
mod ledger;
mod store;
mod stored_state;
mod traces;
mod watch;

use std::time::Duration;

pub use self::{clients::*, ledger::*, store::*, stored_state::*, traces::*, watch::*};

/// File descriptors that are asked for where the system sets no bound: [`MAX_CONNECTIONS`] clients, as many
/// connections to workers, and as many again for those that wait for a request.
pub const DESCRIPTORS_WANTED: u64 = 131_072;

/// File descriptors that clients leave to probes, operators, KV events, files and name lookups; of a limit
/// below 256 a quarter. Half of them may be used by requests that were let in already.
pub const RESERVED_DESCRIPTORS: u64 = 64;

/// How long a request waits for a connection where the gateway itself lacks descriptors, ports or memory:
/// some answers end in that time.
pub const SHORTAGE_PATIENCE: Duration = Duration::from_millis(500);

/// How often it looks meanwhile, as does the listener whether there is room for another client.
pub const SHORTAGE_LOOK: Duration = Duration::from_millis(20);

/// Time between two words in the log on one thing that the gateway lacks.
pub const SHORTAGE_SAID_EVERY: Duration = Duration::from_secs(30);

/// How often the files of certificates are looked at: some calls of the kernel.
pub const TLS_RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// The share of a budget from which on its tenant is warned, unless the file of tenants says otherwise.
pub const BUDGET_WARN_AT: f64 = 0.8;

/// Tenants of one gateway: each is a series of every metric by tenant.
pub const MAX_TENANTS: usize = 1_000;

/// How long a browser need not ask again whether a page may use the API: a change of the rules reaches it
/// within minutes.
pub const CORS_MAX_AGE: Duration = Duration::from_secs(600);

/// Set aside for an answer, in tokens, where a request of a tenant with a limit of tokens does not say how
/// long it may be: a few paragraphs.
pub const ANSWER_TOKENS_RESERVED: u64 = 256;

/// The most that is set aside for one, whatever the request says: what a stream generates in ten seconds, as
/// much as a limit lets come at once. What passes beyond it is taken as it passes; many clients name a length
/// that no answer has.
pub const ANSWER_TOKENS_RESERVED_MAX: u64 = 1_024;

/// Taken at a time of what passes beyond that: the tenant's limit is touched for one event in so many.
pub const ANSWER_TOKENS_STEP: u64 = 64;

/// Bytes of text that are taken for a token where tokens are not counted: English text's.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Longest list of token ids that is read, in bytes: a million tokens and more.
pub const PROMPT_IDS_BYTES_MAX: usize = 8 << 20;

/// Pictures and the like of one prompt that are known each for itself; what comes behind them counts with the
/// last.
pub const MEDIA_ITEMS_MAX: usize = 64;

/// How often the file of tenants is looked at: a call of the kernel.
pub const TENANTS_RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// Bytes of an answer that are read ahead of its client: many events, and little where a client reads slowly.
/// Also the largest head of an answer.
pub const ANSWER_BUFFER_BYTES: usize = 64 << 10;

/// Bytes of interim answers (1xx) that a worker may send before its answer: as many as a head may have.
pub const INTERIM_ANSWERS_BYTES: usize = ANSWER_BUFFER_BYTES;

/// Bytes in which an interim answer is counted, and one of them at least, so that there are at most 64: one a
/// minute for as long as a request may take.
pub const INTERIM_ANSWER_BYTES_MIN: usize = 1 << 10;

/// Time to open a connection to a worker. Within a data centre a SYN is lost at most twice in this time.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Time between two pieces of an answer that has begun: an engine that preempts a stream and computes a long
/// prompt in between takes a minute or two. Before the first piece only the whole request's time counts:
/// queues may be long.
pub const ANSWER_IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Time from a request's head to its answer's end: 100,000 tokens at 30 a second.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(3_600);

/// Workers that may work on one request, the first included.
pub const MAX_ATTEMPTS: usize = 3;

/// Workers asked for one request that say at once that they will not: nothing has begun there, so all of a
/// small fleet may be asked.
pub const MAX_ASKED: usize = 8;

/// Refusals of one worker that are passed on without asking another, to clients whose own fault such a one
/// was, until the worker has served something: one in so many is looked into, should it be the worker after
/// all.
pub const PASSED_REFUSALS_MAX: u32 = 10;

/// Workers asked to go on with one stream: a request that kills its workers must not go through the fleet.
pub const RESUMES_MAX: usize = 3;

/// Memory for what resuming takes, over all streams: 8,000 with requests of 32 KB and 1,000 tokens of 4
/// bytes.
pub const RESUME_BYTES: usize = 256 << 20;

/// Largest request that is kept for that: a 1M-token prompt.
pub const RESUME_BODY_BYTES_MAX: usize = 8 << 20;

/// Idle time after which a pooled worker connection is dropped: below uvicorn's 5 s keep-alive (vLLM,
/// SGLang), so that the worker does not close it under a request.
pub const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Time before the end that a worker sets for idle connections (`Keep-Alive: timeout=N`) at which they are
/// used no more: the word of the end, and the request that it would cross, are on their way for less.
pub const POOL_IDLE_MARGIN: Duration = Duration::from_secs(1);

/// Connections to one worker that wait for a request, about 10 KB each: twice what an engine runs at once.
pub const POOL_IDLE_MAX: usize = 1_024;

/// Of these, each core keeps its part, and on many cores so many at least.
pub const POOL_IDLE_MAX_PER_CORE_MIN: usize = 64;

/// Streams on one HTTP/2 connection to a worker, where it allows so many: 10,000 are 80 connections, and one
/// that breaks takes no more than this many with it.
pub const WORKER_H2_STREAMS: u32 = 128;

/// Bytes of one stream that its worker may send ahead of the client, as over HTTP/1.1. The connection's
/// window is that of all its streams, so that one that no client reads holds up no other.
pub const WORKER_H2_WINDOW: u32 = ANSWER_BUFFER_BYTES as u32;

/// What the `h2` crate may hold for small frames that no client reads, by its own count (256 bytes a frame
/// less its payload): all streams stalled, with frames of 52 bytes. Events are longer.
pub const WORKER_H2_FRAME_BYTES: usize = 4 * WORKER_H2_WINDOW as usize * WORKER_H2_STREAMS as usize;

/// Silence of an HTTP/2 connection with open streams after which its worker is sent a PING, and once more
/// until the connection counts as broken. Any byte ends it, so an engine that is busy has 30 seconds at
/// least.
pub const WORKER_H2_SILENCE: Duration = Duration::from_secs(15);

/// How often a request that a worker says it has not begun (REFUSED_STREAM, GOAWAY) is sent to the same
/// worker again.
pub const WORKER_H2_RESENDS: usize = 2;

/// Largest event of a stream: an image of 12 MB in base64, or all output of a long answer once more. A chunk
/// with 20 logprobs a token and many tokens stays far below.
pub const MAX_EVENT_BYTES: usize = 16 << 20;

/// How much of an unstreamed answer is kept to read its `usage` from; of a longer one only the end is.
pub const MAX_USAGE_BODY_BYTES: usize = 1 << 20;

/// The end of such an answer in which its `usage` is looked for: it is mostly the last field.
pub const USAGE_TAIL_BYTES: usize = 4 << 10;

/// Bytes of memory for the prefix index: at 32 bytes a residency 7.5 million blocks.
pub const INDEX_BYTES: usize = 256 << 20;

/// Bytes of canonical prompt text in one hashed block: 16 tokens (the usual KV block) of 4 bytes.
pub const BLOCK_BYTES: usize = 64;

/// Data-parallel engines behind one address: the largest deployments have 128 GPUs of one rank each.
pub const MAX_DATA_PARALLEL_RANKS: u32 = 256;

/// Tokens in a worker's KV block until it says: vLLM's default.
pub const BLOCK_TOKENS: u32 = 16;

/// Workers that are asked to compute a prompt for another one, before that computes it itself.
pub const MAX_PREFILL_LEGS: usize = 2;
/// How long a worker that computed a prompt for another and said nothing of its KV is not asked to again.
pub const NO_KV_PAUSE: Duration = Duration::from_secs(60);

/// How long a worker is not asked to fetch what others have cached once it has refused a request that asked
/// for it: it was started without, which takes a new start.
pub const NO_PULL_PAUSE: Duration = Duration::from_secs(600);
/// Port at which engines learn where a prompt's KV is: SGLang's and vLLM's Mooncake connector's by default.
pub const BOOTSTRAP_PORT: u16 = 8998;
/// How often a worker that is for a part of requests is asked whether it still is: SGLang can change it.
pub const PARTS_ASKED_EVERY: Duration = Duration::from_secs(10);
/// How long a request waits for a room at a worker that answers with KV from elsewhere.
pub const ROOM_WAIT: Duration = Duration::from_secs(30);
/// How long the word of a worker that computes a prompt is waited for where the one that answers has failed:
/// mostly it has failed because of the first.
pub const PARTNER_GRACE: Duration = Duration::from_secs(1);
/// Bytes of a worker's list of those who send KV.
pub const BOOTSTRAP_ANSWER_BYTES_MAX: usize = 1 << 20;
/// Bytes of a worker's own words on why it computes no prompt, in what the client is told.
pub const PREFILL_WORDS_BYTES_MAX: usize = 500;
/// Bytes of what a worker says of a prompt that it computed for another: names of a million tokens' blocks.
pub const PREFILL_ANSWER_BYTES_MAX: usize = 4 << 20;
/// Uncached prompt tokens from which on another worker computes them for one that is for decode.
pub const PREFILL_FROM_TOKENS: u64 = 256;

/// Bytes of an answer that is read to its end to be told in another API: an answer of a million tokens, with
/// what is said of each.
pub const TRANSLATED_ANSWER_BYTES_MAX: usize = 64 << 20;

/// Bytes of a worker's refusal or failure that are held, to be told in the shape that its API's clients read.
pub const ERROR_BYTES_MAX: usize = 256 << 10;

/// How long after an answer's end those of its blocks still count as held that the worker has not announced:
/// some steps of an engine.
pub const EXPECTED_LINGER: Duration = Duration::from_millis(250);

/// Answers whose blocks linger at once; beyond it the oldest go first. At most 2,000 a second then linger in
/// full.
pub const EXPECTED_LINGER_MAX: usize = 512;

/// Bytes to remember sessions' last prompts by, 4 for each name and 192 more: 16,000 sessions of 6 KB, or
/// 6,500 of 400 KB.
pub const DRIFT_MEMORY_BYTES: usize = 8 << 20;

/// Bytes of remembered tokens for each model with a tokenizer: 16 million tokens of prompts.
pub const TOKEN_MEMORY_BYTES: usize = 64 << 20;

/// Largest request body that is tokenised where it arrived, about 2 ms of it; others go to threads of their
/// own.
pub const INLINE_TOKENIZE_BYTES: usize = 8 << 10;

/// Prompts at those threads for each core, running or waiting; what comes beyond is routed by its text. A
/// turn of a long conversation is 3 ms, so a wait of some 10 ms; one that is all new takes longer and lets
/// the others by.
pub const TOKENIZE_QUEUE_PER_CORE: usize = 4;

/// Largest request body that is tokenised at all, a 1M-token prompt; a larger one is routed by its text.
pub const MAX_TOKENIZE_BYTES: usize = 8 << 20;

/// Prompts that are rendered and tokenised may take one part in so many of what bodies may, on top of that:
/// of 1 GiB enough for a new message of 2 MiB, which is half a million tokens.
pub const PROMPT_MEMORY_PART: usize = 2;

/// Grain by which that is counted.
pub const PROMPT_STEP_BYTES: usize = 64 << 10;

/// Answers by which it is judged whether prompts' tokens here are the engines'.
pub const PROOF_ANSWERS: u32 = 16;

/// Where they are others, one request in so many goes by its tokens all the same.
pub const PROOF_TRY_EVERY: u32 = 32;

/// Bytes of such a body for each of its messages at least: a role and a content, both empty. No engine takes
/// less for a message, and to render one takes 1.5 KB.
pub const MIN_MESSAGE_BYTES: usize = 24;

/// New text that is tokenised in one go there, about 1 ms of it; then the next one's turn comes.
pub const TOKENIZE_SLICE_BYTES: usize = 4 << 10;

/// Known pieces of a prompt that are put together in one go there, each some 2 µs with its hash and its
/// tokens.
pub const TOKENIZE_SLICE_PIECES: usize = 256;

/// Prompt tokens fetched in a second from the host's memory: at 128 KiB of KV a token (8 billion parameters,
/// 16 bit) 13 GB/s, which a PCIe 4.0 link gives; ten times what such a model computes.
pub const FETCH_TOKENS_PER_SECOND: f64 = 100_000.0;

/// Patterns to be left out of hashes: each is searched in each field that it names.
pub const IGNORE_PATTERNS_MAX: usize = 16;

/// Memory that one of these may take compiled: a hundred times what a date takes.
pub const IGNORE_PATTERN_BYTES: usize = 1 << 20;

/// For how long a thread that serves clients may do nothing else than what it does: to read the largest body
/// takes some seconds.
pub const CORE_PATIENCE: Duration = Duration::from_secs(10);

/// Of lines of the log that wait to be written: those of some 50,000 requests.
pub const LOG_QUEUE_BYTES: usize = 16 << 20;

/// Of lines of the decision log that wait to be written, of about 1 KB with ten workers: thousands of
/// choices.
pub const DECISION_LOG_QUEUE_BYTES: usize = 4 << 20;

/// Distinct model names that may appear as a metric label; the fleet's own names come first, the rest is
/// `other`.
pub const MAX_MODEL_LABELS: usize = 256;

/// Models whose bytes per token are learned: about 100 bytes each.
pub const MAX_LEARNED_MODELS: usize = 4_096;

/// Time for a process that asks for the listening sockets to say so, and for the other to answer: both are on
/// one machine.
pub const HANDOVER_HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for a successor to find a worker ready: two probes' time. A successor that does not is refused.
pub const HANDOVER_WORKERS_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for a successor to serve, tokenizers and all, before its predecessor goes on alone.
pub const HANDOVER_READY_TIMEOUT: Duration = Duration::from_secs(60);

/// Age of a snapshot of the index that is still read: a busy cache of 10 GiB is filled anew in some minutes.
pub const SNAPSHOT_MAX_AGE: Duration = Duration::from_secs(600);

/// Time in-flight requests get to finish after SIGTERM.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Time at the end in which a client that keeps its connection may send one more request and be told to go by
/// its answer: longer than a busy client's pauses.
pub const DRAIN_QUIET: Duration = Duration::from_secs(1);

/// Time that operators' connections get once a successor has their listener: those that were let in and have
/// not asked yet among them.
pub const OPERATORS_DRAIN: Duration = Duration::from_secs(2);

/// How long the process waits, where it is kept what requests have used, for those to end that are cut: a
/// connection gets a second to say its last.
pub const CUT_PATIENCE: Duration = Duration::from_secs(2);

/// How often connections are counted meanwhile.
pub const DRAIN_LOOK: Duration = Duration::from_millis(10);

/// Streams that a core may serve beyond what the idlest one does before those of its own connections (HTTP/2)
/// go elsewhere: an event that crosses threads costs a wake, and a core passes on tens of thousands a second.
pub const CORE_KEEPS_STREAMS: usize = 32;

/// How often each core wakes by itself. Tokio writes to the core's event descriptor, a system call, for each
/// new timer that is due before the core's next wake; with this, none that is due later costs one. Each
/// request has such a timer ([`DEAD_LOOK`]).
pub const CORE_BEAT: Duration = Duration::from_secs(1);

/// Silence after which a request at a worker that seems dead is lost: more than two notes of a stream that
/// goes on there are apart.
pub const DEAD_SILENCE: Duration = Duration::from_secs(5);
/// How often who waits for a worker looks whether it is still there. A look takes some 50 ns, and a wake.
pub const DEAD_LOOK: Duration = Duration::from_secs(2);

/// Pause between a stream's terminal error event and the abort of its body, so that the event leaves the
/// socket buffer first (hyper drops unflushed bytes when a body fails).
pub const ABORT_DELAY: Duration = Duration::from_millis(20);

/// How often a running stream counts as a sign of life of its worker: well within the window in which the
/// health state machine takes a worker for alive.
pub const ALIVE_NOTE_INTERVAL: Duration = Duration::from_secs(2);

/// Time after which the tokens that a cache saved count half: conversations and agents come back within
/// minutes.
pub const SAVED_HALF_LIFE: Duration = Duration::from_secs(600);

/// Kinds of requests that did not end well that operators are shown: the last ones.
pub const MAX_MISHAPS: usize = 64;

/// What operators are shown of the past: samples so far apart, for an hour.
pub const HISTORY_STEP: Duration = Duration::from_secs(10);

/// Samples of an hour.
pub const MAX_HISTORY_STEPS: usize = 360;

/// Samples of a minute.
pub const MINUTE_STEPS: usize = 6;

/// Models that an hour tells apart, and each of its samples: some 12 KB each as JSON.
pub const MAX_HISTORY_MODELS: usize = 32;

/// Tenants that an hour tells apart, and each of its samples: some 6 KB each as JSON.
pub const MAX_HISTORY_TENANTS: usize = 32;

/// Largest request that is explained to operators: as large as one that is tokenised.
pub const MAX_EXPLAIN_BYTES: usize = MAX_TOKENIZE_BYTES;

/// Largest body of an operator's command: one worker's table.
pub const MAX_COMMAND_BYTES: usize = 16 << 10;

/// Requests that wait for the first worker of their model, over all models: each holds its body, so at 64 KiB
/// 16 MB.
pub const FIRST_WORKER_WAITERS: usize = 256;

/// Prompt tokens per second of a worker before any answer told: an eight-billion-parameter model on a large
/// GPU.
pub const PRIOR_PREFILL_TOKENS_PER_S: f64 = 8_000.0;

/// Models for which a sum is kept, at about 40 KB each (the times to first token of a window).
pub const MAX_SCALED_MODELS: usize = 256;

/// Connections to the external scaler: KEDA opens one a trigger, and one more while it restarts.
pub const MAX_SCALER_CONNECTIONS: usize = 64;

/// Calls at once on one of those connections: a stream and a question of each object that shares it.
pub const MAX_SCALER_STREAMS: u32 = 64;

/// Largest call to the external scaler: the metadata of a trigger, which Kubernetes itself keeps below 1 MB
/// for the whole object, and people below a page.
pub const MAX_SCALER_MESSAGE_BYTES: usize = 64 << 10;

const _: () = assert!(MAX_TRACED_ATTEMPTS >= MAX_ASKED && MAX_ASKED >= MAX_ATTEMPTS);
const _: () = assert!(MAX_SCALED_MODELS <= MAX_MODEL_LABELS);
const _: () = assert!(MAX_IN_FLIGHT <= MAX_CONNECTIONS);
const _: () = assert!(MAX_USAGE_BODY_BYTES <= MAX_EVENT_BYTES && MAX_EVENT_BYTES <= MAX_BODY_BYTES);
const _: () = assert!(RESUME_BODY_BYTES_MAX <= RESUME_BYTES);
const _: () = assert!(BLOCK_BYTES >= 8);
const _: () = assert!(MAX_URI_BYTES < MAX_HEAD_BYTES && 2 * MAX_HEAD_BYTES <= HEAD_BUFFER_BYTES);
const _: () = assert!(MAX_HEAD_BYTES + 32 * MAX_HEAD_FIELDS < MAX_H2_HEADER_LIST_BYTES as usize);
