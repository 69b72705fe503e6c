//! What the host tells a device of one step: which rows there are, where their keys and values go, what each attends
//! to. All of it is one list of words, copied at once.

use keyway_kernels::compute::Compute;
use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::paged_attention::{Cut, HeadKind, Plan, Sequence};
use keyway_kernels::rope::Rope;

use super::room::Grown;
use crate::backend::{CacheGroup, Chunk, NO_BLOCK};
use crate::limits::ATTENTION_PARTIAL_FLOATS_MAX;

/// Lists begin at multiples of this many words: vectors are read from some.
const ALIGNED: usize = 4;

/// One list of a step: words `first..first + len`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    first: usize,
    len: usize,
}

impl Part {
    /// Where it lies in the step's buffer.
    pub(super) fn of(self, inputs: &Grown) -> Slice<u32> {
        inputs.slice(self.first * size_of::<u32>(), self.len)
    }
}

/// Attention of some rows through one cache group's tables.
#[derive(Debug)]
pub(super) struct Attend {
    pub(super) plan: Plan,
    pub(super) items: Part,
    pub(super) merges: Part,
}

/// What a cache group's layers have in common.
#[derive(Debug)]
pub(super) struct GroupStep {
    /// Where each row's keys and values go.
    pub(super) slots: Part,
    pub(super) tables: Part,
    /// Of all rows.
    pub(super) all: Attend,
    /// Of the rows whose logits are wanted; `None` if these are all rows, or there are none.
    pub(super) wanted: Option<Attend>,
}

/// One step.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) words: Vec<u32>,
    pub(super) rows: usize,
    pub(super) tokens: Part,
    /// Cosines and sines of each row's position.
    pub(super) angles: [Part; 2],
    /// Rows whose logits are wanted, and whether they are all there are.
    pub(super) wanted: Part,
    pub(super) all_wanted: bool,
    pub(super) groups: Vec<GroupStep>,
}

/// What is the same in every step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fixed<'a> {
    pub(super) rope: &'a Rope,
    pub(super) cache_groups: &'a [CacheGroup],
    pub(super) block_size: usize,
    pub(super) kind: HeadKind,
    pub(super) kv_heads: usize,
    /// Query heads per KV head.
    pub(super) heads_per_kv: usize,
    pub(super) processors: usize,
}

impl Step {
    pub(super) fn new(chunks: &[Chunk<'_>], fixed: &Fixed<'_>) -> Self {
        let mut words = Words(Vec::new());
        let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let tokens = words.add(chunks.iter().flat_map(|chunk| chunk.tokens.iter().copied()));
        let angles = angles(chunks, fixed.rope).map(|list| words.add(list.into_iter().map(f32::to_bits)));
        let ends = chunks.iter().scan(0, |end, chunk| {
            *end += chunk.tokens.len();
            Some((*end, chunk.wants_logits))
        });
        let wanted = words.add(ends.filter(|(_, wanted)| *wanted).map(|(end, _)| end as u32 - 1));
        let all_wanted = wanted.len == rows;
        let group = |group| GroupStep::new(&mut words, chunks, fixed, group, all_wanted);
        let groups = (0..fixed.cache_groups.len()).map(group).collect();
        Self { words: words.0, rows, tokens, angles, wanted, all_wanted, groups }
    }

    /// How many rows go through the head.
    pub(super) fn wanted_rows(&self) -> usize {
        self.wanted.len
    }

    /// Floats that attention leaves to be joined, at most.
    pub(super) fn partial_floats(&self, fixed: &Fixed<'_>) -> usize {
        let plans = self.groups.iter().flat_map(|group| [Some(&group.all), group.wanted.as_ref()]).flatten();
        plans.map(|attend| partial_floats(&attend.plan, fixed)).max().unwrap_or(0)
    }
}

impl GroupStep {
    fn new(
        words: &mut Words,
        chunks: &[Chunk<'_>],
        fixed: &Fixed<'_>,
        group: usize,
        all_wanted: bool,
    ) -> Self {
        let size = fixed.block_size;
        let mut slots = Vec::new();
        let (mut tables, mut all, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let mut query = 0;
        for chunk in chunks {
            let end = chunk.start + chunk.tokens.len();
            let table = &chunk.tables[group][..end.div_ceil(size)];
            let slot = |position: usize| table[position / size] * size as u32 + (position % size) as u32;
            slots.extend((chunk.start..end).map(slot));
            let tokens = chunk.tokens.len();
            let sequence = Sequence { query, tokens, start: chunk.start, table: tables.len() };
            all.push(sequence);
            if chunk.wants_logits {
                wanted.push(Sequence { query: wanted.len(), tokens: 1, start: end - 1, ..sequence });
            }
            // Kernels read whole tiles, before a window too, where nothing but zeros comes of it: from any block
            // whose numbers are finite.
            let kept = table.iter().copied().find(|block| *block != NO_BLOCK).unwrap_or(0);
            tables.extend(table.iter().map(|block| if *block == NO_BLOCK { kept } else { *block }));
            query += tokens;
        }
        let window = match fixed.cache_groups[group] {
            CacheGroup::SlidingWindow { window } => Some(window),
            CacheGroup::Full | CacheGroup::MlaLatent => None,
        };
        let mut attend = |sequences: &[Sequence]| Attend::new(words, sequences, fixed, window);
        let all = attend(&all);
        let wanted = (!all_wanted && !wanted.is_empty()).then(|| attend(&wanted));
        Self { slots: words.add(slots), tables: words.add(tables), all, wanted }
    }
}

impl Attend {
    fn new(words: &mut Words, sequences: &[Sequence], fixed: &Fixed<'_>, window: Option<usize>) -> Self {
        let Fixed { kind, kv_heads, heads_per_kv, processors, .. } = *fixed;
        let cut = Cut::choose(sequences, kind, kv_heads, heads_per_kv, processors);
        let mut plan = Plan::new(sequences, heads_per_kv, window, cut);
        if partial_floats(&plan, fixed) > ATTENTION_PARTIAL_FLOATS_MAX {
            plan = Plan::new(sequences, heads_per_kv, window, Cut { chunks: None, ..cut });
        }
        let items = words.add(plan.items.iter().copied());
        let merges = words.add(plan.merges.iter().copied());
        Self { plan, items, merges }
    }
}

fn partial_floats(plan: &Plan, fixed: &Fixed<'_>) -> usize {
    plan.partial_floats(fixed.kv_heads, fixed.kind.value_dim())
}

/// Of each row's position, one row after another.
fn angles(chunks: &[Chunk<'_>], rope: &Rope) -> [Vec<f32>; 2] {
    let (compute, half) = (Compute::single(), rope.inv_freq().len());
    let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
    let [mut cosines, mut sines] = [vec![0.0; rows * half], vec![0.0; rows * half]];
    let positions = chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.tokens.len());
    let places = cosines.chunks_exact_mut(half).zip(sines.chunks_exact_mut(half));
    for (position, (cosines, sines)) in positions.zip(places) {
        rope.angles(&compute, position, cosines, sines);
    }
    [cosines, sines]
}

/// Lists, one behind the other.
struct Words(Vec<u32>);

impl Words {
    fn add(&mut self, list: impl IntoIterator<Item = u32>) -> Part {
        self.0.resize(self.0.len().next_multiple_of(ALIGNED), 0);
        let first = self.0.len();
        self.0.extend(list);
        Part { first, len: self.0.len() - first }
    }
}
