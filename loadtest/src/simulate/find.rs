//! The fewest workers with which a fleet meets an SLO: growth by doubling until it holds, then bisection.
//! Whether it holds is asked, not known here.

/// Tries fleets of 1 to `workers_max` workers. The answer holds itself, and one worker fewer was tried and
/// does not (or there is none fewer); `None` if even the largest fleet does not hold.
pub(super) fn fewest(workers_max: usize, mut holds: impl FnMut(usize) -> bool) -> Option<usize> {
    let (mut too_few, mut enough) = (0, 1);
    while !holds(enough) {
        if enough == workers_max {
            return None;
        }
        too_few = enough;
        enough = (enough * 2).min(workers_max);
    }
    while enough - too_few > 1 {
        let middle = usize::midpoint(too_few, enough);
        if holds(middle) { enough = middle } else { too_few = middle }
    }
    Some(enough)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_knee_is_found_exactly(knee in 1usize..1500, workers_max in 1usize..1024) {
            let mut tried = Vec::new();
            let found = fewest(workers_max, |workers| {
                tried.push(workers);
                workers >= knee
            });
            prop_assert_eq!(found, (knee <= workers_max).then_some(knee));
            prop_assert!(tried.len() <= 22);
            prop_assert!(tried.iter().all(|workers| (1..=workers_max).contains(workers)));
        }

        /// Also where more workers do not always help.
        #[test]
        fn the_answer_holds_and_one_fewer_does_not(table in prop::collection::vec(any::<bool>(), 1..200)) {
            if let Some(workers) = fewest(table.len(), |workers| table[workers - 1]) {
                prop_assert!(table[workers - 1]);
                prop_assert!(workers == 1 || !table[workers - 2]);
            }
        }
    }
}
