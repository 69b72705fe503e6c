//! The series of tokens that an issuer signs. They appear where one is configured.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::Declare;
use crate::clock;

/// Handles of these series.
#[derive(Debug, Clone)]
pub struct OidcMetrics {
    tokens: IntCounterVec,
    keys: IntGaugeVec,
    fetched: IntGaugeVec,
    fetches: IntCounterVec,
}

impl OidcMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let help = "Requests with a token of the issuer of [auth.oidc]: good, or why not.";
        let tokens = d.counter("keyway_oidc_tokens_total", help, &["outcome"])?;
        let help = "Public keys of the issuer of [auth.oidc] by which tokens can be verified.";
        let keys = d.gauges("keyway_oidc_keys", help, &[])?;
        let help = "When they were fetched last, in seconds of Unix time; 0: not yet.";
        let fetched = d.gauges("keyway_oidc_keys_fetched_timestamp_seconds", help, &[])?;
        let help = "Tries to fetch the keys of the issuer of [auth.oidc].";
        let fetches = d.counter("keyway_oidc_fetches_total", help, &["outcome"])?;
        Ok(Self { tokens, keys, fetched, fetches })
    }

    /// On no page, for a test.
    #[cfg(test)]
    pub(crate) fn alone() -> Self {
        Self::declare(&Declare::default()).unwrap_or_else(|error| unreachable!("{error}"))
    }

    /// A request came with a token.
    pub fn judged(&self, outcome: &'static str) {
        self.tokens.with_label_values(&[outcome]).inc();
    }

    /// So many keys were fetched.
    pub fn fetched(&self, keys: usize) {
        self.keys.with_label_values::<&str>(&[]).set(keys as i64);
        self.fetched.with_label_values::<&str>(&[]).set(clock::unix_seconds() as i64);
        self.fetches.with_label_values(&["fetched"]).inc();
    }

    /// They could not be fetched.
    pub fn fetch_failed(&self) {
        // There from the first try on, so that an alert on it looks at something.
        self.fetched.with_label_values::<&str>(&[]);
        self.fetches.with_label_values(&["failed"]).inc();
    }
}
