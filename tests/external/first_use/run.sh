#!/usr/bin/env bash
# What newcomers tried and stumbled over, tried again: each command, what it says now, and whether that is of help.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/first_use/run.sh [--only WORD]... [--table]

Does what newcomers did, and looks at what the programs print. Some two minutes.

  --only WORD   only rows whose name has this word
  --table       a table in Markdown, for the README

Environment (defaults):
  BIN_DIR   built here      folder with keyway, keyway-worker and keyway-loadtest (release builds)

Needs python3, openssl. Exit code: 0 every row holds, 1 one does not.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest -p keyway-worker
exec python3 "$root/tests/external/first_use/first_use.py" --bins "$BIN_DIR" "$@"
