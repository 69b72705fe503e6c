//! What the host tells a device of one step: which rows there are, where their keys and values go, what each
//! attends to. All of it is one list of words, copied at once.
//!
//! A decode step is filled up: to a size of batch from a ladder, with rows that write nothing, and with
//! blocks of attention that do nothing. So few forms of steps are all there are, and one form's launches are
//! the same every time, which a device can record.

use keyway_kernels::compute::Compute;
use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::paged_attention::{AttentionCut, AttentionPlan, CutFor, ITEM_WORDS, Sequence};
use keyway_kernels::cuda::rope::NO_SLOT;
use keyway_kernels::cuda::rules::{ROW_WORDS, RowRules};
use keyway_kernels::cuda::sample::{NOT_WANTED, PARAMETER_WORDS, TOP};
use keyway_kernels::rope::Rope;

use super::room::Grown;
use crate::engine::backend::{CacheGroup, Chunk, Draw, NO_BLOCK, PENDING};
use crate::limits::{ATTENTION_PARTIAL_FLOATS_MAX, RECORDED_ROWS_MAX};

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
    pub(super) plan: AttentionPlan,
    pub(super) items: Part,
    pub(super) merges: Part,
}

/// What a cache group's layers have in common.
#[derive(Debug)]
pub(super) struct GroupStep {
    /// Where each row's keys and values go.
    pub(super) slots: Part,
    pub(super) tables: Part,
    /// Attention of all rows of the step.
    pub(super) all: Attend,
    /// Of the rows whose logits are wanted; `None` if these are all rows, or there are none.
    pub(super) wanted: Option<Attend>,
}

/// One step as the words that kernels read, and where in them each list lies.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) words: Vec<u32>,
    /// Rows there are, with those it is filled up with.
    pub(super) rows: usize,
    /// Whether it is filled up.
    filled: bool,
    pub(super) tokens: Part,
    /// Cosines and sines of each row's position.
    pub(super) angles: [Part; 2],
    /// Rows whose logits are wanted, and whether they are all there are, but for those it is filled up with.
    pub(super) wanted: Part,
    pub(super) all_wanted: bool,
    /// How many are wanted.
    pub(super) wanted_rows: usize,
    /// Where ranks share the experts: how many rows each round has, but for those the step is filled up with;
    /// of all rows, and of those whose logits are wanted.
    counts: Option<[Part; 2]>,
    /// How each row that goes through the head is drawn, where any is, or a token of the step before is
    /// filled in.
    pub(super) draws: Option<Part>,
    /// What changes each such row's logits before, where any row's are changed; and masks, one behind the
    /// other.
    pub(super) rules: Option<Part>,
    pub(super) masks: Option<Part>,
    /// How many of the likeliest tokens are wanted with each such row's score, where any row's is.
    pub(super) scores: Option<Part>,
    pub(super) groups: Vec<GroupStep>,
}

/// What is the same in every step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fixed<'a> {
    pub(super) rope: &'a Rope,
    pub(super) cache_groups: &'a [CacheGroup],
    pub(super) block_size: usize,
    pub(super) cut_for: CutFor,
    /// Where ranks share the experts: rows of a round.
    pub(super) round: Option<usize>,
}

