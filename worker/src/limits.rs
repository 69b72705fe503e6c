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

/// Memory of the KV cache where `--num-kv-blocks` is not given: half a million tokens of the built-in model.
pub(crate) const KV_BYTES_DEFAULT: usize = 256 << 20;

/// Answer's length in tokens where neither the request nor the checkpoint says: enough to see the built-in model
/// speak, and it does not stop by itself.
pub(crate) const BUILTIN_MAX_NEW_TOKENS: usize = 128;

/// Seconds a client is told to wait when the queue is full.
pub(crate) const RETRY_AFTER_S: u64 = 1;
