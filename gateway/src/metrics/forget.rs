//! Takes a worker's series out of every family when it is gone: a gauge that stays at its last value would
//! keep sums over workers too high for ever, and the fleet with them.

use std::{collections::HashMap, fmt};

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};

/// A family with a label `worker`.
pub(super) trait OfWorkers: Send + Sync {
    /// Removes the series of this worker.
    fn forget(&self, worker: &str);
}

impl fmt::Debug for dyn OfWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfWorkers")
    }
}

impl<T: MetricVecBuilder> OfWorkers for MetricVec<T>
where
    Self: Collector,
{
    fn forget(&self, worker: &str) {
        // Labels besides `worker` are closed sets, so going through all series of a family is cheap and rare.
        for family in self.collect() {
            for metric in family.get_metric() {
                let labels = metric.get_label();
                if labels.iter().any(|pair| pair.name() == "worker" && pair.value() == worker) {
                    let labels: HashMap<&str, &str> =
                        labels.iter().map(|pair| (pair.name(), pair.value())).collect();
                    // Gone already is as good.
                    drop(self.remove(&labels));
                }
            }
        }
    }
}
