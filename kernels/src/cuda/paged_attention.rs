//! Plans and launches `attention.cu`: causal attention over a paged KV cache, prefill and decode alike.
//!
//! A [`AttentionPlan`] says which block does which rows over which chunks of positions. It decides speed
//! alone: every plan of the same batch gives the same bits.

use half::bf16;

use super::matmul::Unit;
use super::{Launch, Slice};

/// Absolute positions whose state is joined at a time.
pub const CHUNK: usize = 256;
/// Words of an item, `struct Item` in `attention.cu`; one of zeros has no tokens, and its block returns at
/// once.
pub const ITEM_WORDS: usize = 8;
/// Rows of a block for few tokens, and for prompts.
const FEW_ROWS: usize = 16;
const MANY_ROWS: usize = 128;
const MERGE_THREADS: u32 = 128;
/// Two warpgroups that multiply, and one that brings keys and values.
const PIPELINED_THREADS: u32 = 384;
/// Chunks of a block that are tried; more of them make more different plans than they save time.
const CHUNKS: [usize; 5] = [1, 2, 4, 8, 16];
/// What costs time beside a chunk itself, in chunks: to start a block; to start the merge; and to leave a
/// chunk's state and read it again, of few rows and of many.
const START: f64 = 0.25;
const MERGE: f64 = 0.4;
const APART: [f64; 2] = [0.05, 0.7];

/// How pages hold keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// bf16, two bytes an element; its scales are 1.
    Bf16,
    /// FP8 E4M3, with one scale for all keys and one for all values.
    Fp8,
}

/// A vector's width in the cache, and what a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// Keys and values of 64 elements.
    Dim64,
    /// Keys and values of 128 elements.
    Dim128,
    /// One vector of 576 elements a position, whose first 512 are the value (DeepSeek's MLA, absorbed).
    Latent,
}

impl HeadKind {
    /// Elements of a key.
    pub fn key_dim(self) -> usize {
        match self {
            Self::Dim64 => 64,
            Self::Dim128 => 128,
            Self::Latent => 576,
        }
    }

    /// Elements of a value.
    pub fn value_dim(self) -> usize {
        match self {
            Self::Dim64 => 64,
            Self::Dim128 => 128,
            Self::Latent => 512,
        }
    }
}

/// One layer's pages on the device: `keys` `[page][kv_head][offset][key_dim]`, `values` alike, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    /// Keys; in a latent cache the latents, each with the rotated key that all heads share behind it.
    pub keys: Slice<u8>,
    /// Values; `None` of a latent cache.
    pub values: Option<Slice<u8>>,
    /// What an element is.
    pub kv_type: KvType,
    /// Sizes of a vector.
    pub kind: HeadKind,
    /// Heads of keys and values per position; 1 in a latent cache.
    pub kv_heads: usize,
    /// Positions a page, a power of two.
    pub page_size: usize,
}

impl Pages {
    /// Panics if the sizes disagree.
    fn check(&self) {
        let Self { keys, values, kv_type, kind, kv_heads, page_size } = *self;
        let bytes = kv_heads * page_size * if kv_type == KvType::Fp8 { 1 } else { 2 };
        assert!(
            page_size.is_power_of_two()
                && keys.len % (bytes * kind.key_dim()) == 0
                && keys.len / if kv_type == KvType::Fp8 { 1 } else { 2 } / kind.key_dim() < 1 << 32
                && values.is_none() == (kind == HeadKind::Latent)
                && (kind != HeadKind::Latent || kv_heads == 1)
                && values.is_none_or(|v| v.len * kind.key_dim() == keys.len * kind.value_dim()),
            "attention: shapes disagree"
        );
    }
}

/// New tokens of one sequence, whose keys and values are already in the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Row of the first one among the queries.
    pub query: usize,
    /// How many, at least 1.
    pub tokens: usize,
    /// Absolute position of the first one.
    pub start: usize,
    /// Where its page numbers begin in the tables.
    pub table: usize,
}

/// How a batch is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionCut {
    /// Rows (query heads of tokens that share a KV head) per block: 16 or 128; 16 alone of a latent cache.
    pub rows: usize,
    /// How many chunks a block takes, leaving the state of each to be joined afterwards; `None`: all, and it
    /// joins them itself.
    pub chunks: Option<usize>,
}

