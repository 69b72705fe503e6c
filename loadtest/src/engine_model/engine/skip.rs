//! Many steps at once, where nobody is to hear of the tokens in between. Gives what one step after the other
//! gives, to the nanosecond.

use super::{Engine, Nanos, StepWork};

impl Engine {
    /// A time before which no request's first or last token comes out, if nothing is submitted or cancelled;
    /// at or after [`Engine::next_event_at`]. Who needs no other tokens saves the steps in between: while all
    /// decode, the one that ends first ends after as many steps as it has tokens left, and none is shorter
    /// than for the shortest one alone.
    pub fn quiet_until(&self) -> Option<Nanos> {
        let ends = self.step_ends?;
        let mut left = u32::MAX;
        let mut context = u32::MAX;
        for run in &self.running {
            let request = &self.requests[run.slot as usize];
            if request.generated == 0 || request.cancelled || run.computed + run.scheduled < run.known {
                return Some(ends);
            }
            (left, context) = (left.min(request.left), context.min(run.computed));
        }
        if !self.waiting.is_empty() {
            return Some(ends);
        }
        let alone =
            StepWork { decodes: 1, decode_context: context.into(), sequences: 1, ..StepWork::default() };
        let step = (self.profile.cost.of(&alone) * self.slowdown).floor() as Nanos;
        Some(ends + u64::from(left - 1) * step)
    }

    /// Does the steps from the one that ends `at` on that end until `now`, as long as each running request
    /// decodes, none of them ends, and none needs a block or has filled one: of these all that matters is how
    /// long they take. `false` if there is none such.
    pub(super) fn skip_steps(&mut self, at: Nanos, now: Nanos) -> bool {
        let steps_max = self.steps_alike();
        if steps_max == 0 {
            return false;
        }
        let all = self.running.len() as u64;
        let context = self.running.iter().map(|run| u64::from(run.computed)).sum();
        let mut work =
            StepWork { decodes: all, decode_context: context, sequences: all, ..StepWork::default() };
        let (mut at, mut steps) = (at, 0);
        while steps < steps_max && at <= now {
            work.decode_context += all;
            at += rounded(self.profile.cost.of(&work) * self.slowdown);
            steps += 1;
        }
        for run in &mut self.running {
            (run.computed, run.known) = (run.computed + steps, run.known + steps);
            let request = &mut self.requests[run.slot as usize];
            (request.generated, request.left) = (request.generated + steps, request.left - steps);
        }
        self.totals.steps += u64::from(steps);
        self.totals.generated_tokens += u64::from(steps) * all;
        self.step_ends = Some(at);
        true
    }

    /// How many steps, the one under way among them, [`Engine::skip_steps`] may do at most.
    fn steps_alike(&self) -> u32 {
        let all = self.running.len();
        if all == 0
            || !self.waiting.is_empty()
            || self.leaving > 0
            || all > self.profile.token_budget as usize
        {
            return 0;
        }
        let mut steps = u32::MAX;
        for run in &self.running {
            let request = &self.requests[run.slot as usize];
            if request.generated == 0 || run.scheduled != 1 || run.computed + 1 < run.known {
                return 0;
            }
            // The step after the last one computes one token more.
            let until_block = run.room.min(run.name_at - 1).saturating_sub(run.computed + 1);
            steps = steps.min(request.left - 1).min(until_block);
        }
        steps
    }
}

/// The nearest whole number of nanoseconds, as `f64::round` has it: without the call that this is on
/// processors that are not known to have an instruction for it.
fn rounded(ns: f64) -> Nanos {
    let whole = ns as i64;
    whole as Nanos + Nanos::from(ns - whole as f64 >= 0.5)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_rounds_as_the_library_does(whole in 0_u64..1 << 52, part in 0.0..1.0_f64, small in 0.0..3.0_f64) {
            let halves = whole as f64 / 2.0;
            for ns in [whole as f64 + part, halves, small, 0.5, 0.499_999_999_999_999_94] {
                prop_assert_eq!(rounded(ns), ns.round() as Nanos, "{}", ns);
            }
        }
    }
}
