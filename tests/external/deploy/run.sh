#!/usr/bin/env bash
# What operators see and rely on, too heavy for a test of a change: the page in a browser, and the whole scaling loop with
# Prometheus between. Everything that is fetched goes into a temporary folder; KEYWAY_DEPLOY_VENV names one that stays.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(cd ../../.. && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${KEYWAY_DEPLOY_VENV:-$work/venv}

"$root/tests/setup.sh"
cargo build --release --quiet --manifest-path "$root/Cargo.toml" -p keyway -p keyway-loadtest
bin=${CARGO_TARGET_DIR:-$root/target}/release
command -v chromium >/dev/null || { echo "please install chromium" >&2; exit 1; }
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        playwright==1.65.2 axe-playwright-python==0.1.8
fi
PATH="${KEYWAY_TEST_VENV:-$root/.venv}/bin:$PATH"
"$venv/bin/python" page.py "$bin/keyway" "$bin/keyway-loadtest" "${KEYWAY_SHOTS:-$work/shots}"
if command -v buildah >/dev/null; then ./images.sh "$bin"; else echo "SKIPPED: images; please install buildah" >&2; fi
python3 closed_loop.py "$bin/keyway" "$bin/keyway-loadtest"
