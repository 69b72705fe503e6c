//! Cuts a batch's attention into blocks: which one does which rows over which chunks of positions.

use super::{CHUNK, FEW_ROWS, HeadKind, ITEM_WORDS, KvType, LATENT_ROWS, MANY_ROWS};
use crate::cuda::matmul::Unit;

/// Chunks of a block that are tried; more of them make more different plans than they save time.
const CHUNKS: [usize; 5] = [1, 2, 4, 8, 16];
/// What costs time beside a chunk itself, in chunks: to start a block; to start the merge; to leave a chunk's
/// state and read it again, of few rows, of many, and of latents' many; and for those to join it by way of
/// memory. The latents' two are estimates from bytes.
const START: f64 = 0.25;
const MERGE: f64 = 0.4;
const APART: [f64; 3] = [0.05, 0.7, 0.7];
const JOINED: f64 = 0.3;

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
    /// Rows (query heads of tokens that share a KV head) per block: 16 or 128; of a latent cache 16 or 64.
    pub rows: usize,
    /// How many chunks a block takes, leaving the state of each to be joined afterwards; `None`: all, and it
    /// joins them itself.
    pub chunks: Option<usize>,
}

/// What a batch is cut for.
#[derive(Debug, Clone, Copy)]
pub struct CutFor {
    /// Sizes of a vector.
    pub kind: HeadKind,
    /// What an element of the pages is.
    pub kv_type: KvType,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads that share one of them.
    pub group: usize,
    /// The matrix unit that the device is best at.
    pub unit: Unit,
    /// How many processors the device has.
    pub processors: usize,
}

impl CutFor {
    /// Rows of a block, and how many blocks a processor holds at once.
    fn block(&self, sequences: &[Sequence]) -> (usize, usize) {
        let few = sequences.iter().all(|s| s.tokens * self.group <= FEW_ROWS);
        let is_wide = self.unit == Unit::Warpgroup && self.kv_type == KvType::Bf16;
        match self.kind {
            HeadKind::Latent if few || !is_wide => (FEW_ROWS, 1),
            HeadKind::Latent => (LATENT_ROWS, 1),
            _ if !few => (MANY_ROWS, 1),
            HeadKind::Dim128 => (FEW_ROWS, 2),
            HeadKind::Dim64 => (FEW_ROWS, 3),
        }
    }
}

impl AttentionCut {
    /// Few rows per block where sequences have few; chunks apart where that is estimated to be over sooner on
    /// so many processors: blocks come in waves, as many at once as have room, and the last wave's idle
    /// places are lost.
    pub fn choose(sequences: &[Sequence], cut_for: &CutFor) -> Self {
        let CutFor { kv_heads, group, processors, .. } = *cut_for;
        let (rows, room) = cut_for.block(sequences);
        let room = room * processors.max(1);
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
        let (apart, joined) = match rows {
            FEW_ROWS => (APART[0], 0.0),
            LATENT_ROWS => (APART[2], JOINED),
            _ => (APART[1], 0.0),
        };
        let time = |chunks: Option<usize>| {
            let most = chunks.unwrap_or(longest);
            let blocks = tiles.iter().map(|tile| tile.div_ceil(most)).sum::<usize>() * kv_heads;
            let waves = blocks.div_ceil(room) as f64;
            let each = (all as f64 / blocks as f64 * waves).max(most as f64);
            each * (1.0 + if chunks.is_some() { apart } else { joined })
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

    /// f32 elements of the states that blocks leave, or join there themselves.
    pub fn partial_floats(&self, kv_heads: usize, value_dim: usize, processors: usize) -> usize {
        let of_block = self.cut.rows * value_dim;
        let joined = if self.cut.rows == LATENT_ROWS && self.cut.chunks.is_none() { of_block } else { 0 };
        let blocks = (self.items.len() / ITEM_WORDS).min(processors.max(1));
        self.slots * kv_heads * (of_block + 2 * self.cut.rows) + blocks * joined
    }
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
        let plain = CutFor {
            kind: HeadKind::Dim128,
            kv_type: KvType::Bf16,
            kv_heads: 8,
            group: 4,
            unit: Unit::Warpgroup,
            processors: 132,
        };
        let chosen = |sequences: &[Sequence]| AttentionCut::choose(sequences, &plain);
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

    /// Of 128 heads and of 16, on a device that has the wider products and on others.
    #[test]
    fn latents_of_many_heads_have_wide_blocks_where_there_are_some() {
        let cut_for = |group, unit, kv_type| CutFor {
            kind: HeadKind::Latent,
            kv_type,
            kv_heads: 1,
            group,
            unit,
            processors: 132,
        };
        let wide = cut_for(128, Unit::Warpgroup, KvType::Bf16);
        let rows = |cut_for: &CutFor| AttentionCut::choose(&decode(32, 4096), cut_for).rows;
        assert_eq!(rows(&wide), LATENT_ROWS);
        assert_eq!(rows(&cut_for(128, Unit::Warp, KvType::Bf16)), FEW_ROWS);
        assert_eq!(rows(&cut_for(128, Unit::Warpgroup, KvType::Fp8)), FEW_ROWS);
        assert_eq!(rows(&cut_for(16, Unit::Warpgroup, KvType::Bf16)), FEW_ROWS);
        let chunks = |sequences, context| AttentionCut::choose(&decode(sequences, context), &wide).chunks;
        assert_eq!(chunks(1, 200), None);
        // 64 items would leave half of the processors idle.
        assert_eq!(chunks(32, 4096), Some(8));
        assert_eq!(chunks(66, 4096), None);
        assert_eq!(chunks(1, 32_768), Some(2));
        let prompt = [Sequence { query: 0, tokens: 512, start: 0, table: 0 }];
        assert_eq!(AttentionCut::choose(&prompt, &wide), AttentionCut { rows: LATENT_ROWS, chunks: None });
    }

    proptest! {
        /// Every row of every sequence is in exactly one item per chunk that it sees, and slots are not
        /// shared.
        #[test]
        fn a_plan_covers_every_row_and_chunk_once(
            shapes in prop::collection::vec((1usize..200, 0usize..2000), 1..6),
            group in 1usize..9, window in prop::option::of(1usize..700),
            rows in prop::sample::select(vec![FEW_ROWS, LATENT_ROWS, MANY_ROWS]),
            chunks in prop::option::of(1usize..4),
        ) {
            let cut = AttentionCut { rows, chunks };
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
