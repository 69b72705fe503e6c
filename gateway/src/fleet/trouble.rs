//! A worker's trouble: since when it has which fault, and when that is worth a line in the log: once, then
//! ever more rarely.

use std::time::Duration;

use super::{Cause, Fault};

/// How long after it was last told a fault that stays is told again: 1, 5 and 30 minutes after the first
/// time, then half-hourly.
const PAUSES: [Duration; 4] = [
    Duration::from_secs(60),
    Duration::from_secs(4 * 60),
    Duration::from_secs(25 * 60),
    Duration::from_secs(30 * 60),
];

/// What is wrong with one worker.
#[derive(Debug, Default)]
pub struct Trouble {
    present: Option<Present>,
    /// What has been told, each cause once. Outlives the fault for a minute: a worker that comes and goes is
    /// no news each time.
    told: Vec<Told>,
}

/// The fault that is there.
#[derive(Debug, Clone)]
pub struct Present {
    /// What a probe said last.
    pub fault: Fault,
    /// When one said so first.
    pub since: Duration,
    /// How many have said so since.
    pub times: u64,
    /// When a probe first found any fault, and how many have since.
    began: Duration,
    failures: u64,
}

#[derive(Debug)]
struct Told {
    cause: Cause,
    last: Duration,
    /// How often it was told again; chooses the pause before the next time.
    repeats: usize,
}

impl Told {
    /// Counted from the last time: what was due while the fault was away is not made up for.
    fn next(&self) -> Duration {
        self.last + PAUSES[self.repeats.min(PAUSES.len() - 1)]
    }
}

impl Trouble {
    /// A probe found a fault.
    pub fn found(&mut self, fault: Fault, now: Duration) {
        let Some(present) = &mut self.present else {
            // Told long ago, in trouble that is over: it is news.
            self.told.retain(|told| now.saturating_sub(told.last) < PAUSES[0]);
            self.present = Some(Present { fault, since: now, times: 1, began: now, failures: 1 });
            return;
        };
        present.failures += 1;
        if present.fault.cause == fault.cause {
            present.times += 1;
        } else {
            (present.since, present.times) = (now, 1);
        }
        present.fault = fault;
    }

    /// The fault, if it is to be told: when so many probes have found one, and when its time has come again.
    pub fn to_tell(&self, after: u64, now: Duration) -> Option<&Present> {
        let present = self.present.as_ref().filter(|present| present.failures >= after)?;
        let told = self.told.iter().find(|told| told.cause == present.fault.cause);
        told.is_none_or(|told| told.next() <= now).then_some(present)
    }

    /// It has been told.
    pub fn told(&mut self, now: Duration) {
        let Some(cause) = self.present.as_ref().map(|present| present.fault.cause) else { return };
        match self.told.iter_mut().find(|told| told.cause == cause) {
            Some(told) => (told.last, told.repeats) = (now, told.repeats + 1),
            None => self.told.push(Told { cause, last: now, repeats: 0 }),
        }
    }

    /// A probe found nothing wrong. What was, and whether the log told of it.
    pub fn over(&mut self) -> Option<(Present, bool)> {
        let present = self.present.take()?;
        let told = self.told.iter().any(|told| told.last >= present.began);
        Some((present, told))
    }

