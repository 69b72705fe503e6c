#!/usr/bin/env bash
# Other load testers against `keyway-loadtest mock`, and `keyway-loadtest` beside them on the same mock: do their counts
# agree with the mock's own, what does a request and an event cost each, and what does each see of a server that stalls?
set -euo pipefail

AIPERF=0.13.0
GUIDELLM=0.8.1
OHA=1.16.0

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/loadtest/run.sh [counts] [speed] [streams] [stall] [knee] [repeat] [twice]      (all by default)

  counts   AIPerf and GuideLLM run without an error and agree with the mock on requests and tokens
  speed    requests and events a second on one core against an instant mock on another, and CPU of each client
  streams  10,000 open streams at once, and the memory they take
  stall    a server that stalls for 2 s under a fixed rate: keyway-loadtest and oha must see the same
  knee     search finds the capacity of a queue whose knee theory gives
  repeat   a run compared with itself, with another seed, and with a server 5 % slower
  twice    the same command 21 times at one server that keeps its caches, each compared with the one before;
           a sweep twice; then the server 5 % slower

Environment (defaults):
  BIN_DIR   built here      folder with keyway-loadtest and examples/queue_server (release builds)
  SCRATCH   a new folder    virtual environments, oha, logs; kept if given, so that a second run installs nothing
  PEERS     "oha aiohttp aiperf"   clients that speed measures beside ours

Needs python3 with venv, cargo (for oha), and, for figures worth quoting, a quiet machine with two cores or more.
Exit code: 0 every bar holds, 1 one fails, 2 usage.
EOF_USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
here=$root/tests/external/loadtest
for word in "$@"; do
    case $word in
        counts | speed | streams | stall | knee | repeat | twice) ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
done
parts=${*:-counts speed streams stall knee repeat twice}
peers=${PEERS-oha aiohttp aiperf}
if [[ -z ${SCRATCH:-} ]]; then
    SCRATCH=$(mktemp -d)
fi
mkdir -p "$SCRATCH"
SCRATCH=$(cd "$SCRATCH" && pwd)
. "$root/tests/binaries.sh" -p keyway-loadtest --bins --examples
tester=$BIN_DIR/keyway-loadtest
for program in keyway-loadtest examples/queue_server; do
    [[ -x $BIN_DIR/$program ]] || { echo "run.sh: $BIN_DIR/$program is missing: cargo build --release -p keyway-loadtest --bins --examples" >&2; exit 2; }
done
failed=0
export NO_PROXY='*' HF_HOME=$SCRATCH/hf HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

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

# mock CORE OPTIONS…: starts one; sets $url, $mock_pid.
mock() {
    local core=$1
    shift
    rm -f "$SCRATCH/mock.log"
    taskset -c "$core" "$tester" mock --workers 1 --base-port 0 "$@" >"$SCRATCH/mock.log" 2>&1 &
    mock_pid=$!
    pids+=("$mock_pid")
    for ((tries = 0; tries < 300; tries++)); do
        url=$(sed -n 's/^worker 0 ready on \([^,]*\).*/\1/p' "$SCRATCH/mock.log" 2>/dev/null) || true
        [[ -z $url ]] || return 0
        sleep 0.1
    done
    echo "run.sh: the mock did not start, see $SCRATCH/mock.log" >&2
    exit 1
}

# bar NAME OK TEXT: prints a line of the result, and remembers a failure.
bar() {
    if [[ $2 == 1 ]]; then echo "ok    $1: $3"; else
        echo "FAIL  $1: $3"
        failed=1
    fi
}

# at_least A B: 1 if A >= B.
at_least() { awk -v a="$1" -v b="$2" 'BEGIN { print (a + 0 >= b + 0) ? 1 : 0 }'; }

