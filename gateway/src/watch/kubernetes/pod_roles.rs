//! Which part of requests a pod is for, by a label of its own: EndpointSlices have the labels of Services
//! alone. The pods that have the label are watched, as metadata. A pod without it, or with a value that is
//! no role, gets no requests: which it could serve is not known, and it is seen at once that it has none.

use std::{
    collections::{HashMap, VecDeque},
    pin::pin,
};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    access::{self, Pauses},
    slices::Found,
};
use crate::{clock, config::KubernetesFleet, limits::KUBERNETES_WATCH_SECONDS};

/// Pods that are gone whose labels are remembered: their endpoints may be seen a little longer.
const GONE_MAX: usize = 256;

/// What is known of the pods' labels.
#[derive(Debug, Default)]
pub(super) struct PodRoles {
    seen: Mutex<Seen>,
    /// Told when that changes.
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
struct Seen {
    /// The label's value of each pod that has it, by UID; `None` until they were listed once.
    values: Option<HashMap<String, String>>,
    /// What a list that is being read has shown so far.
    reading: HashMap<String, String>,
    gone: VecDeque<String>,
    /// Why the last look failed.
    trouble: Option<String>,
    /// What was last said of pods that are held back.
    told: Option<String>,
}

impl Seen {
    /// Takes an event. Returns whether more is known than before.
    fn apply(&mut self, event: Event<PartialObjectMeta<Pod>>, label: &str) -> bool {
        self.trouble = None;
        let named = |pod: &PartialObjectMeta<Pod>| Some((pod.uid()?, pod.labels().get(label)?.clone()));
        match event {
            Event::Init => self.reading = HashMap::new(),
            Event::InitApply(pod) => self.reading.extend(named(&pod)),
            Event::InitDone => {
                self.gone.clear();
                self.values = Some(std::mem::take(&mut self.reading));
            }
            Event::Apply(pod) => self.values.get_or_insert_default().extend(named(&pod)),
            Event::Delete(pod) => {
                self.gone.extend(pod.uid());
                while self.gone.len() > GONE_MAX {
                    let oldest = self.gone.pop_front().unwrap_or_default();
                    self.values.get_or_insert_default().remove(&oldest);
                }
                return false;
            }
        }
        self.values.is_some()
    }
}

impl PodRoles {
    /// Follows the labels of a fleet's pods, for ever.
    pub(super) async fn follow(&self, client: Client, namespace: &str, label: &str) {
        let pods: Api<PartialObjectMeta<Pod>> = Api::namespaced(client, namespace);
        let how = watcher::Config::default().labels(label).timeout(KUBERNETES_WATCH_SECONDS);
        loop {
            let mut events = pin!(watcher(pods.clone(), how.clone()).backoff(Pauses::default()));
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => {
                        if self.seen.lock().apply(event, label) {
                            self.changed.notify_one();
                        }
                    }
                    // As with slices: what was watched from is too old to be known.
                    Err(watcher::Error::WatchStartFailed(error)) if access::status(&error) == Some(410) => {
                        break;
                    }
                    Err(watcher::Error::WatchError(status)) if status.code == 410 => {}
                    Err(error) => self.failed(access::explain(&error)),
                }
            }
            clock::sleep(Pauses::default().next_pause()).await;
        }
    }

    fn failed(&self, error: String) {
        self.seen.lock().trouble = Some(format!("pods, for discovery.kubernetes.role_label: {error}"));
        self.changed.notify_one();
    }

    /// Why labels cannot be looked at, as far as the last look goes.
    pub(super) fn trouble(&self) -> Option<String> {
        self.seen.lock().trouble.clone()
    }

    /// Gives each worker the role that its pod's label says, and holds back those of which none is known.
    /// Returns whether the pods were ever listed: before, nothing is known of anybody.
    pub(super) fn assign(&self, fleet: &KubernetesFleet, workers: &mut [Found]) -> bool {
        let mut seen = self.seen.lock();
        let Some(values) = &seen.values else { return false };
        let mut held = Vec::new();
        for found in workers {
            let config = &mut found.listed.config;
            let value = config.identity.as_ref().and_then(|uid| values.get(uid)).map(String::as_str);
            if let Some(role) = fleet.role_by_label(value) {
                config.role = Some(role);
            } else {
                found.listed.ready = false;
                held.push((found.pod.clone().unwrap_or_else(|| found.listed.config.name()), value));
            }
        }
        let told = held.first().map(|(pod, value)| {
            let value = value.map_or_else(|| "no such label".to_owned(), |value| format!("{value:?}"));
            format!("{pod} has {value}, {} pods in all", held.len())
        });
        if seen.told != told {
            if let Some(told) = &told {
                let label = fleet.role_label.as_deref().unwrap_or_default();
                tracing::warn!(
                    label,
                    told,
                    "pods whose label says no role get no requests: prefill, decode or both"
                );
            }
            seen.told = told;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        config::{KubernetesTable, Role, WorkerConfig},
        watch::members::Listed,
    };

    const LABEL: &str = "llm-d.ai/role";

    fn pod(uid: &str, value: &str) -> PartialObjectMeta<Pod> {
        let pod = json!({ "metadata": { "name": uid, "uid": uid, "labels": { LABEL: value } } });
        serde_json::from_value(pod).unwrap()
    }

    fn fleet(more: &str) -> KubernetesFleet {
        let table = format!("service = \"workers\"\nrole_label = {LABEL:?}\n{more}");
        KubernetesFleet::try_from(&toml::from_str::<KubernetesTable>(&table).unwrap()).unwrap()
    }

    fn found(uid: &str) -> Found {
        let config: WorkerConfig = "http://10.0.0.1:1".parse().unwrap();
        let config = WorkerConfig { identity: Some(uid.to_owned()), ..config };
        Found { listed: Listed { config, ready: true }, pod: Some(uid.to_owned()) }
    }

    /// What becomes of a worker: its role, and whether it may have requests.
    fn assigned(roles: &PodRoles, fleet: &KubernetesFleet, uid: &str) -> Option<(Role, bool)> {
        let mut found = [found(uid)];
        roles
            .assign(fleet, &mut found)
            .then(|| (found[0].listed.config.role.unwrap_or_default(), found[0].listed.ready))
    }

    #[test]
    fn a_pod_has_the_role_that_its_label_says_and_else_gets_nothing() {
        let (roles, fleet) = (PodRoles::default(), fleet(""));
        let apply = |event| roles.seen.lock().apply(event, LABEL);
        assert!(!apply(Event::Init) && !apply(Event::InitApply(pod("p", "prefill"))));
        assert_eq!(assigned(&roles, &fleet, "p"), None, "the list is not whole");
        apply(Event::InitApply(pod("w", "writer")));
        assert!(apply(Event::InitDone));
        assert_eq!(assigned(&roles, &fleet, "p"), Some((Role::Prefill, true)));
        assert_eq!(assigned(&roles, &fleet, "w"), Some((Role::Both, false)), "no role");
        assert_eq!(assigned(&roles, &fleet, "new"), Some((Role::Both, false)), "not seen yet");
        assert!(apply(Event::Apply(pod("new", "decode"))));
        assert_eq!(assigned(&roles, &fleet, "new"), Some((Role::Decode, true)));
        // Its endpoint may outlive it by a moment.
        assert!(!apply(Event::Delete(pod("new", "decode"))));
        assert_eq!(assigned(&roles, &fleet, "new"), Some((Role::Decode, true)));
        for i in 0..GONE_MAX {
            apply(Event::Delete(pod(&i.to_string(), "decode")));
        }
        assert_eq!(assigned(&roles, &fleet, "new"), Some((Role::Both, false)), "not for ever");
    }

    #[test]
    fn those_without_the_label_have_the_role_of_the_table_and_those_with_a_wrong_one_have_none() {
        let (roles, fleet) = (PodRoles::default(), fleet("role = \"decode\""));
        let apply = |event| roles.seen.lock().apply(event, LABEL);
        apply(Event::InitApply(pod("w", "writer")));
        apply(Event::InitApply(pod("b", "prefill-decode")));
        apply(Event::InitDone);
        assert_eq!(assigned(&roles, &fleet, "none"), Some((Role::Decode, true)));
        assert!(!assigned(&roles, &fleet, "w").unwrap().1);
        assert_eq!(assigned(&roles, &fleet, "b"), Some((Role::Both, true)));
    }
}
