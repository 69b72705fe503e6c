//! Cold workers join gradually: an engine that has just come up compiles kernels, captures graphs and holds
//! no prefix, so for a while it counts as slower than the others. It is sent little at first, mostly what it
//! costs it least to be sent; each of that warms its cache. A fleet that is new as a whole is not slowed, and
//! where requests wait the caller leaves it: a cold worker is better than none.

use std::time::Duration;

/// Speed of a worker that has just come up, relative to its own.
const FIRST: f64 = 0.1;

/// Each worker's speed relative to its own, from how long it has been up: evenly from a tenth to all of it
/// `over` this time, as a share of what the oldest of them has.
pub fn ramps(up_for: &[Duration], over: Duration) -> impl Iterator<Item = f64> {
    let ramp = move |up_for: &Duration| (up_for.as_secs_f64() / over.as_secs_f64()).clamp(FIRST, 1.0);
    let most = up_for.iter().map(ramp).fold(FIRST, f64::max);
    up_for.iter().map(move |up_for| ramp(up_for) / most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;
    use crate::pace::PaceSnapshot;
    use crate::pick::{Candidate, Policy, RequestView, Turn, pick};

    const OVER: Duration = Duration::from_secs(30);

    fn s(seconds: &[u64]) -> Vec<Duration> {
        seconds.iter().map(|s| Duration::from_secs(*s)).collect()
    }

    #[test]
    fn the_cold_one_is_slower_and_a_new_fleet_is_not() {
        let ramps = |up_for: &[Duration], over| ramps(up_for, over).collect::<Vec<_>>();
        assert_eq!(ramps(&s(&[100, 0, 15, 30]), OVER), [1.0, 0.1, 0.5, 1.0]);
        assert_eq!(ramps(&s(&[0, 1, 2]), OVER), [1.0; 3]);
        assert_eq!(ramps(&s(&[5, 0]), Duration::ZERO)[0], 1.0);
        assert!(ramps(&[], OVER).is_empty());
    }

    /// Requests of a second each come to a warm worker and one that has come up this long ago; how many the
    /// latter is sent of a burst of twenty.
    fn sent_to_the_new_one(up_for: u64) -> usize {
        let speeds: Vec<f64> = ramps(&s(&[1000, up_for]), OVER).collect();
        let mut backlogs = [0.0; 2];
        let request =
            RequestView { chain: &[], prompt_tokens: 1_000, block_tokens: 16.0, media: &[], session: None };
        (0..20)
            .filter(|_| {
                let candidate = |i: usize| {
                    let pace =
                        PaceSnapshot { backlog_ms: backlogs[i] / speeds[i], ..PaceSnapshot::default() };
                    let load = LoadSnapshot { pace, ..LoadSnapshot::default() };
                    Candidate::new(WorkerId(i as u32), load, speeds[i], 1.0)
                };
                let all = [candidate(0), candidate(1)];
                let chosen = pick(Policy::Prefix, &request, &all, &Turn { counter: 0, random: 1 }).unwrap();
                backlogs[chosen.index] += 1_000.0;
                chosen.index == 1
            })
            .count()
    }

    #[test]
    fn a_cold_worker_gets_a_share_that_grows() {
        let shares: Vec<usize> = [0, 10, 20, 30].into_iter().map(sent_to_the_new_one).collect();
        assert!(shares[0] <= 2 && shares.is_sorted() && shares[1] > shares[0], "{shares:?}");
        assert_eq!(shares[3], 10);
    }
}
