#!/usr/bin/env bash
# Several gateways that see no KV events, in front of real workers: whether conversations whose turns come to any of them find as much
# cached as behind one gateway.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/several_gateways/run.sh [arguments of conversations.py]

  --gateways 1,4,8         how many, one run after the other; the first is what the others are compared with
  --seeds 1,2,3            of conversations and of the gateways that requests come to
  --workers 4              keyway-worker processes with the built-in model
  --kv-blocks 1500         of 16 tokens, of each worker
  --at-once 24             conversations
  --conversations 160      in all
  --burst                  all begin at the same moment, before workers that have nothing cached
  --every-ms 50            gateways tell each other what they did so often
  --silent                 gateways do not tell each other anything: what is lost without
  --listen-port 18800      and the next ones

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-worker

Needs python3. A run takes about a minute.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-worker
exec python3 "$root/tests/external/several_gateways/conversations.py" --bins "$BIN_DIR" "$@"
