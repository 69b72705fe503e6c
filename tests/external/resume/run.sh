#!/usr/bin/env bash
# What four independent clients make of streams whose worker breaks off: with resume off each must see an error, with it
# on none sees anything. Needs python3 with venv, node and npm; builds the binaries unless KEYWAY_BIN_DIR names them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

bins=${KEYWAY_BIN_DIR:-}
if [ -z "$bins" ]; then
    (cd "$root" && cargo build --quiet -p keyway -p keyway-worker --bins)
    bins=${CARGO_TARGET_DIR:-$root/target}/debug
fi
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.52.0 litellm==1.83.0 httpx-sse==0.4.3
npm install --silent --no-audit --no-fund --prefix "$scratch" openai@6.49.0 >/dev/null
cp "$here/client.mjs" "$scratch/"
"$scratch/venv/bin/python" "$here/clients.py" --bins "$bins" --node "$scratch/client.mjs"
