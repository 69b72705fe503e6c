//! One gateway of several does what must be done once: it holds a Lease, and renews it while it lives. A
//! gateway that finds a Lease which was not renewed for its whole duration takes it.
//!
//! As in Kubernetes' own leader election (`client-go/tools/leaderelection`), time is only compared with what
//! this process has seen itself, so that clocks may differ. Two may hold it at once for a moment; what they
//! do must bear that.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Error,
    api::{ObjectMeta, PostParams},
};

use crate::{clock::Instant, limits::KUBERNETES_LEASE_TIME};

/// A Lease and this gateway's part in it.
#[derive(Debug)]
pub(super) struct Holder {
    leases: Api<Lease>,
    name: String,
    /// This gateway's name in the Lease: its host's, and a random part for this process.
    identity: String,
    /// The version last seen, and when it was first seen.
    seen: Option<(String, Instant)>,
    /// When this gateway last wrote it.
    renewed: Option<Instant>,
}

impl Holder {
    /// Of a Lease of this name; holds nothing yet.
    pub(super) fn new(leases: Api<Lease>, name: String) -> Self {
        let pod = std::env::var("HOSTNAME").unwrap_or_else(|_| "keyway".to_owned());
        let identity = format!("{pod}-{:08x}", fastrand::u32(..));
        Self { leases, name, identity, seen: None, renewed: None }
    }

    /// Whether this gateway holds the Lease now; renews or takes it if need be.
    pub(super) async fn holds(&mut self, now: Instant) -> Result<bool, Error> {
        if self.renewed.is_some_and(|then| now < then + KUBERNETES_LEASE_TIME / 3) {
            return Ok(true);
        }
        self.renewed = None;
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            let new = self.written(None, 0);
            return self.wrote(self.leases.create(&PostParams::default(), &new).await, now);
        };
        let spec = lease.spec.unwrap_or_default();
        let own = spec.holder_identity.as_deref() == Some(&self.identity);
        let version = lease.metadata.resource_version.unwrap_or_default();
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != version) {
            self.seen = Some((version.clone(), now));
        }
        let duration = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = duration.map_or(KUBERNETES_LEASE_TIME, Duration::from_secs);
        let given_up = spec.holder_identity.as_deref().is_none_or(str::is_empty);
        let stale = self.seen.as_ref().is_some_and(|(_, since)| now >= *since + duration);
        if !(own || given_up || stale) {
            return Ok(false);
        }
        let transitions = spec.lease_transitions.unwrap_or(0) + i32::from(!own);
        let mut new = self.written(Some(version), transitions);
        if own && let Some(spec_new) = &mut new.spec {
            spec_new.acquire_time = spec.acquire_time;
        }
        self.wrote(self.leases.replace(&self.name, &PostParams::default(), &new).await, now)
    }

    fn written(&self, resource_version: Option<String>, transitions: i32) -> Lease {
        let now = MicroTime(Timestamp::now());
        let seconds = i32::try_from(KUBERNETES_LEASE_TIME.as_secs()).unwrap_or(i32::MAX);
        Lease {
            metadata: ObjectMeta { name: Some(self.name.clone()), resource_version, ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: Some(seconds),
                lease_transitions: Some(transitions),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                ..LeaseSpec::default()
            }),
        }
    }

    /// A conflict means that another gateway was faster.
    fn wrote(&mut self, outcome: Result<Lease, Error>, now: Instant) -> Result<bool, Error> {
        match outcome {
            Ok(_) => {
                self.renewed = Some(now);
                Ok(true)
            }
            Err(Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }
}
