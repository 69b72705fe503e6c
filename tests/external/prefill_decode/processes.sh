#!/usr/bin/env bash
# The simulator's scenarios of roles and of prefixes that are fetched, by processes: a mock fleet that moves KV, a gateway, a load tester.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: TRACE=mooncake_conversation_trace.jsonl tests/external/prefill_decode/processes.sh [OPTION]... [alone|pull|split|always]...

Three and a half minutes each. --slice, --time-scale (10) and --workers (8) as `--help` of processes.py says.

Environment (defaults):
  TRACE     -               the Mooncake conversations (github.com/kvcache-ai/Mooncake, FAST25-release/traces)
  BIN_DIR   built here      folder with keyway and keyway-loadtest
  OUT       a new folder    logs and reports

Exit code: 0 cached tokens and mean times to first token are within 10 % of the simulator's, 1 they are not. Needs python3.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
[[ -n ${TRACE:-} ]] || { usage >&2 && exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
OUT=${OUT:-$(mktemp -d)}
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
exec python3 "$root/tests/external/prefill_decode/processes.py" --trace "$TRACE" --bin-dir "$BIN_DIR" --out "$OUT" "$@"
