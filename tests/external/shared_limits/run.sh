#!/usr/bin/env bash
# Whether tenants' limits hold over eight gateways that share a Redis, also while it is away; and what asking it costs.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/shared_limits/run.sh [arguments of limits.py]

  --seconds 600            of load over the limits
  --away 30                seconds for which the store is killed, and for which it hangs
  --gateways 8
  --asks 4000              requests of each kind to compare times
  --seed 1                 of the times of requests
  --server redis-server    or valkey-server, or the path of one
  --tls                    the store speaks TLS, asks gateways for their certificate, and wants a password (needs openssl)
  --alone                  gateways without a store: the suite must fail

Environment (defaults):
  BIN_DIR   built here      folder with keyway (a release build)
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
command -v redis-server >/dev/null || [[ $* == *--server* ]] ||
    { echo "please install redis-server" >&2; exit 1; }
. "$root/tests/binaries.sh" -p keyway
exec python3 "$root/tests/external/shared_limits/limits.py" --keyway "$BIN_DIR/keyway" "$@"
