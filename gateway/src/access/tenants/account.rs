//! What one tenant has used of its budgets, and what its requests in flight may use. A request is charged
//! when it is over, at the same moment as it is entered in the ledger; what it may use is set aside before a
//! worker is asked. What was used before this process is asked of the ledger.

mod name;

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use http::HeaderValue;
use k8s_openapi::jiff::Timestamp;
use keyway_core::{Budget, BudgetMark};
use parking_lot::Mutex;

pub(super) use self::name::BudgetName;
use super::file::BudgetTable;
use crate::{
    error::{Error, OverBudget},
    ledger::{Outlay, Sums},
    limits::STORE_BUDGETS_KEEP,
    metrics::TenantMetrics,
    store::{About, BudgetQuestion, LimitQuestion},
};

/// How long a request may wait that could begin if those in flight used less than was set aside for them.
const WHILE_HELD: Duration = Duration::from_secs(1);

/// One tenant's budgets. It has one for as long as usage is kept, so that a tenant may get budgets while its
/// requests are in flight.
#[derive(Debug)]
pub struct Account {
    tenant: String,
    /// Whether any budget is in `kept`: others need not look there.
    has_budget: AtomicBool,
    kept: Mutex<Kept>,
    counted: TenantMetrics,
    /// Whose use this is, among gateways: the ledger's number, once that is open.
    id: Arc<OnceLock<u64>>,
}

#[derive(Debug)]
struct Kept {
    /// Those that it has, in the order of [`BudgetName::ALL`].
    budgets: Vec<(BudgetName, Budget)>,
    /// What was set aside for requests in flight.
    held: Outlay,
}

/// What the store was asked of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AskedBudget {
    name: BudgetName,
    /// When the day or month began.
    begins: u64,
    said: Option<u64>,
}

/// What is set aside for a request, until this is dropped.
#[derive(Debug)]
pub struct Held {
    account: Arc<Account>,
    outlay: Outlay,
}

/// Budgets that have just come to a mark.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "operators are to be told"]
pub struct Crossed(Vec<(BudgetName, BudgetMark, String, String)>);

impl Account {
    pub(super) fn new(tenant: &str, counted: TenantMetrics, id: Arc<OnceLock<u64>>) -> Arc<Self> {
        let kept = Kept { budgets: Vec::new(), held: Outlay::default() };
        Arc::new(Self { tenant: tenant.to_owned(), has_budget: false.into(), kept: kept.into(), counted, id })
    }

    /// Goes by this table from now on, in seconds since 1970; what was used stays used.
    pub(super) fn allow(&self, table: Option<&BudgetTable>, now: u64) -> Crossed {
        let mut kept = self.kept.lock();
        let mut before = std::mem::take(&mut kept.budgets);
        for name in BudgetName::ALL {
            let known = before.iter().position(|(other, _)| *other == name).map(|at| before.remove(at).1);
            let Some((allowed, table)) = table.and_then(|table| Some((name.allowed(table)?, table))) else {
                self.forget(name);
                continue;
            };
            let budget = match known {
                Some(mut known) => {
                    known.allow(allowed, table.warn_at());
                    known
                }
                None => Budget::new(allowed, table.warn_at(), name.by().time(now)),
            };
            kept.budgets.push((name, budget));
        }
        self.has_budget.store(!kept.budgets.is_empty(), Relaxed);
        kept.crossed(now)
    }

    /// Whether it has any budget.
    pub(super) fn has_budget(&self) -> bool {
        self.has_budget.load(Relaxed)
    }

    /// Whether a request may begin at `now`: each budget has something left.
    pub(super) fn may_begin(&self, now: u64) -> Result<(), Error> {
        self.kept.lock().may_begin(now)
    }

    /// Sets aside what a request may use, if it may begin.
    pub(super) fn hold(self: &Arc<Self>, outlay: Outlay, now: u64) -> Result<Held, Error> {
        let mut kept = self.kept.lock();
        kept.may_begin(now)?;
        kept.held.add(outlay);
        drop(kept);
        Ok(Held { account: Arc::clone(self), outlay })
    }

