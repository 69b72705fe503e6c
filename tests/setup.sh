#!/usr/bin/env bash
# Installs what the tests need beyond Rust into .venv/ (ignored by git; another folder: KEYWAY_TEST_VENV): the
# official openai client, msgspec, pyzmq, Kubernetes' schemas, Helm's library, gRPC, OpenTelemetry's messages, Playwright with
# axe, HTTP/2's frames (h2), Prometheus, kubectl, and what sends or serves odd HTTP and TLS: varnishtest, slowhttptest, sslscan,
# nginx, HAProxy; and redis-server. Starts no service and installs nothing outside that folder, except Debian's own python3-venv, curl,
# ca-certificates, systemd, chromium, openssl and some libraries where they are missing and this runs as root.
set -euo pipefail

OPENAI_VERSION=3.52.0
MSGSPEC_VERSION=0.22.0
PYZMQ_VERSION=27.3.0
KUBERNETES_VALIDATE_VERSION=1.37.0
HELM_SDKPY_VERSION=0.1.32
CFFI_VERSION=2.1.1
GRPCIO_VERSION=1.85.1
OPENTELEMETRY_PROTO_VERSION=1.45.2
PLAYWRIGHT_VERSION=1.65.2
AXE_PLAYWRIGHT_VERSION=0.1.8
H2_VERSION=4.4.1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${KEYWAY_TEST_VENV:-$root/.venv}

say() { echo "setup: $*"; }

apt_updated=
apt() {
    [ "$(id -u)" = 0 ] || return 1
    [ -n "$apt_updated" ] || apt-get update -qq </dev/null
    apt_updated=yes
    DEBIAN_FRONTEND=noninteractive apt-get "$@" </dev/null
}

missing=()
command -v curl >/dev/null || missing+=(curl ca-certificates)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
# For `systemd-analyze verify`; elsewhere than on Debian its test is skipped.
if command -v apt-get >/dev/null && ! command -v systemd-analyze >/dev/null; then missing+=(systemd); fi
# For the test of the operators' page; Playwright brings none that every network may fetch.
if command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then missing+=(chromium); fi
# For a weak TLS server that sslscan must complain of.
if command -v apt-get >/dev/null && ! command -v openssl >/dev/null; then missing+=(openssl); fi
# Libraries of what is unpacked below: varnishtest, HAProxy, and redis-server.
if command -v apt-get >/dev/null; then
    loadable=$(/sbin/ldconfig -p)
    for library in libvarnishapi.so.3:libvarnishapi3 liblua5.3.so.0:liblua5.3-0 \
        libopentracing-c-wrapper.so.0:libopentracing-c-wrapper0 libpcre2-8.so.0:libpcre2-8-0 \
        liblzf.so.1:liblzf1 libjemalloc.so.2:libjemalloc2 libatomic.so.1:libatomic1; do
        [[ $loadable == *"${library%:*}"* ]] || missing+=("${library#*:}")
    done
fi
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    apt install -y -qq --no-install-recommends "${missing[@]}" ||
        { say "please install: ${missing[*]}" >&2; exit 1; }
fi

packages=("openai==$OPENAI_VERSION" "msgspec==$MSGSPEC_VERSION" "pyzmq==$PYZMQ_VERSION"
    "kubernetes-validate==$KUBERNETES_VALIDATE_VERSION" "helm-sdkpy==$HELM_SDKPY_VERSION" "cffi==$CFFI_VERSION"
    "grpcio==$GRPCIO_VERSION" "grpcio-tools==$GRPCIO_VERSION" "opentelemetry-proto==$OPENTELEMETRY_PROTO_VERSION"
    "playwright==$PLAYWRIGHT_VERSION" "axe-playwright-python==$AXE_PLAYWRIGHT_VERSION"
    "h2==$H2_VERSION")
if ! "$venv/bin/python" - "${packages[@]}" 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
sys.exit(any(version(name) != wanted for name, wanted in (p.split("==") for p in sys.argv[1:])))
PYTHON
then
    say "${packages[*]} into $venv"
    python3 -m venv "$venv"
    # helm-sdkpy asks for Python 3.12 and works on 3.11 as well.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --ignore-requires-python "${packages[@]}"
fi

# From Debian's packages: Prometheus and its promtool, kubectl, of which only `kubectl kustomize` is used, and the tools for
# the wire.
unpack() { # PACKAGE PATH_IN_PACKAGE...
    local package=$1 wanted=() path
    shift
    for path; do
        command -v "${path##*/}" >/dev/null || [ -x "$venv/bin/${path##*/}" ] || wanted+=("$path")
    done
    [ ${#wanted[@]} -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        say "please install ${wanted[*]##*/} (Debian: $package); the tests that need it are skipped without" >&2
        return 0
    fi
    # Unpacked, not installed: the package would start a server.
    say "${wanted[*]##*/} into $venv"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    (
        cd "$scratch"
        apt download -qq "$package" || apt-get download -qq "$package" </dev/null
        dpkg-deb --fsys-tarfile "$package"_*.deb | tar -x "${wanted[@]}"
    )
    for path in "${wanted[@]}"; do
        install -m 755 "$scratch/$path" "$venv/bin/${path##*/}"
    done
    rm -rf "$scratch"
}
unpack prometheus ./usr/bin/promtool ./usr/bin/prometheus
unpack kubernetes-client ./usr/bin/kubectl
unpack varnish ./usr/bin/varnishtest
unpack slowhttptest ./usr/bin/slowhttptest
unpack sslscan ./usr/bin/sslscan
unpack nginx ./usr/sbin/nginx
unpack haproxy ./usr/sbin/haproxy
# Debian's redis-server is a link to what is in redis-tools.
if ! command -v redis-server >/dev/null && [ ! -x "$venv/bin/redis-server" ]; then
    unpack redis-tools ./usr/bin/redis-check-rdb
    [ ! -x "$venv/bin/redis-check-rdb" ] || mv "$venv/bin/redis-check-rdb" "$venv/bin/redis-server"
fi
say "ready"
