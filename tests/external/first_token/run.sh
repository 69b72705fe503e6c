#!/usr/bin/env bash
# What streams say before their first token changes no figure: the same seeded load through a gateway to three mock workers that
# say nothing first, the API's opening words, or keep-alives. Exit code: 0 every bar holds, 1 one fails.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/first_token/run.sh [API-FIRST...]

  API is chat, completions, responses or messages; FIRST is none, role or comment. By default chat-none chat-role chat-comment
  responses-none responses-role messages-none messages-role. Each API's first is what its others are held against.

Environment (defaults):
  BIN_DIR    built here   folder with keyway and keyway-loadtest
  REQUESTS   250          of each run, the first tenth to warm up
  RATE       5            requests a second: a third of what the workers can, so that waits are the prompts' own
  KEYS       1            how often all of it is done, each time with another key of the prompts' names, which says where
                          new ones go; figures are the means. Runs of one key place prompts alike
EOF_USAGE
}
case ${1:-} in -h | --help) usage && exit 0 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest --bins
scratch=$(mktemp -d)
pids=()
# Where a prompt goes follows from its name and its workers' addresses. Both stay, so that runs differ by what
# streams say alone.
base_port=${BASE_PORT:-$((20000 + RANDOM % 10000))}
stop() {
    if ((${#pids[@]})); then
        kill "${pids[@]}" 2>/dev/null || true
        wait "${pids[@]}" 2>/dev/null || true
    fi
    pids=()
}
trap 'stop; rm -rf "$scratch"' EXIT

# found FILE PATTERN: what the pattern's group has found in the file, as soon as it is there.
found() {
    local value
    for ((tries = 0; tries < 300; tries++)); do
        value=$(sed -nE "s#$2#\\1#p" "$1" 2>/dev/null) || true
        [[ -z $value ]] || { echo "$value" && return; }
        sleep 0.1
    done
    echo "run.sh: $1 does not say where it listens" >&2
    return 1
}

one() { # API FIRST KEY
    local api=$1 first=$2 log=$scratch/$1-$2.$3 urls url admin
    printf 'first token %s' "$3" >"$scratch/key.$3"
    printf '[routing]\nhash_key_file = "%s"\n' "$scratch/key.$3" >"$scratch/keyway.$3.toml"
    # A queue in order of arrival at 6,000 prompt tokens a second: its rate is known, and its waits are the schedule's.
    "$BIN_DIR/keyway-loadtest" mock --workers 3 --base-port "$base_port" --profile fcfs-6k --first "$first" >"$log.mock" 2>&1 &
    pids+=("$!")
    found "$log.mock" '^worker 2 ready on ([^,]*).*' >/dev/null
    urls=$(sed -nE 's#^worker . ready on ([^,]*).*#--worker \1#p' "$log.mock")
    # shellcheck disable=SC2086
    NO_COLOR=1 "$BIN_DIR/keyway" --config "$scratch/keyway.$3.toml" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 $urls >"$log.keyway" 2>&1 &
    pids+=("$!")
    url=$(found "$log.keyway" '.*listening on (http://[0-9.:]+).*')
    admin=$(found "$log.keyway" '.*admin on (http://[0-9.:]+).*')
    for ((tries = 0; tries < 300; tries++)); do
        [[ $(curl -s "$admin/workers" | grep -o '"ready"' | wc -l) == 3 ]] && break
        sleep 0.1
    done
    local requests=${REQUESTS:-250}
    "$BIN_DIR/keyway-loadtest" run --url "$url" --model mock --endpoint "$api" --workload shared-prefix --prefix-groups 24 \
        --prefix-len 800 --isl 'uniform(200,2400)' --osl 8 --rate "${RATE:-5}" --arrival constant --requests "$requests" \
        --warmup $((requests / 10)) --seed 7 --text-seed 7 --bytes-per-token 4 --ui none -o "$log.out" >"$log.run" 2>&1 ||
        # 3: requests were sent late. On a busy machine they are; times count from when they were sent.
        [[ $? == 3 ]] || { cat "$log.run" >&2 && exit 1; }
    curl -s "$admin/metrics" >"$log.metrics"
    stop
}

runs=${*:-chat-none chat-role chat-comment responses-none responses-role messages-none messages-role}
for ((key = 1; key <= ${KEYS:-1}; key++)); do
    for run in $runs; do one "${run%-*}" "${run#*-}" "$key"; done
done
# shellcheck disable=SC2086
python3 "$root/tests/external/first_token/figures.py" "$scratch" "${KEYS:-1}" $runs
