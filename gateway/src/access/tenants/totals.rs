//! What each tenant has asked for since the gateway's start, for operators: the sums that requests move
//! anyway, read now and then.

use std::collections::BTreeMap;

use prometheus::{
    core::Collector as _,
    proto::{LabelPair, MetricFamily},
};

use super::{ADMITTED, Tenants};

/// What has been counted of a tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantTotals {
    /// Its name, as its series have it.
    pub tenant: String,
    /// Requests that were let in.
    pub admitted: u64,
    /// Those over one of its limits. One whose tokens were gone once its body was read is among both.
    pub refused: u64,
    /// Prompt tokens, as workers report them; from 0 again where the tenant gets other limits.
    pub prompt_tokens: u64,
}

impl Tenants {
    /// What has been counted of each tenant that has sent a request, those included that are in the file no
    /// more.
    pub fn totals(&self) -> Vec<TenantTotals> {
        let mut found: BTreeMap<String, TenantTotals> = BTreeMap::new();
        for metric in self.counted.requests.collect().iter().flat_map(MetricFamily::get_metric) {
            let pairs = metric.get_label();
            let label = |name| pairs.iter().find(|pair| pair.name() == name).map(LabelPair::value);
            let Some(tenant) = label("tenant") else { continue };
            let totals = found.entry(tenant.to_owned()).or_default();
            let counted = metric.get_counter().get_value() as u64;
            if label("outcome") == Some(ADMITTED) {
                totals.admitted += counted;
            } else {
                totals.refused += counted;
            }
        }
        let current = self.current.read();
        let named = found.into_iter().map(|(name, totals)| {
            let prompt_tokens = current.by_name.get(&name).map_or(0, |of| of.left.lock().prompt_tokens);
            TenantTotals { tenant: name, prompt_tokens, ..totals }
        });
        named.collect()
    }
}
