#!/usr/bin/env bash
# The same bytes to Keyway, nginx and HAProxy: requests over HTTP/1 that two servers may read in two ways, and frames of HTTP/2 that
# one must refuse. Fails where Keyway lets through what both others hold back.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/smuggling/run.sh [arguments of matrix.py]

  --only WORD   cases whose name, or part, has this word
  --all         show the cases of which all three make the same, too

Needs nginx and haproxy (Debian's packages of these names, or tests/setup.sh), and hpack and hyperframe for Python (tests/setup.sh).

Environment (defaults):
  BIN_DIR   built here      folder with keyway
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway
venv=${KEYWAY_TEST_VENV:-$root/.venv}
python=$venv/bin/python
[ -x "$python" ] || python=python3
PATH=$venv/bin:$PATH:/usr/sbin
exec "$python" "$root/tests/external/smuggling/matrix.py" --keyway "$BIN_DIR/keyway" "$@"
