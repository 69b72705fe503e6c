# shellcheck shell=bash
# Sourced by scripts that measure: BIN_DIR is the folder of programs. Unless it is given, what the arguments name (as cargo's) is
# built first, by the profile whose builds figures are taken from.
if [[ -z ${BIN_DIR:-} ]]; then
    workspace=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    cargo build --profile measured --manifest-path "$workspace/Cargo.toml" "$@"
    BIN_DIR=${CARGO_TARGET_DIR:-$workspace/target}/measured
fi
