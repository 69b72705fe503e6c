# shellcheck shell=bash
# Sourced by scripts that measure: BIN_DIR is the folder of release builds. Unless it is given, what the arguments name (as cargo's)
# is built first.
if [[ -z ${BIN_DIR:-} ]]; then
    workspace=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    cargo build --release --manifest-path "$workspace/Cargo.toml" "$@"
    BIN_DIR=${CARGO_TARGET_DIR:-$workspace/target}/release
fi
