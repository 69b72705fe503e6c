#!/usr/bin/env bash
# What operators see and rely on, too heavy for a test of a change: the page in a browser with pictures of it, the images, and the
# whole scaling loop with Prometheus between.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(cd ../../.. && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=${KEYWAY_TEST_VENV:-$root/.venv}/bin

"$root/tests/setup.sh"
./types.sh
cargo build --release --quiet --manifest-path "$root/Cargo.toml" -p keyway -p keyway-worker -p keyway-loadtest
bin=${CARGO_TARGET_DIR:-$root/target}/release
chromium=$(command -v chromium) || { echo "please install chromium" >&2; exit 1; }
"$tools/python" "$root/tests/python/page.py" "$bin/keyway" "$bin/keyway-loadtest" "$chromium" "${KEYWAY_SHOTS:-$work/shots}"
if command -v buildah >/dev/null; then ./images.sh "$bin"; else echo "SKIPPED: images; please install buildah" >&2; fi
PATH="$tools:$PATH" python3 closed_loop.py "$bin/keyway" "$bin/keyway-loadtest"
