#!/usr/bin/env bash
# Prints the address that a log names behind a text, once it does. Usage: ready.sh LOG TEXT
set -euo pipefail
for _ in $(seq 300); do
    address=$(sed -n "s|.*$2\([0-9.]*:[0-9]*\).*|\1|p" "$1" | head -n 1)
    [ -z "$address" ] || { echo "$address"; exit 0; }
    sleep 0.1
done
echo "no address in $1:" >&2
cat "$1" >&2
exit 1
