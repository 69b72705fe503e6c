#!/usr/bin/env bash
# How long a one-word request waits beside a picture of a megabyte, and beside a text of as many tokens as the engine makes of it.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/pictures/run.sh [arguments of beside.py]

  --rounds 60              of each kind
  --image-tokens 8000      that the simulated engine makes of a picture, whatever its size
  --bytes 1000000          of a picture
  --keyway FILE            another build of the gateway

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)

Needs python3. Exit code: 0 every bar holds, 1 one fails.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
exec python3 "$root/tests/external/pictures/beside.py" --keyway "$BIN_DIR/keyway" --loadtest "$BIN_DIR/keyway-loadtest" "$@"
