//! How many lines a fleet's faults may take in the log. A worker is named while there is room; of the others
//! one line says how many there are, so that a fleet of a thousand workers whose network is gone does not
//! bury everything else.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use keyway_core::{index::WorkerId, rate_limit::RateLimit};
use parking_lot::Mutex;

use crate::{
    fleet::Cause,
    limits::{FAULT_LINES_PER_MINUTE, FAULT_SUMMARY_AFTER, FAULT_SUMMARY_EVERY},
};

/// What the workers' probes share.
#[derive(Debug)]
pub struct Complaints(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    room: RateLimit,
    /// Workers whose faults were not told for want of room; at most the fleet.
    untold: HashMap<WorkerId, Cause>,
    summary_at: Duration,
}

impl Default for Complaints {
    fn default() -> Self {
        let room = RateLimit::per_minute(FAULT_LINES_PER_MINUTE, Duration::ZERO);
        Self(Mutex::new(Inner { room, untold: HashMap::new(), summary_at: Duration::ZERO }))
    }
}

impl Complaints {
    /// Whether this worker's fault may have a line now. If not it is among the others.
    pub fn may_tell(&self, worker: WorkerId, cause: Cause, now: Duration) -> bool {
        let mut inner = self.0.lock();
        if inner.room.take(1.0, now).is_ok() {
            inner.untold.remove(&worker);
            return true;
        }
        if inner.untold.is_empty() {
            inner.summary_at = inner.summary_at.max(now + FAULT_SUMMARY_AFTER);
        }
        inner.untold.insert(worker, cause);
        false
    }

    /// A worker has no fault any more, or has gone.
    pub fn over(&self, worker: WorkerId) {
        self.0.lock().untold.remove(&worker);
    }

    /// How many workers were not named and why, if it is time to say so.
    pub fn summary(&self, now: Duration) -> Option<(usize, String)> {
        let mut inner = self.0.lock();
        if inner.untold.is_empty() || now < inner.summary_at {
            return None;
        }
        inner.summary_at = now + FAULT_SUMMARY_EVERY;
        let mut by_cause = BTreeMap::<&str, usize>::new();
        for cause in inner.untold.values() {
            *by_cause.entry(cause.as_str()).or_default() += 1;
        }
        let causes: Vec<_> = by_cause.iter().map(|(cause, workers)| format!("{cause} {workers}")).collect();
        let workers = inner.untold.len();
        inner.untold.clear();
        Some((workers, causes.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand workers that fail from the start, each probed every 15 s; named lines and summaries of
    /// `minutes`.
    fn outage(minutes: u64) -> (usize, Vec<(usize, String)>) {
        let complaints = Complaints::default();
        let (mut named, mut summaries) = (0, Vec::new());
        let mut told = std::collections::HashSet::new();
        for second in (0..minutes * 60).step_by(15) {
            for worker in 0..1_000_u32 {
                let now = Duration::from_secs(second) + Duration::from_millis(u64::from(worker) * 15);
                let cause = if worker % 10 == 0 { Cause::Dns } else { Cause::Refused };
                if !told.contains(&worker) && complaints.may_tell(WorkerId(worker), cause, now) {
                    told.insert(worker);
                    named += 1;
                }
                summaries.extend(complaints.summary(now));
            }
        }
        (named, summaries)
    }

    #[test]
    fn a_thousand_workers_that_fail_at_once_take_some_lines_a_minute() {
        let (named, summaries) = outage(5);
        let most = FAULT_LINES_PER_MINUTE as usize * 5 + FAULT_LINES_PER_MINUTE as usize / 6 + 1;
        assert!((10..=most).contains(&named), "{named} lines");
        assert!((4..=6).contains(&summaries.len()), "{summaries:?}");
        let (workers, causes) = &summaries[1];
        assert!(*workers > 850 && causes.starts_with("dns ") && causes.contains(", refused "), "{causes}");
    }

    #[test]
    fn who_is_well_again_is_not_counted() {
        let complaints = Complaints::default();
        let mut now = Duration::from_secs(1);
        let untold: Vec<_> =
            (0..100).map(WorkerId).filter(|id| !complaints.may_tell(*id, Cause::Reset, now)).collect();
        untold.iter().skip(1).for_each(|id| complaints.over(*id));
        assert_eq!(complaints.summary(now), None, "others may still come");
        now += FAULT_SUMMARY_AFTER;
        assert_eq!(complaints.summary(now), Some((1, "reset 1".to_owned())));
        assert_eq!(complaints.summary(now + FAULT_SUMMARY_EVERY), None, "said once");
    }

    #[test]
    fn a_few_workers_are_all_named_and_need_no_summary() {
        let complaints = Complaints::default();
        assert!((0..3).all(|id| complaints.may_tell(WorkerId(id), Cause::Tls, Duration::ZERO)));
        assert_eq!(complaints.summary(Duration::from_secs(100)), None);
    }
}