impl AttentionCut {
    /// Few rows per block where sequences have few; chunks apart where that is estimated to be over sooner on
    /// so many `processors`: blocks come in waves, as many at once as have room, and the last wave's idle
    /// places are lost.
    pub fn choose(
        sequences: &[Sequence],
        kind: HeadKind,
        kv_heads: usize,
        group: usize,
        processors: usize,
    ) -> Self {
        let few = kind == HeadKind::Latent || sequences.iter().all(|s| s.tokens * group <= FEW_ROWS);
        let rows = if few { FEW_ROWS } else { MANY_ROWS };
        let room = match kind {
            HeadKind::Latent => 1,
            _ if !few => 1,
            HeadKind::Dim128 => 2,
            HeadKind::Dim64 => 3,
        } * processors.max(1);
        let (mut all, mut longest) = (0, 0);
        // Of every tile of rows, the chunks that its last row sees.
        let mut tiles = Vec::new();
        for s in sequences {
            for first_row in (0..s.tokens * group).step_by(rows) {
                let last_row = (s.tokens * group).min(first_row + rows) - 1;
                let chunks = (s.start + last_row / group + 1).div_ceil(CHUNK);
                tiles.push(chunks);
                all += chunks * kv_heads;
                longest = longest.max(chunks);
            }
        }
        let time = |chunks: Option<usize>| {
            let most = chunks.unwrap_or(longest);
            let blocks = tiles.iter().map(|tile| tile.div_ceil(most)).sum::<usize>() * kv_heads;
            let waves = blocks.div_ceil(room) as f64;
            let each = (all as f64 / blocks as f64 * waves).max(most as f64);
            let apart = if few { APART[0] } else { APART[1] };
            each * if chunks.is_some() { 1.0 + apart } else { 1.0 }
                + START * waves
                + if chunks.is_some() { MERGE } else { 0.0 }
        };
        let candidates = CHUNKS.into_iter().filter(|chunks| *chunks < longest).map(Some).chain([None]);
        let best = candidates.map(|chunks| (time(chunks), chunks)).min_by(|a, b| a.0.total_cmp(&b.0));
        Self { rows, chunks: best.and_then(|(_, chunks)| chunks) }
    }
}

/// Which block does what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionPlan {
    /// How it was cut.
    pub cut: AttentionCut,
    /// One item per block and KV head.
    pub items: Vec<u32>,
    /// One item per tile of rows, where chunks are joined afterwards; else empty.
    pub merges: Vec<u32>,
    /// States that blocks leave for each KV head.
    pub slots: usize,
    /// Whether a block carries one state over all its chunks: see [`AttentionPlan::carried`].
    pub carried: bool,
}

impl AttentionPlan {
    /// For `group` query heads per KV head and a sliding window, if any.
    ///
    /// # Panics
    /// If a sequence has no new tokens, or the window or the chunks of a block are 0.
    pub fn new(sequences: &[Sequence], group: usize, window: Option<usize>, cut: AttentionCut) -> Self {
        Self::cut(sequences, group, window, cut, false)
    }

    /// The same for kernels that carry a block's state over all its chunks, of bf16 heads of 128 alone. Bits
    /// then depend on the cut: this is what [`AttentionPlan::new`] is held against, to see what it costs to
    /// be independent of it.
    ///
    /// # Panics
    /// As [`AttentionPlan::new`].
    pub fn carried(sequences: &[Sequence], group: usize, window: Option<usize>, cut: AttentionCut) -> Self {
        Self::cut(sequences, group, window, cut, true)
    }

    fn cut(
        sequences: &[Sequence],
        group: usize,
        window: Option<usize>,
        cut: AttentionCut,
        carried: bool,
    ) -> Self {
        assert!(window != Some(0), "attention: a window of 0 sees nothing");
        let mut plan = Self { cut, items: Vec::new(), merges: Vec::new(), slots: 0, carried };
        for sequence in sequences {
            let rows = sequence.tokens * group;
            assert!(rows > 0, "attention: a sequence without new tokens");
            // The last rows see most: begun first, they are not what the launch waits for at the end.
            for first_row in (0..rows).step_by(cut.rows).rev() {
                let first_end = sequence.start + first_row / group + 1;
                let last_end = sequence.start + (rows.min(first_row + cut.rows) - 1) / group + 1;
                let first_chunk = window.map_or(0, |window| first_end.saturating_sub(window)) / CHUNK;
                plan.add(sequence, first_row, first_chunk, last_end.div_ceil(CHUNK));
            }
        }
        plan
    }

