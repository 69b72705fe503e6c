#!/usr/bin/env bash
# Builds what people install without a toolchain, from the commit that is checked out. Progress goes to stderr, the paths of what was
# made to stdout.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: deploy/release.sh [options]

Packages keyway, keyway-worker and keyway-loadtest as they are checked out: `git checkout v1.2.3` first for a tag.

  a Python wheel     pip install ./keyway_gateway-*.whl: the three programs, for any Python from 3.8 on
  Debian packages    apt install ./keyway_*.deb ./keyway-worker_*.deb ./keyway-loadtest_*.deb, with systemd units
  a tarball          programs, completions, man pages, units, example configuration, licences
  a Helm chart       helm install keyway ./keyway-*.tgz; helm push keyway-*.tgz oci://REGISTRY/FOLDER
  papers             THIRD-PARTY-NOTICES.txt, a bill of materials (CycloneDX 1.6), SHA256SUMS

Options (defaults):
  --bin-dir DIR      built here     programs that are built already. Without it they are built link-time optimised, for any
                                    processor: some 20 minutes on 2 cores
  --out DIR          target/packages
                                    where packages go; what lies there stays, but for files of the same names
  --version V        the tag's, else the programs'
                                    SemVer. What the programs say they are, or a pre-release (1.2.3-rc.1) or build (1.2.3+7) of it
  --maintainer WHO   the commit's author
                                    'NAME <ADDRESS>', for the Debian packages
  --images           no             container images too, in buildah's storage (deploy/containers/build.sh)
  --help

Environment:
  CARGO_TARGET_DIR   target         where builds go
  SOURCE_DATE_EPOCH  the commit's   the time that everything in a package gets, in seconds since 1970

Equal programs and an equal commit give equal bytes, with the same versions of Python, zlib and dpkg. Which glibc the packages ask for
is read from the programs: the build machine's is the newest that they can need, so build on the oldest system that is to be served.
A gateway that is optimised by a profile as well: --bin-dir with the program of `TARGET_CPU=x86-64 deploy/dist.sh`.

Needs python3 (3.11 or newer), binutils, dpkg-deb, git, and cargo, which knows what the programs are built from.
Exit code: 0 all is made, 1 something is missing or wrong, 2 bad arguments.
EOF_USAGE
}

say() { echo "release: $*" >&2; }
die() { say "$@"; exit 1; }

bin_dir='' out='' version='' maintainer='' images=''
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --images) images=yes && shift && continue ;;
    --bin-dir | --out | --version | --maintainer) ;;
    *) say "what is $1? --help says what there is" && exit 2 ;;
    esac
    if [ $# -lt 2 ] || [ -z "$2" ]; then
        say "$1 wants a value" && exit 2
    fi
    case $1 in
    --bin-dir) bin_dir=$(realpath -m "$2") ;;
    --out) out=$(realpath -m "$2") ;;
    --version) version=$2 ;;
    --maintainer) maintainer=$2 ;;
    esac
    shift 2
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
out=${out:-$target/packages}
programs=(keyway keyway-worker keyway-loadtest)

for need in python3:python3 readelf:binutils strip:binutils dpkg-deb:dpkg git:git cargo:rustup sha256sum:coreutils; do
    command -v "${need%:*}" >/dev/null || die "${need%:*} is missing: install ${need#*:}"
done
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "python3 is older than 3.11"
[ -z "$images" ] || command -v buildah >/dev/null || die "buildah is missing, which --images needs"

# What a package says of its time and its origin is the commit's.
git rev-parse --verify --quiet HEAD >/dev/null || die "no commit is checked out in $root"
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
maintainer=${maintainer:-$(git log -1 --format='%an <%ae>')}
[ -z "$(git status --porcelain)" ] || say "warning: files differ from the commit $(git rev-parse --short HEAD)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/out"

if [ -z "$bin_dir" ]; then
    say "building the programs ..."
    # No path of this machine goes into them.
    export RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$root=keyway --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
    cargo build --profile dist --locked --target-dir "$target" "${programs[@]/#/--package=}" >&2
    bin_dir=$target/dist
fi
for program in "${programs[@]}"; do
    [ -x "$bin_dir/$program" ] || die "no program $bin_dir/$program"
    install -m 755 "$bin_dir/$program" "$work/bin/"
    strip "$work/bin/$program" || die "$bin_dir/$program cannot be stripped"
done

# All three are of one version, of which the tag is a form where there is one.
built=''
for program in "${programs[@]}"; do
    told=$("$work/bin/$program" --version) || die "$program --version fails"
    [ -z "$built" ] || [ "$built" = "${told##* }" ] || die "$program is ${told##* }, keyway is $built"
    built=${told##* }
done
tag=$(git describe --exact-match --tags --match 'v[0-9]*' HEAD 2>/dev/null || true)
version=${version:-${tag#v}}
version=${version:-$built}
[[ $version == "$built" || $version == "$built"[-+]* ]] || die "the programs are $built, which $version is no form of"

export PYTHONDONTWRITEBYTECODE=1
made=(--stage "$work" --out "$work/out" --version "$version" --epoch "$SOURCE_DATE_EPOCH")
needs=$(deploy/release/elf.py "${programs[@]/#/$work/bin/}")
say "version $version, for $needs"
say "completions and man pages ..."
deploy/release/pages.py "${made[@]}" --out "$work"
say "notices and bill of materials ..."
deploy/notices.py --output "$work/THIRD-PARTY-NOTICES.txt"
deploy/release/sbom.py --version "$version" --epoch "$SOURCE_DATE_EPOCH" --output "$work/keyway.cdx.json"
say "wheel ..."
deploy/release/wheel.py "${made[@]}"
say "Debian packages ..."
deploy/release/deb.py "${made[@]}" --maintainer "$maintainer"
say "tarball and chart ..."
deploy/release/archives.py "${made[@]}"
cp "$work/THIRD-PARTY-NOTICES.txt" "$work/out/"
cp "$work/keyway.cdx.json" "$work/out/keyway-$version.cdx.json"
(cd "$work/out" && LC_ALL=C && sha256sum -- * >../SHA256SUMS && mv ../SHA256SUMS .)

if [ -n "$images" ]; then
    for program in "${programs[@]}"; do
        # A tag of an image has no plus.
        say "image $program:${version/+/_} ..."
        KEYWAY_BIN_DIR=$work/bin deploy/containers/build.sh "$program" "$program:${version/+/_}" >&2
    done
    say "push them: buildah push keyway:${version/+/_} docker://REGISTRY/keyway:${version/+/_}"
fi

mkdir -p "$out"
for file in "$work"/out/*; do
    install -m 644 "$file" "$out/"
    printf 'release: %8s KiB  %s\n' "$(( ($(stat -c %s "$file") + 1023) / 1024 ))" "${file##*/}" >&2
    echo "$out/${file##*/}"
done
for program in "${programs[@]}"; do
    say "$program is $(( $(stat -c %s "$work/bin/$program") / 1024 )) KiB, stripped"
done
