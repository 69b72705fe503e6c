//! Every bound of the worker, with its unit and where its number comes from. Nothing here is a tuning knob:
//! those are options of the command line.

use std::time::Duration;

use keyway_clients::limits::{BODY_IDLE_TIMEOUT, BODY_TIMEOUT, CLIENT_STALL_TIMEOUT, HEADER_READ_TIMEOUT};

/// Largest request body. A prompt of 10^6 tokens is about 4 MiB of text, or 8 MiB of token ids; JSON escapes
/// can multiply text by six. The gateway's own limit is not smaller.
pub(crate) const BODY_BYTES_MAX: usize = 64 << 20;

/// Memory for requests where no option sets it, at least: a quarter for bodies, which is four of the largest,
/// the rest for parsing, rendering and tokenising. With long contexts it is more: see
/// [`PROMPT_BYTES_PER_TOKEN`].
pub(crate) const REQUEST_MEMORY_MIN: usize = 1 << 30;

/// Smallest that an option may set: below it the largest context of a small model would not fit.
pub(crate) const REQUEST_MEMORY_LEAST: usize = 64 << 20;

/// What a request takes besides its body, until its answer's end; also the grain by which bodies count.
pub(crate) const REQUEST_BYTES: usize = 4 << 10;

/// Grain by which work's memory counts.
pub(crate) const WORK_STEP_BYTES: usize = 64 << 10;

/// Memory that short work takes without asking, once for each thread of the runtime: a body of 16 KiB at its
/// worst, and a text of twice as many bytes. A long text must not keep short ones from being answered.
pub(crate) const SHORT_WORK_BYTES_MAX: usize = 16 << 20;

/// Requests that are parsed, rendered and tokenised at once, of those that take long; others wait. The engine
/// has the other cores.
pub(crate) const WORK_AT_ONCE: usize = 2;

/// How long such a request waits for memory before it is told to come back.
pub(crate) const WORK_WAIT_MAX: Duration = Duration::from_secs(30);

/// Stack of a thread that does such work: templates are bounded to fit 2 MiB, and regular expressions of
/// tokenizers take some themselves.
pub(crate) const WORK_STACK_BYTES: usize = 8 << 20;

/// Bytes a token of the longest prompt for which the default of the memory for requests suffices: English has
/// 4 to 5, indented code some more.
pub(crate) const PROMPT_BYTES_PER_TOKEN: usize = 16;

/// Memory that telling an id's text takes: the id, its text by itself and as a part of the whole, and the
/// answer's JSON.
pub(crate) const DETOKENIZE_BYTES_EACH: usize = 160;

/// Memory for each token of a prompt while it is answered, for each choice: ids for the engine, which may
/// grow by half, for the answer, and for penalties.
pub(crate) const LIVE_BYTES_PER_TOKEN: usize = 24;

/// Bytes of an error's text that repeats what a client sent.
pub(crate) const ERROR_BYTES_MAX: usize = 1 << 10;

/// Sequences accepted and not finished, running ones included; further ones are told to come back. At a queue
/// of this length a client waits for minutes, and would rather be elsewhere.
pub(crate) const LIVE_SEQUENCES_MAX: usize = 1024;

/// Prompts of one `/v1/completions` request. A fraction of the queue, so that one request cannot fill it.
pub(crate) const PROMPTS_PER_REQUEST_MAX: usize = 128;
const _: () = assert!(PROMPTS_PER_REQUEST_MAX <= LIVE_SEQUENCES_MAX / 4);

/// Tokens of a step, over all sequences, whose prompts are scored: each has a row of logits, of 600 KB with
/// the largest vocabularies. The step's other tokens have none, or one for a whole piece.
pub(crate) const SCORED_TOKENS_PER_STEP_MAX: usize = 64;

/// Likeliest tokens told with a token's own log probability: OpenAI's bound, and vLLM's default.
pub(crate) const TOP_LOGPROBS_MAX: usize = 20;

/// Answers to one prompt (`n`). All of a request's together are bounded by [`PROMPTS_PER_REQUEST_MAX`].
pub(crate) const CHOICES_MAX: usize = 128;
const _: () = assert!(CHOICES_MAX <= PROMPTS_PER_REQUEST_MAX);

