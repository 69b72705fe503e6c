//! The series of KV that goes between workers. A worker without a listener for it has none of them.

use std::sync::Arc;

use prometheus::{Error, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use super::Series;

/// Seconds of one transfer: from a short prompt on one machine to a long one over a network.
const TRANSFER_BUCKETS_S: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0];

/// What a worker's KV transfers tell.
#[derive(Debug)]
pub(crate) struct KvTransferMetrics {
    pub(super) registry: Registry,
    /// Prompts kept for other workers now.
    pub(crate) kept: IntGauge,
    pub(crate) export_blocks: IntCounter,
    pub(crate) import_blocks: IntCounter,
    pub(crate) export_bytes: ByTransport,
    pub(crate) import_bytes: ByTransport,
    pub(crate) export_seconds: Histogram,
    pub(crate) import_seconds: Histogram,
    transfers: IntCounterVec,
}

/// Bytes that went in one direction, over each transport.
#[derive(Debug)]
pub(crate) struct ByTransport {
    tcp: IntCounter,
    shared_memory: IntCounter,
}

impl ByTransport {
    fn new(bytes: &IntCounterVec, direction: &str) -> Self {
        let over = |transport| bytes.with_label_values(&[direction, transport]);
        Self { tcp: over("tcp"), shared_memory: over("shared_memory") }
    }

    /// Those over one transport.
    pub(crate) fn over(&self, is_shared: bool) -> &IntCounter {
        if is_shared { &self.shared_memory } else { &self.tcp }
    }
}

impl KvTransferMetrics {
    pub(crate) fn new() -> Result<Arc<Self>, Error> {
        let registry = Registry::new();
        let new = Series { registry: &registry };
        let counters = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, Error> {
            let counter = IntCounterVec::new(Opts::new(format!("keyway_worker_{name}_total"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let direction = &["direction"];
        let blocks = counters("kv_transfer_blocks", "KV blocks that went between workers.", direction)?;
        let help = "Bytes of KV that went between workers, over TCP or through memory that they share.";
        let bytes = counters("kv_transfer_bytes", help, &["direction", "transport"])?;
        let help = "Transfers of KV between workers, by how they ended.";
        let transfers = counters("kv_transfers", help, &["direction", "outcome"])?;
        for direction in ["export", "import"] {
            transfers.with_label_values(&[direction, "done"]);
        }
        let help = "Time of one transfer of KV, from its connection to its end.";
        let seconds: HistogramVec = new.seconds("kv_transfer", help, TRANSFER_BUCKETS_S, direction)?;
        Ok(Arc::new(Self {
            kept: new.gauge("kv_transfers_kept", "Prompts whose KV is kept for other workers to fetch.")?,
            export_blocks: blocks.with_label_values(&["export"]),
            import_blocks: blocks.with_label_values(&["import"]),
            export_bytes: ByTransport::new(&bytes, "export"),
            import_bytes: ByTransport::new(&bytes, "import"),
            export_seconds: seconds.with_label_values(&["export"]),
            import_seconds: seconds.with_label_values(&["import"]),
            transfers,
            registry,
        }))
    }

    /// Counts what was to be given to another worker, by how that ended.
    pub(crate) fn exported(&self, outcome: &str) {
        self.transfers.with_label_values(&["export", outcome]).inc();
    }

    /// Counts what was to be fetched from another worker, by how that ended.
    pub(crate) fn imported(&self, outcome: &str) {
        self.transfers.with_label_values(&["import", outcome]).inc();
    }
}

#[cfg(test)]
impl KvTransferMetrics {
    /// How many transfers in a direction ended so.
    pub(crate) fn count(&self, direction: &str, outcome: &str) -> u64 {
        self.transfers.with_label_values(&[direction, outcome]).get()
    }
}
