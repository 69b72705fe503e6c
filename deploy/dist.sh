#!/usr/bin/env bash
# Builds `keyway` as it is best shipped: link-time optimised, and by a profile of its own work, so that what requests need lies
# together and is as fast as it can be. Prints where the program is; progress goes to stderr.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: deploy/dist.sh

Builds the gateway so that it counts what it does, lets it serve some twenty seconds of what requests ask of it (HTTP/1.1 and
HTTP/2, plain and TLS, streams and whole answers, prompts by text and by token with KV events), and builds it again by these
counts. Some 20 minutes on 2 cores, most of them the second build.

  KEYWAY_BIN_DIR=$(dirname "$(deploy/dist.sh)") deploy/containers/build.sh keyway     an image of it

Environment (defaults):
  CARGO_TARGET_DIR   target   where builds go; the program is there, in HOST/dist/keyway
  TRAIN_PORT         9300     first of 20 ports on 127.0.0.1 that nobody uses
  TARGET_CPU         x86-64-v3 (on x86-64), generic (elsewhere)
                              the least that it runs on. x86-64-v3 has AVX2 and BMI2: Intel since Haswell (2013), AMD since
                              Zen (2017). On less it says "CPU ISA level is lower than required" and ends with 127.

Needs curl, openssl, and rustup's llvm-tools (rustup component add llvm-tools).
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; '') ;; *) usage >&2 && exit 2 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR=$target
profdata=$(rustc --print sysroot)/lib/rustlib/$host/bin/llvm-profdata
[ -x "$profdata" ] || { echo "no llvm-profdata: rustup component add llvm-tools" >&2; exit 1; }
for tool in curl openssl; do
    command -v $tool >/dev/null || { echo "$tool is missing" >&2; exit 1; }
done
port=${TRAIN_PORT:-9300}
case $host in x86_64-*) cpu=${TARGET_CPU:-x86-64-v3} ;; *) cpu=${TARGET_CPU:-generic} ;; esac
flags="-Ctarget-cpu=$cpu"
# The program is marked with what it needs, so glibc says it where a processor has less. Only GNU's linker has this mark.
case $cpu in x86-64-v[234]) flags+=" -Clinker-features=-lld -Clink-arg=-Wl,-z,$cpu" ;; esac
work=$(mktemp -d)
trap 'jobs -p | xargs -r kill 2>/dev/null; wait; rm -rf "$work"' EXIT

# With `--target`, build scripts and procedural macros stay as they are.
echo "building the load tester and the gateway that counts ..." >&2
cargo build --release -p keyway-loadtest
loadtest=$target/release/keyway-loadtest
counts=$target/train/counts
rm -rf "$counts"
RUSTFLAGS="$flags -Cprofile-generate=$counts" cargo build --release -p keyway --target "$host" --target-dir "$target/train"
gateway=$target/train/$host/release/keyway

await() {
    for _ in $(seq 100); do
        curl -sf "$1" >/dev/null && return
        sleep 0.1
    done
    echo "nothing answers at $1" >&2
    exit 1
}

# 3: the load tester was late on a busy machine, which is nothing here.
load() {
    "$loadtest" run --ui none --model mock "$@" >/dev/null || [ $? -eq 3 ]
}

# The whole answers of COUNT chats, 16 under way.
whole() {
    local url=$1 count=$2
    shift 2
    curl -skZ --parallel-max 16 -o /dev/null -H 'content-type: application/json' -d @"$work/chat.json" "$@" \
        "$url/v1/chat/completions?n=[1-$count]" 2>/dev/null
}

printf '{"model":"mock","messages":[{"role":"user","content":"%s"}]}' "$(seq -s ' ' 300)" >"$work/chat.json"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost \
    -keyout "$work/key.pem" -out "$work/cert.pem" 2>/dev/null
cat >"$work/tls.toml" <<EOF_CONFIG
listen = "127.0.0.1:$((port + 4))"
admin_listen = "127.0.0.1:$((port + 5))"
[tls]
cert_file = "$work/cert.pem"
key_file = "$work/key.pem"
EOF_CONFIG

echo "letting it serve ..." >&2
"$loadtest" mock --profile instant --workers 2 --base-port $((port + 10)) --kv-events --kv-events-base-port $((port + 12)) \
    --kv-replay-base-port $((port + 14)) >/dev/null 2>&1 &
workers=(--worker "http://127.0.0.1:$((port + 10))" --worker "http://127.0.0.1:$((port + 11))")
by_events=()
for i in 0 1; do
    by_events+=(--worker "http://127.0.0.1:$((port + 10 + i));kv-events=tcp://127.0.0.1:$((port + 12 + i));kv-replay=tcp://127.0.0.1:$((port + 14 + i))")
done
await "http://127.0.0.1:$((port + 10))/v1/models"
export RUST_LOG=error
gateways=()
"$gateway" --listen 127.0.0.1:$port --admin-listen 127.0.0.1:$((port + 1)) "${workers[@]}" >&2 &
gateways+=($!)
"$gateway" --listen 127.0.0.1:$((port + 2)) --admin-listen 127.0.0.1:$((port + 3)) --tokenizer mock=builtin "${by_events[@]}" >&2 &
gateways+=($!)
"$gateway" --config "$work/tls.toml" "${workers[@]}" >&2 &
gateways+=($!)
for admin in 1 3 5; do await "http://127.0.0.1:$((port + admin))/readyz"; done
for gateway_port in $port $((port + 2)); do
    url=http://127.0.0.1:$gateway_port
    load --url "$url" --workload shared-prefix --prefix-len 200 --isl 200 --osl 32 --concurrency 8 --requests 3000
    load --url "$url" --workload multi-turn --turns 8 --isl 300 --osl 64 --concurrency 8 --conversations 100
    load --url "$url" --endpoint completions --isl 8000 --osl 16 --concurrency 8 --requests 500
    whole "$url" 5000
done
whole "https://127.0.0.1:$((port + 4))" 2000 --http1.1
whole "https://127.0.0.1:$((port + 4))" 2000 --http2
for admin in 1 3 5; do curl -sf "http://127.0.0.1:$((port + admin))/metrics" >/dev/null; done
# They write their counts as they leave.
kill "${gateways[@]}"
wait "${gateways[@]}"
"$profdata" merge -o "$work/keyway.profdata" "$counts"/*.profraw

echo "building the gateway by its profile ..." >&2
RUSTFLAGS="$flags -Cprofile-use=$work/keyway.profdata" cargo build --profile dist -p keyway --target "$host"
echo "$target/$host/dist/keyway"
