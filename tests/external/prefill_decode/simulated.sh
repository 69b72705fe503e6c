#!/usr/bin/env bash
# The tables of simulated.md: prompts computed where they are answered, elsewhere, or wherever that costs less; and prefixes fetched from
# other workers. Nothing is sent; the figures are the same on any machine.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: TRACE=mooncake_conversation_trace.jsonl tests/external/prefill_decode/simulated.sh [split|fleet|pull]...     (all: two minutes)

Environment (defaults):
  TRACE     -               the Mooncake conversations (github.com/kvcache-ai/Mooncake, FAST25-release/traces)
  BIN_DIR   built here      folder with keyway-loadtest

Needs python3.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
[[ -n ${TRACE:-} ]] || { usage >&2 && exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway-loadtest
exec python3 "$root/tests/external/prefill_decode/simulated.py" "$BIN_DIR/keyway-loadtest" "$TRACE" "$@"
