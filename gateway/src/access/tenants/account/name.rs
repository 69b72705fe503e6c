//! Which budgets there are: of tokens and of what they cost, in a day and in a month.

use keyway_core::Money;

use crate::{
    access::tenants::file::BudgetTable,
    ledger::{By, Outlay},
};

/// A budget that a tenant may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BudgetName {
    TokensPerDay,
    TokensPerMonth,
    CostPerDay,
    CostPerMonth,
}

impl BudgetName {
    pub(crate) const ALL: [Self; 4] =
        [Self::TokensPerDay, Self::TokensPerMonth, Self::CostPerDay, Self::CostPerMonth];

    /// Its key in the file of tenants, also the metric label `budget`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::TokensPerDay => "tokens_per_day",
            Self::TokensPerMonth => "tokens_per_month",
            Self::CostPerDay => "cost_per_day",
            Self::CostPerMonth => "cost_per_month",
        }
    }

    /// For people, with its key.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::TokensPerDay => "tokens in a day (budget.tokens_per_day)",
            Self::TokensPerMonth => "tokens in a month (budget.tokens_per_month)",
            Self::CostPerDay => "cost in a day (budget.cost_per_day)",
            Self::CostPerMonth => "cost in a month (budget.cost_per_month)",
        }
    }

    /// The piece of time that it is for.
    pub(super) fn by(self) -> By {
        match self {
            Self::TokensPerDay | Self::CostPerDay => By::Day,
            Self::TokensPerMonth | Self::CostPerMonth => By::Month,
        }
    }

    /// Which of the ledger's sums is of that.
    pub(super) fn which_sum(self) -> usize {
        usize::from(self.by() == By::Month)
    }

    fn is_of_cost(self) -> bool {
        matches!(self, Self::CostPerDay | Self::CostPerMonth)
    }

    /// What it counts: tokens, or nano-units of money.
    pub(super) fn of(self, outlay: Outlay) -> u64 {
        if self.is_of_cost() { outlay.cost.nanos() } else { outlay.tokens }
    }

    /// What a table allows, in the same unit; `None`: there is no such budget.
    pub(super) fn allowed(self, table: &BudgetTable) -> Option<u64> {
        let nanos = |cost: Option<f64>| cost.and_then(Money::of_decimal).map(Money::nanos);
        match self {
            Self::TokensPerDay => table.tokens_per_day,
            Self::TokensPerMonth => table.tokens_per_month,
            Self::CostPerDay => nanos(table.cost_per_day),
            Self::CostPerMonth => nanos(table.cost_per_month),
        }
    }

    /// An amount for people, exactly.
    pub(super) fn shown(self, amount: u64) -> String {
        if self.is_of_cost() { Money::of_nanos(amount).to_string() } else { amount.to_string() }
    }

    /// An amount for metrics: in tokens, or in the currency of prices.
    pub(super) fn in_units(self, amount: u64) -> f64 {
        if self.is_of_cost() { amount as f64 / 1e9 } else { amount as f64 }
    }
}