impl Step {
    /// `draws`: of each row that is wanted; `rules`: the same, without masks.
    pub(super) fn new(
        chunks: &[Chunk<'_>],
        draws: &[Option<Draw<'_>>],
        rules: &[Option<RowRules>],
        fixed: &Fixed<'_>,
    ) -> Self {
        let decode = chunks.iter().all(|chunk| chunk.tokens.len() == 1 && chunk.wants_logits);
        let filled = decode && chunks.len() <= RECORDED_ROWS_MAX;
        let mut words = Words { list: Vec::new(), filled };
        let own_rows: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let rows = if filled { ladder(own_rows) } else { own_rows };
        let tokens = words.fill(chunks.iter().flat_map(|chunk| chunk.tokens.iter().copied()), rows, 0);
        let half = fixed.rope.inv_freq().len();
        let angles = angles(chunks, fixed.rope)
            .map(|list| words.fill(list.into_iter().map(f32::to_bits), rows * half, 0));
        let ends = chunks.iter().scan(0, |end, chunk| {
            *end += chunk.tokens.len();
            Some((*end, chunk.wants_logits))
        });
        let wanted: Vec<u32> = ends.filter(|(_, wanted)| *wanted).map(|(end, _)| end as u32 - 1).collect();
        let (wanted_rows, all_wanted) = (wanted.len(), wanted.len() == own_rows);
        let wanted = words.add(if all_wanted { Vec::new() } else { wanted });
        let head_rows = if all_wanted { rows } else { wanted_rows };
        let (rules, masks) = words.rules(draws, rules, head_rows);
        let scores = words.scores(draws, head_rows);
        let counts = fixed.round.map(|round| {
            [(rows, own_rows), (head_rows, wanted_rows)].map(|(rows, own)| words.rounds(rows, own, round))
        });
        let draws = words.draws(chunks, draws, head_rows);
        let group = |group| GroupStep::new(&mut words, chunks, fixed, group, [rows, wanted_rows]);
        let groups = (0..fixed.cache_groups.len()).map(group).collect();
        Self {
            words: words.list,
            rows,
            filled,
            tokens,
            angles,
            wanted,
            all_wanted,
            wanted_rows,
            counts,
            draws,
            rules,
            masks,
            scores,
            groups,
        }
    }

    /// How many rows each round has, of `rows` rows that still go through the layers. Where ranks share the
    /// experts.
    pub(super) fn counts(&self, rows: usize) -> Part {
        let [all, wanted] = self.counts.unwrap_or([Part { first: 0, len: 0 }; 2]);
        if rows == self.rows { all } else { wanted }
    }

    /// Of a step that is filled up, where rows' keys and values go: those that fill it up, nowhere.
    pub(super) fn kv_slots(&self) -> Option<Part> {
        self.groups.first().filter(|_| self.filled).map(|group| group.slots)
    }

    /// How many rows go through the head, with those it is filled up with.
    pub(super) fn head_rows(&self) -> usize {
        if self.all_wanted { self.rows } else { self.wanted_rows }
    }

    /// What its launches follow from, while no buffer moves: where its lists begin and how attention is cut.
    /// `None` of a step that is not filled up.
    pub(super) fn form(&self) -> Option<Vec<usize>> {
        let mut form = vec![self.rows];
        let mut add = |part: &Part| form.extend([part.first, part.len]);
        [&self.tokens, &self.angles[0], &self.angles[1]].into_iter().for_each(&mut add);
        for group in &self.groups {
            [&group.slots, &group.tables, &group.all.items, &group.all.merges].into_iter().for_each(&mut add);
        }
        [&self.draws, &self.rules, &self.masks]
            .into_iter()
            .flatten()
            .chain(self.counts.iter().flatten())
            .for_each(&mut add);
        // Beside the others' places this one's says whether it is there.
        add(&self.scores.unwrap_or(Part { first: 0, len: 0 }));
        for group in &self.groups {
            let AttentionCut { rows, chunks } = group.all.plan.cut;
            form.extend([rows, chunks.unwrap_or(0)]);
        }
        self.filled.then_some(form)
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
        [rows, wanted_rows]: [usize; 2],
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
            // Kernels read whole tiles, before a window too, where nothing but zeros comes of it: from any
            // block whose numbers are finite.
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
        let some = wanted_rows > 0 && wanted_rows < query;
        let wanted = some.then(|| attend(&wanted));
        let entries = words.ladder(tables.len());
        Self { slots: words.fill(slots, rows, NO_SLOT), tables: words.fill(tables, entries, 0), all, wanted }
    }
}

impl Attend {
    fn new(words: &mut Words, sequences: &[Sequence], fixed: &Fixed<'_>, window: Option<usize>) -> Self {
        let group = fixed.cut_for.group;
        let cut = AttentionCut::choose(sequences, &fixed.cut_for);
        let mut plan = AttentionPlan::new(sequences, group, window, cut);
        if partial_floats(&plan, fixed) > ATTENTION_PARTIAL_FLOATS_MAX {
            plan = AttentionPlan::new(sequences, group, window, AttentionCut { chunks: None, ..cut });
        }
        for list in [&mut plan.items, &mut plan.merges] {
            // An item of zeros has no tokens, so nothing to do.
            list.resize(words.ladder(list.len() / ITEM_WORDS) * ITEM_WORDS, 0);
        }
        let items = words.add(plan.items.iter().copied());
        let merges = words.add(plan.merges.iter().copied());
        Self { plan, items, merges }
    }
}

fn partial_floats(plan: &AttentionPlan, fixed: &Fixed<'_>) -> usize {
    let CutFor { kind, kv_heads, processors, .. } = fixed.cut_for;
    plan.partial_floats(kv_heads, kind.value_dim(), processors)
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

/// Sizes that steps are filled up to, a quarter apart, of few in eights: 1, 2, 4, 8, 16, 24, 32, 40 … 128,
/// 160 ….
pub(super) fn ladder(size: usize) -> usize {
    let power = size.next_power_of_two();
    if size <= 8 { size.max(1).next_power_of_two() } else { size.next_multiple_of((power / 8).max(8)) }
}

/// Lists, one behind the other.
struct Words {
    list: Vec<u32>,
    /// Whether the step is filled up.
    filled: bool,
}

impl Words {
    fn add(&mut self, list: impl IntoIterator<Item = u32>) -> Part {
        self.list.resize(self.list.len().next_multiple_of(ALIGNED), 0);
        let first = self.list.len();
        self.list.extend(list);
        Part { first, len: self.list.len() - first }
    }

    /// A list that is filled up with `by` to `len`.
    fn fill(&mut self, list: impl IntoIterator<Item = u32>, len: usize, by: u32) -> Part {
        let first = self.add(list).first;
        self.list.resize(first + len, by);
        Part { first, len }
    }

    /// How many of `own` rows there are in each round of `round` rows; the step is filled up to `rows`.
    fn rounds(&mut self, rows: usize, own: usize, round: usize) -> Part {
        self.add((0..rows).step_by(round).map(|first| own.saturating_sub(first).min(round) as u32))
    }

    /// How rows are drawn. A row of zeros takes the likeliest: rows whose logits are wanted, or that fill up.
    fn draws(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>], head_rows: usize) -> Option<Part> {
        let pending = |chunk: &Chunk<'_>| chunk.tokens.iter().any(|token| token & PENDING != 0);
        if draws.iter().all(Option::is_none) && !chunks.iter().any(pending) {
            return None;
        }
        let words = draws.iter().flat_map(|draw| draw.map_or([0; PARAMETER_WORDS], |draw| draw.by.words()));
        Some(self.fill(words, head_rows * PARAMETER_WORDS, 0))
    }

    /// What changes rows' logits, and masks. Rows without either, or that fill up, have words that say so.
    fn rules(
        &mut self,
        draws: &[Option<Draw<'_>>],
        rules: &[Option<RowRules>],
        head_rows: usize,
    ) -> (Option<Part>, Option<Part>) {
        let (mut words, mut masks) = (Vec::new(), Vec::new());
        let mut stride = 0;
        for (draw, rules) in draws.iter().zip(rules) {
            let own = draw.and_then(|draw| draw.mask);
            let mask = own.map(|_| masks.len());
            masks.extend(own.into_iter().flatten());
            stride = stride.max(own.map_or(0, <[u32]>::len));
            words.extend(RowRules { mask, ..rules.unwrap_or_default() }.words());
        }
        if rules.iter().all(Option::is_none) && masks.is_empty() {
            return (None, None);
        }
        let rules = self.fill(words, head_rows * ROW_WORDS, u32::MAX);
        let len = self.ladder(masks.len() / stride.max(1)) * stride;
        (Some(rules), (len > 0).then(|| self.fill(masks, len, 0)))
    }

    fn scores(&mut self, draws: &[Option<Draw<'_>>], head_rows: usize) -> Option<Part> {
        let wanted: Vec<Option<usize>> = draws.iter().map(|draw| draw.and_then(|draw| draw.score)).collect();
        wanted.iter().any(Option::is_some).then(|| {
            let words = wanted.into_iter().map(|top| top.map_or(NOT_WANTED, |top| top.min(TOP) as u32));
            self.fill(words, head_rows, NOT_WANTED)
        })
    }

    /// How long a list of `len` is to be.
    fn ladder(&self, len: usize) -> usize {
        if self.filled && len > 0 { ladder(len) } else { len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_up_in_eights_and_then_in_quarters() {
        let mut steps: Vec<usize> = (1..=300).map(ladder).collect();
        assert!((1..=300).zip(&steps).all(|(size, step)| *step >= size && *step <= (size * 2).max(8)));
        assert!((32..=300).zip(&steps[31..]).all(|(size, step)| *step * 4 <= size * 5));
        steps.dedup();
        assert_eq!(steps[..11], [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]);
        assert!(steps.len() < 30, "{steps:?}");
    }
}
