"""llama.cpp on the steps of `worker/benches/qwen3_0_6b`: decode of 24 tokens from an empty context, one sequence, eight and
32, and a prompt of 512; medians.

    llama.py MODEL.gguf THREADS ROUNDS
"""

import ctypes
import sys
import time

import llama_cpp as llama
from steps import BATCHES, DECODE, PREFILL, VOCAB, report


def step(context, tokens) -> None:
    """Computes `tokens`, each (token id, position, sequence, whether its logits are wanted)."""
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence, wanted) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
        batch.seq_id[i][0], batch.logits[i] = sequence, wanted
    assert llama.llama_decode(context, batch) == 0
    llama.llama_batch_free(batch)


def decode(context, sequences: int) -> float:
    """Seconds per step."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    begin = time.perf_counter()
    for position in range(DECODE):
        step(context, [(position * 7919 % VOCAB, position, sequence, 1) for sequence in range(sequences)])
    return (time.perf_counter() - begin) / DECODE


def prefill(context) -> float:
    """Seconds for the prompt."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    begin = time.perf_counter()
    step(context, [(i * 7919 % VOCAB, i, 0, int(i + 1 == PREFILL)) for i in range(PREFILL)])
    return time.perf_counter() - begin


@llama.llama_log_callback
def quiet(_level, _text, _data) -> None:
    """Drops llama.cpp's log."""


def main() -> None:
    path, threads, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_load_model_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, PREFILL, PREFILL
    params.n_threads, params.n_threads_batch, params.n_seq_max = threads, threads, max(BATCHES)
    params.kv_unified = True
    context = llama.llama_new_context_with_model(model, params)
    decode(context, 1)
    rounds = [([decode(context, sequences) for sequences in BATCHES], prefill(context)) for _ in range(rounds)]
    report(*zip(*rounds))


if __name__ == "__main__":
    main()
