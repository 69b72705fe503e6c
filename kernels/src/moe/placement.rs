//! Which ranks hold which expert: one each, or several for experts that serve many tokens. A pure value; who
//! moves weights is not its business.

use std::fmt;

use crate::fabric::RANKS_MAX;

/// Which ranks hold each logical expert of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    ranks: usize,
    /// By expert: bit `r` is set if rank `r` holds it.
    holders: Vec<u32>,
}

/// Why experts cannot be placed so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlacementError {
    /// There are no ranks, or more than [`RANKS_MAX`]: so many.
    Ranks(usize),
    /// No rank holds an expert, or one that there is not.
    Holders {
        /// The first such expert.
        expert: usize,
        /// How many ranks there are.
        ranks: usize,
    },
}

impl fmt::Display for PlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ranks(ranks) => write!(f, "{ranks} ranks are not 1 to {RANKS_MAX}"),
            Self::Holders { expert, ranks } => {
                write!(f, "expert {expert} is held by no rank, or by one beyond {ranks}")
            }
        }
    }
}

impl std::error::Error for PlacementError {}

impl Placement {
    /// Every expert once: equal runs of neighbours, the first ranks one longer if need be.
    ///
    /// # Panics
    /// If there is no rank, or more than [`RANKS_MAX`].
    pub fn even(experts: usize, ranks: usize) -> Self {
        assert!((1..=RANKS_MAX).contains(&ranks), "placement: 1 to {RANKS_MAX} ranks");
        Self { ranks, holders: (0..experts).map(|expert| 1 << (expert * ranks / experts)).collect() }
    }

    /// From the mask of holders of each expert; the reason if that cannot be.
    pub fn from_holders(ranks: usize, holders: Vec<u32>) -> Result<Self, PlacementError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(PlacementError::Ranks(ranks));
        }
        let all = u32::MAX >> (RANKS_MAX - ranks);
        match holders.iter().position(|mask| *mask == 0 || mask & !all != 0) {
            Some(expert) => Err(PlacementError::Holders { expert, ranks }),
            None => Ok(Self { ranks, holders }),
        }
    }

    /// A placement for measured `loads`, tokens by expert, over `ranks` of `room` experts each: what room
    /// there is beyond one place for each expert goes to further holders of the hottest. Greedy in two steps,
    /// as DeepSeek's EPLB: a holder more, again and again, for whichever expert has the greatest load per
    /// holder; then the greatest shares first, each to the rank with the least. Equal loads give equal
    /// placements.
    ///
    /// # Panics
    /// If the experts have no room, or the ranks are not 1 to [`RANKS_MAX`].
    pub fn balanced(loads: &[u64], ranks: usize, room: usize) -> Self {
        assert!((1..=RANKS_MAX).contains(&ranks), "placement: 1 to {RANKS_MAX} ranks");
        assert!(ranks * room >= loads.len(), "placement: the experts have no room");
        let copies = copies(loads, ranks, ranks * room - loads.len());
        let share = |expert: usize| loads[expert] as f64 / f64::from(copies[expert]);
        let mut parts: Vec<usize> =
            (0..loads.len()).flat_map(|expert| (0..copies[expert]).map(move |_| expert)).collect();
        parts.sort_by(|a, b| share(*b).total_cmp(&share(*a)).then(a.cmp(b)));
        let mut holders = vec![0_u32; loads.len()];
        let (mut held, mut load) = (vec![0; ranks], vec![0.0; ranks]);
        for expert in parts {
            let free = (0..ranks).filter(|rank| held[*rank] < room && holders[expert] >> rank & 1 == 0);
            // There is room for all parts, so an expert's first finds a rank. A further one may find only
            // ranks that have the expert: then it stays with fewer.
            if let Some(rank) = free.min_by(|a, b| f64::total_cmp(&load[*a], &load[*b])) {
                holders[expert] |= 1 << rank;
                held[rank] += 1;
                load[rank] += share(expert);
            }
        }
        Self { ranks, holders }
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How many logical experts there are.
    pub fn experts(&self) -> usize {
        self.holders.len()
    }

    /// By expert, the mask of the ranks that hold it.
    pub fn holders(&self) -> &[u32] {
        &self.holders
    }

    /// The greatest load of a rank for measured `loads`, if an expert's tokens are shared equally by its
    /// holders.
    ///
    /// # Panics
    /// If there are not as many loads as experts.
    pub fn heaviest(&self, loads: &[u64]) -> f64 {
        assert_eq!(loads.len(), self.holders.len(), "placement: a load for each expert");
        let of_rank = |rank: usize| -> f64 {
            let held = self.holders.iter().zip(loads).filter(|(mask, _)| *mask >> rank & 1 == 1);
            held.map(|(mask, load)| *load as f64 / f64::from(mask.count_ones())).sum()
        };
        (0..self.ranks).map(of_rank).fold(0.0, f64::max)
    }

    /// Whether `rank` holds `expert`.
    pub fn holds(&self, rank: usize, expert: usize) -> bool {
        self.holders[expert] >> rank & 1 == 1
    }
}

