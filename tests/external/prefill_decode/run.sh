#!/usr/bin/env bash
# The gateway before real vLLM engines of which some compute prompts and others answer, with KV that NIXL carries from one to another.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/prefill_decode/run.sh [arguments of legs.py]
       tests/external/prefill_decode/run.sh faults [--times 1]     engines that are killed, and clients that leave, in each leg

  --requests 200 --turns 5 --seed 1
  --prefill 1 --decode 1      engines for each part; one more answers alone, to compare with
  --from-tokens 1             uncached tokens from which on a prompt is computed elsewhere (the gateway's prefill_from_tokens)

Environment (defaults):
  BIN_DIR   built here      folder with keyway (a release build)
  VLLM      SCRATCH/vllm    virtual environment with vLLM 0.32.0 for CPUs; installed there if it is not there: 6 GB. NIXL 1.5.1 is added
  SCRATCH   a new folder    models, logs

An engine takes a minute to start, and 1 GB of memory.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway
SCRATCH=${SCRATCH:-$(mktemp -d)}
VLLM=${VLLM:-$SCRATCH/vllm}
mkdir -p "$SCRATCH"
"$root/tests/external/engines/install.sh" "$VLLM"
"$VLLM/bin/python" -c 'import nixl' 2>/dev/null || "$VLLM/bin/pip" install --quiet --no-deps nixl==1.5.1 nixl-cu13==1.5.1
script=legs.py
if [[ ${1:-} == faults ]]; then
    script=faults.py
    shift
fi
exec python3 "$root/tests/external/prefill_decode/$script" --keyway "$BIN_DIR/keyway" --vllm "$VLLM" --scratch "$SCRATCH" "$@"
