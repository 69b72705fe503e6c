#!/usr/bin/env bash
# Other people's suites for OpenAI's interface against a gateway with one worker: the openai package's own tests,
# LangChain's standard tests of a chat model, and requests that schemathesis makes up from worker/openapi.yaml. Of the
# openai package's tests those of creating, streaming and listing: stored completions and deleted models do not exist. Fetches
# them from PyPI into a temporary folder, or into $KEYWAY_CONFORMANCE_DIR, which is kept. Prints a table; fails if anything
# fails that exceptions.txt does not name, or passes that it names.
set -euo pipefail

OPENAI=3.52.0
LANGCHAIN_TESTS=1.1.9
LANGCHAIN_OPENAI=1.7.3
SCHEMATHESIS=4.32.5

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
scratch=$(mktemp -d)
pids=()
cleanup() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    rm -rf "$scratch"
}
trap cleanup EXIT
dir=${KEYWAY_CONFORMANCE_DIR:-$scratch}
mkdir -p "$dir"

if [ ! -x "$dir/venv/bin/python" ]; then
    python3 -m venv "$dir/venv"
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check "openai[aiohttp]==$OPENAI" pytest pytest-asyncio \
        inline-snapshot "langchain-tests==$LANGCHAIN_TESTS" "langchain-openai==$LANGCHAIN_OPENAI" "schemathesis==$SCHEMATHESIS"
fi
if [ ! -d "$dir/openai-$OPENAI" ]; then
    "$dir/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary openai "openai==$OPENAI" -d "$dir"
    tar -xzf "$dir/openai-$OPENAI.tar.gz" -C "$dir"
fi

cd "$root"
if [ -z "${KEYWAY_BIN_DIR:-}" ]; then
    cargo build --quiet --bin keyway --bin keyway-worker -p keyway -p keyway-worker
    KEYWAY_BIN_DIR=$(cargo metadata --format-version 1 --no-deps |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')/debug
fi

# The openai tests name OpenAI's models.
"$KEYWAY_BIN_DIR/keyway-worker" --model random --listen 127.0.0.1:0 \
    --served-model-name keyway-builtin,gpt-6-astra,gpt-3.5-turbo-instruct,text-embedding-3-small,model \
    2>"$scratch/worker.log" &
pids+=($!)
worker=$("$here/ready.sh" "$scratch/worker.log" 'ready on http://')
"$KEYWAY_BIN_DIR/keyway" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --worker "http://$worker" \
    2>"$scratch/gateway.log" &
pids+=($!)
gateway=$("$here/ready.sh" "$scratch/gateway.log" 'listening on http://')
echo "worker at $worker, gateway at $gateway"
export NO_PROXY='*' TEST_API_BASE_URL="http://$gateway/v1"

pytest() { "$dir/venv/bin/python" -m pytest -q -p no:cacheprovider "$@" || true; }
resources=$dir/openai-$OPENAI/tests/api_resources
(cd "$dir/openai-$OPENAI" && pytest -o addopts= --junitxml "$scratch/openai.xml" \
    -k 'create or (test_models and not delete)' \
    "$resources"/{chat/test_completions,test_completions,test_models,test_embeddings}.py) >"$scratch/openai.log" 2>&1
pytest -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session --junitxml "$scratch/langchain.xml" "$here/test_langchain.py" >"$scratch/langchain.log" 2>&1
# It keeps a cache where it runs.
(cd "$scratch" && "$dir/venv/bin/schemathesis" run "$root/worker/openapi.yaml" --url "http://$worker" --seed 1 \
    --max-examples 100 \
    --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
    --report junit --report-junit-path "$scratch/schemathesis.xml") >"$scratch/schemathesis.log" 2>&1 || true

"$dir/venv/bin/python" "$here/judge.py" "$here/exceptions.txt" "$scratch"/{openai,langchain,schemathesis}.xml ||
    { tail -n 60 "$scratch"/{openai,langchain,schemathesis,worker}.log; exit 1; }
