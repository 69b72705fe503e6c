//! Where the slots of a rank's tokens go, and where their rows come back: a pure function of the router's
//! choice, the placement and the rank. Moves nothing; `parallel.rs` does.
//!
//! A slot is a token's choice of an expert (`token * top + choice`). The slots that go to one rank form a
//! [`Part`], grouped by expert, ascending; a token is sent to a rank once, however many of its experts are
//! there. What comes back is a row for each slot, in the part's order: the sum over a token's slots is made
//! here, in slot order, by which it has the same bits wherever the experts are.

use super::Placement;

/// Slots of an expert with several holders that stay together: fewer are not worth another rank's reading of
/// its weights.
const RUN: u32 = 16;

/// What one rank's tokens need of all ranks.
#[derive(Debug, Default)]
pub struct ExchangePlan {
    /// By rank, this one included.
    pub parts: Vec<Part>,
    /// By slot: the rank its row comes from, and the row among those of that rank.
    pub returns: Vec<(u32, u32)>,
    /// By expert: slots so far, and the rank of the run under way.
    seen: Vec<(u32, u32)>,
    /// Slots of each rank so far.
    assigned: Vec<u32>,
    /// By slot: its rank.
    targets: Vec<u32>,
    /// By rank and expert: the next row.
    next: Vec<u32>,
}

/// What goes to one rank.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Tokens, ascending, each once.
    pub tokens: Vec<u32>,
    /// Experts, ascending, and how many of the rows are theirs; none without.
    pub experts: Vec<(u32, u32)>,
    /// Places in `tokens`, a row for each slot: grouped by expert, ascending in a group.
    pub rows: Vec<u32>,
}

impl ExchangePlan {
    /// Makes the plan for the slots `ids` `[tokens, top]`, reusing this value's memory.
    ///
    /// # Panics
    /// If an id is not an expert of the placement.
    pub fn make(&mut self, ids: &[u32], top: usize, placement: &Placement) {
        let (experts, ranks) = (placement.experts(), placement.ranks());
        self.choose(ids, placement);
        self.parts.resize_with(ranks, Part::default);
        self.next.clear();
        self.next.resize(ranks * experts, 0);
        for (id, target) in ids.iter().zip(&self.targets) {
            self.next[*target as usize * experts + *id as usize] += 1;
        }
        for (part, counts) in self.parts.iter_mut().zip(self.next.chunks_exact_mut(experts.max(1))) {
            part.begin(counts);
        }
        self.returns.clear();
        for (slot, (id, target)) in ids.iter().zip(&self.targets).enumerate() {
            let part = &mut self.parts[*target as usize];
            let token = (slot / top) as u32;
            if part.tokens.last() != Some(&token) {
                part.tokens.push(token);
            }
            let next = &mut self.next[*target as usize * experts + *id as usize];
            part.rows[*next as usize] = part.tokens.len() as u32 - 1;
            self.returns.push((*target, *next));
            *next += 1;
        }
    }

    /// Chooses a holder for each slot: the only one, or of several, run by run, the one with the fewest slots
    /// so far.
    fn choose(&mut self, ids: &[u32], placement: &Placement) {
        self.seen.clear();
        self.seen.resize(placement.experts(), (0, 0));
        self.assigned.clear();
        self.assigned.resize(placement.ranks(), 0);
        self.targets.clear();
        for id in ids {
            let (seen, target) = &mut self.seen[*id as usize];
            if *seen % RUN == 0 {
                let holders = placement.holders()[*id as usize];
                let holding = (0..placement.ranks()).filter(|rank| holders >> rank & 1 == 1);
                let least = holding.min_by_key(|rank| self.assigned[*rank]);
                // A placement has a holder for every expert.
                *target = least.unwrap_or(0) as u32;
            }
            *seen += 1;
            self.assigned[*target as usize] += 1;
            self.targets.push(*target);
        }
    }
}

