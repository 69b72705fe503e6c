#!/usr/bin/env bash
# Builds the images of the gateway and of the mock fleet twice, wants them alike, and runs the demo in them: a mock worker, a gateway
# in front of it, one request. images.sh FOLDER_OF_PROGRAMS; needs root or user namespaces.
set -euo pipefail
export KEYWAY_BIN_DIR=${1:?folder of programs} STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
work=$(mktemp -d)
pids=()
containers=()
finish() {
    for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
    for container in "${containers[@]}"; do buildah rm "$container" >/dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT

for program in keyway keyway-loadtest; do
    first=$("$root/deploy/containers/build.sh" "$program" "keyway-test/$program")
    second=$("$root/deploy/containers/build.sh" "$program" "keyway-test/$program")
    [ -n "$first" ] && [ "$first" = "$second" ] || { echo "$program: two builds differ: $first $second" >&2; exit 1; }
    echo "image $program: $(buildah images --format '{{.Size}}' "keyway-test/$program" | head -1), twice alike"
done
# Each in a process group of its own, so that what runs inside ends with it.
run() { # NAME IMAGE ARGUMENTS...
    local container
    container=$(buildah from "keyway-test/$2")
    containers+=("$container")
    setsid buildah run "$container" -- /usr/local/bin/program "${@:3}" >"$work/$1.log" 2>&1 &
    pids+=($!)
}
said() { # NAME MARKER
    for _ in $(seq 300); do
        grep -q "$2" "$work/$1.log" && return
        sleep 0.1
    done
    cat "$work/$1.log" >&2
    exit 1
}
run mock keyway-loadtest mock --workers 1 --base-port 9461 --time-scale 20
said mock "ready on"
run gateway keyway --worker http://127.0.0.1:9461 --listen 127.0.0.1:9462 --admin-listen 127.0.0.1:9463
said gateway "listening on"
curl -sS --noproxy '*' --retry 20 --retry-delay 1 --retry-all-errors --fail http://127.0.0.1:9463/readyz
curl -sS --noproxy '*' --fail -H 'content-type: application/json' \
    -d '{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":4}' \
    http://127.0.0.1:9462/v1/chat/completions | grep -q '"completion_tokens"'
echo "images: all well"
