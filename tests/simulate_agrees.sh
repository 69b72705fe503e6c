#!/usr/bin/env bash
# Checks that `keyway-loadtest simulate` tells what the real gateway does: replays a trace through `keyway` over the mock,
# several times, and compares the medians with the simulation of the same fleet.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/simulate_agrees.sh TRACE

Environment (defaults):
  POLICIES     "prefix round-robin"
  SLICE        0s..300s       stretch of the trace's own time
  TIME_SCALE   2              how many times faster than the trace the real runs are
  WORKERS      8
  PROFILE      h100x4-70b     engines (`keyway-loadtest mock --help`) that are busy with the trace, but not overloaded:
                              in an overload the order of two requests decides about seconds
  RUNS         3              real runs of each policy, and simulations, each with another hash key; medians count
  OUT          a new folder   run.json and logs
  BIN_DIR      built here     folder with keyway and keyway-loadtest (release builds)

Bars: hit ratio within 2 points, TTFT p50 and p90 within 15 %. Exit code: 0 they hold, 1 one fails, 2 usage.
EOF_USAGE
}

if [[ $# -ne 1 || $1 == -h || $1 == --help ]]; then
    usage
    [[ $# -ge 1 ]] && exit 0 || exit 2
fi
trace=$1
[[ -r $trace ]] || { echo "simulate_agrees.sh: cannot read the trace $trace" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
policies=${POLICIES:-prefix round-robin}
slice=${SLICE:-0s..300s}
time_scale=${TIME_SCALE:-2}
workers=${WORKERS:-8}
profile=${PROFILE:-h100x4-70b}
runs=${RUNS:-3}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest

pids=()
stop() {
    # Ours only, by their ids; one that has ended already is no failure.
    if ((${#pids[@]})); then
        kill "${pids[@]}" 2>/dev/null || true
        wait "${pids[@]}" 2>/dev/null || true
    fi
    pids=()
}
trap stop EXIT
trap 'exit 130' INT TERM

# wait_for COMMAND…: until it succeeds, for at most a minute.
wait_for() {
    for ((tries = 0; tries < 600; tries++)); do
        if "$@"; then return; fi
        sleep 0.1
    done
    echo "simulate_agrees.sh: not started, see $out" >&2
    exit 1
}

all_ready() {
    python3 - "$1" "$workers" 2>/dev/null <<'PYTHON'
import json, sys, urllib.request
listed = json.load(urllib.request.urlopen(sys.argv[1], timeout=5))
sys.exit(sum(worker["state"] == "ready" for worker in listed) != int(sys.argv[2]))
PYTHON
}

for policy in $policies; do
    for ((run = 1; run <= runs; run++)); do
        dir=$out/$policy-$run
        mkdir -p "$dir"
        "$BIN_DIR/keyway-loadtest" simulate --trace "$trace" --slice "$slice" --spread-bursts --workers "$workers" \
            --profile "$profile" --policy "$policy" --hash-seed "$run" --json >"$dir/simulated.json"
        : >"$dir/mock.log" >"$dir/gateway.log"
        "$BIN_DIR/keyway-loadtest" mock --workers "$workers" --base-port 0 --profile "$profile" \
            --time-scale "$time_scale" >"$dir/mock.log" 2>&1 &
        pids+=($!)
        wait_for grep -q 'put a gateway' "$dir/mock.log"
        args=()
        while read -r url; do args+=(--worker "$url"); done < <(sed -n 's/^worker .* ready on //p' "$dir/mock.log")
        RUST_LOG=warn,keyway=info "$BIN_DIR/keyway" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 \
            --policy "$policy" "${args[@]}" >"$dir/gateway.log" 2>&1 &
        pids+=($!)
        wait_for grep -q 'listening on http' "$dir/gateway.log"
        admin=$(sed -n 's|.*admin on \(http://[0-9.:]*\).*|\1|p;' "$dir/gateway.log" | head -n 1)
        url=$(sed -n 's|.*listening on \(http://[0-9.:]*\).*|\1|p' "$dir/gateway.log" | head -n 1)
        wait_for all_ready "$admin/workers"
        # 3 says that requests were sent late: the table shows by how much.
        code=0
        "$BIN_DIR/keyway-loadtest" run --url "$url" --trace "$trace" --slice "$slice" --spread-bursts \
            --time-scale "$time_scale" --bytes-per-token 4 -o "$dir" >"$dir/table.txt" 2>"$dir/run.log" || code=$?
        [[ -s $dir/run.json && $code =~ ^[03]$ ]] || { echo "simulate_agrees.sh: run ended with $code" >&2; exit 1; }
        stop
    done
done

# shellcheck disable=SC2086 # one argument a policy
python3 - "$out" "$time_scale" "$runs" $policies <<'PYTHON'
import json, statistics, sys
from pathlib import Path

out, scale, runs, policies = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
holds = True
print(f"{'policy':<14}{'figure':<10}{'real (each run)':<34}{'median':>10}{'simulated':>11}{'apart':>10}")
for policy in policies:
    dirs = [out / f"{policy}-{run}" for run in range(1, runs + 1)]
    simulated = [json.loads((dir / "simulated.json").read_text())["runs"][0] for dir in dirs]
    real = [json.loads((dir / "run.json").read_text()) for dir in dirs]
    for run in real:
        lag = run["schedule_lag"]["lag"]["p99"]
        if run["requests"]["failed"] or run["verdict"]["status"] != "valid":
            print(f"note {policy}: {run['requests']['failed']} failed, {run['verdict']['reason']} (lag p99 {lag} ms)")

    def row(figure, values, want, apart, unit, bar):
        global holds
        ok = apart <= bar
        holds &= ok
        shown = " ".join(f"{value:.4g}" for value in values)
        print(f"{policy:<14}{figure:<10}{shown:<34}{statistics.median(values):>10.4g}{want:>11.4g}"
              f"{apart:>8.1f} {unit} {'ok' if ok else 'FAIL'}")

    cached = [run["cache"]["achieved"] * 100 for run in real]
    want = statistics.median(run["cached"] for run in simulated) * 100
    row("cached %", cached, want, abs(statistics.median(cached) - want), "points", 2)
    for figure in ("p50", "p90"):
        ttft = [run["response"]["ttft"][figure] * scale for run in real]
        want = statistics.median(run["ttft"][figure] for run in simulated)
        row(f"TTFT {figure}", ttft, want, abs(statistics.median(ttft) / want - 1) * 100, "%", 15)
print(f"TTFT in ms of engine time; reports and logs: {out}")
sys.exit(not holds)
PYTHON