    /// A request for which nothing was set aside has used so much.
    pub(super) fn charge(&self, outlay: Outlay, now: u64) -> Crossed {
        self.kept.lock().uses(outlay, now)
    }

    /// Whether what was used before this process is in all of the budgets.
    pub(super) fn is_summed(&self) -> bool {
        self.kept.lock().budgets.iter().all(|(_, budget)| budget.is_summed())
    }

    /// The ledger's sums are being asked for: what is charged from now on is not in them.
    pub(super) fn asks_sums(&self, now: u64) {
        let mut kept = self.kept.lock();
        for (_, budget) in kept.at(now).filter(|(_, budget)| !budget.is_summed()) {
            budget.asks_sum();
        }
    }

    /// Takes the sums, where they are of the day or month that a budget is in.
    pub(super) fn takes_sums(&self, sums: &Sums, now: u64) -> Crossed {
        let mut kept = self.kept.lock();
        for (name, budget) in kept.budgets.iter_mut().filter(|(_, budget)| !budget.is_summed()) {
            let (begins, of) = &sums[name.which_sum()];
            let outlay = of.get(&self.tenant).copied().unwrap_or_default();
            // It is asked for again where it is of another day.
            let _ = budget.takes_sum(*begins, name.of(outlay));
        }
        kept.crossed(now)
    }

    /// Adds what the store is to be asked now. Before what was used earlier is known, nothing is said.
    pub(super) fn questions(&self, into: &mut Vec<LimitQuestion>, now: u64) -> Vec<AskedBudget> {
        let mut kept = self.kept.lock();
        let ask = |(name, budget): (BudgetName, &mut Budget)| {
            let (Range { start, end }, said) = (budget.time(), budget.to_say());
            let number = said.and(self.id.get().copied()).unwrap_or(0);
            let keep = Duration::from_secs(end.saturating_sub(now)) + STORE_BUDGETS_KEEP;
            let about = About::Budget(BudgetQuestion { own: said.unwrap_or(0), keep });
            into.push(LimitQuestion {
                key: format!("{}:{start}:{}", name.as_str(), self.tenant),
                number,
                about,
            });
            AskedBudget { name, begins: start, said }
        };
        kept.at(now).map(ask).collect()
    }

    /// Takes the answer to one of [`Account::questions`].
    pub(super) fn answer(&self, asked: AskedBudget, others: u64, now: u64) -> Crossed {
        let mut kept = self.kept.lock();
        if let Some((_, budget)) = kept.budgets.iter_mut().find(|(name, _)| *name == asked.name) {
            budget.hears(asked.begins, asked.said, others);
        }
        kept.crossed(now)
    }

    /// The store may have forgotten what it was told.
    pub(super) fn unsays(&self) {
        self.kept.lock().budgets.iter_mut().for_each(|(_, budget)| budget.unsays());
    }

    /// Whether the store has heard all of it.
    pub(super) fn is_said(&self) -> bool {
        self.kept.lock().budgets.iter().all(|(_, budget)| budget.is_said())
    }

    /// What is left of the budgets of which the tenant is warned, as a header says it.
    pub(super) fn left(&self, now: u64) -> Option<HeaderValue> {
        let mut kept = self.kept.lock();
        let warned = kept.at(now).filter(|(_, budget)| budget.stands_at() >= BudgetMark::Warned);
        let left: Vec<String> =
            warned.map(|(name, budget)| format!("{}={}", name.as_str(), name.shown(budget.left()))).collect();
        // Digits and letters are always a header's value.
        (!left.is_empty()).then(|| HeaderValue::try_from(left.join(", ")).ok()).flatten()
    }

