#!/usr/bin/env bash
# Compares the prompts that vLLM makes of requests to three APIs with those that `gateway/text` makes of them, for every chat template of
# llama.cpp's collection (in the sdist of llama-cpp-python). Fetches both from PyPI; VLLM names a virtual environment that has vLLM for
# CPUs already. Prints what differs and a table; arguments go to compare.py (--only Qwen3, --seed 2, --many 300).
set -euo pipefail

LLAMA_CPP_PYTHON=0.3.36

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

VLLM=${VLLM:-$scratch/vllm}
"$root/tests/external/engines/install.sh" "$VLLM"
python=$VLLM/bin/python
# The sdist only: nothing of it is built or run, except its metadata.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    "llama-cpp-python==$LLAMA_CPP_PYTHON" -d "$scratch/sdist"
mkdir "$scratch/templates"
tar -xzf "$scratch"/sdist/*.tar.gz -C "$scratch/templates" --strip-components=4 --wildcards '*/models/templates/*.jinja'
"$python" "$root/tests/external/engines/tiny_model.py" full "$scratch/model" 2>/dev/null
"$python" "$root/tests/external/engines/tiny_model.py" sees "$scratch/sees" 2>/dev/null

cd "$root"
cargo build --quiet -p keyway-text --example prompts
target=$(cargo metadata --format-version 1 --no-deps | "$python" -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
"$python" "$here/compare.py" --templates "$scratch/templates" --model "$scratch/model" --prompts "$target/debug/examples/prompts" "$@"
# A model that sees, with its own template: what of a request with pictures is known.
"$python" "$here/compare.py" --templates "$scratch/sees" --model "$scratch/sees" --prompts "$target/debug/examples/prompts"