    fn add(&mut self, sequence: &Sequence, first_row: usize, first_chunk: usize, end_chunk: usize) {
        let item = |from: usize, to: usize, slot: usize| {
            let Sequence { query, tokens, start, table } = *sequence;
            [query, tokens, start, table, first_row, from, to, slot].map(|n| n as u32)
        };
        let Some(chunks) = self.cut.chunks else {
            self.items.extend(item(first_chunk, end_chunk, 0));
            return;
        };
        // What is joined: chunks, or what blocks carried over several.
        let states =
            |from: usize, to: usize| if self.carried { (to - from).div_ceil(chunks) } else { to - from };
        self.merges.extend(item(first_chunk, first_chunk + states(first_chunk, end_chunk), self.slots));
        for chunk in (first_chunk..end_chunk).step_by(chunks) {
            let end = end_chunk.min(chunk + chunks);
            self.items.extend(item(chunk, end, self.slots));
            self.slots += states(chunk, end);
        }
    }

    /// f32 elements of the states that blocks leave.
    pub fn partial_floats(&self, kv_heads: usize, value_dim: usize) -> usize {
        self.slots * kv_heads * self.cut.rows * (value_dim + 2)
    }
}

/// What a launch reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The plan, and its lists on the device.
    pub plan: &'a AttentionPlan,
    /// [`AttentionPlan::items`], copied to the device by the caller.
    pub items: Slice<u32>,
    /// [`AttentionPlan::merges`], copied to the device by the caller; empty if it is.
    pub merges: Slice<u32>,
    /// Page numbers of all sequences.
    pub tables: Slice<u32>,
    /// Queries; row `t` begins at `t * q_stride` with its heads.
    pub q: Slice<bf16>,
    /// Distance between rows, in elements.
    pub q_stride: usize,
    /// Query heads of a token: a multiple of the pages' `kv_heads`.
    pub heads: usize,
    /// One logit per query head that joins the denominator alone.
    pub sinks: Option<Slice<f32>>,
    /// How many positions a token sees, its own among them.
    pub window: Option<usize>,
    /// Factor of `q . k`.
    pub scale: f32,
    /// What multiplies where there are many rows, of bf16 heads: the device's best. The others, and FP8, know
    /// one unit alone. Either gives the same bits.
    pub unit: Unit,
    /// The device's: by `Unit::Warpgroup` each has one block, which goes through its share of the work.
    pub processors: usize,
    /// What FP8 keys and values were divided by, the same of a latent's; 1 for bf16.
    pub kv_scale: [f32; 2],
    /// `[tokens, heads * value_dim]`.
    pub out: Slice<bf16>,
    /// Room for the states of parts that are merged, at least [`AttentionPlan::partial_floats`] of the plan.
    pub partials: Slice<f32>,
}

/// Attention of a batch over one layer's pages.
///
/// # Panics
/// If shapes disagree.
pub fn launch(pages: &Pages, batch: &Batch<'_>) -> Vec<Launch> {
    pages.check();
    let (plan, kind, AttentionCut { rows, chunks }) = (batch.plan, pages.kind, batch.plan.cut);
    let group = batch.heads / pages.kv_heads;
    let items = plan.items.len() / ITEM_WORDS;
    assert!(
        batch.heads == group * pages.kv_heads
            && batch.q_stride >= batch.heads * kind.key_dim()
            && batch.q_stride.is_multiple_of(8)
            && (kind != HeadKind::Latent || batch.kv_scale[0] == batch.kv_scale[1])
            && batch.sinks.is_none_or(|sinks| sinks.len == batch.heads)
            && batch.items.len == plan.items.len()
            && batch.merges.len == plan.merges.len()
            && batch.partials.len >= plan.partial_floats(pages.kv_heads, kind.value_dim()),
        "attention: shapes disagree"
    );
    let carries = kind == HeadKind::Dim128 && pages.kv_type == KvType::Bf16;
    assert!(carries || !plan.carried, "attention: only bf16 heads of 128 have kernels that carry");
    if items == 0 {
        return Vec::new();
    }
    let attend = attend(pages, batch, items);
    if chunks.is_none() {
        return vec![attend];
    }
    let merge = Launch {
        module: "attention",
        kernel: "attention_merge".into(),
        grid: [(plan.merges.len() / ITEM_WORDS) as u32, pages.kv_heads as u32, rows as u32],
        threads: MERGE_THREADS,
        shared_bytes: 0,
        arguments: vec![
            batch.merges.into(),
            batch.partials.into(),
            batch.sinks.into(),
            batch.out.into(),
            pages.kv_heads.into(),
            group.into(),
            rows.into(),
            kind.value_dim().into(),
            batch.kv_scale[1].into(),
        ],
    };
    vec![attend, merge]
}

