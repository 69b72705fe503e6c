//! Every bound of the worker, with its unit and where its number comes from. Nothing here is a tuning knob: those
//! are options of the command line.

use std::time::Duration;

/// Largest request body. A prompt of 10^6 tokens is about 4 MiB of text, or 8 MiB of token ids; JSON escapes can
/// multiply text by six. The gateway's own limit is not smaller.
pub(crate) const BODY_BYTES_MAX: usize = 64 << 20;

/// Sequences accepted and not finished, running ones included; further ones are told to come back. At a queue of
/// this length a client waits for minutes, and would rather be elsewhere.
pub(crate) const LIVE_SEQUENCES_MAX: usize = 1024;

/// Prompts of one `/v1/completions` request. A fraction of the queue, so that one request cannot fill it.
pub(crate) const PROMPTS_PER_REQUEST_MAX: usize = 128;
const _: () = assert!(PROMPTS_PER_REQUEST_MAX <= LIVE_SEQUENCES_MAX / 4);

/// `stop` strings of one request. OpenAI takes 4; engines' own clients send more.
pub(crate) const STOP_STRINGS_MAX: usize = 16;

/// Bytes of one `stop` string, which is also how much text may be withheld.
pub(crate) const STOP_STRING_BYTES_MAX: usize = 1024;

/// Connections served at once; more wait in the kernel's backlog. Each costs a task and its buffers, about 30 KiB.
pub(crate) const CONNECTIONS_MAX: usize = 4096;

/// A client that has not sent a request's head by then is cut off.
pub(crate) const HEADER_READ_MAX: Duration = Duration::from_secs(30);

/// Prompts up to this many bytes are tokenised where they are read: 16 KiB take well under a millisecond, about what
/// handing them to another thread costs under load. Longer ones must not hold up other connections.
pub(crate) const INLINE_TOKENIZE_BYTES_MAX: usize = 16 << 10;

/// How long open answers may go on after a shutdown was asked for; Kubernetes kills after 30 s by default.
pub(crate) const DRAIN_MAX: Duration = Duration::from_secs(25);

/// Memory of the KV cache where no option sets it: 131,072 tokens of the built-in model.
pub(crate) const KV_BYTES_DEFAULT: usize = 256 << 20;

/// Answer's length in tokens where neither the request nor the checkpoint says: enough to see the random model
/// speak, and it does not stop by itself.
pub(crate) const RANDOM_MAX_NEW_TOKENS: usize = 128;

/// Batches of KV events kept for replay: vLLM's default, some minutes of steps.
pub(crate) const KV_REPLAY_BATCHES_MAX: usize = 10_000;

/// Bytes of the batches kept for replay. A step of 512 new tokens makes about 3 KB of events, so that the number of
/// batches is the bound at the default batch, and this one with larger batches.
pub(crate) const KV_REPLAY_BYTES_MAX: usize = 64 << 20;

/// Blocks in one batch of a snapshot: about 100 KB with 16 tokens each, so that a message is neither tiny nor stalls
/// what goes over the same connection.
pub(crate) const KV_SNAPSHOT_BLOCKS_PER_BATCH: usize = 1024;

/// How long a reply on the KV replay socket may wait for a client that does not read.
pub(crate) const KV_REPLY_STALL_MAX: Duration = Duration::from_secs(10);

/// Changes of the prefix cache that may wait for the publisher of KV events before they are merged. Merged they are
/// at most two a block, so twice that pays for a merge; at least some steps' worth, lest a tiny cache merges always.
pub(crate) const fn kv_events_pending_max(num_blocks: usize) -> usize {
    4 * num_blocks + 4096
}

/// Time between two lines about loading: a small checkpoint prints none, a large one a few.
pub(crate) const LOAD_PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// Seconds a client is told to wait when the queue is full.
pub(crate) const RETRY_AFTER_S: u64 = 1;
