"""Does with the Helm chart what its users do, by Helm's own library.

Usage:
  chart.py lint CHART                        lints and packages it
  chart.py install CHART KUBECONFIG VALUES   installs it as the release `keyway` in the namespace `models`
  chart.py same OBJECTS BUILT                compares what a server received with a built overlay"""

import asyncio
import json
import os
import sys
import tempfile

import yaml

# What Helm or kustomize adds, and what tells releases apart where kustomize has one fleet a namespace.
ADDED = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart",
         "keyway.dev/config", "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"}
SERVERS = {"resourceVersion", "uid", "namespace"}


def lint(chart):
    import helm_sdkpy

    config = helm_sdkpy.Configuration(namespace="models", kubeconfig=os.devnull)
    said = asyncio.run(helm_sdkpy.Lint(config).run(chart))
    # 1 is information (an icon is recommended), 2 a warning, 3 an error.
    worst = max((message["Severity"] for message in said["Messages"] or []), default=0)
    if said["Errors"] or worst > 1:
        sys.exit(f"lint: {said}")
    with tempfile.TemporaryDirectory() as folder:
        archive = asyncio.run(helm_sdkpy.Package(config).run(chart, folder))
        if not os.path.getsize(archive) > 1000:
            sys.exit(f"package: {archive} is empty")
        print(os.path.basename(archive))


def install(chart, kubeconfig, values):
    if os.environ.get("HELM_DRIVER") != "memory":
        # Helm would keep the release in a Secret, which it writes as protobuf; the tests' server reads JSON alone. A library
        # in Go sees only the environment that its process began with.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "HELM_DRIVER": "memory"})
    import helm_sdkpy

    with open(values, encoding="utf-8") as file:
        values = yaml.safe_load(file) or {}
    config = helm_sdkpy.Configuration(namespace="models", kubeconfig=kubeconfig)
    try:
        release = asyncio.run(helm_sdkpy.Install(config).run("keyway", chart, values=values, wait=False, timeout=60))
    except helm_sdkpy.HelmError as error:
        sys.exit(f"install: {error}")
    print(json.dumps(release))


def plain(value, of=None):
    """A manifest without what differs by tool: added labels and annotations, generated names, empty parts."""
    if isinstance(value, dict):
        if of == "metadata":
            value = {k: v for k, v in value.items() if k not in SERVERS}
        inner = {k: plain(v, k) for k, v in value.items() if k not in ADDED}
        return {k: v for k, v in inner.items() if v not in ({}, [], None)}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, str) and value.startswith("keyway-") and len(value) == len("keyway-xxxxxxxxxx") and of == "name":
        return "keyway"  # kustomize names a ConfigMap by its content
    if of == "namespace" and value in ("models", "keyway-demo"):
        return "the release's"
    return value


def by_name(manifests):
    found = {}
    for manifest in manifests:
        manifest = plain(manifest)
        # A label that no selector asks for is no difference.
        manifest["metadata"].pop("labels", None) if manifest["kind"] != "Service" else None
        found[manifest["kind"], manifest["metadata"]["name"]] = manifest
    return found


def effect(manifest):
    """What is left to defaults, said."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        spec.setdefault("type", "ClusterIP")
        manifest["metadata"].pop("labels", None)
    if manifest["kind"] == "Deployment":
        for container in spec["template"]["spec"]["containers"]:
            container.setdefault("imagePullPolicy", "IfNotPresent")
            container["ports"].sort(key=lambda port: port["containerPort"])
    if manifest["kind"] == "ConfigMap":
        import tomllib

        manifest["data"] = {name: tomllib.loads(text) for name, text in manifest["data"].items()}
    return manifest


def same(objects, built):
    with open(objects, encoding="utf-8") as file:
        received = by_name(yaml.safe_load_all(file))
    with open(built, encoding="utf-8") as file:
        wanted = by_name(m for m in yaml.safe_load_all(file) if m)
    faults = [f"{kind} {name}: only {'the chart' if (kind, name) in received else 'kustomize'} has it"
              for kind, name in received.keys() ^ wanted.keys()]
    for key in sorted(received.keys() & wanted.keys()):
        ours, theirs = effect(received[key]), effect(wanted[key])
        faults += [f"{' '.join(key)}: {line}" for line in differences(ours, theirs, "")]
    if faults or len(received) < 8:
        sys.exit("\n".join(faults) or f"only {len(received)} objects")


def differences(ours, theirs, path):
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs)):
            yield from differences(a, b, f"{path}.{i}")
    elif ours != theirs:
        yield f"{path}: chart {ours!r}, kustomize {theirs!r}"


{"lint": lint, "install": install, "same": same}[sys.argv[1]](*sys.argv[2:])