/// The launch that goes through keys and values.
fn attend(pages: &Pages, batch: &Batch<'_>, items: usize) -> Launch {
    let (plan, kind, AttentionCut { rows, chunks }) = (batch.plan, pages.kind, batch.plan.cut);
    let pipelined =
        rows == MANY_ROWS && batch.unit == Unit::Warpgroup && pages.kv_type == KvType::Bf16 && !plan.carried;
    let partials = if chunks.is_some() { batch.partials.into() } else { super::Argument::Null };
    let pieces = items * pages.kv_heads;
    let mut arguments = vec![batch.items.into()];
    if pipelined {
        arguments.push(pieces.into());
    }
    arguments.extend([
        batch.tables.into(),
        batch.q.into(),
        batch.q_stride.into(),
        pages.keys.into(),
        pages.values.into(),
        batch.sinks.into(),
        batch.out.into(),
        partials,
        pages.kv_heads.into(),
        (batch.heads / pages.kv_heads).into(),
        (pages.page_size.trailing_zeros() as usize).into(),
        batch.window.unwrap_or(0).into(),
        (batch.scale * batch.kv_scale[0] * std::f32::consts::LOG2_E).into(),
        batch.kv_scale[1].into(),
    ]);
    if pipelined {
        return Launch {
            module: "attention_sm90",
            kernel: pipelined_kernel(kind, chunks.is_some()),
            grid: [pieces.min(batch.processors.max(1)) as u32, 1, 1],
            threads: PIPELINED_THREADS,
            shared_bytes: pipelined_shared_bytes(kind) as u32,
            arguments,
        };
    }
    Launch {
        module: "attention",
        kernel: kernel(kind, pages.kv_type, rows, plan.carried),
        grid: [items as u32, pages.kv_heads as u32, 1],
        threads: if rows == FEW_ROWS { 128 } else { 256 },
        shared_bytes: shared_bytes(kind, pages.kv_type, rows) as u32,
        arguments,
    }
}

/// The kernel of `attention_sm90.cu` for bf16 heads of this kind, whose states are merged afterwards if
/// `apart`.
fn pipelined_kernel(kind: HeadKind, apart: bool) -> String {
    let apart = if apart { "_apart" } else { "" };
    format!("attention_sm90_{}_bf16{apart}", kind.key_dim())
}

/// `SHARED` in `attention_sm90.cuh`: the query, five tiles of keys and values, two barriers of each, and what
/// of the joined sums has no room in registers.
fn pipelined_shared_bytes(kind: HeadKind) -> usize {
    let (row, stages) = (2 * kind.key_dim(), 5);
    let stashed = if kind == HeadKind::Dim128 { 6 * 4 * 256 * 4 } else { 0 };
    MANY_ROWS * row + stages * 2 * 64 * row + (stages + 1) * 16 + stashed
}

fn kernel(kind: HeadKind, kv_type: KvType, rows: usize, carried: bool) -> String {
    assert!(
        rows == FEW_ROWS || rows == MANY_ROWS && kind != HeadKind::Latent,
        "attention: no kernel has {rows} rows"
    );
    let kind = match kind {
        HeadKind::Dim64 => "64",
        HeadKind::Dim128 => "128",
        HeadKind::Latent => "latent",
    };
    let kv_type = if kv_type == KvType::Fp8 { "fp8" } else { "bf16" };
    let carried = if carried { "_carried" } else { "" };
    format!("attention_{kind}_{kv_type}_{rows}{carried}")
}

