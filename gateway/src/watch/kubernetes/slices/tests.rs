//! Slices that overlap, contradict each other, or are read anew.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::config::KubernetesTable;

fn fleet(toml: &str) -> KubernetesFleet {
    let table: KubernetesTable = toml::from_str(toml).unwrap();
    KubernetesFleet::try_from(&KubernetesTable { service: Some("workers".to_owned()), ..table }).unwrap()
}

fn slice(name: &str, endpoints: &[Value]) -> EndpointSlice {
    with_ports(name, &json!([{ "name": "http", "port": 8000 }]), endpoints)
}

fn with_ports(name: &str, ports: &Value, endpoints: &[Value]) -> EndpointSlice {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": name, "namespace": "models" }, "ports": ports, "endpoints": endpoints,
    });
    serde_json::from_value(slice).unwrap()
}

fn pod(address: &str, uid: &str, conditions: Value) -> Value {
    json!({ "addresses": [address], "conditions": conditions,
        "targetRef": { "kind": "Pod", "name": format!("pod-{uid}"), "namespace": "models", "uid": uid } })
}

fn ready(address: &str, uid: &str) -> Value {
    pod(address, uid, json!({ "ready": true, "serving": true, "terminating": false }))
}

/// `name identity ready` of each worker.
fn shown(slices: &Slices) -> Vec<String> {
    let show = |found: Found| {
        let Listed { config, ready } = found.listed;
        let identity = config.identity.clone().unwrap_or_default();
        format!("{} {identity} {ready}", config.name())
    };
    slices.view(&fleet("")).unwrap().workers.into_iter().map(show).collect()
}

#[test]
fn who_terminates_is_gone_and_who_is_not_ready_stays_listed() {
    let mut slices = Slices::default();
    slices.apply(Event::Apply(slice(
        "a",
        &[
            ready("10.0.0.1", "u1"),
            pod("10.0.0.2", "u2", json!({ "ready": false })),
            pod("10.0.0.3", "u3", json!({ "ready": false, "serving": true, "terminating": true })),
            // Absent conditions mean ready (the API's documentation).
            json!({ "addresses": ["10.0.0.4"] }),
            pod("no.address", "u5", json!({ "ready": true })),
        ],
    )));
    let wanted = ["10.0.0.1:8000 u1 true", "10.0.0.2:8000 u2 false", "10.0.0.4:8000  true"];
    assert_eq!(shown(&slices), wanted);
    assert_eq!(slices.view(&fleet("")).unwrap().ending, HashSet::from(["u3".to_owned()]));
}

#[test]
fn an_endpoint_of_two_slices_counts_once_and_the_careful_view_wins() {
    let mut slices = Slices::default();
    slices.apply(Event::Apply(slice("a", &[ready("10.0.0.1", "u1"), ready("10.0.0.2", "u2")])));
    slices.apply(Event::Apply(slice("b", &[pod("10.0.0.1", "u1", json!({ "ready": false }))])));
    assert_eq!(shown(&slices), ["10.0.0.1:8000 u1 false", "10.0.0.2:8000 u2 true"]);
    slices.apply(Event::Delete(slice("b", &[])));
    assert_eq!(shown(&slices)[0], "10.0.0.1:8000 u1 true");
}

#[test]
fn what_is_no_pod_is_told_apart_by_its_port_too() {
    let by_hand = [json!({ "addresses": ["10.0.0.1"] })];
    let mut slices = Slices::default();
    for (name, port) in [("a", 8000), ("b", 8001)] {
        slices.apply(Event::Apply(with_ports(name, &json!([{ "port": port }]), &by_hand)));
    }
    assert_eq!(shown(&slices), ["10.0.0.1:8000  true", "10.0.0.1:8001  true"]);
    let view = slices.view(&fleet("")).unwrap();
    assert_eq!(view.workers[1].identity(), "10.0.0.1:8001");
}

#[test]
fn a_pod_with_two_addresses_is_one_worker() {
    let mut slices = Slices::default();
    slices.apply(Event::Apply(slice("a", &[ready("fd00::1", "u1")])));
    slices.apply(Event::Apply(slice("b", &[ready("10.0.0.1", "u1")])));
    assert_eq!(shown(&slices), ["10.0.0.1:8000 u1 true"]);
}

