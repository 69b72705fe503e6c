#!/usr/bin/env bash
# Keyway against other routers, one at a time, in front of the same simulated fleet and under the same trace.
set -euo pipefail

SGLANG_ROUTER=0.3.2
SMG=1.13.0
VLLM_ROUTER=0.1.17

usage() {
    cat <<'EOF_USAGE'
Usage: TRACE=FILE tests/external/routing/run.sh [OPTION of compare.py]...     (--help lists them)

  All of it:     TRACE=… OUT=results tests/external/routing/run.sh                  about 2.5 hours of a quiet machine
  In pieces:     TRACE=… OUT=results tests/external/routing/run.sh --router keyway-text vllm-kv-aware --cache 25
                 what OUT has already is not run again, so pieces add up to one table
  Other blocks:  TRACE=… OUT=results tests/external/routing/run.sh --router keyway-text keyway-events --block-tokens 16 64 528
  A short look:  TRACE=… tests/external/routing/run.sh --minutes 8 --warm-minutes 2 --cache 25 --repeats 1

Environment (defaults):
  TRACE     required        the Mooncake project's conversation_trace.jsonl
  OUT       a new folder    results, one file for each (router, cache, block size, repeat), and table.md
  SCRATCH   a new folder    virtual environments, configurations, logs; kept if given, so that a second run installs nothing
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)

Needs python3 with venv and two cores or more. Runs in which others used more than a tenth of a core are repeated.
EOF_USAGE
}

[[ ${1:-} != -h ]] || { usage && exit 0; }
if [[ -z ${TRACE:-} ]]; then
    # Among all suites: what is not there cannot be measured.
    usage
    echo "run.sh: skipped, because TRACE names no trace"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
SCRATCH=${SCRATCH:-$(mktemp -d)}
OUT=${OUT:-$(mktemp -d)}
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
venv() {
    [[ -x $SCRATCH/$1/bin/$2 ]] && return
    python3 -m venv "$SCRATCH/$1"
    "$SCRATCH/$1/bin/pip" install --quiet --disable-pip-version-check "$3"
}
venv sglang sglang-router "sglang-router==$SGLANG_ROUTER"
venv smg smg "smg==$SMG"
venv vllm vllm-router "vllm-router==$VLLM_ROUTER"
exec python3 "$root/tests/external/routing/compare.py" --trace "$TRACE" --bin-dir "$BIN_DIR" --scratch "$SCRATCH" --out "$OUT" "$@"
