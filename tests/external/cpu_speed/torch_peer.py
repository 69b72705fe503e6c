"""PyTorch with transformers on the steps of `worker/benches/qwen3_0_6b`; medians.

    torch_peer.py MODEL_DIR bfloat16|float32 THREADS ROUNDS
"""

import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

DECODE, PREFILL, VOCAB = 24, 512, 151936


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
        times = [(decode(model), prefill(model)) for _ in range(rounds)]
    token, prompt = (statistics.median(column) for column in zip(*times))
    print(f"  decode, batch 1            {1 / token:7.1f} tokens/s")
    print(f"  prefill of {PREFILL}             {PREFILL / prompt:7.0f} tokens/s")


if __name__ == "__main__":
    main()
