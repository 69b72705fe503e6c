//! A budget: how much may be used in a day or a month. What is used counts once it is known. Several
//! gateways may have one budget together: each says what it has used itself, and is told what the others
//! have. All sums are integers, in tokens or in nano-units of money. When a day or month begins and ends is
//! an argument, in seconds since 1970, so that no clock or calendar is here.

use std::ops::Range;

/// One budget, in the day or month that was last seen.
#[derive(Debug, Clone)]
pub struct Budget {
    allowed: u64,
    warn_from: u64,
    /// The day or month: from its first second to the next one's.
    time: Range<u64>,
    own: u64,
    others: u64,
    /// `own` as the sum up to then was asked for.
    asked_at: Option<u64>,
    /// Whether what was used before is in `own`.
    is_summed: bool,
    /// `own` as the others know it.
    said: Option<u64>,
    /// What was said of this gateway's use before is in `others`.
    others_have_own: bool,
    mark: BudgetMark,
}

/// How far a budget is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum BudgetMark {
    /// Not so far that anybody need know.
    #[default]
    Below,
    /// So far that its tenant is warned.
    Warned,
    /// All of it, or more.
    Used,
}

impl Budget {
    /// Of `allowed`, of which nothing is known to be used yet in this day or month. From `warn_at` of it on,
    /// a share between 0 and 1, its tenant is warned.
    pub fn new(allowed: u64, warn_at: f64, time: Range<u64>) -> Self {
        let mut budget = Self {
            allowed,
            warn_from: 0,
            time,
            own: 0,
            others: 0,
            asked_at: None,
            is_summed: false,
            said: None,
            others_have_own: false,
            mark: BudgetMark::Below,
        };
        budget.allow(allowed, warn_at);
        budget
    }

    /// So much is allowed from now on; what was used stays used.
    pub fn allow(&mut self, allowed: u64, warn_at: f64) {
        self.allowed = allowed;
        self.warn_from = ((allowed as f64 * warn_at).ceil() as u64).min(allowed);
        // What is raised may be crossed again.
        self.mark = self.mark.min(self.stands_at());
    }

    /// Goes over to the day or month of `now`, if that is another one. `time_of`: its beginning, and the next
    /// one's. A clock that goes back changes nothing.
    pub fn at(&mut self, now: u64, time_of: impl FnOnce(u64) -> Range<u64>) {
        if now >= self.time.end {
            self.time = time_of(now);
            (self.own, self.asked_at, self.said) = (0, None, None);
            self.forgets_others();
            self.mark = BudgetMark::Below;
        }
    }

    /// So much was used here.
    pub fn uses(&mut self, amount: u64) {
        self.own = self.own.saturating_add(amount);
    }

    /// The sum of what was used before is being asked for: all that is used from now on is not in it.
    pub fn asks_sum(&mut self) {
        self.asked_at = Some(self.own);
    }

    /// Takes the sum that was asked for, if it is of this day or month; whether it was.
    pub fn takes_sum(&mut self, begins: u64, sum: u64) -> bool {
        let Some(asked_at) = self.asked_at.take().filter(|_| begins == self.time.start) else { return false };
        self.own = sum.saturating_add(self.own.saturating_sub(asked_at));
        self.is_summed = true;
        if self.others_have_own {
            // It would count twice; the next answer says it anew.
            self.forgets_others();
        }
        true
    }

    /// Whether what was used before is known.
    pub fn is_summed(&self) -> bool {
        self.is_summed
    }

    /// What the others are to know; `None`: that is not known yet.
    pub fn to_say(&self) -> Option<u64> {
        self.is_summed.then_some(self.own)
    }

    /// The others know that so much was used here, and have used so much themselves, in the day or month that
    /// began then. Who has said nothing hears of them all that was said before, by itself too. What others
    /// have used never becomes less: who says so has forgotten some of it.
    pub fn hears(&mut self, begins: u64, said: Option<u64>, others: u64) {
        if begins != self.time.start || (said.is_none() && self.is_summed) {
            return;
        }
        self.others_have_own = said.is_none();
        (self.said, self.others) = (said, others.max(self.others));
    }

    fn forgets_others(&mut self) {
        (self.others, self.others_have_own) = (0, false);
    }

    /// The others may have forgotten what was used here.
    pub fn unsays(&mut self) {
        self.said = None;
    }

    /// Whether the others know all that was used here.
    pub fn is_said(&self) -> bool {
        self.is_summed && self.own == self.said.unwrap_or(0)
    }

    /// What was used in this day or month, here and by others.
    pub fn used(&self) -> u64 {
        self.own.saturating_add(self.others)
    }

    /// What may be used in each day or month.
    pub fn allowed(&self) -> u64 {
        self.allowed
    }

    /// From how much on its tenant is warned.
    pub fn warn_from(&self) -> u64 {
        self.warn_from
    }

    /// What is left in this day or month, at least 0.
    pub fn left(&self) -> u64 {
        self.allowed.saturating_sub(self.used())
    }

    /// The day or month: from its first second to the next one's.
    pub fn time(&self) -> Range<u64> {
        self.time.clone()
    }