    /// Shows how the budgets stand, in the metrics.
    pub(super) fn show(&self, now: u64) {
        let mut kept = self.kept.lock();
        for (name, budget) in kept.at(now) {
            let labels = [self.tenant.as_str(), name.as_str()];
            let counted = &self.counted;
            for (gauge, value) in [
                (&counted.budget_used, budget.used()),
                (&counted.budget_allowed, budget.allowed()),
                (&counted.budget_warn_from, budget.warn_from()),
            ] {
                gauge.with_label_values(&labels).set(name.in_units(value));
            }
        }
    }

    /// Tells operators, once for each.
    pub(super) fn tell(&self, crossed: &Crossed) {
        for (name, mark, used, allowed) in &crossed.0 {
            let (tenant, budget) = (&self.tenant, name.as_str());
            let mark = if *mark == BudgetMark::Used { "used" } else { "warned" };
            self.counted.budget_crossings.with_label_values(&[tenant.as_str(), budget, mark]).inc();
            if mark == "used" {
                tracing::warn!(tenant, budget, used, allowed, "a tenant's budget is used up");
            } else {
                tracing::warn!(tenant, budget, used, allowed, "a tenant's budget is nearly used up");
            }
        }
    }

    fn forget(&self, name: BudgetName) {
        let labels = [self.tenant.as_str(), name.as_str()];
        let counted = &self.counted;
        for gauge in [&counted.budget_used, &counted.budget_allowed, &counted.budget_warn_from] {
            // Mostly there is none.
            let _ = gauge.remove_label_values(&labels);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        for name in BudgetName::ALL {
            self.forget(name);
        }
    }
}

impl Held {
    /// Its request has used so much: nothing is set aside for it from that moment on, so that no other
    /// request sees both.
    pub(super) fn charge(mut self, outlay: Outlay, now: u64) -> Crossed {
        let mut kept = self.account.kept.lock();
        kept.held.take(std::mem::take(&mut self.outlay));
        kept.uses(outlay, now)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.account.kept.lock().held.take(self.outlay);
    }
}

impl Kept {
    /// All budgets, in the day and month of `now`.
    fn at(&mut self, now: u64) -> impl Iterator<Item = (BudgetName, &mut Budget)> {
        self.budgets.iter_mut().map(move |(name, budget)| {
            budget.at(now, |now| name.by().time(now));
            (*name, budget)
        })
    }

    fn uses(&mut self, outlay: Outlay, now: u64) -> Crossed {
        for (name, budget) in self.at(now) {
            budget.uses(name.of(outlay));
        }
        self.crossed(now)
    }

    fn may_begin(&mut self, now: u64) -> Result<(), Error> {
        let held = self.held;
        let over = self.at(now).filter_map(|(name, budget)| over(name, budget, name.of(held), now));
        match over.max_by_key(|over| over.retry_after) {
            Some(over) => Err(Error::OverBudget(Box::new(over))),
            None => Ok(()),
        }
    }

    fn crossed(&mut self, now: u64) -> Crossed {
        let crossed = self.at(now).filter_map(|(name, budget)| {
            let mark = budget.crossed()?;
            Some((name, mark, name.shown(budget.used()), name.shown(budget.allowed())))
        });
        Crossed(crossed.collect())
    }
}

/// What is told of a budget that has nothing left, if that is so.
fn over(name: BudgetName, budget: &Budget, held: u64, now: u64) -> Option<OverBudget> {
    if budget.used().saturating_add(held) < budget.allowed() {
        return None;
    }
    let Range { end, .. } = budget.time();
    let until = Duration::from_secs(end.saturating_sub(now));
    let anew = i64::try_from(end).ok().and_then(|end| Timestamp::from_second(end).ok());
    Some(OverBudget {
        budget: name.words(),
        used: name.shown(budget.used()),
        held: name.shown(held),
        allowed: name.shown(budget.allowed()),
        anew: anew.unwrap_or(Timestamp::MAX).to_string(),
        retry_after: if budget.left() == 0 { until } else { until.min(WHILE_HELD) },
    })
}

#[cfg(test)]
mod tests;