/// Entries of `logit_bias`, and ids of `stop_token_ids`, of one request: OpenAI's clients may bias 300
/// tokens. Each costs a few nanoseconds a token.
pub(crate) const TOKEN_RULES_MAX: usize = 1024;

/// Steps that compiling a grammar may take before it is refused: llguidance's default, some 20 ms.
pub(crate) const GRAMMAR_COMPILE_FUEL_MAX: u64 = 1_000_000;

/// Bytes of the text that says an answer's form, schemas as JSON: the largest public ones have some hundred
/// kilobytes.
pub(crate) const GRAMMAR_BYTES_MAX: usize = 1 << 20;

/// Symbols of a compiled grammar: llguidance's default, a few megabytes of JSON schema.
pub(crate) const GRAMMAR_SIZE_MAX: usize = 500_000;

/// Bytes of a regular expression that says an answer's form: those that people write have some hundred.
pub(crate) const GRAMMAR_REGEX_BYTES_MAX: usize = 64 << 10;

/// Bytes of a Lark grammar of a client's: on one line stand as many alternatives as fit, which take time with
/// their square (40,000 a second).
pub(crate) const GRAMMAR_LARK_BYTES_MAX: usize = 256 << 10;

/// Texts to choose from (`guided_choice`): llguidance holds up to 2,000 possibilities at once.
pub(crate) const GRAMMAR_CHOICES_MAX: usize = 1_000;

/// Lines, and so rules, of a Lark grammar. Each may be nested in the one before it, which takes three
/// kilobytes of stack.
pub(crate) const GRAMMAR_LINES_MAX: usize = 10_000;

/// JSON objects in a request's schemas: each schema is one, and each table of properties. OpenAI lets a
/// schema have 5,000 properties in all (its guide to structured outputs). Each may be nested in the one
/// before it, by `$ref`, which takes up to five kilobytes of stack.
pub(crate) const GRAMMAR_SCHEMA_OBJECTS_MAX: usize = 10_000;

/// Properties of one object in a schema. Compiling takes time with their square: 0.4 s for so many.
pub(crate) const GRAMMAR_PROPERTIES_MAX: usize = 2_000;

/// `patternProperties` of one object: each is held against each other.
pub(crate) const GRAMMAR_PATTERN_NAMES_MAX: usize = 32;

/// Regular expressions that may have to match at once: patterns and formats of joined schemas, `&` in Lark.
/// The number of their parts is multiplied, for each step of the automaton.
pub(crate) const GRAMMAR_JOINED_MAX: usize = 3;

/// Operators `~` in Lark.
pub(crate) const GRAMMAR_NEGATIONS_MAX: usize = 8;

/// `multipleOf`, without its decimal point: that many states. Of several that may have to hold at once, their
/// product.
pub(crate) const GRAMMAR_MULTIPLE_MAX: f64 = 100_000.0;

/// Stack of a thread that compiles: ten times what the deepest form within the bounds has been seen to take.
/// Only what is used of it takes memory.
pub(crate) const GRAMMAR_STACK_BYTES: usize = 512 << 20;

/// Forms compiled at once; further ones wait.
pub(crate) const GRAMMAR_THREADS_MAX: usize = 2;

/// Requests whose form waits to be compiled, at most, and for how long; further ones are told to come back.
pub(crate) const GRAMMAR_WAITING_MAX: usize = 128;
pub(crate) const GRAMMAR_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long the compilation of one form is waited for: the largest within the bounds take some two seconds.
pub(crate) const GRAMMAR_COMPILE_MAX: Duration = Duration::from_secs(20);

/// States of a grammar's lexer, of one to two kilobytes each: 100 MB at the worst, for one request.
pub(crate) const GRAMMAR_STATES_MAX: usize = 50_000;

/// `stop` strings of one request. OpenAI takes 4; engines' own clients send more.
pub(crate) const STOP_STRINGS_MAX: usize = 16;

/// Bytes of one `stop` string, which is also how much text may be withheld.
pub(crate) const STOP_STRING_BYTES_MAX: usize = 1024;