    /// How far it is used, here and by others.
    pub fn stands_at(&self) -> BudgetMark {
        match self.used() {
            used if used >= self.allowed => BudgetMark::Used,
            used if used >= self.warn_from => BudgetMark::Warned,
            _ => BudgetMark::Below,
        }
    }

    /// The mark that was crossed since this was last asked: each once in a day or month.
    pub fn crossed(&mut self) -> Option<BudgetMark> {
        let (before, now) = (self.mark, self.stands_at());
        self.mark = before.max(now);
        (before < now).then_some(now)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: u64 = 86_400;

    fn day(now: u64) -> Range<u64> {
        now / DAY * DAY..(now / DAY + 1) * DAY
    }

    /// Of which nothing was used before.
    fn budget(allowed: u64, warn_at: f64) -> Budget {
        let mut budget = Budget::new(allowed, warn_at, day(0));
        budget.asks_sum();
        assert!(budget.takes_sum(0, 0) && budget.is_summed());
        budget
    }

    #[test]
    fn each_mark_is_crossed_once_and_again_where_more_is_allowed() {
        let mut budget = budget(100, 0.8);
        budget.uses(79);
        assert_eq!((budget.crossed(), budget.stands_at()), (None, BudgetMark::Below));
        budget.uses(1);
        assert_eq!((budget.crossed(), budget.crossed(), budget.left()), (Some(BudgetMark::Warned), None, 20));
        budget.uses(50);
        assert_eq!((budget.crossed(), budget.crossed(), budget.left()), (Some(BudgetMark::Used), None, 0));
        budget.allow(200, 0.5);
        assert_eq!((budget.crossed(), budget.stands_at(), budget.left()), (None, BudgetMark::Warned, 70));
        budget.uses(70);
        assert_eq!(budget.crossed(), Some(BudgetMark::Used));
    }

    #[test]
    fn at_midnight_all_is_left_again_and_a_clock_that_goes_back_changes_nothing() {
        let mut budget = budget(10, 1.0);
        budget.uses(10);
        budget.hears(0, Some(10), 5);
        budget.at(DAY - 1, day);
        assert_eq!((budget.used(), budget.stands_at()), (15, BudgetMark::Used));
        budget.at(DAY, day);
        assert_eq!((budget.used(), budget.time(), budget.is_said()), (0, DAY..2 * DAY, true));
        budget.uses(3);
        budget.at(DAY - 1, day);
        assert_eq!((budget.used(), budget.time()), (3, DAY..2 * DAY));
        // What was asked or said of yesterday is not today's.
        budget.hears(0, Some(10), 5);
        budget.asks_sum();
        assert!(!budget.takes_sum(0, 100));
        assert_eq!((budget.used(), budget.is_said()), (3, false));
    }

    #[test]
    fn who_forgets_what_was_said_is_told_again_and_takes_nothing_back() {
        let mut budget = budget(100, 1.0);
        budget.uses(10);
        budget.hears(0, Some(10), 50);
        assert!(budget.is_said());
        budget.unsays();
        budget.hears(0, Some(0), 0);
        assert_eq!((budget.used(), budget.is_said()), (60, false));
        budget.hears(0, budget.to_say(), 55);
        assert_eq!((budget.used(), budget.is_said()), (65, true));
    }

    #[test]
    fn what_was_used_before_is_added_to_what_came_meanwhile() {
        let mut budget = Budget::new(1_000, 0.8, day(0));
        budget.uses(7);
        budget.asks_sum();
        budget.uses(5);
        // What was said of it before is the others', as far as is known yet.
        assert_eq!(budget.to_say(), None);
        budget.hears(0, None, 130);
        assert_eq!((budget.used(), budget.is_said()), (142, false));
        assert!(budget.takes_sum(0, 107), "7 of them are in the sum");
        assert_eq!((budget.used(), budget.to_say()), (112, Some(112)));
        budget.hears(0, None, 130);
        assert_eq!(budget.used(), 112, "an answer that comes too late");
        budget.hears(0, Some(112), 30);
        assert_eq!((budget.used(), budget.is_said()), (142, true));
        assert!(!budget.takes_sum(0, 107), "once");
    }

    proptest! {
        /// In whatever order gateways use, say and hear: once all have said all, each knows the sum.
        #[test]
        fn gateways_come_to_know_the_sum(steps in prop::collection::vec((0..3_usize, 0..1_000_u64, any::<bool>()), 0..64)) {
            let mut gateways = [(); 3].map(|()| budget(u64::MAX, 1.0));
            let mut store = [0; 3];
            let exchange = |gateways: &mut [Budget; 3], store: &mut [u64; 3], at: usize| {
                store[at] = gateways[at].to_say().unwrap();
                let others = store.iter().sum::<u64>() - store[at];
                gateways[at].hears(0, Some(store[at]), others);
            };
            let mut all = 0_u64;
            for (at, amount, says) in steps {
                gateways[at].uses(amount);
                all += amount;
                if says {
                    exchange(&mut gateways, &mut store, at);
                }
                prop_assert!(gateways[at].used() <= all);
            }
            for round in 0..6 {
                exchange(&mut gateways, &mut store, round % 3);
            }
            for gateway in &gateways {
                prop_assert_eq!((gateway.used(), gateway.is_said()), (all, true));
            }
        }
    }
}
