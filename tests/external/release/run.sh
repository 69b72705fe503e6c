#!/usr/bin/env bash
# Makes what people install, installs each kind of it in a clean Debian of its own, and runs the README's demo there without a network.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/release/run.sh [--packages DIR]

  --packages DIR   what deploy/release.sh has made already; without it, it is called here, twice, and must give equal bytes

For each of wheel, Debian packages and tarball: a fresh Debian by debootstrap, the programs installed into it by pip, dpkg or tar, then
in namespaces without any network the README's commands with curl, and a short run of keyway-loadtest. At the end the Debian packages
are purged, and nothing of theirs may be left. Lintian looks at the packages, CycloneDX's own library at the bill of materials.

Environment (defaults):
  BIN_DIR   built here        folder of release builds (--packages needs none)
  SUITE     bookworm          Debian's release
  WITHIN_S  60                most seconds from the beginning of `pip install` to the first answer

Needs root, and debootstrap, lintian and iproute2, which it installs where there is apt-get. Exit code: 0 all is well, 1 something fails.
EOF_USAGE
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
packages=''
case ${1:-} in
-h | --help) usage && exit 0 ;;
--packages) packages=$(realpath "${2:?a folder}") ;;
'') ;;
*) usage >&2 && exit 2 ;;
esac
[ "$(id -u)" = 0 ] || { echo "this needs root, for chroot and namespaces" >&2; exit 1; }
missing=()
for need in debootstrap:debootstrap lintian:lintian ip:iproute2 curl:curl; do
    command -v "${need%:*}" >/dev/null || missing+=("${need#*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq </dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
fi

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }

if [ -z "$packages" ]; then
    . "$root/tests/binaries.sh" -p keyway -p keyway-worker -p keyway-loadtest
    packages=$work/packages
    "$root/deploy/release.sh" --bin-dir "$BIN_DIR" --out "$packages" >/dev/null
    "$root/deploy/release.sh" --bin-dir "$BIN_DIR" --out "$work/again" >/dev/null 2>&1
    cmp "$packages/SHA256SUMS" "$work/again/SHA256SUMS" || fail "a second run gives other bytes"
    echo "made twice, alike"
fi
(cd "$packages" && sha256sum --quiet -c SHA256SUMS) || fail "SHA256SUMS"
wheel=("$packages"/*.whl)
debs=("$packages"/*.deb)
bill=("$packages"/*.cdx.json)

echo "--- papers"
lintian --allow-root --fail-on error,warning "${debs[@]}" || fail "lintian"
echo "lintian: no error, no warning"
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'cyclonedx-python-lib[json-validation]==11.12.0'
"$work/venv/bin/python" "$here/bill.py" "${bill[0]}" || fail "the bill of materials"
# pip takes the wheel for no system older than its programs need.
if "$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-index --no-deps --only-binary=:all: \
    --platform manylinux_2_17_x86_64 --dest "$work/old" "${wheel[0]}" 2>"$work/refused"; then
    fail "pip takes the wheel for glibc 2.17"
fi
grep -q 'is not a supported wheel' "$work/refused" || fail "$(cat "$work/refused")"
echo "pip refuses the wheel for glibc 2.17"

echo "--- a clean Debian"
debootstrap --variant=minbase --include=python3-venv "${SUITE:-bookworm}" "$work/base" >"$work/debootstrap.log" 2>&1 ||
    fail "debootstrap: $(tail -3 "$work/debootstrap.log")"
chroot "$work/base" sh -c '. /etc/os-release && echo "$PRETTY_NAME, $(ldd --version | head -1)"'

# KIND INSTALL PATH: a copy of the clean system, with the packages in /packages; INSTALL runs in it, and so does the demo.
try() {
    local kind=$1 place=$work/$1
    echo "--- $kind"
    cp -a "$work/base" "$place"
    mkdir "$place/packages"
    cp "$packages"/* "$place/packages/"
    unshare --net --mount --pid --fork --kill-child "$here/demo.sh" "$place" "$2" "$3" "$root/README.md" || fail "$kind"
}

try wheel 'python3 -m venv /opt/keyway && /opt/keyway/bin/pip install --no-index --quiet /packages/*.whl' /opt/keyway/bin
try tarball 'mkdir /opt/keyway && tar -xf /packages/*-linux-gnu.tar.gz -C /opt/keyway --strip-components=1' /opt/keyway/bin
try deb 'dpkg -i /packages/*.deb >/dev/null' /usr/bin
chroot "$work/deb" keyway config check --config /etc/keyway/keyway.toml >/dev/null || fail "the packaged configuration"
for program in keyway keyway-worker keyway-loadtest; do
    chroot "$work/deb" bash -n "/usr/share/bash-completion/completions/$program" || fail "completions of $program"
done
rm -rf "$work/deb/packages" "$work/deb/tmp/"*
chroot "$work/deb" /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin dpkg --purge keyway keyway-worker keyway-loadtest >/dev/null 2>&1 || fail "purge"
left=$(find "$work/deb" -xdev -path "$work/deb/proc" -prune -o -path "$work/deb/var/log" -prune -o -name '*keyway*' -print)
[ -z "$left" ] || fail "a purge leaves $left"
echo "purged, nothing left"
echo "release: all well"
