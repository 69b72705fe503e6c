//! What EndpointSlices say of a fleet: the workers of all slices together, and who may get requests. No time
//! and no sockets: events come in, a list goes out.
//!
//! Sources: <https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/>, of which three rules
//! matter here: an endpoint may be in several slices at once; a condition that is absent is `ready: true` and
//! `terminating: false`; a pod that ends is `terminating` and not `ready` any more.

use std::{
    collections::{BTreeMap, HashSet},
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use kube::runtime::watcher::Event;

use crate::{
    config::{ConfigError, KubernetesFleet, PortRef},
    limits::KUBERNETES_SLICES_MAX,
    watch::members::Listed,
};

/// The slices of one fleet.
#[derive(Debug, Default)]
pub(super) struct Slices {
    known: BTreeMap<String, EndpointSlice>,
    /// What a list that is being read has shown so far.
    reading: Option<BTreeMap<String, EndpointSlice>>,
}

/// A worker, and the pod that it runs in.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Found {
    /// As members are listed.
    pub listed: Listed,
    /// Its pod's name, where it is one.
    pub pod: Option<String>,
}

impl Found {
    /// What it is told from others by: its pod's UID, else its address and port.
    pub(super) fn identity(&self) -> String {
        let config = &self.listed.config;
        config.identity.clone().unwrap_or_else(|| config.name())
    }
}

/// What the slices of a fleet say together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct View {
    /// Those that do not end.
    pub workers: Vec<Found>,
    /// Identities of those that do.
    pub ending: HashSet<String>,
}

/// Why slices do not say which workers there are.
#[derive(Debug, thiserror::Error)]
pub(super) enum SlicesError {
    /// More slices than are looked through.
    #[error("more than {KUBERNETES_SLICES_MAX} EndpointSlices have these labels")]
    TooMany,
    /// A slice has no port of workers.
    #[error("{slice}: {source}")]
    Port {
        /// The slice's name.
        slice: String,
        /// What is wrong with its ports.
        source: PortError,
    },
    /// An endpoint cannot be a worker.
    #[error(transparent)]
    Worker(#[from] ConfigError),
}

/// Why a slice does not say at which port its workers listen.
#[derive(Debug, thiserror::Error)]
pub(super) enum PortError {
    /// No port has the name that is wanted.
    #[error("its Service has no port {name:?}, but {known}")]
    NoSuchName {
        /// The name, as the configuration has it.
        name: String,
        /// The names that there are, comma separated.
        known: String,
    },
    /// The only port there is has no number.
    #[error("its Service's port has no number")]
    NoNumber,
    /// There are ports of these names, and which one is meant is not said.
    #[error("its Service has the ports {0}: set discovery.kubernetes.port")]
    Several(String),
}

/// What is known of an endpoint from all slices it is in.
struct Seen<'a> {
    address: IpAddr,
    port: u16,
    h2c: bool,
    uid: Option<&'a str>,
    pod: Option<&'a str>,
    ready: bool,
    terminating: bool,
}

impl Slices {
    /// Takes an event. Returns whether the slices are whole: while a list is being read, those known before
    /// count.
    pub(super) fn apply(&mut self, event: Event<EndpointSlice>) -> bool {
        match event {
            Event::Init => self.reading = Some(BTreeMap::new()),
            Event::InitApply(slice) => {
                self.reading.get_or_insert_default().insert(name_of(&slice), slice);
            }
            Event::InitDone => self.known = self.reading.take().unwrap_or_default(),
            Event::Apply(slice) => {
                self.known.insert(name_of(&slice), slice);
            }
            Event::Delete(slice) => {
                self.known.remove(&name_of(&slice));
            }
        }
        self.reading.is_none()
    }

