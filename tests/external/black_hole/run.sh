#!/usr/bin/env bash
# What a worker that refuses everything at once costs its fleet's clients, by prefix beside round-robin.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/black_hole/run.sh [arguments of bench.py]

  --workers 3 8            sizes of the fleet
  --refusing 1             workers that refuse
  --refusers 503 401 …     how: 503, 429, 401, 404, "error event", "abort event"
  --policies prefix …      --loads "new prompts" "shared prefix" "8 sessions"
  --rate 60 --seconds 5    of each run
  --seed 1                 of prompts and times

Environment (defaults):
  BIN_DIR   built here      folder with keyway
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway
exec python3 "$root/tests/external/black_hole/bench.py" --keyway "$BIN_DIR/keyway" "$@"