impl Part {
    /// Lays out the groups of `counts`, by expert, which becomes the first row of each group.
    fn begin(&mut self, counts: &mut [u32]) {
        self.tokens.clear();
        self.experts.clear();
        let mut rows = 0;
        for (expert, count) in counts.iter_mut().enumerate() {
            if *count > 0 {
                self.experts.push((expert as u32, *count));
            }
            let first = rows;
            rows += *count;
            *count = first;
        }
        self.rows.clear();
        self.rows.resize(rows as usize, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any placement, any slots: (placement, ids, top).
    fn cases() -> impl Strategy<Value = (Placement, Vec<u32>, usize)> {
        (1..=6_usize, 1..=20_usize, 1..=4_usize, 0..40_usize).prop_flat_map(
            |(ranks, experts, top, tokens)| {
                let masks = prop::collection::vec(1..1_u32 << ranks, experts);
                let ids = prop::collection::vec(0..experts as u32, tokens * top);
                (masks, ids)
                    .prop_map(move |(masks, ids)| (Placement::from_holders(ranks, masks).unwrap(), ids, top))
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Every slot is a row of the part of a rank that holds its expert, in that expert's group, with its
        /// token; rows and slots are as many, and no two slots have the same row.
        #[test]
        fn rows_are_a_permutation_of_the_slots((placement, ids, top) in cases(), (_, other, other_top) in cases()) {
            let mut plan = ExchangePlan::default();
            // Memory of another plan must not show.
            let wide = Placement::even(20, 6);
            plan.make(&other, other_top, &wide);
            plan.make(&ids, top, &placement);
            let mut fresh = ExchangePlan::default();
            fresh.make(&ids, top, &placement);
            prop_assert_eq!(&plan.parts, &fresh.parts);
            prop_assert_eq!(&plan.returns, &fresh.returns);
            prop_assert_eq!(plan.returns.len(), ids.len());
            prop_assert_eq!(plan.parts.iter().map(|part| part.rows.len()).sum::<usize>(), ids.len());
            let mut taken = std::collections::BTreeSet::new();
            for (slot, (rank, row)) in plan.returns.iter().enumerate() {
                prop_assert!(taken.insert((*rank, *row)));
                prop_assert!(placement.holds(*rank as usize, ids[slot] as usize));
                let part = &plan.parts[*rank as usize];
                prop_assert_eq!(part.tokens[part.rows[*row as usize] as usize] as usize, slot / top);
                prop_assert_eq!(group_of(part, *row), ids[slot]);
            }
        }

        #[test]
        fn parts_are_ascending_and_without_what_nobody_needs((placement, ids, top) in cases()) {
            let mut plan = ExchangePlan::default();
            plan.make(&ids, top, &placement);
            prop_assert_eq!(plan.parts.len(), placement.ranks());
            for part in &plan.parts {
                prop_assert!(part.tokens.is_sorted_by(|a, b| a < b));
                prop_assert!(part.experts.is_sorted_by(|a, b| a.0 < b.0));
                prop_assert!(part.experts.iter().all(|(_, count)| *count > 0));
                let rows: u32 = part.experts.iter().map(|(_, count)| count).sum();
                prop_assert_eq!(rows as usize, part.rows.len());
                let used: std::collections::BTreeSet<u32> = part.rows.iter().copied().collect();
                prop_assert_eq!(used.len(), part.tokens.len());
                let mut first = 0;
                for (_, count) in &part.experts {
                    prop_assert!(part.rows[first..first + *count as usize].is_sorted());
                    first += *count as usize;
                }
            }
        }
    }

    fn group_of(part: &Part, row: u32) -> u32 {
        let mut first = 0;
        for (expert, count) in &part.experts {
            first += count;
            if row < first {
                return *expert;
            }
        }
        u32::MAX
    }

    #[test]
    fn a_token_goes_to_a_rank_once() {
        let mut plan = ExchangePlan::default();
        plan.make(&[0, 1, 3, 2, 0, 1], 3, &Placement::even(4, 2));
        assert_eq!(plan.parts[0].tokens, [0, 1]);
        assert_eq!(plan.parts[0].experts, [(0, 2), (1, 2)]);
        assert_eq!(plan.parts[0].rows, [0, 1, 0, 1]);
        assert_eq!(
            plan.parts[1],
            Part { tokens: vec![0, 1], experts: vec![(2, 1), (3, 1)], rows: vec![1, 0] }
        );
        assert_eq!(plan.returns, [(0, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 3)]);
    }

    #[test]
    fn several_holders_share_long_runs_and_keep_short_ones_together() {
        let everywhere = Placement::from_holders(4, vec![0b1111; 2]).unwrap();
        let mut plan = ExchangePlan::default();
        plan.make(&[0; 64], 1, &everywhere);
        assert!(plan.parts.iter().all(|part| part.rows.len() == 16));
        plan.make(&[0, 0, 1, 1, 1], 1, &everywhere);
        assert_eq!(plan.parts.iter().map(|part| part.rows.len()).collect::<Vec<_>>(), [2, 3, 0, 0]);
    }
}
