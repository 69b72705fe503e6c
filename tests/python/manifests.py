"""Reads a built overlay and holds it against Kubernetes' own schemas, several versions of them, unknown fields included.
Kinds that Kubernetes does not know are held against the fields that their own projects' types have
(tests/data/custom_resources.json); a kind that neither knows is a fault. Usage: manifests.py BUILT.yaml; prints one line a fault and ends with 1 if there are any."""

import json
import pathlib
import sys

import kubernetes_validate
import yaml

VERSIONS = ["1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
# The fields of kinds that are not Kubernetes' own: name -> [required, fields of it if it is an object].
CUSTOM = json.loads((pathlib.Path(__file__).parent.parent / "data/custom_resources.json").read_text(encoding="utf-8"))
# What a trigger of KEDA needs besides, by its type (keda.sh/docs, scalers).
TRIGGERS = {
    "prometheus": {"serverAddress", "query", "threshold"},
    "external": {"scalerAddress"},
    "external-push": {"scalerAddress", "model"},
}


def strict_faults(manifest):
    """Against Kubernetes' schemas; an unknown version, kind or field is a fault."""
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{version}: {error.message} at {list(error.path)}"
        except Exception as error:
            yield f"{version}: {type(error).__name__}: {error}"


def unknown_fields(value, fields, path):
    """What would be lost if the value were read into its type and written again, and what would be missing."""
    if isinstance(fields, list):
        if not isinstance(value, list):
            yield f"{path} is no list"
            return
        for i, each in enumerate(value):
            yield from unknown_fields(each, fields[0], f"{path}.{i}")
    elif fields is not None:
        if not isinstance(value, dict):
            yield f"{path} is no object"
            return
        yield from (f"has unknown {path}.{key}" for key in value if key not in fields)
        yield from (f"lacks {path}.{key}" for key, (required, _) in fields.items() if required and key not in value)
        for key in value.keys() & fields.keys():
            yield from unknown_fields(value[key], fields[key][1], f"{path}.{key}")


def scaled_faults(spec):
    """What KEDA hands on to an HPA must be what an HPA knows, and a trigger must have what its scaler needs."""
    behavior = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
    hpa = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "x"},
           "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "x"}, "maxReplicas": 1, "behavior": behavior}}
    yield from strict_faults(hpa)
    for trigger in spec.get("triggers", []):
        if trigger.get("type") not in TRIGGERS:
            yield f"knows no trigger of type {trigger.get('type')}"
        missing = TRIGGERS.get(trigger.get("type"), set()) - {k for k, v in trigger.get("metadata", {}).items() if v}
        yield from (f"lacks spec.triggers.metadata.{key}" for key in sorted(missing))
        yield from (f"metadata.{k} is no string" for k, v in trigger.get("metadata", {}).items() if not isinstance(v, str))


def schema_faults(manifest):
    custom = CUSTOM.get(f"{manifest['apiVersion']} {manifest['kind']}")
    if custom is None:
        yield from strict_faults(manifest)
        return
    yield from unknown_fields(manifest["spec"], custom["spec"], "spec")
    yield from (f"has unknown {key}" for key in manifest.keys() - {"apiVersion", "kind", "metadata", "spec"})
    if manifest["kind"] == "ScaledObject":
        yield from scaled_faults(manifest["spec"])


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
        for backend in [b for rule in spec.get("rules", []) for b in rule.get("backendRefs", [])] if m["kind"] == "HTTPRoute" else []:
            ports = [p["port"] for s in manifests if (s["kind"], s["metadata"]["name"]) == ("Service", backend["name"])
                     for p in s["spec"]["ports"]]
            if backend.get("port") not in ports:
                yield f"{name}: {backend['name']} has no port {backend.get('port')}"
        if m["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = spec["scaleTargetRef"]["name"]
            if ("Deployment", target) not in named:
                yield f"{name}: there is no Deployment {target}"
        if m["kind"] == "RoleBinding":
            wanted = [(m["roleRef"]["kind"], m["roleRef"]["name"])] + [(s["kind"], s["name"]) for s in m["subjects"]]
            yield from (f"{name}: there is no {' '.join(other)}" for other in wanted if other not in named)
            # The API server refuses a ServiceAccount without one.
            yield from (f"{name}: {s['name']} has no namespace" for s in m["subjects"] if not s.get("namespace"))
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


def read(path):
    return [m for m in yaml.safe_load_all(open(path, encoding="utf-8")) if m]


def main():
    manifests = read(sys.argv[1])
    if len(manifests) < 8:
        sys.exit(f"only {len(manifests)} manifests")
    faults = []
    for manifest in manifests:
        label = f"{manifest['kind']}/{manifest['metadata']['name']}"
        faults += [f"{label}: {fault}" for fault in schema_faults(manifest)]
    faults += references(manifests)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
