#!/usr/bin/env bash
# Installs SGLang into a virtual environment, unless it is there: second_engine.sh FOLDER VLLM. The wheel on PyPI is the one for GPUs,
# 5 GB with what it asks for; on a CPU it runs with what vLLM's environment has, and a few small packages.
set -euo pipefail
VERSION=0.5.23
venv=${1:?"which folder?"}
vllm=$(realpath "${2:?"where is the environment with vLLM?"}")
if "$venv/bin/python" -c "import importlib.metadata as m; assert m.version('sglang') == '$VERSION'; import torch" 2>/dev/null; then
    exit 0
fi
python3 -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$vllm" >"$(site "$venv")/beside.pth"
# What is asked for is left out: kernels for GPUs, and another torch.
"$venv/bin/pip" install --quiet --no-deps "sglang==$VERSION" orjson==3.13.0 ipython==9.18.1 traitlets==5.16.1 gguf==0.19.0 soundfile==0.14.0
