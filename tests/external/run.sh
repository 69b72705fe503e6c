#!/usr/bin/env bash
# Every suite that is too heavy, or needs too much from elsewhere, for a test of a change. Each one is a folder with a
# run.sh, which fetches what it needs into a temporary folder, and a README.md with the dated table of its results.
# Arguments name the suites to run; all of them without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

suites=("$@")
[ ${#suites[@]} -gt 0 ] || suites=(*/run.sh)
failed=()
for suite in "${suites[@]}"; do
    suite=${suite%/run.sh}
    echo "=== $suite"
    "./$suite/run.sh" </dev/null || failed+=("$suite")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