/// Answers of `/v1/responses` that are kept, for conversations to go on from, and their bytes together. A
/// conversation of 10^5 tokens takes a megabyte, its items and its answer, anew with each turn.
pub(crate) const STORED_RESPONSES_MAX: usize = 1024;
pub(crate) const STORED_RESPONSES_BYTES_MAX: usize = 64 << 20;

/// Connections served at once; more wait in the kernel's backlog. Each costs a task and its buffers, about 30
/// KiB; one whose head grows to the largest, 128 KiB more.
pub(crate) const CONNECTIONS_MAX: usize = 4096;

/// Memory of the grammars of all answers under way: some hundred that are large, thousands of the usual ones.
pub(crate) const GRAMMAR_MEMORY_MAX: usize = 512 << 20;

/// Of it, what grammars of new requests leave to those that are under way, whose states become more as they
/// are used.
pub(crate) const GRAMMAR_MEMORY_LEFT: usize = GRAMMAR_MEMORY_MAX / 4;

/// What a grammar takes besides its lexer: its rules, and where in them an answer is.
pub(crate) const GRAMMAR_BYTES_EACH: usize = 256 << 10;

/// How much more a lexer takes than llguidance says, whose figures leave out what its tables have free.
pub(crate) const GRAMMAR_LEXER_FACTOR: usize = 2;

/// Prompts up to this many bytes are tokenised where they are read: 16 KiB take well under a millisecond,
/// about what handing them to another thread costs under load. Longer ones must not hold up other
/// connections.
pub(crate) const INLINE_TOKENIZE_BYTES_MAX: usize = 16 << 10;

/// How long open answers may go on after a shutdown was asked for; Kubernetes kills after 30 s by default.
pub(crate) const DRAIN_MAX: Duration = Duration::from_secs(25);

/// Tokens and sequences of a step where no option says, on the CPU and on a GPU. A GPU's step of few tokens
/// takes as long as reading the weights does, which 4,096 tokens of a prompt outweigh even with experts; more
/// would keep those who are answered waiting.
pub(crate) const CPU_STEP_DEFAULTS: (usize, usize) = (512, 64);
pub(crate) const GPU_STEP_DEFAULTS: (usize, usize) = (4096, 256);

/// Steps in a row that may fail before `/health` says so: a request may be at fault for one.
pub(crate) const FAILED_STEPS_MAX: usize = 3;

/// Share of a GPU's free memory that the KV cache takes where no option says: the rest is for kernels, which
/// the driver loads when they are first used, for what a larger step needs, and for other programs on the
/// GPU.
pub(crate) const GPU_KV_SHARE: f64 = 0.9;

/// Tokens of a KV block on a GPU, at least: the attention kernels' smallest page.
pub(crate) const KV_BLOCK_SIZE_MIN: usize = 8;

/// Tokens of a step on a GPU, at most: kernels have a row of blocks for each, along an axis of 65,535 (CUDA
/// C++ Programming Guide, Compute Capabilities).
pub(crate) const GPU_STEP_TOKENS_MAX: usize = 65_535;

/// The same of a model with latent attention, and its heads, at most: the products of each head's part of a
/// row take items of 128 rows, of 32,768 tokens and 128 heads 32,896, along that axis. DeepSeek-V3 has 128
/// heads.
pub(crate) const GPU_LATENT_STEP_TOKENS_MAX: usize = 32_768;
pub(crate) const GPU_LATENT_HEADS_MAX: usize = 128;

/// Experts of a token on a GPU, at most: the products' items of 64 rows and more, one or more for each
/// expert, must fit on that axis too, and 65,535 tokens of 32 make 32,768. Models have up to 10.
pub(crate) const GPU_EXPERTS_PER_TOKEN_MAX: usize = 32;

/// Tokens of a step up to which a GPU may compute both products of their experts in one launch: with more,
/// two launches' beginnings and ends are little beside the products.
pub(crate) const GPU_PAIRED_TOKENS_MAX: usize = 32;

/// Ids that one sequence's rules on a GPU speak of, at most: half a megabyte for each of the sequences that
/// run. Of who has more, the host samples.
pub(crate) const GPU_RULES_MAX: usize = 32_768;
/// Sequences up to which a decode step on a GPU is recorded: more make kernels long enough to hide their
/// launches.
pub(crate) const RECORDED_ROWS_MAX: usize = 256;

