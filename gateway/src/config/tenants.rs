//! What `[auth]` says of all tenants; each one's own limits are in the file of tenants.

use super::UsageConfig;

/// What holds for the requests of all tenants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantRules {
    /// Whether their prompts share no cache.
    pub isolate: bool,
    /// Fields and headers by which they may steer engines.
    pub steering: Vec<String>,
    /// What budgets can be kept in.
    pub budgets: BudgetUnits,
}

/// What budgets can be kept in: what is known of usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BudgetUnits {
    /// Whether usage is kept, so in tokens.
    pub tokens: bool,
    /// Whether tokens have prices too, so in what they cost.
    pub cost: bool,
}

impl BudgetUnits {
    /// `usage`: where it is kept who has used how much, if it is.
    pub fn of(usage: Option<&UsageConfig>) -> Self {
        Self { tokens: usage.is_some(), cost: usage.is_some_and(|usage| usage.prices.is_some()) }
    }
}
