#!/usr/bin/env bash
# The tables of simulated.md: agents' sessions in the simulator, with the gateway's pauses and without them, and how near its
# placement of sub-agents is to what can be found afterwards. Nothing is sent; the figures are the same on any machine.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/agents/simulated.sh [cliff|vary|sub-agents]...     (all of them: about four minutes)

Environment (defaults):
  BIN_DIR   built here      folder with keyway-loadtest
  TRIES     1000            placements that sub-agents tries

Needs python3.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway-loadtest
exec python3 "$root/tests/external/agents/simulated.py" "$BIN_DIR/keyway-loadtest" "${TRIES:-1000}" "$@"