# field FILE PATH: a value of a JSON file.
field() { python3 -c 'import json,sys; v=json.load(open(sys.argv[1]))
for k in sys.argv[2].split("."): v=v[int(k)] if isinstance(v, list) else v[k]
print(v)' "$1" "$2"; }

venv() {
    local dir=$SCRATCH/$1
    [[ -x $dir/bin/$2 ]] && return
    python3 -m venv "$dir"
    "$dir/bin/pip" install --quiet --disable-pip-version-check "$3"
}

# A tokenizer where a hub's cache would be, because AIPerf loads from nowhere else when offline.
tokenizer() {
    local snapshot=$HF_HOME/hub/models--keyway--bytes/snapshots/0000000000000000000000000000000000000000
    [[ -e $snapshot/tokenizer.json ]] && return
    mkdir -p "$snapshot" "$HF_HOME/hub/models--keyway--bytes/refs"
    basename "$snapshot" | tr -d '\n' >"$HF_HOME/hub/models--keyway--bytes/refs/main"
    "$1" "$here/tokenizer.py" "$snapshot" >/dev/null 2>&1
}

counts() {
    venv aiperf aiperf "aiperf==$AIPERF"
    venv guidellm guidellm "guidellm==$GUIDELLM"
    tokenizer "$SCRATCH/aiperf/bin/python"
    local snapshot=$HF_HOME/hub/models--keyway--bytes/snapshots/0000000000000000000000000000000000000000
    mock 0 --profile h100-8b --time-scale 10
    "$SCRATCH/aiperf/bin/aiperf" profile --model mock --url "$url" --endpoint-type chat --streaming --ui none \
        --tokenizer keyway/bytes --request-count 200 --concurrency 8 --isl 200 --osl 32 --random-seed 1 \
        --extra-inputs ignore_eos:true --artifact-dir "$SCRATCH/aiperf-out" >"$SCRATCH/aiperf.log" 2>&1 ||
        { bar "AIPerf runs" 0 "see $SCRATCH/aiperf.log" && return; }
    result=$(python3 "$here/counts.py" aiperf "$SCRATCH/aiperf-out/profile_export_aiperf.json" "$url/metrics") && ok=1 || ok=0
    bar "AIPerf $AIPERF agrees with the mock" $ok "$result"
    stop
    mock 0 --profile h100-8b --time-scale 10
    "$SCRATCH/guidellm/bin/guidellm" run --backend "kind=openai_http,target=$url,model=mock" \
        --profile kind=concurrent,streams=8 --constraint kind=max_requests,count=200 \
        --data kind=synthetic_text,prompt_tokens=200,output_tokens=32 \
        --tokenizer "kind=huggingface_auto,model=$snapshot" --output "kind=json,path=$SCRATCH/guidellm.json" \
        >"$SCRATCH/guidellm.log" 2>&1 || { bar "GuideLLM runs" 0 "see $SCRATCH/guidellm.log" && return; }
    result=$(python3 "$here/counts.py" guidellm "$SCRATCH/guidellm.json" "$url/metrics") && ok=1 || ok=0
    bar "GuideLLM $GUIDELLM agrees with the mock" $ok "$result"
    stop
}

# timed NAME COMMAND…: runs on core 1; the last line of $SCRATCH/NAME.time is CPU seconds, wall seconds, KB.
timed() {
    local name=$1
    shift
    /usr/bin/time -o "$SCRATCH/$name.time" -f '%U %S %e %M' taskset -c 1 "$@" >"$SCRATCH/$name.out" 2>"$SCRATCH/$name.err" || true
}

# cost NAME COUNT: microseconds of CPU for each of COUNT, and COUNT by wall second.
cost() {
    tail -n 1 "$SCRATCH/$1.time" | awk -v n="$2" '{ printf "%.1f us CPU each, %.0f/s", ($1 + $2) * 1e6 / n, n / $3 }'
}

body='{"model":"mock","messages":[{"role":"user","content":"one two three four five six seven eight nine"}],"max_tokens":1,"stream":true,"stream_options":{"include_usage":true}}'
many=${body/\"max_tokens\":1,/\"max_tokens\":1000,}

speed() {
    mock 0 --profile instant --threads 1
    local ours=(run --url "$url" --isl 16 --bytes-per-token 4 --ui none --threads 1)
    # The best of three: other work on the machine can only slow it.
    local best=0 rate
    for try in 1 2 3; do
        timed "ours-$try" "$tester" "${ours[@]}" --osl 1 --concurrency 64 --requests 200000 -o "$SCRATCH/ours-$try"
        rate=$(field "$SCRATCH/ours-$try/run.json" throughput.requests_per_s)
        if [[ $(at_least "$rate" "$best") == 1 ]]; then
            best=$rate
            cp "$SCRATCH/ours-$try.time" "$SCRATCH/ours.time"
        fi
    done
    bar "requests a second, closed loop of 64, at least 30,000" "$(at_least "$best" 30000)" \
        "${best%.*}/s; $(cost ours 200000)"
    timed events "$tester" "${ours[@]}" --osl 1000 --concurrency 16 --requests 10000 -o "$SCRATCH/events"
    bar "events a second, streams of 1,000, at least 1,000,000" \
        "$(at_least "$(field "$SCRATCH/events/run.json" throughput.output_tokens_per_s)" 1000000)" \
        "$(field "$SCRATCH/events/run.json" throughput.output_tokens_per_s | cut -d. -f1)/s; $(cost events 10000000)"
    for peer in $peers; do "speed_$peer"; done
    stop
}

speed_oha() {
    [[ -x $SCRATCH/oha/bin/oha ]] || cargo install --quiet oha --locked --version "$OHA" --root "$SCRATCH/oha"
    local oha=("$SCRATCH/oha/bin/oha" --no-tui --worker-threads 1 -m POST -T application/json --output-format json)
    timed oha "${oha[@]}" -c 64 -n 300000 -d "$body" "$url/v1/chat/completions"
    echo "note  oha $OHA, requests: $(cost oha 300000)"
    timed oha-events "${oha[@]}" -c 16 -n 10000 -d "$many" "$url/v1/chat/completions"
    echo "note  oha $OHA, events (it reads bytes, no events): $(cost oha-events 10000000)"
}

speed_aiohttp() {
    venv aiperf aiperf "aiperf==$AIPERF"
    local client=("$SCRATCH/aiperf/bin/python" "$here/aiohttp_client.py" "$url/v1/chat/completions")
    timed aiohttp "${client[@]}" --concurrency 64 --requests 10000 --body "$body"
    echo "note  aiohttp client, requests: $(cost aiohttp 10000); $(cat "$SCRATCH/aiohttp.out")"
    timed aiohttp-events "${client[@]}" --concurrency 16 --requests 300 --body "$many"
    echo "note  aiohttp client, events: $(cost aiohttp-events 300000); $(cat "$SCRATCH/aiohttp-events.out")"
}

speed_aiperf() {
    venv aiperf aiperf "aiperf==$AIPERF"
    tokenizer "$SCRATCH/aiperf/bin/python"
    timed aiperf "$SCRATCH/aiperf/bin/aiperf" profile --model mock --url "$url" --endpoint-type chat --streaming --ui none \
        --tokenizer keyway/bytes --request-count 3000 --concurrency 64 --isl 16 --osl 1 --random-seed 1 \
        --use-server-token-count --artifact-dir "$SCRATCH/aiperf-speed"
    local rate
    rate=$(field "$SCRATCH/aiperf-speed/profile_export_aiperf.json" request_throughput.avg) || rate=none
    echo "note  AIPerf $AIPERF, requests (start included): $(cost aiperf 3000); its own rate $rate/s"
}

streams() {
    (($(ulimit -n) >= 11000)) || { echo "skip  10,000 streams: only $(ulimit -n) file descriptors" && return; }
    # Steps of a long decode with 10,000 in the batch, sped up so that the run takes seconds.
    mock 0 --profile h100-8b --max-running 20000 --kv-blocks 4000000 --max-batched-tokens 100000 --time-scale 1 --threads 1
    timed streams "$tester" run --url "$url" --isl 16 --osl 40 --concurrency 10000 --requests 20000 --bytes-per-token 4 \
        --ui none --threads 1 -o "$SCRATCH/streams"
    local kb open
    kb=$(tail -n 1 "$SCRATCH/streams.time" | awk '{ print $4 }')
    open=$(python3 -c 'import json,sys; print(max(json.load(open(sys.argv[1]))["series"]["in_flight"]))' "$SCRATCH/streams/run.json")
    bar "10,000 open streams in less than 1 GB" "$(at_least 1000000 "$kb")" \
        "$((kb / 1024)) MiB, $open open at once, $(field "$SCRATCH/streams/run.json" requests.ok) of 20000 answered"
    bar "they are open at once" "$(at_least "$open" 9900)" "$open"
    stop
}

stall() {
    [[ -x $SCRATCH/oha/bin/oha ]] || cargo install --quiet oha --locked --version "$OHA" --root "$SCRATCH/oha"
    # 10 s at 200 requests/s; the engine stands still from the 4th to the 6th second. A tenth of the requests and more wait.
    for client in ours held oha; do
        mock 0 --profile instant --threads 1
        (sleep 4 && curl -s -o "$SCRATCH/fault.txt" -d 'stall@0s..2s' "$url/mock/faults") &
        local run=(run --url "$url" --isl 16 --osl 1 --rate 200 --arrival constant --duration 10s --bytes-per-token 4 --ui none)
        case $client in
            ours) timed stall "$tester" "${run[@]}" -o "$SCRATCH/stall" ;;
            held) timed held "$tester" "${run[@]}" --max-concurrency 32 -o "$SCRATCH/held" ;;
            oha) timed stall-oha "$SCRATCH/oha/bin/oha" --no-tui --latency-correction -q 200 -c 32 -n 2000 -m POST \
                -T application/json --output-format json -d "$body" "$url/v1/chat/completions" ;;
        esac
        stop
    done
    # Waits of the tenth are spread evenly over 2 s: of all requests 1 % waited more than 1.9 s.
    python3 "$here/stall.py" "$SCRATCH/stall/run.json" "$SCRATCH/held/run.json" "$SCRATCH/stall-oha.out" && ok=1 || ok=0
    bar "a stall of 2 s is seen as oha sees it with latency correction" $ok "see the lines above"
}

