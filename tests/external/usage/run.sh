#!/usr/bin/env bash
# Accounts that add up: what three gateways say of their tenants' usage beside what simulated engines have counted themselves, while
# gateways are restarted and clients leave in the middle of streams.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/usage/run.sh [arguments of accounts.py]

  --requests 100000        in all, over three gateways
  --rate 900               a second, of all gateways together
  --restarts 2             of each gateway while it serves, by SIGTERM
  --listen-port 18720      and the next ones

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest

Needs python3.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
exec python3 "$root/tests/external/usage/accounts.py" --bins "$BIN_DIR" "$@"