/// How many holders each expert shall have: 1, and `more` in all besides.
fn copies(loads: &[u64], ranks: usize, more: usize) -> Vec<u32> {
    let mut copies = vec![1_u32; loads.len()];
    for _ in 0..more {
        let growing =
            (0..loads.len()).filter(|expert| (copies[*expert] as usize) < ranks && loads[*expert] > 0);
        // Cross-multiplied, so that equal shares are equal; of those the first.
        let hottest = growing.reduce(|best, expert| {
            let (a, b) = (u128::from(loads[best]), u128::from(loads[expert]));
            if b * u128::from(copies[best]) > a * u128::from(copies[expert]) { expert } else { best }
        });
        let Some(hottest) = hottest else { break };
        copies[hottest] += 1;
    }
    copies
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The greatest load of a rank if an expert's tokens are shared equally by its holders, over the mean.
    fn imbalance(placement: &Placement, loads: &[u64]) -> f64 {
        let mean = loads.iter().sum::<u64>() as f64 / placement.ranks() as f64;
        placement.heaviest(loads) / mean.max(f64::MIN_POSITIVE)
    }

    #[test]
    fn even_runs_are_neighbours() {
        assert_eq!(Placement::even(4, 2).holders(), [1, 1, 2, 2]);
        assert_eq!(Placement::even(3, 4).holders(), [1, 2, 4]);
        assert_eq!(Placement::even(5, 2).holders(), [1, 1, 1, 2, 2]);
        assert_eq!(Placement::even(2, 1).holders(), [1, 1]);
    }

    #[test]
    fn a_hot_expert_is_held_more_than_once() {
        let loads = [800, 10, 10, 10, 10, 10, 10, 10];
        let once = Placement::balanced(&loads, 4, 2);
        assert!(once.holders().iter().all(|mask| mask.is_power_of_two()));
        let redundant = Placement::balanced(&loads, 4, 3);
        assert_eq!(redundant.holders()[0].count_ones(), 4);
        assert!(imbalance(&once, &loads) > 3.0 && imbalance(&redundant, &loads) < 1.2);
    }

    #[test]
    fn masks_that_cannot_be_are_refused() {
        assert!(Placement::from_holders(2, vec![1, 3]).is_ok());
        let refused = |ranks, masks| Placement::from_holders(ranks, masks).unwrap_err();
        assert_eq!(refused(2, vec![1, 0]), PlacementError::Holders { expert: 1, ranks: 2 });
        assert_eq!(refused(2, vec![4]).to_string(), "expert 0 is held by no rank, or by one beyond 2");
        assert_eq!(refused(0, vec![]), PlacementError::Ranks(0));
        assert_eq!(refused(33, vec![]).to_string(), "33 ranks are not 1 to 32");
        assert!(Placement::from_holders(32, vec![u32::MAX]).is_ok());
    }

    proptest! {
        #[test]
        fn every_expert_has_a_holder_and_no_rank_more_than_its_room(
            loads in prop::collection::vec(0..1000_u64, 1..60),
            ranks in 1..=8_usize,
            spare in 0..4_usize,
        ) {
            let room = loads.len().div_ceil(ranks) + spare;
            let placement = Placement::balanced(&loads, ranks, room);
            prop_assert!(Placement::from_holders(ranks, placement.holders().to_vec()).is_ok());
            for rank in 0..ranks {
                let held = (0..loads.len()).filter(|expert| placement.holds(rank, *expert)).count();
                prop_assert!(held <= room);
            }
            prop_assert_eq!(&placement, &Placement::balanced(&loads, ranks, room));
            // List scheduling is at most twice the best, plus the greatest single share.
            let total: u64 = loads.iter().sum();
            if total > 0 && spare == 0 {
                let most = imbalance(&placement, &loads) * total as f64 / ranks as f64;
                let largest = *loads.iter().max().unwrap() as f64;
                prop_assert!(most <= total as f64 / ranks as f64 * 2.0 + largest + 1e-9);
            }
        }
    }
}
