//! Marks the pod that is worth least, so that a ReplicaSet that becomes smaller takes that one
//! (<https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost>). One gateway
//! does it for all (`lease.rs`); which pod, and how often that may change, is decided in `worth.rs`.
//!
//! A pod whose cost was not set by Keyway keeps it.

use std::sync::Arc;

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, Client, Error, ResourceExt,
    api::{Patch, PatchParams},
};
use parking_lot::Mutex;
use serde_json::json;

use super::{
    access,
    lease::Holder,
    slices::Found,
    worth::{Choice, Worth},
};
use crate::{
    clock::{self, Clock, Instant},
    config::KubernetesFleet,
    limits::KUBERNETES_MARK_LOOK,
    watch::members::{Members, Source},
};

/// What a ReplicaSet orders its pods by; those without it have 0.
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// That the cost is Keyway's to take back.
const MARK: &str = "keyway.dev/least-valuable";
/// Below the 0 of pods without a mark.
const LEAST: &str = "-1000";

/// The pods of a fleet as its slices name them, UID and name.
pub(super) type Pods = Arc<Mutex<Vec<(String, String)>>>;

/// The pods among these.
pub(super) fn pods_of(found: &[Found]) -> Vec<(String, String)> {
    let pod = |found: &Found| Some((found.listed.config.identity.clone()?, found.pod.clone()?));
    found.iter().filter_map(pod).collect()
}

/// Marks for one fleet, for ever.
pub(super) async fn mark(
    client: Client,
    namespace: String,
    fleet: &KubernetesFleet,
    source: Source,
    pods: Pods,
    members: Arc<Members>,
) {
    let hash = fleet.selector.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let leases: Api<Lease> = Api::namespaced(client.clone(), &namespace);
    let mut marker = Marker {
        holder: Holder::new(leases, format!("keyway-deletion-cost-{hash:016x}")),
        api: Api::namespaced(client, &namespace),
        choice: None,
        clock: Clock::start(),
    };
    let mut told = String::new();
    loop {
        clock::sleep(KUBERNETES_MARK_LOOK).await;
        let known = pods.lock().clone();
        let worths = members.worths(source);
        match marker.look(&known, &worths).await {
            Ok(()) => told.clear(),
            Err(error) => {
                let error = access::explain(&error);
                if error != told {
                    tracing::warn!(namespace, selector = fleet.selector, %error, "no pod could be marked");
                    told = error;
                }
            }
        }
    }
}

struct Marker {
    holder: Holder,
    api: Api<Pod>,
    /// While this gateway is the one.
    choice: Option<Choice>,
    clock: Clock,
}

impl Marker {
    async fn look(&mut self, pods: &[(String, String)], worths: &[(String, f64)]) -> Result<(), Error> {
        if !self.holder.holds(Instant::now()).await? {
            self.choice = None;
            return Ok(());
        }
        if self.choice.is_none() {
            self.choice = Some(self.take_over(pods).await?);
        }
        let Some(choice) = &mut self.choice else { return Ok(()) };
        let worth = |(uid, tokens): &(String, f64)| Worth { uid: uid.clone(), tokens: *tokens };
        let worths: Vec<Worth> = worths.iter().map(worth).collect();
        let Some(next) = choice.next(&worths, self.clock.now()) else { return Ok(()) };
        let name = |uid: &str| pods.iter().find(|pod| pod.0 == uid).map(|pod| pod.1.as_str());
        if let Some((uid, name)) = choice.marked().and_then(|uid| Some((uid, name(uid)?))) {
            set(&self.api, uid, name, false).await?;
        }
        // What has been taken back is noted before the next is marked, so that a failure in between leaves
        // none, not two.
        choice.note(None, self.clock.now());
        if let Some(pod) = name(&next) {
            set(&self.api, &next, pod, true).await?;
            tracing::info!(pod, "marked as worth least: a scale-in takes it first");
            choice.note(Some(next), self.clock.now());
        }
        Ok(())
    }

    /// What another gateway has marked before: one of them stays, the others are taken back.
    async fn take_over(&self, pods: &[(String, String)]) -> Result<Choice, Error> {
        let mut choice = Choice::default();
        for (uid, name) in pods {
            let pod = self.api.get_metadata_opt(name).await?;
            if pod.is_some_and(|pod| pod.annotations().contains_key(MARK)) {
                if choice.marked().is_none() {
                    choice.note(Some(uid.clone()), self.clock.now());
                } else {
                    set(&self.api, uid, name, false).await?;
                }
            }
        }
        Ok(choice)
    }
}

/// Marks a pod, or takes that back. Not one whose cost is not Keyway's, nor another pod of the same name.
async fn set(api: &Api<Pod>, uid: &str, name: &str, marked: bool) -> Result<(), Error> {
    let Some(pod) = api.get_metadata_opt(name).await? else { return Ok(()) };
    let annotations = pod.annotations();
    let foreign = annotations.contains_key(COST) && !annotations.contains_key(MARK);
    if pod.uid().as_deref() != Some(uid) || foreign {
        return Ok(());
    }
    let (cost, mark) = if marked { (Some(LEAST), Some("true")) } else { (None, None) };
    let annotations = json!({ COST: cost, MARK: mark });
    // With its UID, so that a pod that has taken its name since refuses.
    let patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
    match api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
        outcome => outcome.map(drop),
    }
}