/// Recordings of steps on a GPU, at most; a step's form follows the batch's size and total context in steps
/// of a quarter, so a growing batch passes some ten forms for each size. Each takes about a megabyte.
pub(crate) const RECORDINGS_MAX: usize = 256;

/// Floats that attention's blocks on a GPU may leave to be joined afterwards, 256 MiB; beyond, each block
/// takes whole sequences. 32 sequences of 4,096 tokens with 8 KV heads of 128 leave 34 MB, and need the
/// parallelism; where more would be left there are blocks enough for all processors.
pub(crate) const ATTENTION_PARTIAL_FLOATS_MAX: usize = 64 << 20;

/// Memory of the KV cache where no option sets it: 131,072 tokens of the built-in model.
pub(crate) const KV_BYTES_DEFAULT: usize = 256 << 20;

/// Answer's length in tokens where neither the request nor the checkpoint says: enough to see the random
/// model speak, and it does not stop by itself.
pub(crate) const RANDOM_MAX_NEW_TOKENS: usize = 128;

/// Bytes of the log's lines that wait to be written: some 10,000 lines. What comes on top is dropped, and
/// counted.
pub(crate) const LOG_QUEUE_BYTES: usize = 4 << 20;

/// How long the end of the process waits for the log's last lines.
pub(crate) const LAST_LINES_MAX: Duration = Duration::from_secs(1);

/// Batches of KV events kept for replay: vLLM's default, some minutes of steps.
pub(crate) const KV_REPLAY_BATCHES_MAX: usize = 10_000;

/// Bytes of the batches kept for replay. A step of 512 new tokens makes about 3 KB of events, so that the
/// number of batches is the bound at the default batch, and this one with larger batches.
pub(crate) const KV_REPLAY_BYTES_MAX: usize = 64 << 20;

/// Blocks in one batch of a snapshot: about 100 KB with 16 tokens each, so that a message is neither tiny nor
/// stalls what goes over the same connection.
pub(crate) const KV_SNAPSHOT_BLOCKS_PER_BATCH: usize = 1024;

/// Subscribers to KV events at once: many times the gateways of a fleet. Each costs some kilobytes, and 64
/// KiB of payloads while it is slow.
pub(crate) const KV_SUBSCRIBERS_MAX: usize = 256;

/// A subscriber to KV events that takes nothing for so long, though there is something for it, is
/// disconnected: its machine is gone, or its process stands still. It sees by the numbers what it missed.
pub(crate) const KV_SUBSCRIBER_STALL_MAX: Duration = Duration::from_secs(60);

/// Clients of the KV replay at once: a gateway asks for seconds, after a gap. Each holds one reply, and in a
/// snapshot eight bytes for each block of the cache, and what blocks are that leave the cache until its end.
pub(crate) const KV_ASKERS_MAX: usize = 64;

/// How long one reply on the KV replay socket, of 100 KB or one batch, may take a client that reads slowly.
pub(crate) const KV_REPLY_STALL_MAX: Duration = Duration::from_secs(10);

/// Prefixes held for other workers at once: as many as a fleet computes in a second or two. Each takes its
/// blocks, and its ids.
pub(crate) const HOLDS_MAX: usize = 256;

/// Of the KV blocks one in so many may be held for other workers, or for KV that comes from them: the others
/// stay for those who run here.
pub(crate) const HOLDS_SHARE: usize = 2;

/// Bytes of a host's name (RFC 1035, 2.3.4).
pub(crate) const HOST_BYTES_MAX: usize = 253;

/// Bytes of the secret that workers of a fleet share: as many as guessing needs, and no file that is no key.
pub(crate) const KV_KEY_BYTES_MIN: usize = 16;
pub(crate) const KV_KEY_BYTES_MAX: usize = 4096;

/// Transfers of KV that are given at once, and that are fetched at once; of further ones the prompt is
/// computed. Each holds [`KV_BATCH_BYTES`] and some blocks, and on one machine [`KV_ROOM_BYTES`] together.
pub(crate) const KV_EXPORTS_MAX: usize = 16;
pub(crate) const KV_IMPORTS_MAX: usize = 16;

