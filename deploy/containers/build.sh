#!/usr/bin/env bash
# Builds an image from a built program: build.sh PROGRAM [TAG]. PROGRAM is keyway, keyway-worker or keyway-loadtest; it is taken from
# KEYWAY_BIN_DIR (target/release). Equal inputs give an equal image: every time in it is SOURCE_DATE_EPOCH (0). Needs buildah;
# no root, no daemon: STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot work inside a container.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${1:?usage: build.sh PROGRAM [TAG]}
tag=${2:-$program:0.1.0}
bin=${KEYWAY_BIN_DIR:-$here/../../target/release}/$program
[ -x "$bin" ] || { echo "no program $bin: cargo build --release -p $program" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stage=$work/stage
install -D -m 755 "$bin" "$stage/usr/local/bin/$program"
strip "$stage/usr/local/bin/$program"
ln -s "$program" "$stage/usr/local/bin/program"
# Every library that the loader would take, and the loader itself, where it looks for them.
ldd "$bin" | grep -o '/[^ ]*' | while read -r library; do
    install -D -m 755 "$(readlink -f "$library")" "$stage$library"
done
# Names are looked up by glibc's own resolver.
for library in libnss_dns.so.2 libnss_files.so.2 libresolv.so.2; do
    found=$(ldconfig -p | grep -m1 -o "/.*/$library" || true)
    [ -z "$found" ] || install -D -m 755 "$(readlink -f "$found")" "$stage$found"
done
mkdir -p "$stage/etc"
echo 'keyway:x:65532:65532::/:/nonexistent' >"$stage/etc/passwd"
echo 'hosts: files dns' >"$stage/etc/nsswitch.conf"
cp "$here/Containerfile" "$work/"
buildah bud --quiet --timestamp "${SOURCE_DATE_EPOCH:-0}" --tag "$tag" --file "$work/Containerfile" "$work"
