//! What one request has used, for the ledger: settled once, as its tenant's limits are, and entered when its
//! record is written.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    access::tenants::{Crossed, Estimate, Held, Used, Visit},
    error::Error,
    ledger::{BilledEnd, Counts, Ledger, Outlay, Series, Tokens},
};

/// The bill of a request that may make a worker compute.
pub(super) struct Bill {
    ledger: Arc<Ledger>,
    estimate: Estimate,
    /// A worker was asked: the prompt may have been computed, even if the client has left since.
    asked: bool,
    spent: Option<Spent>,
    /// What is set aside of its tenant's budgets until it is over.
    held: Option<Held>,
}

/// Tokens, and which of them no worker has reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spent {
    tokens: Tokens,
    estimated: Tokens,
}

impl Spent {
    /// `estimate`: what is taken for the prompt and the longest answer, where neither was reported.
    fn of(used: Used, estimate: Estimate) -> Self {
        let prompt = estimate.prompt;
        match used {
            Used::Nothing => Self::default(),
            Used::Tokens(tokens) => Self { tokens, estimated: Tokens::default() },
            Used::Begun(tokens) => {
                Self { tokens, estimated: Tokens { generated: tokens.generated, ..Tokens::default() } }
            }
            Used::Passed(generated) => Self::all(Tokens { prompt, cached: 0, generated }),
            Used::Most => Self::all(Tokens { prompt, cached: 0, generated: estimate.most }),
        }
    }

    fn all(tokens: Tokens) -> Self {
        Self { tokens, estimated: tokens }
    }

    /// As a worker has reported them.
    pub(super) fn reported(tokens: Tokens) -> Self {
        Self { tokens, estimated: Tokens::default() }
    }

    /// All of them, estimated ones too.
    pub(super) fn tokens(&self) -> Tokens {
        self.tokens
    }
}

impl Bill {
    pub(super) fn new(ledger: Arc<Ledger>) -> Self {
        ledger.begins();
        Self { ledger, estimate: Estimate::default(), asked: false, spent: None, held: None }
    }

    /// What it may take is known.
    pub(super) fn estimate(&mut self, estimate: Estimate) {
        self.estimate = estimate;
    }

    /// Sets aside of its tenant's budgets what it may use, where they have anything left.
    pub(super) fn hold(&mut self, visit: &Visit, model: &str) -> Result<(), Error> {
        let Estimate { prompt, answer, .. } = self.estimate;
        let tokens = Tokens { prompt, cached: 0, generated: answer };
        let cost = self.ledger.cost(model, tokens).unwrap_or_default();
        self.held = visit.hold(Outlay { tokens: tokens.total(), cost })?;
        Ok(())
    }

    /// A worker is asked.
    pub(super) fn asks(&mut self) {
        self.asked = true;
    }

    /// Charges it. The first word counts.
    pub(super) fn settle(&mut self, used: Used) {
        let estimate = self.estimate;
        self.spent.get_or_insert_with(|| Spent::of(used, estimate));
    }

    /// The request is over: who left before any answer is charged for the prompt, if a worker was asked.
    pub(super) fn enter(
        mut self,
        whose: Option<&Visit>,
        model: &str,
        end: BilledEnd,
        ttft: Option<Duration>,
    ) -> Spent {
        self.settle(if self.asked { Used::Passed(0) } else { Used::Nothing });
        let spent = self.spent.unwrap_or_default();
        let series = Series::new(whose.map(|visit| (visit.tenant().name(), visit.key())), model);
        let counts = Counts::of(end, spent.tokens, spent.estimated, ttft);
        let cost = self.ledger.cost(model, spent.tokens);
        let counts = cost.map_or(counts, |cost| counts.priced(cost));
        let mut crossed = Crossed::default();
        let held = self.held.take();
        let charge =
            || crossed = whose.map(|visit| visit.charge(held, Outlay::of(&counts))).unwrap_or_default();
        self.ledger.enter(series, &counts, charge);
        if let Some(visit) = whose {
            visit.charged(&crossed);
        }
        spent
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        self.ledger.ended();
    }
}

impl fmt::Debug for Bill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bill").field("spent", &self.spent).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_worker_reports_is_estimated_and_said_to_be() {
        let estimate = Estimate { prompt: 100, answer: 20, most: 500 };
        let tokens = |prompt, generated| Tokens { prompt, cached: 0, generated };
        for (used, all, estimated) in [
            (Used::Nothing, tokens(0, 0), tokens(0, 0)),
            (Used::Tokens(tokens(90, 7)), tokens(90, 7), tokens(0, 0)),
            (Used::Begun(tokens(90, 7)), tokens(90, 7), tokens(0, 7)),
            (Used::Passed(7), tokens(100, 7), tokens(100, 7)),
            (Used::Most, tokens(100, 500), tokens(100, 500)),
        ] {
            assert_eq!(Spent::of(used, estimate), Spent { tokens: all, estimated }, "{used:?}");
        }
    }
}