/// Tokens of a prompt of which another worker may ask what is cached: a million bytes, as much as is read
/// before it is known who asks. Of a longer prompt what lies behind is computed.
pub(crate) const KV_FIND_TOKENS_MAX: usize = 1 << 18;

/// Bytes of KV that leave or enter the cache at once, between two steps: some milliseconds' copy, and few
/// enough pieces that a busy engine's steps do not slow a transfer down too much.
pub(crate) const KV_BATCH_BYTES: usize = 8 << 20;

/// Bytes of the memory that two workers of one machine share for a transfer: one batch is read while the next
/// is written.
pub(crate) const KV_ROOM_BYTES: usize = 2 * KV_BATCH_BYTES;

/// How long another worker may take to answer a connection, and to say what it wants: on one network
/// milliseconds.
pub(crate) const KV_CONNECT_MAX: Duration = Duration::from_secs(2);
pub(crate) const KV_HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// How long it may take for each frame, which may wait for the end of a step there.
pub(crate) const KV_STALL_MAX: Duration = Duration::from_secs(15);

/// How long one prompt's KV is fetched at most: 30 GB over 10 Gbit/s.
pub(crate) const KV_IMPORT_MAX: Duration = Duration::from_secs(30);

/// Changes of the prefix cache that may wait for the publisher of KV events before they are merged. Merged
/// they are at most two a block, so twice that pays for a merge; at least some steps' worth, lest a tiny
/// cache merges always.
pub(crate) const fn kv_events_pending_max(num_blocks: usize) -> usize {
    4 * num_blocks + 4096
}

/// Time between two lines about loading: a small checkpoint prints none, a large one a few.
pub(crate) const LOAD_PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// How long the ranks of an expert-parallel group may take to load their experts: 60 GB from a disk of 100
/// MB/s.
pub(crate) const EXPERT_LOAD_MAX: Duration = Duration::from_secs(600);

/// How long a rank waits for all others to join their group: a process of another machine to be started
/// again.
pub(crate) const EXPERT_JOIN_MAX: Duration = Duration::from_secs(30);

/// Shortest deadline of an exchange between expert-parallel ranks: below it a busy machine's scheduling would
/// show.
pub(crate) const EXPERT_DEADLINE_MIN: Duration = Duration::from_millis(100);

/// Bytes of one message between expert-parallel ranks: what 1024 tokens of 8 experts and a width of 2048 send
/// back. It takes memory as it is used; more tokens go in several exchanges.
pub(crate) const EXPERT_MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Seconds a client is told to wait when the queue is full.
pub(crate) const RETRY_AFTER_S: u64 = 1;

/// Tokens of a rank in a round of a GPU's exchange, at most. Each round reads the weights of the experts that
/// it asks: of 128 experts, 8 of them a token, so many ask each for 64 rows. Longer prompts take several
/// rounds a layer.
pub(crate) const GPU_ROUND_TOKENS_MAX: usize = 1024;

/// Memory of a rank's mailbox and of the rows that come to it, on a GPU, in bytes; both are as large as the
/// worst routing needs. Rounds have fewer tokens where they would take more: 256 with the largest models' 8
/// experts of 7168 over 8 ranks.
pub(crate) const GPU_ROUND_BYTES_MAX: usize = 1 << 30;

/// What clients' connections are held to; the default is the gateway's.
#[derive(Debug, Clone, Copy)]
pub struct ClientBounds {
    /// Connections at once; who comes then waits until one that is idle has made room.
    pub connections: usize,
    /// Time for a request's head to come, from the connection's beginning or the last answer's end.
    pub header_read: Duration,
    /// Time between two pieces of a request's body.
    pub body_idle: Duration,
    /// Time for all of a body.
    pub body: Duration,
    /// Time for which a client may take nothing of its answer.
    pub stall: Duration,
}

impl Default for ClientBounds {
    fn default() -> Self {
        Self {
            connections: CONNECTIONS_MAX,
            header_read: HEADER_READ_TIMEOUT,
            body_idle: BODY_IDLE_TIMEOUT,
            body: BODY_TIMEOUT,
            stall: CLIENT_STALL_TIMEOUT,
        }
    }
}