    /// The fault that is there.
    pub fn present(&self) -> Option<&Present> {
        self.present.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EVERY: Duration = Duration::from_secs(15);

    fn fault(cause: Cause) -> Fault {
        Fault { cause, url: "http://w:1/health".into(), text: "nothing came".into(), remedy: "look" }
    }

    fn minutes(minutes: u64) -> Duration {
        Duration::from_secs(60 * minutes)
    }

    /// Probes of a worker with this fault, from `from` on until `until`; when it was told.
    fn probed(trouble: &mut Trouble, cause: Cause, from: Duration, until: Duration) -> Vec<Duration> {
        let mut lines = Vec::new();
        let mut now = from;
        while now < until {
            trouble.found(fault(cause), now);
            if trouble.to_tell(2, now).is_some() {
                trouble.told(now);
                lines.push(now);
            }
            now += EVERY;
        }
        lines
    }

    #[test]
    fn a_fault_is_told_at_its_second_probe_and_then_after_1_5_30_60_and_90_minutes() {
        let mut trouble = Trouble::default();
        let lines = probed(&mut trouble, Cause::Refused, Duration::ZERO, minutes(100));
        let after: Vec<u64> = lines.iter().map(|at| at.saturating_sub(lines[0]).as_secs() / 60).collect();
        assert_eq!((lines[0], after), (EVERY, vec![0, 1, 5, 30, 60, 90]));
        let present = trouble.present().unwrap();
        assert_eq!((present.since, present.times), (Duration::ZERO, 400));
    }

    #[test]
    fn another_cause_is_told_at_once_and_the_first_is_not_told_anew_when_it_returns() {
        let mut trouble = Trouble::default();
        probed(&mut trouble, Cause::Refused, Duration::ZERO, minutes(1));
        assert_eq!(probed(&mut trouble, Cause::ServerError, minutes(1), minutes(2)), [minutes(1)]);
        assert_eq!(trouble.present().unwrap().since, minutes(1));
        let again = probed(&mut trouble, Cause::Refused, minutes(2), minutes(3));
        assert_eq!(again, [minutes(2)], "its minute is over");
        assert!(probed(&mut trouble, Cause::Refused, minutes(3), minutes(4)).is_empty());
    }

    #[test]
    fn a_cause_that_returns_late_is_told_once_and_not_for_each_time_it_missed() {
        let mut trouble = Trouble::default();
        probed(&mut trouble, Cause::Refused, Duration::ZERO, minutes(1));
        probed(&mut trouble, Cause::Reset, minutes(1), minutes(20));
        let lines = probed(&mut trouble, Cause::Refused, minutes(20), minutes(24));
        assert_eq!(lines, [minutes(20)]);
    }

    #[test]
    fn what_is_over_is_gone_and_is_news_when_it_comes_back_later() {
        let mut trouble = Trouble::default();
        let first = probed(&mut trouble, Cause::Timeout, Duration::ZERO, minutes(1));
        let (past, told) = trouble.over().unwrap();
        assert!(told && past.times == 4 && trouble.present().is_none() && trouble.over().is_none());
        let later = probed(&mut trouble, Cause::Timeout, minutes(10), minutes(11));
        assert_eq!((first.len(), later), (1, vec![minutes(10) + EVERY]));
    }

    #[test]
    fn one_failed_probe_is_not_told_nor_that_it_is_over() {
        let mut trouble = Trouble::default();
        trouble.found(fault(Cause::Reset), minutes(1));
        assert!(trouble.to_tell(2, minutes(1)).is_none() && trouble.to_tell(1, minutes(1)).is_some());
        assert!(trouble.over().is_some_and(|(_, told)| !told));
    }

    proptest! {
        /// However a worker comes and goes, each cause has at most a line a minute, and what is kept stays
        /// small.
        #[test]
        fn a_worker_that_comes_and_goes_is_no_flood(steps in prop::collection::vec((0_u8..4, 1_u64..20), 1..300)) {
            let causes = [Cause::Refused, Cause::Reset, Cause::ServerError];
            let (mut trouble, mut now, mut lines) = (Trouble::default(), Duration::ZERO, Vec::new());
            for (what, wait) in steps {
                now += Duration::from_secs(wait);
                let Some(cause) = causes.get(usize::from(what)) else {
                    trouble.over();
                    continue;
                };
                trouble.found(fault(*cause), now);
                if trouble.to_tell(1, now).is_some() {
                    trouble.told(now);
                    lines.push((*cause, now));
                }
            }
            prop_assert!(trouble.told.len() <= causes.len());
            for cause in causes {
                let times: Vec<Duration> = lines.iter().filter(|line| line.0 == cause).map(|line| line.1).collect();
                prop_assert!(times.windows(2).all(|two| two[1].saturating_sub(two[0]) >= PAUSES[0]), "{times:?}");
            }
        }
    }
}
