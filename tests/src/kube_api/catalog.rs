//! What the server says of itself: its version and which kinds it knows, at which paths. The kinds are those
//! of the manifests under `deploy/`, Helm's own (Secrets), and what the gateway asks for.

use serde_json::{Value, json};

/// Group and version, kind, plural, and whether it is in a namespace.
const KINDS: [(&str, &str, &str, bool); 19] = [
    ("v1", "ConfigMap", "configmaps", true),
    ("v1", "Namespace", "namespaces", false),
    ("v1", "Pod", "pods", true),
    ("v1", "Secret", "secrets", true),
    ("v1", "Service", "services", true),
    ("v1", "ServiceAccount", "serviceaccounts", true),
    ("apps/v1", "Deployment", "deployments", true),
    ("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", true),
    ("coordination.k8s.io/v1", "Lease", "leases", true),
    ("discovery.k8s.io/v1", "EndpointSlice", "endpointslices", true),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", true),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", true),
    ("rbac.authorization.k8s.io/v1", "Role", "roles", true),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings", true),
    ("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes", true),
    ("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", true),
    ("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", true),
    ("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules", true),
    ("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors", true),
];

/// Where an object is.
///
/// # Panics
/// When its kind is not known.
pub(super) fn path_of(object: &Value) -> String {
    let (version, kind) =
        (object["apiVersion"].as_str().unwrap_or(""), object["kind"].as_str().unwrap_or(""));
    let known = KINDS.iter().find(|known| known.0 == version && known.1 == kind);
    let (_, _, plural, scoped) = known.unwrap_or_else(|| panic!("{version} {kind} is not known here"));
    let root = if version.contains('/') { "apis" } else { "api" };
    let name = object["metadata"]["name"].as_str().expect("a name");
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
    let within = if *scoped { format!("namespaces/{namespace}/") } else { String::new() };
    format!("/{root}/{version}/{within}{plural}/{name}")
}

/// A document about the server itself.
pub(super) fn document(path: &str) -> Option<Value> {
    match path.trim_end_matches('/') {
        "/version" => Some(
            json!({ "major": "1", "minor": "34", "gitVersion": "v1.34.0", "gitCommit": "", "platform": "",
            "gitTreeState": "clean", "buildDate": "2025-08-27T10:09:04Z", "goVersion": "go1.24.6", "compiler": "gc" }),
        ),
        "/api" => {
            Some(json!({ "kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [] }))
        }
        "/apis" => Some(groups()),
        path => {
            let version = path.strip_prefix("/apis/").or_else(|| path.strip_prefix("/api/"))?;
            resources(version)
        }
    }
}

fn groups() -> Value {
    let mut groups: Vec<Value> = Vec::new();
    for (version, ..) in KINDS {
        let Some((group, number)) = version.split_once('/') else { continue };
        let this = json!({ "groupVersion": version, "version": number });
        if groups.iter().all(|known| known["name"] != group) {
            groups.push(json!({ "name": group, "versions": [this], "preferredVersion": this }));
        }
    }
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })
}

fn resources(version: &str) -> Option<Value> {
    let verbs = ["create", "delete", "get", "list", "patch", "update", "watch"];
    let of_version = KINDS.iter().filter(|known| known.0 == version);
    let resources: Vec<Value> = of_version
        .map(|(_, kind, plural, scoped)| {
            json!({ "name": plural, "singularName": kind.to_lowercase(), "namespaced": scoped, "kind": kind,
                "verbs": verbs })
        })
        .collect();
    let list = json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources });
    (!resources.is_empty()).then_some(list)
}
