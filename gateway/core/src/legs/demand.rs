//! How much of their time prompts ask of workers that compute for others, sent to them or not. It tells
//! whether they could compute all prompts, so that answers elsewhere need not stand still.
//!
//! A worker that was sent few prompts has little of them cached, and would have more if it were sent all. So
//! while answers' pace does not count, and few are sent, a prompt asks for what is left of it where it is
//! answered, as many times over as was left of prompts while the pace did count. That is forgotten in ten
//! minutes, and tried again.
//!
//! Figures as in [`crate::legs`]'s table, of the same scenarios:
//!
//! | answers' pace counts | 6 of 8 | 4 of 8 | agents, 2 of 8 |
//! |---|---|---|---|
//! | always | 20.2, 20, 10.2 | 27.5, 85, 13.8 | 0.89, 38, 4.4 |
//! | where all could be computed elsewhere | 20.5, 20, 10.2 | 17.2, 85, 13.3 | 0.44, 85, 4.8 |

use std::f64::consts::LN_2;
use std::time::Duration;

use crate::fading::FadingSum;
use crate::pick::Candidate;

/// After so long what a prompt asked for counts half: long enough that a burst is no load, short enough that
/// a load is seen within minutes.
const HALF_LIFE: Duration = Duration::from_secs(180);
/// Before its first prompt nothing was asked of a worker for so long: one prompt is no load.
const IDLE_BEFORE: Duration = Duration::from_secs(5);
/// After so long it counts half how much more was left to compute there.
const DEARER_HALF_LIFE: Duration = Duration::from_secs(600);
/// Tokens of which as many are taken to be left there as here, before prompts were compared.
const AS_MANY_TOKENS: f64 = 6_000.0;

/// Up to this share of what workers for prefill can do, the pace of answers counts in full.
const EVEN_UP_TO: f64 = 1.0;
/// From this share on it does not count: they cannot compute all prompts, so answers stand still in any case.
const UNEVEN_FROM: f64 = 1.05;

/// Tokens of a prompt that are left to compute.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct LeftToCompute {
    /// Where the request is answered.
    pub here: u64,
    /// At the worker that computes it for another one, or would be the one to.
    pub there: u64,
}

/// What is asked of one worker that computes prompts for others.
#[derive(Debug, Clone)]
pub(crate) struct PrefillDemand {
    /// Tokens: a speed that was not known when they came counts, too.
    asked: FadingSum,
    first: Option<Duration>,
    /// Tokens of prompts that came while answers' pace counted: there, and here.
    there: FadingSum,
    here: FadingSum,
}

impl Default for PrefillDemand {
    fn default() -> Self {
        let of_prompts = || FadingSum::new(DEARER_HALF_LIFE);
        Self { asked: FadingSum::new(HALF_LIFE), first: None, there: of_prompts(), here: of_prompts() }
    }
}

impl PrefillDemand {
    /// A request begins whose prompt this worker computes, or would be the one to; `evenness`: how much
    /// answers' pace counted.
    pub(crate) fn add(&mut self, now: Duration, left: LeftToCompute, evenness: f64) {
        self.first.get_or_insert(now);
        let (here, there) = (left.here as f64, left.there as f64);
        self.there.add(there * evenness, now);
        self.here.add(here * evenness, now);
        let if_all_were_sent = there.min(here * self.dearer(now));
        self.asked.add(evenness * there + (1.0 - evenness) * if_all_were_sent, now);
    }

    /// The share of its time that is asked for, of a worker that computes `tokens_per_ms`; above 1 it is more
    /// than there is.
    pub(crate) fn share(&self, now: Duration, tokens_per_ms: f64) -> f64 {
        let Some(first) = self.first else { return 0.0 };
        let halves = (now.saturating_sub(first) + IDLE_BEFORE).as_secs_f64() / HALF_LIFE.as_secs_f64();
        // What a steady rate adds up to is that rate times the half-life over ln 2, once all of it was seen.
        let seen = 1.0 - (-halves).exp2();
        self.asked.at(now) * LN_2 / HALF_LIFE.as_millis() as f64 / seen / tokens_per_ms
    }

    /// How many times as much was left of prompts there as here.
    fn dearer(&self, now: Duration) -> f64 {
        (self.there.at(now) + AS_MANY_TOKENS) / (self.here.at(now) + AS_MANY_TOKENS)
    }
}

/// How much the pace of answers counts, from 1 to 0, by the share of their time that is asked of the workers
/// for prefill.
pub fn evenness(prefill: &[Candidate]) -> f64 {
    ((UNEVEN_FROM - asked_share(prefill)) / (UNEVEN_FROM - EVEN_UP_TO)).clamp(0.0, 1.0)
}

