#!/usr/bin/env bash
# Expert parallelism between network namespaces: three namespaces with a rank each on one bridge. The answers must be
# those of one process; then a link is cut in the middle of a generation, mended, and a rank killed: the same answers
# again, and the log names the rank. Needs Linux, root (ip netns), python3 and curl; KEYWAY_WORKER names a built program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
[ "$(id -u)" = 0 ] || { echo "needs root for ip netns" >&2; exit 1; }
worker=${KEYWAY_WORKER:-}
if [ -z "$worker" ]; then
    cargo build --release -q -p keyway-worker
    worker=${CARGO_TARGET_DIR:-target}/release/keyway-worker
fi
name=kwx$$
dir=$(mktemp -d)
pids=()

clean() {
    for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    for i in 0 1 2; do ip netns del "$name-$i" 2>/dev/null || true; done
    ip link del "$name" 2>/dev/null || true
    rm -rf "$dir"
}
trap clean EXIT

ip link add "$name" type bridge
ip link set "$name" up
for i in 0 1 2; do
    ip netns add "$name-$i"
    ip link add "${name}v$i" type veth peer name eth0 netns "$name-$i"
    ip link set "${name}v$i" master "$name" up
    ip -n "$name-$i" addr add "10.77.0.1$i/24" dev eth0
    ip -n "$name-$i" link set eth0 up
    ip -n "$name-$i" link set lo up
done
hosts=10.77.0.10:7070,10.77.0.11:7070,10.77.0.12:7070

rank() {
    ip netns exec "$name-$1" "$worker" expert-rank --rank "$1" --hosts $hosts --model random --threads 1 --deadline 3 \
        2>>"$dir/rank$1.log" &
    pids+=($!)
}

serve() { # name, namespace, options: waits until it is ready
    local log=$dir/$1.log
    ip netns exec "$2" "$worker" --model random --listen 127.0.0.1:8000 --threads 1 "${@:3}" 2>"$log" &
    pids+=($!)
    for _ in $(seq 300); do
        grep -q "ready on" "$log" && return
        sleep 0.1
    done
    cat "$log" >&2
    exit 1
}

ask() { # namespace: the text of one long generation
    ip netns exec "$1" curl -sS --max-time 120 127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d \
        '{"prompt": "The quick brown fox", "max_tokens": 20000, "temperature": 0.9, "seed": 5, "ignore_eos": true}' |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])'
}

equal() { # what, file
    cmp -s "$dir/alone" "$2" || { echo "$1: another answer" >&2; cat "$dir/group.log" >&2; exit 1; }
    echo "$1: the same answer"
}

serve alone "$name-1"
ask "$name-1" >"$dir/alone"
[ "$(wc -c <"$dir/alone")" -gt 1000 ] || { echo "no answer" >&2; exit 1; }
rank 1
rank 2
second=${pids[-1]}
serve group "$name-0" --expert-parallel-hosts $hosts --expert-parallel-deadline 3
ask "$name-0" >"$dir/whole"
equal "three namespaces" "$dir/whole"

ask "$name-0" >"$dir/cut" &
asked=$!
sleep 0.3
ip link set "${name}v2" down
sleep 4
ip link set "${name}v2" up
wait $asked
equal "a link cut for 4 s" "$dir/cut"
grep -q "rank [12] failed in exchange .* no answer within 3s" "$dir/group.log" || {
    echo "the cut was not noticed" >&2
    cat "$dir/group.log" >&2
    exit 1
}

ask "$name-0" >"$dir/killed" &
asked=$!
sleep 0.3
kill -9 "$second"
rank 2
wait $asked
equal "a rank killed" "$dir/killed"
grep -q "rank 2 failed in exchange" "$dir/group.log"
grep "WARN" "$dir/group.log"
