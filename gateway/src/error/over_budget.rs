//! What a tenant is told whose budget has nothing left.

use std::time::Duration;

/// A budget that a request may not begin by.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "over the budget of {budget}: {used} of {allowed} are used{}; it begins anew at {anew}; try again in {} s",
    if *held == "0" { String::new() } else { format!(", and {held} set aside for requests in flight") },
    retry_after.as_secs()
)]
pub struct OverBudget {
    /// The budget in words, with its key in the file of tenants.
    pub budget: &'static str,
    /// What was used, in the budget's unit.
    pub used: String,
    /// What requests in flight may use.
    pub held: String,
    /// What may be used, in the same unit.
    pub allowed: String,
    /// When the next day or month begins, in RFC 3339.
    pub anew: String,
    /// How long until there may be something left.
    pub retry_after: Duration,
}