/// The share of their time that prompts ask of the workers for prefill, other gateways' prompts among them.
pub fn asked_share(prefill: &[Candidate]) -> f64 {
    let asked: f64 = prefill.iter().map(|one| one.load.asked_share / one.load.shares.own).sum();
    asked / prefill.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;
    use crate::others::Shares;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Tokens of a worker that computes so many in a millisecond.
    const PER_MS: f64 = 10.0;

    fn same(ms: u64) -> LeftToCompute {
        left(ms, ms)
    }

    /// A prompt that takes so long.
    fn left(here_ms: u64, there_ms: u64) -> LeftToCompute {
        LeftToCompute { here: here_ms * PER_MS as u64, there: there_ms * PER_MS as u64 }
    }

    /// Prompts of `own` each `gap` seconds from one time to another; what they are asked by then.
    fn asks(
        demand: &mut PrefillDemand,
        (from, to): (f64, f64),
        gap: f64,
        own: LeftToCompute,
        evenness: f64,
    ) -> f64 {
        for i in 0..((to - from) / gap) as u32 {
            demand.add(s(from + f64::from(i) * gap), own, evenness);
        }
        demand.share(s(to), PER_MS)
    }

    #[test]
    fn a_steady_load_is_its_share_of_the_time_from_its_first_minute_on() {
        for until in [60.0, 200.0, 3_000.0] {
            let mut demand = PrefillDemand::default();
            assert_eq!(demand.share(s(1_000.0), PER_MS), 0.0);
            let share = asks(&mut demand, (1_000.0, 1_000.0 + until), 0.5, same(300), 1.0);
            assert!((share / 0.6 - 1.0).abs() < 0.1, "{until}: {share}");
        }
        // It is forgotten.
        let mut demand = PrefillDemand::default();
        asks(&mut demand, (0.0, 600.0), 0.5, same(600), 1.0);
        assert!(demand.share(s(600.0 + 20.0 * 60.0), PER_MS) < 0.02);
    }

    /// Sessions that fit into the answering workers' caches, and not into those of a worker that computes for
    /// all of them.
    #[test]
    fn what_would_not_be_cached_there_is_known_for_a_while_after_none_is_sent() {
        let evicted = left(100, 400);
        let mut demand = PrefillDemand::default();
        assert!(asks(&mut demand, (0.0, 300.0), 0.2, evicted, 1.0) > 1.8);
        // None is sent there any more, so nothing of a prompt is cached there.
        let cold = left(100, 2_000);
        let soon = asks(&mut demand, (300.0, 900.0), 0.2, cold, 0.0);
        assert!((1.5..2.1).contains(&soon), "{soon}");
        let late = asks(&mut demand, (900.0, 9_000.0), 0.2, cold, 0.0);
        assert!((0.45..0.6).contains(&late), "{late}");
    }

    /// A burst is over; the same sessions would be cached at a worker for prefill, were they sent to it.
    #[test]
    fn a_worker_whose_cache_went_cold_while_none_was_sent_is_found_able_again() {
        let mut demand = PrefillDemand::default();
        asks(&mut demand, (0.0, 300.0), 0.2, same(100), 1.0);
        assert!(asks(&mut demand, (300.0, 600.0), 0.2, same(400), 0.0) > 1.2);
        let cold = left(100, 2_000);
        let share = asks(&mut demand, (600.0, 1_800.0), 0.2, cold, 0.0);
        assert!(share < 0.6, "{share}");
    }

    #[test]
    fn the_pace_counts_where_all_can_be_computed_elsewhere_and_not_where_they_cannot() {
        let of = |shares: &[f64], own: f64| {
            let one = |(i, share): (usize, &f64)| {
                let shares = Shares { own, gateways: own };
                let load = LoadSnapshot { asked_share: *share, shares, ..LoadSnapshot::default() };
                Candidate::new(WorkerId(i as u32), load, 8.0, 1.0)
            };
            evenness(&shares.iter().enumerate().map(one).collect::<Vec<_>>())
        };
        assert_eq!((of(&[], 1.0), of(&[0.0], 1.0), of(&[1.5, 0.2], 1.0)), (1.0, 1.0, 1.0));
        assert_eq!((of(&[1.9, 0.2], 1.0), of(&[4.0], 1.0)), (0.0, 0.0));
        assert!((of(&[1.025], 1.0) - 0.5).abs() < 1e-9);
        // Two other gateways send as much each.
        assert_eq!((of(&[0.4], 1.0), of(&[0.4], 1.0 / 3.0)), (1.0, 0.0));
    }

    proptest! {
        /// More to compute is never less that is asked, and nothing is asked of a worker twice.
        #[test]
        fn what_is_asked_lies_between_what_is_left_here_and_there(
            here_ms in 0_u64..9_000, there_ms in 0_u64..9_000, evenness in 0.0..=1.0_f64, gap in 0.01..5.0_f64,
        ) {
            let asked = |own| asks(&mut PrefillDemand::default(), (0.0, 100.0 * gap), gap, own, evenness);
            let share = asked(left(here_ms, there_ms));
            let (least, most) = (asked(same(here_ms.min(there_ms))), asked(same(there_ms)));
            prop_assert!(share >= least * 0.999 && share <= most * 1.001, "{share} {least} {most}");
        }
    }
}
