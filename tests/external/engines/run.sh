#!/usr/bin/env bash
# The gateway in front of real vLLM engines, judged by what they report and count themselves.
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
Usage: tests/external/engines/run.sh [ends|forms|images|ranks|second|routers] [arguments]

What the gateway predicts of conversations' prompts under eviction, beside what engines find; or

  ends    engines and gateways that end and come back: what clients see, what is still predicted, and what is left of clients
          that have gone (--only restarts,cancels,breaks,load)
  forms   requests of many forms, adapters and salts, each asked twice: what is predicted, and what engines find
  images  chats with pictures, of a model that sees: what is predicted and priced, and what engines find and count (--by events,text)
  ranks   one vLLM with two data-parallel engines behind one URL: what is predicted, and what each finds (--by events,text)
  second  SGLang instead of vLLM: whether its answers come through as they are, and what conversations find by each way of choosing
  routers conversations, several at once, through Keyway and other routers in turn: what engines find, and time to the first token
          (--render: engines render prompts, which vllm-router's cache_aware asks for)

Of the first:
  --kinds full,window      tiny random models: one whose layers all keep a whole prompt, one most of whose keep a window; agent: the
                           first with a template that shows tools and their calls
  --by events,text         what the gateway predicts from; ids: events alone, for prompts of token ids without a tokenizer;
                           messages,responses: events, of agents over Anthropic's or OpenAI's API
  --engines 2 --requests 200 --turns 6 --at-a-time 12 --seed 1
Of the first and of ends: --engine vllm|sglang

Environment (defaults):
  BIN_DIR   built here      folder with keyway (a release build)
  VLLM      SCRATCH/vllm    virtual environment with vLLM 0.32.0 for CPUs; installed there if it is not there: 6 GB
  SGLANG    SCRATCH/sglang  virtual environment with SGLang 0.5.23, beside vLLM's; installed there where it is needed: 0.3 GB
  ROUTERS   SCRATCH/routers virtual environment with vllm-router 0.1.17 and smg 1.13.0; installed there where it is needed
  SCRATCH   a new folder    models, logs

An engine takes a minute to start, and 1 GB of memory.
EOF_USAGE
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$root/tests/binaries.sh" -p keyway
SCRATCH=${SCRATCH:-$(mktemp -d)}
VLLM=${VLLM:-$SCRATCH/vllm}
mkdir -p "$SCRATCH"
"$root/tests/external/engines/install.sh" "$VLLM"
script=predictions
case ${1:-} in ends | forms | images | ranks | second | routers) script=$1 && shift ;; esac
more=()
if [[ $script = second || " $* " = *" --engine sglang "* ]]; then
    SGLANG=${SGLANG:-$SCRATCH/sglang}
    "$root/tests/external/engines/second_engine.sh" "$SGLANG" "$VLLM"
    more=(--engine sglang --sglang "$SGLANG")
elif [[ $script = routers ]]; then
    ROUTERS=${ROUTERS:-$SCRATCH/routers}
    if [[ ! -x $ROUTERS/bin/smg ]]; then
        python3 -m venv "$ROUTERS"
        "$ROUTERS/bin/pip" install --quiet vllm-router==0.1.17 smg==1.13.0
    fi
    more=(--routers "$ROUTERS")
fi
exec python3 "$root/tests/external/engines/$script.py" --keyway "$BIN_DIR/keyway" --vllm "$VLLM" --scratch "$SCRATCH" "${more[@]}" "$@"
