#!/usr/bin/env bash
# Compares chat templates of real models, as transformers renders them and as `gateway/text` does, over a matrix of
# conversations. Fetches transformers and the templates (llama.cpp's collection, in the sdist of llama-cpp-python) from
# PyPI into a temporary folder; PYTHON names a Python that has transformers already. Prints what differs and a table.
set -euo pipefail

TRANSFORMERS=5.23.0
JINJA=3.1.6
LLAMA_CPP_PYTHON=0.3.36

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$scratch/venv"
    python=$scratch/venv/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check \
        "transformers==$TRANSFORMERS" "jinja2==$JINJA"
fi

# The sdist only: nothing of it is built or run, except its metadata.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    "llama-cpp-python==$LLAMA_CPP_PYTHON" -d "$scratch/sdist"
mkdir "$scratch/templates"
tar -xzf "$scratch"/sdist/*.tar.gz -C "$scratch/templates" --strip-components=4 --wildcards '*/models/templates/*.jinja'

cd "$root"
cargo build --quiet -p keyway-text --example render
target=$(cargo metadata --format-version 1 --no-deps | "$python" -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
"$python" "$here/compare.py" --templates "$scratch/templates" --render "$target/debug/examples/render" --show 20 "$@"
