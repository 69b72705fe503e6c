#!/usr/bin/env bash
# All attackers at once beside honest load: what honest clients notice, and what the gateway takes.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/attack/run.sh [arguments of attack.py]

  --seconds 1800           with attackers, all rounds together; while they stand still a third of that
  --rounds 6               how often they stand still
  --rate 40                honest requests a second
  --without floods,idle    attackers to leave out, by the names of attackers.py

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)

Needs python3, and Linux for /proc.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
exec python3 "$root/tests/external/attack/attack.py" --bins "$BIN_DIR" "$@"
