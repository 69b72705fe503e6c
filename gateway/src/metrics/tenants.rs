//! The series of tenants.

use prometheus::{GaugeVec, IntCounterVec};

use super::Declare;

/// Handles of these series.
#[derive(Debug, Clone)]
pub struct TenantMetrics {
    /// `keyway_tenant_requests_total{tenant,outcome="admitted|rate_limit_exceeded|insufficient_quota"}`: two
    /// count one whose tokens were gone once its body was read.
    pub requests: IntCounterVec,
    /// `keyway_tenant_tokens_total{tenant,kind="prompt|cached|generated"}`: of requests that are over.
    pub tokens: IntCounterVec,
    /// `keyway_tenant_budget_used{tenant,budget}`: in tokens or the currency of prices.
    pub budget_used: GaugeVec,
    /// `keyway_tenant_budget_allowed{tenant,budget}`: in the same unit.
    pub budget_allowed: GaugeVec,
    /// `keyway_tenant_budget_warn_from{tenant,budget}`: in the same unit.
    pub budget_warn_from: GaugeVec,
    /// `keyway_tenant_budget_crossings_total{tenant,budget,mark="warned|used"}`: once in a day or month.
    pub budget_crossings: IntCounterVec,
}

impl TenantMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            requests: d.counter(
                "keyway_tenant_requests_total",
                "Requests with a tenant's key: let in, or over one of its limits or budgets; both where its tokens were gone once its body was read.",
                &["tenant", "outcome"],
            )?,
            tokens: d.counter(
                "keyway_tenant_tokens_total",
                "Tokens of a tenant's requests that are over, cached ones among the prompt's: as workers report them; with [usage], estimated ones too.",
                &["tenant", "kind"],
            )?,
            budget_used: d.real_gauges_of(
                "keyway_tenant_budget_used",
                "What a tenant has used of a budget in its day or month so far, in tokens or the currency of prices; over all gateways where they share a store.",
                &["tenant", "budget"],
            )?,
            budget_allowed: d.real_gauges_of(
                "keyway_tenant_budget_allowed",
                "What a tenant may use of a budget in a day or month, in the same unit.",
                &["tenant", "budget"],
            )?,
            budget_warn_from: d.real_gauges_of(
                "keyway_tenant_budget_warn_from",
                "From what use of a budget on its tenant is warned, in the same unit.",
                &["tenant", "budget"],
            )?,
            budget_crossings: d.counter(
                "keyway_tenant_budget_crossings_total",
                "Times that a tenant came to where it is warned of a budget, or to its end: each once in a day or month.",
                &["tenant", "budget", "mark"],
            )?,
        })
    }

    /// Of no registry, for tests.
    #[cfg(test)]
    pub(crate) fn alone() -> Self {
        Self::declare(&Declare::default()).unwrap_or_else(|error| unreachable!("{error}"))
    }
}