#[test]
fn an_address_that_two_pods_claim_belongs_to_the_one_that_is_ready() {
    let old = pod("10.0.0.1", "u1", json!({ "ready": false }));
    for endpoints in [[old.clone(), ready("10.0.0.1", "u2")], [ready("10.0.0.1", "u2"), old]] {
        let mut slices = Slices::default();
        slices.apply(Event::Apply(slice("a", &endpoints)));
        assert_eq!(shown(&slices), ["10.0.0.1:8000 u2 true"]);
    }
}

#[test]
fn a_list_counts_once_it_is_whole() {
    let mut slices = Slices::default();
    assert!(slices.apply(Event::Apply(slice("a", &[ready("10.0.0.1", "u1")]))));
    assert!(!slices.apply(Event::Init));
    assert!(!slices.apply(Event::InitApply(slice("b", &[ready("10.0.0.2", "u2")]))));
    assert_eq!(shown(&slices), ["10.0.0.1:8000 u1 true"], "half a list takes nobody out");
    // A list that broke off begins anew.
    assert!(!slices.apply(Event::Init));
    assert!(!slices.apply(Event::InitApply(slice("c", &[ready("10.0.0.3", "u3")]))));
    assert!(slices.apply(Event::InitDone));
    assert_eq!(shown(&slices), ["10.0.0.3:8000 u3 true"]);
}

#[test]
fn the_port_is_the_one_that_is_meant_or_an_error_that_names_the_key() {
    let several = json!([{ "name": "http", "port": 8000 }, { "name": "grpc", "port": 9000 }]);
    let odd = json!([{ "name": "a", "port": 1 }, { "name": "b", "port": 2 }]);
    let port = |ports: &Value, toml: &str| {
        let mut slices = Slices::default();
        slices.apply(Event::Apply(with_ports("a", ports, &[ready("10.0.0.1", "u1")])));
        let view = slices.view(&fleet(toml)).map_err(|error| error.to_string())?;
        Ok::<_, String>(view.workers[0].listed.config.name())
    };
    assert_eq!(port(&several, "").unwrap(), "10.0.0.1:8000");
    assert_eq!(port(&several, "port = \"grpc\"").unwrap(), "10.0.0.1:9000");
    assert_eq!(port(&several, "port = 7000").unwrap(), "10.0.0.1:7000");
    assert_eq!(port(&json!([{ "port": 80 }]), "").unwrap(), "10.0.0.1:80");
    assert!(port(&odd, "").unwrap_err().contains("a, b: set discovery.kubernetes.port"));
    assert!(port(&odd, "port = \"http\"").unwrap_err().contains("no port \"http\""));
    let mut slices = Slices::default();
    slices.apply(Event::Apply(with_ports("a", &json!([]), &[])));
    assert_eq!(slices.view(&fleet("")).unwrap().workers, [], "no endpoints, no ports, no error");
}

proptest! {
    /// The list depends on what slices there are, not on how they came to be.
    #[test]
    fn events_in_any_order_end_in_the_same_list(
        steps in prop::collection::vec((0_u8..4, 0_u8..6, any::<bool>(), any::<bool>()), 0..40),
    ) {
        let mut slices = Slices::default();
        let mut last: BTreeMap<String, EndpointSlice> = BTreeMap::new();
        for (name, host, is_ready, deleted) in steps {
            let name = format!("s{name}");
            let endpoint = pod(&format!("10.0.0.{host}"), &format!("u{host}"), json!({ "ready": is_ready }));
            let slice = slice(&name, &[endpoint]);
            if deleted {
                last.remove(&name);
                slices.apply(Event::Delete(slice));
            } else {
                last.insert(name, slice.clone());
                slices.apply(Event::Apply(slice));
            }
        }
        let mut read = Slices::default();
        read.apply(Event::Init);
        for slice in last.into_values().rev() {
            read.apply(Event::InitApply(slice));
        }
        read.apply(Event::InitDone);
        prop_assert_eq!(shown(&slices), shown(&read));
    }
}
