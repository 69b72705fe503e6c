#!/usr/bin/env bash
# Whether a tenant can tell by its clock what another one has asked: times to first token, by the Kolmogorov-Smirnov test.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/tenants/run.sh [arguments of timing.py]
       tests/external/tenants/run.sh isolation --engine http://HOST:PORT

  isolation                in a real vLLM's cache, by its own counter of hits, for every path that it offers

  --samples 200            of each kind
  --words 400              of a prompt
  --seed 1                 of prompts and their order
  --profile h100-8b        of the simulated workers
  --worker FILE            real workers of this binary instead

Environment (defaults):
  BIN_DIR   built here      folder with keyway and keyway-loadtest (release builds)
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway -p keyway-loadtest
if [[ ${1:-} == isolation ]]; then
    shift
    exec python3 "$root/tests/external/tenants/isolation.py" --keyway "$BIN_DIR/keyway" "$@"
fi
exec python3 "$root/tests/external/tenants/timing.py" --keyway "$BIN_DIR/keyway" --loadtest "$BIN_DIR/keyway-loadtest" "$@"
