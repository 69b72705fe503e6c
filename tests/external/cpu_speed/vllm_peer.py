"""vLLM for CPUs on the steps of `worker/benches/qwen3_0_6b`; medians.

    vllm_peer.py MODEL_DIR THREADS ROUNDS

Through its engine, scheduler and sampling included: it has no way to its model alone. A step is the difference between
answers of 25 tokens and of one.
"""

import os
import sys
import time

from steps import BATCHES, DECODE, PREFILL, VOCAB, report


def answer(model, prompts, tokens: int) -> float:
    """Seconds until each prompt has an answer of so many tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return seconds


def decode(model, sequences: int) -> float:
    """Seconds per step, from a context of one token on."""
    prompts = [[7919 * (i + 1) % VOCAB] for i in range(sequences)]
    return (answer(model, prompts, DECODE + 1) - answer(model, prompts, 1)) / DECODE


def prefill(model) -> float:
    """Seconds for the prompt and one token."""
    return answer(model, [[i * 7919 % VOCAB for i in range(PREFILL)]], 1)


def main() -> None:
    path, threads, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    model = vllm.LLM(
        path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    for sequences in BATCHES:
        decode(model, sequences)
    prefill(model)
    rounds = [([decode(model, sequences) for sequences in BATCHES], prefill(model)) for _ in range(rounds)]
    report(*zip(*rounds))


if __name__ == "__main__":
    main()
