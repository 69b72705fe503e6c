#!/usr/bin/env bash
# Replays a trace against four workers behind the gateway, once for each routing policy, and checks what prefix-aware
# routing must gain. Every policy gets fresh workers with empty caches and the very same requests.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: tests/replay.sh TRACE [OPTION of `keyway-loadtest run`]...

Environment (defaults):
  POLICIES       "prefix round-robin least-loaded"; with +pull behind one, workers fetch from each other's caches
  SLICE          0s..1200s       stretch of the trace's own time
  TIME_SCALE     25              seconds of trace time in one second
  SCALE_LEN      0.125           tokens sent for one token of the trace; a block of 512 becomes 64
  WORKERS        4
  CACHE_PERCENT  60              the workers' KV blocks together, in per cent of the slice's distinct blocks
  KILL_AFTER_S   unset           kill -9 one worker so many seconds into the run of the first policy, which is then the
                                 only one, and check how the rest carries on instead of comparing policies
  OUT            a new folder    run.json and logs of each policy
  BIN_DIR        built here      folder with keyway, keyway-worker and keyway-loadtest (release builds)

Exit code: 0 all bars hold, 1 a bar fails or something does not start, 2 usage, 3 a machine too busy to compare times.
EOF
}

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    usage
    [[ $# -ge 1 ]] && exit 0 || exit 2
fi
trace=$1
shift
[[ -r $trace ]] || { echo "replay.sh: cannot read the trace $trace" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
policies=${POLICIES:-prefix round-robin least-loaded}
slice=${SLICE:-0s..1200s}
time_scale=${TIME_SCALE:-25}
scale_len=${SCALE_LEN:-0.125}
workers=${WORKERS:-4}
cache_percent=${CACHE_PERCENT:-60}
kill_after_s=${KILL_AFTER_S:-}
[[ -z $kill_after_s ]] || policies=${policies%% *}
out=${OUT:-$(mktemp -d)}
# What keyway-worker runs with by default. The random model has one token a byte, so the gateway's blocks are as long.
kv_block_tokens=16
mkdir -p "$out"

. "$root/tests/binaries.sh" -p keyway -p keyway-worker -p keyway-loadtest

# --- sizes -----------------------------------------------------------------------------------------------------------

info=$("$BIN_DIR/keyway-loadtest" trace info "$trace" --slice "$slice" --scale-len "$scale_len" --json)
read -r distinct_blocks block_tokens < <(python3 -c '
import json, sys
info = json.load(sys.stdin)
print(info["distinct_blocks"], info["block_tokens"])' <<<"$info")
pooled_blocks=$((distinct_blocks * cache_percent / 100))
worker_blocks=$((pooled_blocks * block_tokens / kv_block_tokens / workers))
echo "slice $slice: $distinct_blocks distinct blocks of $block_tokens tokens;" \
    "$workers workers of $worker_blocks KV blocks of $kv_block_tokens tokens"

# --- processes -------------------------------------------------------------------------------------------------------

pids=()
worker_pids=()
gateway_url=

stop_fleet() {
    # Ours only, by their ids; one that has ended already is no failure.
    if ((${#pids[@]})); then
        kill "${pids[@]}" 2>/dev/null || true
        wait "${pids[@]}" 2>/dev/null || true
    fi
    pids=()
}
trap stop_fleet EXIT
trap 'exit 130' INT TERM

# announced LOG PID WORDS: the URL that the log names behind WORDS, waited for while the process lives.
announced() {
    local log=$1 pid=$2 words=$3 url=
    for ((tries = 0; tries < 1200; tries++)); do
        # The log is there a moment after the process.
        [[ -e $log ]] || { sleep 0.05; continue; }
        url=$(sed -n "s|.*$words \(http://[0-9.:]*\).*|\1|p;/$words/q" "$log")
        [[ -n $url ]] && break
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.05
    done
    if [[ -z $url ]]; then
        echo "replay.sh: not started: no '$words' in $log; its end:" >&2
        tail -n 5 "$log" >&2
        exit 1
    fi
    echo "$url"
}

# start_fleet POLICY DIR. Ports are the system's choice, so that nothing else can take them first.
start_fleet() {
    local policy=${1%+pull} dir=$2 i url args=() exchange=()
    [[ $1 == "$policy" ]] || exchange=(--kv-transfer-listen 127.0.0.1:0)
    worker_pids=()
    for ((i = 0; i < workers; i++)); do
        RUST_LOG=info "$BIN_DIR/keyway-worker" --model random --listen 127.0.0.1:0 --block-size "$kv_block_tokens" \
            --threads 1 --num-kv-blocks "$worker_blocks" "${exchange[@]}" >"$dir/worker-$i.log" 2>&1 &
        pids+=($!)
        worker_pids+=($!)
    done
    for ((i = 0; i < workers; i++)); do
        url=$(announced "$dir/worker-$i.log" "${worker_pids[i]}" "ready on")
        args+=(--worker "$url")
        ((i > 0)) || victim=$url
    done
    RUST_LOG=info "$BIN_DIR/keyway" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --policy "$policy" \
        --block-bytes "$kv_block_tokens" "${args[@]}" >"$dir/gateway.log" 2>&1 &
    pids+=($!)
    admin_url=$(announced "$dir/gateway.log" $! "admin on")
    gateway_url=$(announced "$dir/gateway.log" $! "listening on")
    wait_all_workers "$admin_url/workers" "$dir/gateway.log"
}

# The gateway is ready with its first worker; a comparison needs all of them.
wait_all_workers() {
    if ! python3 - "$1" "$workers" <<'EOF'
import json, sys, time, urllib.request

deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    listed = json.load(urllib.request.urlopen(sys.argv[1], timeout=5))
    if sum(worker["state"] == "ready" for worker in listed) == int(sys.argv[2]):
        sys.exit(0)
    time.sleep(0.05)
sys.exit(1)
EOF
    then
        echo "replay.sh: not all workers became ready; see $2" >&2
        exit 1
    fi
}

# Seconds of CPU that the workers have used since they began.
worker_cpu_s() {
    local pid stat
    for pid in "${worker_pids[@]}"; do
        stat=$(<"/proc/$pid/stat")
        echo "${stat##*) }"
    done | awk -v hz="$(getconf CLK_TCK)" '{ ticks += $12 + $13 } END { printf "%.2f\n", ticks / hz }'
}

# kill_while_streaming METRICS PID SECONDS: waits so long, then for a moment in which the worker has several requests.
kill_while_streaming() {
    python3 - "$@" <<'EOF'
import os, re, signal, sys, time, urllib.request

metrics, pid, after_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
time.sleep(after_s)
running = re.compile(r"^keyway_worker_requests_running(?:\{[^}]*\})? (\S+)$", re.M)
while float(running.search(urllib.request.urlopen(metrics, timeout=5).read().decode())[1]) < 2:
    time.sleep(0.002)
os.kill(pid, signal.SIGKILL)
EOF
}

# What must hold once a worker was killed in the middle of a run.
check_after_kill() {
    python3 - "$@" <<'EOF'
import json, re, sys, time, urllib.request
from pathlib import Path

dir, admin, victim = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
run = json.loads((dir / "run.json").read_text())
records = [json.loads(line) for line in (dir / "requests.jsonl").read_text().splitlines()]
errors = {error["class"]: error["count"] for error in run["errors"]}
# The broken streams tell when the worker died, in the run's own time.
killed_ms = min((record["end_ms"] for record in records if record["outcome"] == "error_event"), default=0)
later = [record for record in records if record["sent_ms"] > killed_ms > 0]


def in_flight():
    text = urllib.request.urlopen(f"{admin}/metrics", timeout=5).read().decode()
    gauge = re.compile(r"^(keyway_(?:in_flight|requests_in_flight|waiting_prefill_tokens)(?:\{[^}]*\})?) (\S+)$", re.M)
    return {name: float(value) for name, value in gauge.findall(text)}


deadline = time.monotonic() + 30
while any(in_flight().values()) and time.monotonic() < deadline:
    time.sleep(0.1)
print(f"{len(records)} requests, worker {victim} killed after {killed_ms / 1e3:.1f} s, {len(later)} sent after that")
print(f"failed: {errors or 'none'}")
print(f"workers that answered later: {sorted({record['worker'] for record in later if record['outcome'] == 'ok'})}")
bars = [
    ("streams were broken off", errors.get("error_event", 0) > 0),
    ("a request fails only if its stream had begun, with one error event and no [DONE]", set(errors) <= {"error_event"}),
    ("every request sent after the kill succeeded", bool(later) and all(r["outcome"] == "ok" for r in later)),
    ("the dead worker answered none of them", all(record["worker"] != victim for record in later)),
    ("every in-flight gauge is 0", in_flight() and not any(in_flight().values())),
]
for text, holds in bars:
    print("ok  " if holds else "FAIL", text)
sys.exit(not all(holds for _, holds in bars))
EOF
}

# --- runs ------------------------------------------------------------------------------------------------------------

for policy in $policies; do
    dir=$out/$policy
    mkdir -p "$dir"
    echo "== $policy"
    start_fleet "$policy" "$dir"
    before=$(worker_cpu_s)
    if [[ -n $kill_after_s ]]; then
        kill_while_streaming "$victim/metrics" "${worker_pids[0]}" "$kill_after_s" &
    fi
    # 1 and 3 are verdicts, which the table shows; anything else is no measurement.
    code=0
    "$BIN_DIR/keyway-loadtest" run --url "$gateway_url" --workload trace --trace "$trace" --slice "$slice" \
        --scale-len "$scale_len" --time-scale "$time_scale" --spread-bursts --oracle-blocks "$pooled_blocks" \
        --text-seed 1 --records -o "$dir" "$@" >"$dir/table.txt" || code=$?
    [[ -s $dir/run.json && $code =~ ^[013]$ ]] || { echo "replay.sh: the load test ended with $code" >&2; exit 1; }
    if [[ -n $kill_after_s ]]; then
        check_after_kill "$dir" "$admin_url" "${victim#http://}"
        exit
    fi
    after=$(worker_cpu_s)
    echo "{\"worker_cpu_s\": $(awk -v a="$after" -v b="$before" 'BEGIN { printf "%.2f", a - b }'), \"cores\": $(nproc)}" \
        >"$dir/cpu.json"
    stop_fleet
done

# --- table and bars --------------------------------------------------------------------------------------------------

# shellcheck disable=SC2086 # one argument a policy
python3 - "$out" "$workers" $policies <<'EOF'
import json, sys
from pathlib import Path

out, workers, policies = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
NAN = float("nan")


def figures(policy):
    run = json.loads((out / policy / "run.json").read_text())
    cpu = json.loads((out / policy / "cpu.json").read_text())
    ttft = run["response"]["ttft"] or dict.fromkeys(("mean", "p50", "p99"), NAN)
    prompt = [worker["prompt_tokens"] for worker in run["workers"]["list"]]
    return {
        "verdict": run["verdict"]["status"],
        "reason": run["verdict"]["reason"],
        "errors": run["requests"]["failed"],
        "cached": run["cache"]["achieved"] if run["cache"]["achieved"] is not None else NAN,
        "of_pooled": run["cache"]["of_pooled_lru"] if run["cache"]["of_pooled_lru"] is not None else NAN,
        "mean": ttft["mean"],
        "p50": ttft["p50"],
        "p99": ttft["p99"],
        # Over all workers: one that got nothing counts.
        "spread": max(prompt) * workers / sum(prompt) if sum(prompt) else NAN,
        # Of the machine's cores, while the schedule ran and its last answers came.
        "used": cpu["worker_cpu_s"] / (cpu["cores"] * run["elapsed_s"]),
        "hash": run["workload"]["body_hash"],
    }


rows = {policy: figures(policy) for policy in policies}
base = rows.get("round-robin")
print()
print(f"{'policy':<14}{'verdict':>9}{'errors':>8}{'cached':>9}{'of pooled':>11}{'x r-robin':>11}"
      f"{'TTFT mean':>11}{'p50':>9}{'p99':>10}{'max/mean':>10}{'CPU used':>10}")
for policy, row in rows.items():
    gain = row["cached"] / base["cached"] if base and base["cached"] else NAN
    print(f"{policy:<14}{row['verdict']:>9}{row['errors']:>8}{row['cached']:>9.1%}{row['of_pooled']:>11.1%}{gain:>11.2f}"
          f"{row['mean']:>11.2f}{row['p50']:>9.2f}{row['p99']:>10.2f}{row['spread']:>10.2f}{row['used']:>10.0%}")
print("cached: share of prompt tokens; of pooled: of what one LRU cache as large as all workers' would have held;")
print("TTFT: ms from the intended time of sending; max/mean: prompt tokens of the busiest worker over the mean;")
print("CPU used: CPU seconds of the workers over (cores of the machine x elapsed seconds)")
print()

bars = [(f"{policy}: no request failed", row["errors"] == 0) for policy, row in rows.items()]
bars += [("every policy got the same bytes", len({row["hash"] for row in rows.values()}) == 1)]
ours = rows.get("prefix")
if ours:
    bars += [("prefix: at least 85 % of the pooled LRU cache", ours["of_pooled"] >= 0.85)]
    bars += [("prefix: no worker above 1.5 times the mean prompt tokens", ours["spread"] <= 1.5)]
    if base:
        bars += [("prefix: at least 1.5 times round-robin's cached share", ours["cached"] >= 1.5 * base["cached"])]
    for other in ("round-robin", "least-loaded"):
        if other in rows:
            # Times of a run that sent too late decide nothing.
            decided = ours["verdict"] == rows[other]["verdict"] == "valid"
            below = ours["mean"] < rows[other]["mean"] if decided else None
            bars += [(f"prefix: mean TTFT below {other}'s", below)]
for text, holds in bars:
    print({True: "ok  ", False: "FAIL", None: "????"}[holds], text)
for policy, row in rows.items():
    if row["verdict"] != "valid":
        print(f"note {policy}: {row['reason']}")
print(f"\nreports and logs: {out}")
results = [holds for _, holds in bars]
sys.exit(1 if False in results else 3 if None in results else 0)
EOF