/// `SHARED` in `attention_decode.cuh` and `attention_prefill.cuh`, with the stages named beside each kernel
/// in `attention.cu`.
fn shared_bytes(kind: HeadKind, kv_type: KvType, rows: usize) -> usize {
    let fp8 = kv_type == KvType::Fp8;
    let latent = kind == HeadKind::Latent;
    let tile = if latent { 32 } else { 64 };
    let values = if latent { 0 } else { kind.value_dim() };
    let wide = tile * (kind.key_dim() + values) * 2;
    let stage = if fp8 { wide / 2 } else { wide };
    if rows == MANY_ROWS {
        return if fp8 { 2 * stage + 2 * wide } else { 3 * stage };
    }
    let stages = match (kind, kv_type) {
        (HeadKind::Latent, _) | (HeadKind::Dim128, KvType::Bf16) => 3,
        _ => 4,
    };
    // Weights, maxima of four warps, and of latents what weights add up to.
    let exchanged = rows * tile * 2 + 4 * rows * 4 + if latent { 1024 } else { 0 };
    let kept = if latent { rows * kind.key_dim() * 2 + if fp8 { wide } else { 0 } } else { 0 };
    stages * stage + exchanged + kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(sequences: usize, context: usize) -> Vec<Sequence> {
        (0..sequences).map(|query| Sequence { query, tokens: 1, start: context - 1, table: 0 }).collect()
    }

    /// Shapes whose best cut on 132 processors was measured or is plain.
    #[test]
    fn blocks_come_in_full_waves() {
        let chosen = |sequences: &[Sequence]| AttentionCut::choose(sequences, HeadKind::Dim128, 8, 4, 132);
        assert_eq!(chosen(&decode(32, 4096)), AttentionCut { rows: FEW_ROWS, chunks: None });
        assert_eq!(chosen(&decode(1, 32_768)), AttentionCut { rows: FEW_ROWS, chunks: Some(4) });
        assert_eq!(chosen(&decode(1, 1024)), AttentionCut { rows: FEW_ROWS, chunks: Some(1) });
        assert_eq!(chosen(&decode(1, 100)), AttentionCut { rows: FEW_ROWS, chunks: None });
        assert_eq!(chosen(&[]), AttentionCut { rows: FEW_ROWS, chunks: None });
        let prompt = |tokens, start| [Sequence { query: 0, tokens, start, table: 0 }];
        assert_eq!(chosen(&prompt(8192, 0)), AttentionCut { rows: MANY_ROWS, chunks: None });
        assert_eq!(chosen(&prompt(1024, 0)), AttentionCut { rows: MANY_ROWS, chunks: None });
        assert!(chosen(&prompt(64, 32_000)).chunks.is_some());
    }

    /// What a block may have on the smallest GPUs (sm_86, sm_89, sm_120), and on sm_80, for latents.
    #[test]
    fn shared_memory_fits() {
        for kv_type in [KvType::Bf16, KvType::Fp8] {
            for kind in [HeadKind::Dim64, HeadKind::Dim128] {
                for rows in [FEW_ROWS, MANY_ROWS] {
                    assert!(shared_bytes(kind, kv_type, rows) <= 99 << 10, "{kind:?} {kv_type:?} {rows}");
                }
            }
            assert!(shared_bytes(HeadKind::Latent, kv_type, FEW_ROWS) <= 163 << 10);
        }
        assert!(pipelined_shared_bytes(HeadKind::Dim128) <= 227 << 10);
    }

    proptest! {
        /// Every row of every sequence is in exactly one item per chunk that it sees, and slots are not
        /// shared.
        #[test]
        fn a_plan_covers_every_row_and_chunk_once(
            shapes in prop::collection::vec((1usize..200, 0usize..2000), 1..6),
            group in 1usize..9, window in prop::option::of(1usize..700), wide: bool,
            chunks in prop::option::of(1usize..4),
        ) {
            let cut = AttentionCut { rows: if wide { MANY_ROWS } else { FEW_ROWS }, chunks };
            let mut sequences = Vec::new();
            for (query, (tokens, start)) in shapes.iter().copied().enumerate() {
                sequences.push(Sequence { query, tokens, start, table: 0 });
            }
            let plan = AttentionPlan::new(&sequences, group, window, cut);
            let mut slots = Vec::new();
            for s in &sequences {
                for row in 0..s.tokens * group {
                    let end = s.start + row / group + 1;
                    let from = window.map_or(0, |w| end.saturating_sub(w));
                    let seen = from / CHUNK..end.div_ceil(CHUNK);
                    let of_row: Vec<&[u32]> = plan.items.chunks(ITEM_WORDS)
                        .filter(|i| i[0] as usize == s.query && i[4] as usize == row / cut.rows * cut.rows)
                        .collect();
                    let covered: Vec<u32> = of_row.iter().flat_map(|i| i[5]..i[6]).collect();
                    for chunk in seen {
                        prop_assert_eq!(covered.iter().filter(|c| **c as usize == chunk).count(), 1);
                    }
                    if row % cut.rows == 0 && chunks.is_some() {
                        slots.extend(of_row.iter().flat_map(|i| i[7]..i[7] + i[6] - i[5]));
                        let merge = plan.merges.chunks(ITEM_WORDS)
                            .find(|i| i[0] as usize == s.query && i[4] as usize == row);
                        let in_order = |m: &[u32]| of_row.iter().all(|i| i[7] - m[7] == i[5] - m[5]);
                        prop_assert!(merge.is_some_and(in_order));
                    }
                }
            }
            slots.sort_unstable();
            prop_assert_eq!(slots, (0..plan.slots as u32).collect::<Vec<_>>());
        }
    }
}