knee() {
    "$BIN_DIR/examples/queue_server" 127.0.0.1:9917 20 100 90 >"$SCRATCH/queue.log" 2>&1 &
    pids+=($!)
    sleep 1
    timed knee "$tester" search --url http://127.0.0.1:9917 --slo 'ttft.p90<100ms' --requests 400 --from 8 --to 200 \
        --isl 16 --osl 1 --bytes-per-token 4 --ui none -o "$SCRATCH/knee"
    local found exact
    exact=$(sed -n 's/^exact knee: \([0-9.]*\).*/\1/p' "$SCRATCH/queue.log")
    found=$(field "$SCRATCH/knee/search.json" load 2>/dev/null) || { bar "search ends" 0 "see $SCRATCH/knee.err" && return; }
    bar "search finds the knee of a queue within 5 %" \
        "$(awk -v a="$found" -v b="$exact" 'BEGIN { d = a / b - 1; print (d < 0.05 && d > -0.05) ? 1 : 0 }')" \
        "$found requests/s, exact $exact"
    stop
}

repeat() {
    local slower=0
    for name in one other slow; do
        mock 0 --profile h100-8b --time-scale 1 --threads 1
        seed=1
        [[ $name == other ]] && seed=2
        if [[ $name == slow ]]; then
            curl -s -o "$SCRATCH/fault.txt" -d 'slow=1.05' "$url/mock/faults"
        fi
        timed "repeat-$name" "$tester" run --url "$url" --isl 512 --osl 32 --rate 20 --duration 15s --seed $seed \
            --bytes-per-token 4 --ui none -o "$SCRATCH/repeat-$name"
        stop
    done
    local compare=("$tester" compare --json)
    count() { python3 -c 'import json,sys; print(sum(r["verdict"] == sys.argv[1] for r in json.load(sys.stdin)["rows"]))' "$1"; }
    slower=$("${compare[@]}" "$SCRATCH/repeat-one" "$SCRATCH/repeat-one" | count same)
    bar "a run equals itself" "$(at_least "$slower" 10)" "$slower figures the same"
    slower=$("${compare[@]}" "$SCRATCH/repeat-one" "$SCRATCH/repeat-other" | python3 -c 'import json,sys
print(sum(r["verdict"] in ("better", "worse") for r in json.load(sys.stdin)["rows"]))')
    bar "another seed differs in nothing" "$([[ $slower == 0 ]] && echo 1 || echo 0)" "$slower figures differ"
    slower=$("${compare[@]}" "$SCRATCH/repeat-one" "$SCRATCH/repeat-slow" | count worse)
    bar "a server 5 % slower is found" "$(at_least "$slower" 1)" "$slower figures worse"
}

# The server and its caches stay from one run to the next, as an engine's do.
twice() {
    local i false_verdicts=0 warm=0 found cached
    local run=(run --isl 512 --osl 32 --rate 20 --duration 12s --bytes-per-token 4 --ui none)
    mock 0 --profile h100-8b --time-scale 1 --threads 1
    one() { timed "twice-$1" "$tester" "${run[@]}" --url "$url" -o "$SCRATCH/twice-$1"; }
    differ() {
        "$tester" compare --json "$SCRATCH/twice-$1" "$SCRATCH/twice-$2" | python3 -c 'import json,sys
told = json.load(sys.stdin)
print(sum(row["verdict"] in sys.argv[1:] for row in told["rows"]))' "${@:3}"
    }
    for i in $(seq 0 20); do
        one "$i"
        [[ $(field "$SCRATCH/twice-$i/run.json" verdict.status) == warm ]] && warm=$((warm + 1))
        if ((i)); then
            [[ $(differ $((i - 1)) "$i" better worse) == 0 ]] || false_verdicts=$((false_verdicts + 1))
        fi
    done
    bar "no run finds another's prompts in a cache" "$([[ $warm == 0 ]] && echo 1 || echo 0)" "$warm of 21 warm"
    bar "the same command twice differs in nothing, 20 times" "$([[ $false_verdicts == 0 ]] && echo 1 || echo 0)" \
        "$false_verdicts false verdicts"
    for i in 1 2; do
        timed "twice-sweep-$i" "$tester" sweep --url "$url" --isl 512 --osl 32 --rates 4,8,16 --requests 40 \
            --bytes-per-token 4 --ui none -o "$SCRATCH/twice-sweep-$i"
    done
    cached=$(python3 -c 'import json,sys
print(max(point["cached"] for path in sys.argv[1:] for point in json.load(open(path))["points"]))' \
        "$SCRATCH"/twice-sweep-{1,2}/sweep.json)
    bar "no point of two sweeps finds another's prompts in a cache" \
        "$(awk -v c="$cached" 'BEGIN { print (c < 0.02) ? 1 : 0 }')" "at most $cached of the prompt tokens cached"
    curl -s -o "$SCRATCH/fault.txt" -d 'slow=1.05' "$url/mock/faults"
    one slow
    found=$(differ 20 slow worse)
    bar "the server 5 % slower is found" "$(at_least "$found" 1)" "$found figures worse"
    stop
}

for part in $parts; do $part; done
echo "logs and reports: $SCRATCH"
exit $failed
