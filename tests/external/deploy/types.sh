#!/usr/bin/env bash
# Every custom resource under deploy/ (KEDA's, the Prometheus operator's, the Gateway API's) through its Rust type and back: nothing
# may be lost. The rules of Prometheus go as the PrometheusRule that deploy/docs/kubernetes.md tells to make of them. Then the same with
# a mistake in each kind, which must be seen. Needs cargo, kubectl and what tests/setup.sh installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(cd ../../.. && pwd)
python=${KEYWAY_TEST_VENV:-$root/.venv}/bin/python
kubectl=$(command -v kubectl || echo "${KEYWAY_TEST_VENV:-$root/.venv}/bin/kubectl")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for overlay in gateway-api scale-to-zero vllm keyway-worker; do
    "$kubectl" kustomize "$root/deploy/kubernetes/overlays/$overlay"
    echo ---
done >"$work/all.yaml"
"$python" - "$work/all.yaml" "$root"/deploy/prometheus/{rules,alerts}.yml >"$work/all.jsonl" <<'PYTHON'
import json, pathlib, sys, yaml
for each in yaml.safe_load_all(open(sys.argv[1], encoding="utf-8")):
    if each:
        print(json.dumps(each))
for path in map(pathlib.Path, sys.argv[2:]):
    print(json.dumps({"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": path.stem},
                      "spec": yaml.safe_load(path.read_text(encoding="utf-8"))}))
PYTHON
cargo build --quiet --locked --manifest-path types/Cargo.toml --target-dir "${TYPES_TARGET_DIR:-$work/target}"
through=${TYPES_TARGET_DIR:-$work/target}/debug/custom-resource-types
"$through" <"$work/all.jsonl"
for mistake in 's/"scaleTargetRef": {"name": "[a-z-]*"}/"scaleTargetRef": {"name": 7}/' 's/"jobLabel"/"jobLable"/' \
    's/"podMetricsEndpoints"/"podMetricEndpoints"/' 's/"alert"/"alarm"/' 's/"backendRequest"/"backendRequests"/'; do
    sed "$mistake" "$work/all.jsonl" >"$work/wrong.jsonl"
    if cmp -s "$work/all.jsonl" "$work/wrong.jsonl" || "$through" <"$work/wrong.jsonl" >"$work/said"; then
        echo "not seen: $mistake" >&2
        exit 1
    fi
    echo "seen  $(grep -m1 LOST "$work/said")"
done
