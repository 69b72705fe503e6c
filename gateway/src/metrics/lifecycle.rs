//! The series of the process's own life.

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::Declare;
use crate::{
    machine::{log, panics},
    shortage::Shortage,
};

/// Handles of these series.
#[derive(Debug)]
pub struct LifecycleMetrics {
    /// `keyway_config_reloads_total{outcome="applied|refused"}`: times that the configuration was read again.
    pub reloads: IntCounterVec,
    /// `keyway_config_last_reload_ok`: 0 while the file in place is one that was refused.
    pub last_reload_ok: IntGauge,
    /// `keyway_shortages_total{resource}`: what the gateway itself lacked.
    pub shortages: IntCounterVec,
    /// `keyway_panics_total`, of the whole process.
    pub panics: IntCounter,
    /// `keyway_log_lines_lost_total`, of the whole process.
    pub log_lines_lost: IntCounter,
    /// How long certificates are good.
    pub certificates: CertificateMetrics,
}

/// When the certificates in use are good, by `certificate="listener|client"` and, for a client's, `worker`.
#[derive(Debug, Clone)]
pub struct CertificateMetrics {
    start: IntGaugeVec,
    expiry: IntGaugeVec,
}

/// When a certificate is good: seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// The second from which on it is good (`notBefore`).
    pub start: i64,
    /// The second until which it is good (`notAfter`).
    pub expiry: i64,
}

impl CertificateMetrics {
    /// Of what clients are shown; one that cannot be read has no series.
    pub fn listener(&self, validity: Option<Validity>) {
        self.set(["listener", ""], validity);
    }

    /// Of what a worker is shown.
    pub fn client(&self, worker: &str, validity: Option<Validity>) {
        self.set(["client", worker], validity);
    }

    fn set(&self, labels: [&str; 2], validity: Option<Validity>) {
        if let Some(Validity { start, expiry }) = validity {
            self.start.with_label_values(&labels).set(start);
            self.expiry.with_label_values(&labels).set(expiry);
        }
    }
}

impl LifecycleMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let series = Self {
            reloads: d.counter(
                "keyway_config_reloads_total",
                "Times that the configuration was read again, and whether it was taken over.",
                &["outcome"],
            )?,
            last_reload_ok: d.gauge(
                "keyway_config_last_reload_ok",
                "0 where the last reload was refused and the configuration before it stays in force.",
            )?,
            shortages: d.counter(
                "keyway_shortages_total",
                "Times that the gateway itself lacked descriptors, ports, memory or permission for a connection.",
                &["resource"],
            )?,
            panics: d.register("counter", panics::counter())?,
            log_lines_lost: d.register("counter", log::counter())?,
            certificates: CertificateMetrics {
                start: d.gauges(
                    "keyway_certificate_start_timestamp_seconds",
                    "Since when the certificate in use is good that runs out first in its chain.",
                    &["certificate", "worker"],
                )?,
                expiry: d.gauges(
                    "keyway_certificate_expiry_timestamp_seconds",
                    "Until when the certificate in use is good that runs out first in its chain: the listener's, or the one \
                     that the gateway shows a worker.",
                    &["certificate", "worker"],
                )?,
            },
        };
        series.last_reload_ok.set(1);
        // There from the start, so that the first one is an increase.
        for outcome in ["applied", "refused"] {
            series.reloads.with_label_values(&[outcome]);
        }
        for resource in Shortage::ALL {
            series.shortages.with_label_values(&[resource.as_str()]);
        }
        Ok(series)
    }
}
