#!/usr/bin/env bash
# demo.sh ROOT INSTALL PATH README: installs programs in the system at ROOT and does what the README shows, within namespaces of its
# own, which have no network but loopback. INSTALL is a command for that system's shell, PATH where the programs then are.
set -euo pipefail
place=$1 install=$2 path=$3 readme=$4
ip link set lo up
mount -t proc proc "$place/proc"
log=$place/tmp/keyway.log
within() { chroot "$place" /usr/bin/env -i PATH="$path:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/tmp "$@"; }
fail() {
    echo "$*" >&2
    tail -20 "$log" >&2 || true
    exit 1
}

begun=$EPOCHREALTIME
within sh -c "$install" || fail "installing fails"
# The README's first command, as one has it who has no toolchain.
within keyway >"$log" 2>&1 &
for _ in $(seq 600); do
    ! curl -sf http://127.0.0.1:9090/readyz >/dev/null || break
    sleep 0.05
done
answer=$(curl -sS --fail -m 60 http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages":[{"role":"user","content":"How do I add a worker?"}]}') || fail "no answer"
seconds=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begun }")
[[ $answer == *--worker* ]] || fail "not an answer about workers: $answer"
echo "installed and first answer after $seconds s"
awk "BEGIN { exit !($seconds < ${WITHIN_S:-60}) }" || fail "that is too late"

# Then its commands with curl, word for word.
blocks=$(awk '/^```/ { if (block ~ /curl/) printf "%s", block; block = ""; inside = /^```sh/; next } inside { block = block $0 "\n" }' "$readme")
[ "$(grep -c curl <<<"$blocks")" -ge 2 ] || fail "the README shows no curl"
told=$(bash -c "$blocks") || fail "the README's commands fail"
cached=$(grep -oE '"cached_tokens" *: *[0-9]+' <<<"$told" | grep -oE '[0-9]+$' | sort -n | tail -1)
[ "${cached:-0}" -gt 0 ] || fail "no cached tokens: $told"
echo "the README's commands: up to $cached cached tokens"

# A valid run. On a busy machine the load tester may have been late, which it says by 3: then once more.
load=$place/tmp/load.log
for try in 1 2 3 4 5; do
    status=0
    within keyway-loadtest run --ui none --url http://127.0.0.1:8080 --isl 64 --osl 16 --concurrency 2 --requests 200 >"$load" 2>&1 || status=$?
    [ $status = 3 ] || break
done
[ $status = 0 ] || fail "keyway-loadtest ends with $status: $(cat "$load")"
echo "keyway-loadtest, run $try: $(grep -E '^requests ' "$load")"
grep -E '^(rates|TTFT response) ' "$load" || fail "keyway-loadtest reports nothing: $(cat "$load")"

# A worker that is installed beside the gateway.
within keyway-worker --listen 127.0.0.1:8000 >"$place/tmp/worker.log" 2>&1 &
for _ in $(seq 600); do
    ! curl -sf http://127.0.0.1:8000/v1/models >"$place/tmp/models" || break
    sleep 0.05
done
grep -q keyway-builtin "$place/tmp/models" || fail "keyway-worker: $(tail -5 "$place/tmp/worker.log")"
echo "keyway-worker serves $(grep -o 'keyway-builtin' "$place/tmp/models" | head -1)"