    /// Whether there are none at all.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The workers, each once, and who ends.
    pub(super) fn view(&self, fleet: &KubernetesFleet) -> Result<View, SlicesError> {
        if self.known.len() > KUBERNETES_SLICES_MAX {
            return Err(SlicesError::TooMany);
        }
        // By pod; what is no pod, by its address and port. IPv4 sorts before IPv6, and a pod that has both is
        // met at the first.
        let mut by_identity: BTreeMap<String, Seen<'_>> = BTreeMap::new();
        for slice in self.known.values() {
            let port = match port_of(slice.ports.as_deref().unwrap_or_default(), fleet.port.as_ref()) {
                Ok(port) => port,
                // A Service without endpoints has a slice without ports.
                Err(_) if slice.endpoints.is_empty() => continue,
                Err(source) => return Err(SlicesError::Port { slice: name_of(slice), source }),
            };
            let ports = slice.ports.iter().flatten();
            let h2c = ports.into_iter().any(|known| number(known) == Some(port) && speaks_h2c(known));
            for endpoint in &slice.endpoints {
                if let Some(seen) = seen(endpoint, port, h2c) {
                    let place = SocketAddr::new(seen.address, seen.port);
                    let identity = seen.uid.map_or_else(|| place.to_string(), str::to_owned);
                    by_identity.entry(identity).and_modify(|known| known.merge(&seen)).or_insert(seen);
                }
            }
        }
        let ends = by_identity.iter().filter(|(_, seen)| seen.terminating);
        let ending = ends.map(|(identity, _)| identity.clone()).collect();
        let mut by_address: BTreeMap<(IpAddr, u16), Seen<'_>> = BTreeMap::new();
        for seen in by_identity.into_values().filter(|seen| !seen.terminating) {
            // The address of a pod that is gone may be another's before its slice says so: who is ready has
            // it.
            let at = by_address.entry((seen.address, seen.port));
            at.and_modify(|other| {
                if seen.ready && !other.ready {
                    seen.clone_into(other);
                }
            })
            .or_insert(seen);
        }
        let workers = by_address.into_values().map(|seen| seen.found(fleet)).collect::<Result<_, _>>()?;
        Ok(View { workers, ending })
    }
}

impl Seen<'_> {
    /// Adds what another slice says of the same endpoint. Which of the two is older is not known, so it may
    /// get requests only if both say so.
    fn merge(&mut self, other: &Self) {
        self.ready &= other.ready;
        self.terminating |= other.terminating;
        if (other.address, other.port) < (self.address, self.port) {
            (self.address, self.port) = (other.address, other.port);
        }
    }

    fn found(&self, fleet: &KubernetesFleet) -> Result<Found, ConfigError> {
        let config = fleet.worker(self.address, self.port, self.uid, self.h2c)?;
        let listed = Listed { config, ready: self.ready };
        Ok(Found { listed, pod: self.pod.map(str::to_owned) })
    }
}

impl<'a> Seen<'a> {
    fn clone_into(&self, other: &mut Seen<'a>) {
        let Seen { address, port, h2c, uid, pod, ready, terminating } = *self;
        *other = Seen { address, port, h2c, uid, pod, ready, terminating };
    }
}

/// `None`: not at an address (slices of the type FQDN).
fn seen(endpoint: &Endpoint, port: u16, h2c: bool) -> Option<Seen<'_>> {
    let address = endpoint.addresses.first()?.parse().ok()?;
    let conditions = endpoint.conditions.as_ref();
    let pod = endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"));
    Some(Seen {
        address,
        port,
        h2c,
        uid: pod.and_then(|pod| pod.uid.as_deref()),
        pod: pod.and_then(|pod| pod.name.as_deref()),
        ready: conditions.and_then(|conditions| conditions.ready).unwrap_or(true),
        terminating: conditions.and_then(|conditions| conditions.terminating).unwrap_or(false),
    })
}

fn name_of(slice: &EndpointSlice) -> String {
    slice.metadata.name.clone().unwrap_or_default()
}

fn number(port: &EndpointPort) -> Option<u16> {
    port.port.and_then(|number| u16::try_from(number).ok())
}

/// Whether the port's `appProtocol` says that it speaks HTTP/2 without TLS
/// (<https://kubernetes.io/docs/concepts/services-networking/service/#application-protocol>).
fn speaks_h2c(port: &EndpointPort) -> bool {
    port.app_protocol.as_deref() == Some("kubernetes.io/h2c")
}

/// The workers' port: the one that is wanted, else the only one, else the one named `http`.
fn port_of(ports: &[EndpointPort], wanted: Option<&PortRef>) -> Result<u16, PortError> {
    let named = |name: &str| ports.iter().find(|port| port.name.as_deref() == Some(name)).and_then(number);
    let names = || {
        let names: Vec<&str> = ports.iter().map(|port| port.name.as_deref().unwrap_or("(no name)")).collect();
        names.join(", ")
    };
    match (wanted, ports) {
        (Some(PortRef::Number(port)), _) => Ok(*port),
        (Some(PortRef::Name(name)), _) => {
            named(name).ok_or_else(|| PortError::NoSuchName { name: name.clone(), known: names() })
        }
        (None, [only]) => number(only).ok_or(PortError::NoNumber),
        (None, _) => named("http").ok_or_else(|| PortError::Several(names())),
    }
}

#[cfg(test)]
mod tests;
