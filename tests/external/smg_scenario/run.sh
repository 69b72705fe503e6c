#!/usr/bin/env bash
# SMG's own comparison of gateways in virtual time: 240 workers, 611 sessions a second, one gateway and eight, by KV
# events and by placements that gateways tell each other. Prints a table; fails where a bar is missed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
case ${1:-} in
-h | --help)
    cat <<'TEXT'
usage: run.sh [SEED …]      (default: 42 1 2; some ten minutes for each on one core)
  BIN_DIR   where keyway-loadtest is (default: target/release of the checkout)
  SCRATCH   where sessions and results go (default: a temporary folder, removed at the end)
TEXT
    exit 0
    ;;
esac
BIN_DIR=${BIN_DIR:-../../../target/release}
if [[ -z ${SCRATCH:-} ]]; then
    SCRATCH=$(mktemp -d)
    trap 'rm -rf "$SCRATCH"' EXIT
fi
mkdir -p "$SCRATCH"
[[ -x $BIN_DIR/keyway-loadtest ]] || { echo "no $BIN_DIR/keyway-loadtest: cargo build --release -p keyway-loadtest" >&2; exit 1; }

simulate() { # SEED NAME OPTION …
    local seed=$1 name=$2
    shift 2
    [[ -s $SCRATCH/$seed-$name.json ]] && return
    echo "seed $seed: $name" >&2
    "$BIN_DIR/keyway-loadtest" simulate --trace "$SCRATCH/$seed.jsonl" --live --cache-answers --profile smg-80k \
        --workers 240 --index-block-tokens 256 --policy prefix --seed "$seed" --hash-seed "$seed" --json "$@" \
        >"$SCRATCH/$seed-$name.part"
    mv "$SCRATCH/$seed-$name.part" "$SCRATCH/$seed-$name.json"
}

seeds=("${@:-42}")
[[ $# -gt 0 ]] || seeds=(42 1 2)
for seed in "${seeds[@]}"; do
    python3 sessions.py --seed "$seed" >"$SCRATCH/$seed.jsonl"
    simulate "$seed" events-1 --events
    simulate "$seed" events-8 --events --gateways 8 --scrape 1s --peers 50ms
    simulate "$seed" told-1 --index-knows-capacity
    simulate "$seed" told-8 --index-knows-capacity --gateways 8 --scrape 1s --peers 50ms
    # As late for these engines as 50 ms are for ones that are not ten times as fast.
    simulate "$seed" told-8-early --index-knows-capacity --gateways 8 --scrape 100ms --peers 5ms
    simulate "$seed" alone-8 --index-knows-capacity --gateways 8 --scrape 1s --peers 50ms --no-told-placements
done
python3 table.py "$SCRATCH" "${seeds[@]}"
