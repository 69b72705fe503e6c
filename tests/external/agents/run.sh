#!/usr/bin/env bash
# Agents' conversations before a fleet whose caches cannot hold them all: what is answered and found, with Keyway's pauses, without
# them, and through other routers.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/agents/run.sh [arguments of cliff.py]
       tests/external/agents/run.sh engines [arguments of engines.py]

Before mock workers:
  --routers keyway,keyway-no-pauses,smg,vllm-router     one at a time before the same four mock workers
  --at-once 14,29,58,116                                conversations under way: 0.5, 1, 2 and 4 times what the caches hold
  --seconds 40 --turns 20 --added 600 --first 2000 --answer 60 --think 'exp(200ms)'
  --kv-blocks 4096 --workers 4 --time-scale 10          of the workers: blocks of 16 tokens each, and how fast their time goes
  --header x-session-id                                 names each conversation; without it, its first message does
  --out DIR                                             keeps the load tester's files
Before real vLLM engines, with pauses and without (engines.md):
  --at-once 8,15,30,60                                  conversations under way: 0.5, 1, 2 and 4 times what the caches hold
  --by events,text                                      what the gateway goes by
  --engines 3 --seconds 60 --turns 10 --first 400 --added 180 --answer 12 --think 'exp(300ms)'

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest
  SCRATCH   a new folder    virtual environment with smg 1.13.0 and vllm-router 0.1.17, if they are asked for; logs
  VLLM      SCRATCH/vllm    virtual environment with vLLM 0.32.0 for CPUs; installed there if it is needed and not there: 6 GB

Needs python3 with venv, and two cores that nothing else uses.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
SCRATCH=${SCRATCH:-$(mktemp -d)}
mkdir -p "$SCRATCH"
if [[ ${1:-} = engines ]]; then
    shift
    VLLM=${VLLM:-$SCRATCH/vllm}
    "$root/tests/external/engines/install.sh" "$VLLM"
    exec python3 "$root/tests/external/agents/engines.py" --keyway "$BIN_DIR/keyway" --loadtest "$BIN_DIR/keyway-loadtest" \
        --vllm "$VLLM" --scratch "$SCRATCH" "$@"
fi
if [[ ! -x $SCRATCH/routers/bin/smg && ! " $* " =~ " --routers keyway"[a-z,-]*" " ]]; then
    python3 -m venv "$SCRATCH/routers"
    "$SCRATCH/routers/bin/pip" install --quiet vllm-router==0.1.17 smg==1.13.0
fi
exec python3 "$root/tests/external/agents/cliff.py" --keyway "$BIN_DIR/keyway" --loadtest "$BIN_DIR/keyway-loadtest" \
    --scratch "$SCRATCH" "$@"
