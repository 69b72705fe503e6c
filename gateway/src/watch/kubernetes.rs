//! Workers of a Kubernetes cluster: watches the EndpointSlices of Services through the API server and tells
//! [`Members`] who is ready, who is not, and who ends. What slices mean is `kubernetes/slices.rs`; the watch
//! protocol (lists, bookmarks, versions that have expired) is `kube`'s, which opens its own connections: they
//! are few, and none carries a request.
//!
//! The API server may be away for as long as it likes: what is known stays, as with every list of workers.

mod access;
mod deletion_cost;
mod lease;
mod moves;
mod pod_roles;
mod slices;
mod worth;

use std::{
    future::pending,
    pin::{Pin, pin},
    sync::Arc,
};

use futures_util::{Stream, StreamExt, future::join_all};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, Client,
    runtime::{
        WatchStreamExt,
        watcher::{self, watcher},
    },
};

pub use self::access::check;
use self::{
    access::Pauses,
    deletion_cost::Pods,
    moves::Moves,
    pod_roles::PodRoles,
    slices::{Found, Slices},
};
use crate::{
    clock::{self, Instant},
    config::{DiscoveryConfig, KubernetesFleet, RankError},
    limits::KUBERNETES_WATCH_SECONDS,
    metrics::Metrics,
    watch::{
        discovery::Looks,
        members::{Listed, Members, Source},
    },
};

/// Follows every fleet of the configuration, for ever.
pub async fn follow(config: DiscoveryConfig, members: Arc<Members>, metrics: Arc<Metrics>) {
    if config.kubernetes.is_empty() {
        return;
    }
    let client = reach(&config, &members, &metrics).await;
    let following = config.kubernetes.iter().enumerate().map(|(place, fleet)| {
        let source = Source::Kubernetes(place);
        let namespace = fleet.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let (pods, marking) = (Pods::default(), fleet.deletion_cost);
        let looks = Looks::new(source, &fleet.selector, &members, &metrics);
        let follower = Follower {
            looks,
            slices: Slices::default(),
            moves: Moves::default(),
            pods: Arc::clone(&pods),
            roles: fleet.role_label.is_some().then(Arc::default),
            namespace: namespace.clone(),
            fleet,
        };
        let roles = follower.roles.clone();
        let (client, members) = (client.clone(), Arc::clone(&members));
        async move {
            let slices = follower.follow(client.clone());
            let following = async {
                match roles.as_deref().zip(fleet.role_label.as_deref()) {
                    Some((roles, label)) => {
                        tokio::join!(slices, roles.follow(client.clone(), &namespace, label));
                    }
                    None => slices.await,
                }
            };
            if marking {
                let marking =
                    deletion_cost::mark(client.clone(), namespace.clone(), fleet, source, pods, members);
                tokio::join!(following, marking);
            } else {
                following.await;
            }
        }
    });
    join_all(following).await;
}

/// A client, once it is known how the cluster is reached.
async fn reach(config: &DiscoveryConfig, members: &Arc<Members>, metrics: &Arc<Metrics>) -> Client {
    let mut looks = Looks::new(Source::Kubernetes(0), "the cluster", members, metrics);
    let mut pauses = Pauses::default();
    loop {
        match access::client(config.kubeconfig.as_deref()).await {
            Ok(client) => return client,
            Err(error) => looks.failed(&error),
        }
        clock::sleep(pauses.next_pause()).await;
    }
}

/// One fleet as it is followed.
struct Follower<'a> {
    fleet: &'a KubernetesFleet,
    looks: Looks,
    slices: Slices,
    moves: Moves,
    /// The pods of its slices, for the task that marks them.
    pods: Pods,
    /// What their labels say of their roles, if that counts.
    roles: Option<Arc<PodRoles>>,
    namespace: String,
}

impl Follower<'_> {
    async fn follow(mut self, client: Client) {
        let slices: Api<EndpointSlice> = Api::namespaced(client, &self.namespace);
        let how = watcher::Config::default().labels(&self.fleet.selector).timeout(KUBERNETES_WATCH_SECONDS);
        loop {
            let events = watcher(slices.clone(), how.clone()).backoff(Pauses::default());
            self.watch(pin!(events)).await;
            clock::sleep(Pauses::default().next_pause()).await;
        }
    }

    /// Takes events until the watch must begin anew.
    async fn watch(
        &mut self,
        mut events: Pin<&mut impl Stream<Item = watcher::Result<watcher::Event<EndpointSlice>>>>,
    ) {
        loop {
            let next = async {
                match self.moves.next_end() {
                    None => Ok(events.next().await),
                    Some(end) => clock::timeout_at(end, events.next()).await,
                }
            };
            let roles = async {
                match &self.roles {
                    Some(roles) => roles.changed.notified().await,
                    None => pending().await,
                }
            };
            let next = tokio::select! {
                next = next => next.ok(),
                () = roles => None,
            };
            let Some(event) = next else {
                self.tell();
                continue;
            };
            match event {
                Some(Ok(event)) => self.take(event),
                // The version to begin at is too old to be known, which a server may say by its status; a
                // watcher would ask for it for ever.
                Some(Err(watcher::Error::WatchStartFailed(error))) if access::status(&error) == Some(410) => {
                    return;
                }
                Some(Err(error)) => self.failed(&error),
                None => return,
            }
        }
    }

    fn take(&mut self, event: watcher::Event<EndpointSlice>) {
        let listed = matches!(event, watcher::Event::InitDone);
        if !self.slices.apply(event) {
            return;
        }
        if listed && self.slices.is_empty() {
            let (namespace, selector) = (&self.namespace, &self.fleet.selector);
            tracing::warn!(
                namespace,
                selector,
                "no EndpointSlice has these labels: is there such a Service?"
            );
        }
        self.tell();
    }

    /// Tells the members who there is.
    fn tell(&mut self) {
        match self.slices.view(self.fleet) {
            Ok(mut view) => {
                if let Some(roles) = &self.roles
                    && !self.roles_known(&Arc::clone(roles), &mut view.workers)
                {
                    return;
                }
                let found = self.moves.settle(view, Instant::now());
                *self.pods.lock() = deletion_cost::pods_of(&found);
                match found.into_iter().map(|found| self.by_rank(found.listed)).collect::<Result<Vec<_>, _>>()
                {
                    Ok(listed) => self.looks.found(&listed.concat()),
                    Err(error) => self.looks.failed(&error),
                }
            }
            Err(error) => self.looks.failed(&error),
        }
    }

    /// Whether it is known for which part of requests these are; says why it is not.
    fn roles_known(&mut self, roles: &PodRoles, workers: &mut [Found]) -> bool {
        let is_known = roles.assign(self.fleet, workers);
        if let Some(trouble) = roles.trouble() {
            self.looks.failed(&trouble);
            return false;
        }
        is_known
    }

    fn by_rank(&self, Listed { config, ready }: Listed) -> Result<Vec<Listed>, RankError> {
        let ranks = self.fleet.by_rank(config)?;
        Ok(ranks.into_iter().map(|config| Listed { config, ready }).collect())
    }

    fn failed(&mut self, error: &watcher::Error) {
        if matches!(error, watcher::Error::WatchError(status) if status.code == 410) {
            // What was watched from is too old to be known: the list is read again.
            tracing::debug!(%error, "the watch begins anew");
        } else {
            self.looks.failed(&access::explain(error));
        }
    }
}
