#!/usr/bin/env bash
# Memory over time: prompts that nobody has seen before, at a bounded rate, through a gateway with a small prefix index before
# simulated engines. Fails where resident memory does not stay flat.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/soak/run.sh [arguments of soak.py]

  --seconds 300       after the warm-up; 3600 for an hour
  --rate 30           requests a second        --prompt-bytes 98304  of each
  --index-mib 32      of the prefix index      --listen-port 18620   and the next ones

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)

Needs python3, and Linux for /proc.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
exec python3 "$root/tests/external/soak/soak.py" --bins "$BIN_DIR" "$@"
