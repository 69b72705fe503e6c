#!/usr/bin/env bash
# Builds the images of the gateway, the worker and the mock fleet twice, wants them alike, and runs in them what the README shows:
# the gateway with nothing configured, which answers a question with its own workers; then two workers, each in a container of its own,
# with a gateway in front; then a mock worker. images.sh FOLDER_OF_PROGRAMS; needs buildah, and root or user namespaces.
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

for program in keyway keyway-worker keyway-loadtest; do
    first=$("$root/deploy/containers/build.sh" "$program" "keyway-test/$program")
    second=$("$root/deploy/containers/build.sh" "$program" "keyway-test/$program")
    [ -n "$first" ] && [ "$first" = "$second" ] || { echo "$program: two builds differ: $first $second" >&2; exit 1; }
    echo "image $program: $(buildah images --format '{{.Size}}' "keyway-test/$program" | head -1), twice alike"
done
# Each in a process group of its own, so that what runs inside ends with it. The host's network: chroot has no other.
run() { # NAME IMAGE ARGUMENTS...
    local container
    container=$(buildah from "keyway-test/$2")
    containers+=("$container")
    setsid buildah run "$container" -- /usr/local/bin/program "${@:3}" >"$work/$1.log" 2>&1 &
    pids+=($!)
}
said() { # NAME MARKER: what follows the marker, up to a blank
    local found
    for _ in $(seq 600); do
        # Two looks: with pipefail a grep that ends early would fail the first.
        if found=$(grep -m1 -o "$2[^ ]*" "$work/$1.log"); then
            echo "${found#"$2"}"
            return
        fi
        sleep 0.1
    done
    cat "$work/$1.log" >&2
    exit 1
}
ask() { # URL MODEL
    curl -sS --noproxy '*' --fail -H 'content-type: application/json' \
        -d "{\"model\":\"$2\",\"messages\":[{\"role\":\"user\",\"content\":\"How do I add a worker?\"}],\"max_tokens\":64}" \
        "$1/v1/chat/completions"
}
ready() { # ADMIN WORKERS
    for _ in $(seq 600); do
        [ "$(curl -sS --noproxy '*' "http://$1/workers" | grep -c '"state": "ready"')" = "$2" ] && return
        sleep 0.1
    done
    echo "$1 never had $2 workers ready" >&2
    exit 1
}
any=(--listen 127.0.0.1:0)

run demo keyway "${any[@]}" --admin-listen 127.0.0.1:0
gateway=$(said demo "listening on ")
ask "$gateway" keyway-builtin | tee "$work/answer" | grep -q -- '--worker' || { cat "$work/answer" >&2; exit 1; }
echo "the gateway alone, nothing configured: answers a question about itself"

run one keyway-worker --model builtin "${any[@]}"
run two keyway-worker --model builtin "${any[@]}"
first=$(said one "ready on ") second=$(said two "ready on ")
run fleet keyway "${any[@]}" --admin-listen 127.0.0.1:0 --worker "$first" --worker "$second"
gateway=$(said fleet "listening on ")
ready "$(said fleet "admin on http://")" 2
ask "$gateway" keyway-builtin | tee "$work/answer" | grep -q -- '--worker' || { cat "$work/answer" >&2; exit 1; }
echo "two workers and a gateway, each in a container: the same answer"

port=$((20000 + RANDOM % 20000))
run mock keyway-loadtest mock --workers 1 --base-port "$port" --time-scale 20
said mock "ready on" >/dev/null
run simulated keyway "${any[@]}" --admin-listen 127.0.0.1:0 --worker "http://127.0.0.1:$port"
gateway=$(said simulated "listening on ")
ready "$(said simulated "admin on http://")" 1
ask "$gateway" mock | grep -q '"completion_tokens"'
echo "images: all well"
