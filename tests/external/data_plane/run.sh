#!/usr/bin/env bash
# What a request and an event cost in CPU: `keyway` beside nginx and the routers of SGLang and vLLM, each alone on one
# core in front of the same backends, with everything else on another core.
set -euo pipefail

SGLANG_ROUTER=0.3.2
VLLM_ROUTER=0.1.17
H2=4.4.1

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/data_plane/run.sh [at-once|instructions|cancel|overload] [arguments of bench.py, or of the script of that name]

  at-once                  two builds of keyway at the same time on one core, instead of several proxies in turn: finds a difference
                           of a fiftieth (--base FILE, --only unary|streams, --repeats 8, --seconds 2)

  instructions             user instructions of two builds, by callgrind: the same on a busy machine (--base FILE, --repeats 3);
                           with --log info of a gateway that writes a line for each request, as it does by default;
                           with --new-prompts of requests of which half the prompt is new

  cancel                   how soon a worker notices that its client has left, instead of what a request costs
  overload                 goodput, refusals and a modest tenant's TTFT at four times what the fleet can do

  --proxies nginx,keyway,sglang-router,vllm-router   which to measure, in this order
                           (there is nginx-tcp too, which copies bytes and reads nothing: Debian's libnginx-mod-stream)
  --only unary|streams|ttft    a part of it
  --new-prompts            half of each unary prompt was never sent before, instead of 256 prompts in turn
  --backend plain|mock     what the unary requests end at: an nginx that has its answer ready (the default), so that the
                           proxy's core has most to do; or the mock, which counts tokens and has a cache
  --repeats 3              runs of each, in turn; the table shows medians
  --seconds 3              of each measurement
  --base FILE              another build of keyway, measured as `base` (name it in --proxies)
  --keyway-args '…'        for keyway
  --unbound                nothing is bound to a core, and each proxy may use all of them
  --http2                  with cancel: clients that reset their stream (--proxies keyway)

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)
  SCRATCH   a new folder    virtual environment; kept if given, so that a second run installs nothing

Needs python3 with venv, Debian's nginx and wrk, and two cores that nothing else uses.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
if [[ ${1:-} == overload ]]; then
    shift
    . "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
    exec python3 "$root/tests/external/data_plane/overload.py" --keyway "$BIN_DIR/keyway" \
        --loadtest "$BIN_DIR/keyway-loadtest" "$@"
fi
for tool in nginx wrk taskset; do
    command -v $tool >/dev/null || { echo "$tool is missing: apt-get install nginx-light wrk util-linux" >&2; exit 1; }
done
if [[ ${1:-} == at-once || ${1:-} == instructions ]]; then
    part=${1/-/_}
    shift
    if [[ $part == instructions ]] && ! command -v valgrind >/dev/null; then
        echo "valgrind is missing: apt-get install valgrind" >&2 && exit 1
    fi
    . "$root/tests/binaries.sh" -p keyway
    exec python3 "$root/tests/external/data_plane/$part.py" --keyway "$BIN_DIR/keyway" "$@"
fi
SCRATCH=${SCRATCH:-$(mktemp -d)}
mkdir -p "$SCRATCH"
if [[ ! -x $SCRATCH/venv/bin/vllm-router ]]; then
    python3 -m venv "$SCRATCH/venv"
    "$SCRATCH/venv/bin/pip" install --quiet "sglang-router==$SGLANG_ROUTER" "vllm-router==$VLLM_ROUTER" "h2==$H2"
fi
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
here=$root/tests/external/data_plane
if [[ ${1:-} == cancel ]]; then
    shift
    exec "$SCRATCH/venv/bin/python" "$here/cancel.py" --keyway "$BIN_DIR/keyway" --venv "$SCRATCH/venv" "$@"
fi
exec python3 "$here/bench.py" --keyway "$BIN_DIR/keyway" --loadtest "$BIN_DIR/keyway-loadtest" \
    --venv "$SCRATCH/venv" "$@"
