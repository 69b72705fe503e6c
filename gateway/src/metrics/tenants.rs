//! The series of tenants.

use prometheus::IntCounterVec;

use super::Declare;

/// Handles of these series.
#[derive(Debug, Clone)]
pub struct TenantMetrics {
    /// `keyway_tenant_requests_total{tenant,outcome="admitted|rate_limit_exceeded"}`: both count one whose
    /// tokens were gone once its body was read.
    pub requests: IntCounterVec,
    /// `keyway_tenant_tokens_total{tenant,kind="prompt|cached|generated"}`: of requests that are over.
    pub tokens: IntCounterVec,
}

impl TenantMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            requests: d.counter(
                "keyway_tenant_requests_total",
                "Requests with a tenant's key: let in, or over one of its limits; both where its tokens were gone once its body was read.",
                &["tenant", "outcome"],
            )?,
            tokens: d.counter(
                "keyway_tenant_tokens_total",
                "Tokens of a tenant's requests that are over, cached ones among the prompt's: as workers report them; with [usage], estimated ones too.",
                &["tenant", "kind"],
            )?,
        })
    }

    /// Of no registry, for tests.
    #[cfg(test)]
    pub(crate) fn alone() -> Self {
        Self::declare(&Declare::default()).unwrap_or_else(|error| unreachable!("{error}"))
    }
}
