"""Reads a built overlay and holds it against Kubernetes' own schemas, several versions of them, unknown fields included.
Kinds that Kubernetes does not know are held against the list below: apiVersion, kind and the fields that their projects
document as required. Usage: manifests.py BUILT.yaml; prints one line a fault and ends with 1 if there are any."""

import sys

import kubernetes_validate
import yaml

VERSIONS = ["1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
# Field paths that must be there (lists by their first element), and the keys that `spec` may have.
CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledObject"): (
        ["spec.scaleTargetRef.name", "spec.triggers.0.type"],
        {"scaleTargetRef", "pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount",
         "minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"},
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): (
        ["spec.selector.matchLabels", "spec.endpoints.0.port"],
        {"selector", "endpoints", "jobLabel", "namespaceSelector", "targetLabels", "podTargetLabels", "sampleLimit"},
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): (
        ["spec.selector.matchLabels", "spec.podMetricsEndpoints.0.port"],
        {"selector", "podMetricsEndpoints", "jobLabel", "namespaceSelector", "podTargetLabels", "sampleLimit"},
    ),
}
# What the triggers that are used here must say, by type.
TRIGGERS = {
    "prometheus": ["metadata.serverAddress", "metadata.query", "metadata.threshold"],
    "external-push": ["metadata.scalerAddress", "metadata.model"],
}


def at(value, path):
    for key in path.split("."):
        if isinstance(value, list):
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = (value or {}).get(key)
    return value


def schema_faults(manifest):
    kind = (manifest["apiVersion"], manifest["kind"])
    if kind in CUSTOM:
        needed, allowed = CUSTOM[kind]
        yield from (f"lacks {path}" for path in needed if at(manifest, path) in (None, ""))
        yield from (f"has unknown spec.{key}" for key in set(manifest["spec"]) - allowed)
        for trigger in manifest["spec"].get("triggers", []):
            needed = TRIGGERS.get(trigger["type"], ["a known type"])
            yield from (f"lacks {path}" for path in needed if at(trigger, path) in (None, ""))
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{version}: {error.message} at {list(error.path)}"
        except Exception as error:  # an unknown version or kind is a fault as well
            yield f"{version}: {type(error).__name__}: {error}"


def references(manifests):
    """What must fit together across manifests: selectors, targets, config maps, ports, probes."""
    named = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    pods = [m["spec"]["template"] for m in manifests if m["kind"] == "Deployment"]

    def selected(labels):
        return [p for p in pods if labels.items() <= p["metadata"]["labels"].items()]

    for m in manifests:
        name, spec = f"{m['kind']}/{m['metadata']['name']}", m.get("spec", {})
        if m["kind"] == "Service":
            chosen = selected(spec["selector"])
            ports = {p.get("name") for pod in chosen for c in pod["spec"]["containers"] for p in c.get("ports", [])}
            yield from (f"{name}: no pod has port {p['targetPort']}" for p in spec["ports"] if p["targetPort"] not in ports)
        if m["kind"] in ("PodDisruptionBudget", "PodMonitor") and not selected(spec["selector"]["matchLabels"]):
            yield f"{name}: selects no pod"
        if m["kind"] == "NetworkPolicy" and not selected(spec["podSelector"]["matchLabels"]):
            yield f"{name}: selects no pod"
        if m["kind"] == "ServiceMonitor":
            wanted = spec["selector"]["matchLabels"].items()
            services = [s for s in manifests if s["kind"] == "Service" and wanted <= s["metadata"].get("labels", {}).items()]
            if len(services) != 1:
                yield f"{name}: selects {len(services)} services"
        for trigger in spec.get("triggers", []) if m["kind"] == "ScaledObject" else []:
            host, _, port = trigger["metadata"].get("scalerAddress", "").partition(":")
            service = next((s for s in manifests if s["kind"] == "Service" and s["metadata"]["name"] == host.split(".")[0]), None)
            if host and (service is None or host.split(".")[1:2] != [m["metadata"]["namespace"]]):
                yield f"{name}: there is no Service {host}"
            elif host and int(port or 0) not in {p["port"] for p in service["spec"]["ports"]}:
                yield f"{name}: {host} has no port {port}"
        if m["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = spec["scaleTargetRef"]["name"]
            if ("Deployment", target) not in named:
                yield f"{name}: there is no Deployment {target}"
        if m["kind"] == "Deployment":
            pod = spec["template"]["spec"]
            if not spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items():
                yield f"{name}: does not select its own pods"
            for volume in pod.get("volumes", []):
                config = volume.get("configMap", {}).get("name")
                if config and ("ConfigMap", config) not in named:
                    yield f"{name}: there is no ConfigMap {config}"
            for container in pod["containers"]:
                context = container.get("securityContext", {})
                if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities", {}).get("drop") != ["ALL"]:
                    yield f"{name}: {container['name']} may gain privileges"
                ports = {p["name"] for p in container.get("ports", [])}
                for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                    port = container.get(probe, {}).get("httpGet", {}).get("port", "http" if "http" in ports else None)
                    if port not in ports:
                        yield f"{name}: {container['name']}: {probe} asks port {port}"
                if "readinessProbe" not in container:
                    yield f"{name}: {container['name']} has no readinessProbe"
                drain = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
                if drain >= pod.get("terminationGracePeriodSeconds", 30):
                    yield f"{name}: the pause before its end is longer than its grace period"


def main():
    manifests = [m for m in yaml.safe_load_all(open(sys.argv[1], encoding="utf-8")) if m]
    if len(manifests) < 8:
        sys.exit(f"only {len(manifests)} manifests")
    faults = []
    for manifest in manifests:
        label = f"{manifest['kind']}/{manifest['metadata']['name']}"
        faults += [f"{label}: {fault}" for fault in schema_faults(manifest)]
    faults += references(manifests)
    if faults:
        sys.exit("\n".join(faults))


main()
