#!/usr/bin/env bash
# What following conversations by their tokens costs: turns of 100,000-token conversations that add 200 tokens, while short
# requests pass; the gateway alone on one core, everything else on another.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/long_turns/run.sh [arguments of bench.py]

  --tokens 100000     of a conversation       --rate 50           turns a second
  --added 200         of a turn               --conversations 10  that take turns
  --seconds 20        of each phase           --tokenizer builtin or a folder

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)

Needs python3 and two cores that nothing else uses; as root the short requests' client has a real-time priority.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
exec python3 "$root/tests/external/long_turns/bench.py" --keyway "$BIN_DIR/keyway" --loadtest "$BIN_DIR/keyway-loadtest" "$@"
