"""PyTorch with transformers on the steps of `worker/benches/qwen3_0_6b`; medians.

    torch_peer.py MODEL_DIR bfloat16|float32 THREADS ROUNDS
"""

import sys
import time

import torch
from steps import DECODE, PREFILL, VOCAB, report
from transformers import AutoModelForCausalLM


def decode(model) -> float:
    """Seconds per token, from an empty context."""
    cache, begin = None, time.perf_counter()
    for position in range(DECODE):
        out = model(torch.tensor([[position * 7919 % VOCAB]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    return (time.perf_counter() - begin) / DECODE


def prefill(model) -> float:
    """Seconds for the prompt; logits of its last token only."""
    prompt = (torch.arange(PREFILL) * 7919 % VOCAB).reshape(1, -1)
    begin = time.perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - begin


def main() -> None:
    path, kept, threads, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, kept)).eval()
    with torch.inference_mode():
        decode(model)
        prefill(model)
        rounds = [([decode(model)], prefill(model)) for _ in range(rounds)]
    report(*zip(*rounds))


if __name__ == "__main__":
    main()
