//! KV events: what an engine says about its prefix cache, block by block, in the formats of vLLM and SGLang.
//! Types here; bytes in [`WireFormat`]'s encoder, [`Events`] and [`EventBatch::decode`]; ZMQ frames in
//! [`frames`]. What a router makes of them is `gateway/core`'s business.
//!
//! The formats as read in `vllm/distributed/kv_events.py` and `sglang/srt/disaggregation/kv_events.py`.
//! Events are msgpack arrays (vLLM up to v0.23, SGLang up to mid-2026) or maps (later ones); a decoder must
//! take both, with fields missing at the end and unknown ones anywhere.

mod decode;
mod encode;
pub mod frames;
pub mod load_stat;
mod msgpack;
#[cfg(test)]
mod tests;

use xxhash_rust::xxh3::xxh3_64;

pub use self::decode::{DecodeError, Decoded, Events};
pub use self::encode::WireFormat;

/// The tier that routers call primary: an engine's own KV cache, whatever it lives on. No medium means the
/// same.
pub const MEDIUM_GPU: &str = "GPU";

/// An engine's name for one block and, mostly, for all blocks before it. Opaque: equal names of one engine's
/// life mean the same block, and nothing else may be read from them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// 64 bits; a signed one (SGLang, TensorRT-LLM) by its two's complement.
    Int(u64),
    /// The whole digest (vLLM with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    Bytes(Box<[u8]>),
}

impl EngineHash {
    /// The name in 64 bits, of one size for tables. Two digests may collide there, which costs time.
    pub fn short(&self) -> u64 {
        match self {
            Self::Int(bits) => *bits,
            Self::Bytes(bytes) => xxh3_64(bytes),
        }
    }
}

/// What changed in one step of an engine, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EventBatch {
    /// When the engine made the batch, by its clock, in seconds since 1970.
    pub ts: f64,
    /// The changes, in order.
    pub events: Vec<KvEvent>,
    /// Which of several data-parallel engines; `None` if there is one.
    pub data_parallel_rank: Option<u32>,
}

/// One change of an engine's prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks can be found from now on.
    BlockStored(BlockStored),
    /// Blocks are gone, or one copy of each is.
    BlockRemoved(BlockRemoved),
    /// Nothing is cached any more.
    AllBlocksCleared,
}

/// Consecutive blocks of one prefix that became findable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockStored {
    /// One for each block. None where a group of a hybrid model has kept nothing of `token_ids` (vLLM).
    pub block_hashes: Vec<EngineHash>,
    /// The block before the first of these; `None`: they begin a prompt.
    pub parent_block_hash: Option<EngineHash>,
    /// The tokens of all blocks, `block_hashes.len() * block_size`. Tiers other than the first may leave them
    /// out.
    pub token_ids: Vec<u32>,
    /// The token after the last of `token_ids`. Present where an engine speaks of pairs of neighbours (SGLang
    /// with EAGLE): position `i` then stands for tokens `i` and `i + 1`.
    pub bigram_tail: Option<u32>,
    /// Tokens per block; 0 where a tier does not say.
    pub block_size: u32,
    /// Deprecated by vLLM in favour of `lora_name`.
    pub lora_id: Option<i64>,
    /// The tier: "GPU", "CPU", "STORAGE" and others; see [`BlockStored::is_primary`].
    pub medium: Option<String>,
    /// The LoRA adapter the KV was computed with.
    pub lora_name: Option<String>,
    /// For each block what its hash covers besides tokens: adapter, images, and for a prompt's first block
    /// the cache salt. Empty if there is nothing for any block.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// The cache group, in engines whose layers differ in what they keep.
    pub group_idx: Option<u32>,
    /// What the group's layers keep: `full_attention`, `sliding_window`, `mla_attention`…
    pub kv_cache_spec_kind: Option<String>,
    /// Positions a sliding window keeps.
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// SGLang: the namespace of the prefix. Its hashes do not cover it: equal hashes may come with two salts.
    pub cache_salt: Option<String>,
    /// The session that computed the blocks, where clients name one.
    pub session_id: Option<String>,
    /// `LOCAL` or `REMOTE`; see [`BlockStored::is_primary`].
    pub locality: Option<String>,
}

/// Blocks of which the engine, or one of its tiers, dropped a copy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockRemoved {
    /// In any order, not necessarily of one prefix.
    pub block_hashes: Vec<EngineHash>,
    /// The tier that dropped them, as in [`BlockStored::medium`].
    pub medium: Option<String>,
    /// The cache group that dropped them; `None` counts as group 0.
    pub group_idx: Option<u32>,
    /// `LOCAL` or `REMOTE`; see [`BlockRemoved::is_primary`].
    pub locality: Option<String>,
    /// How many copies of each block are left, where the engine says.
    pub remaining_copy_counts: Option<Vec<u32>>,
}

/// One thing besides tokens that a block's hash covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    /// An adapter's name or a salt.
    Text(String),
    /// Anything else, as the msgpack value it came as.
    Raw(Box<[u8]>),
}

impl BlockStored {
    /// Whether the blocks are in the engine's own cache, so that a request finds them at no cost.
    pub fn is_primary(&self) -> bool {
        is_primary(self.medium.as_deref(), self.locality.as_deref())
    }
}

impl BlockRemoved {
    /// Whether the blocks left the engine's own cache.
    pub fn is_primary(&self) -> bool {
        is_primary(self.medium.as_deref(), self.locality.as_deref())
    }
}

fn is_primary(medium: Option<&str>, locality: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium.eq_ignore_ascii_case(MEDIUM_GPU)) && locality != Some("REMOTE")
}
