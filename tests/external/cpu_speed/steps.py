"""The steps of `worker/benches/qwen3_0_6b`, and how its figures are printed."""

import statistics

# Tokens decoded, sequences at once, tokens of the prompt, tokens that there are.
DECODE, BATCHES, PREFILL, VOCAB = 24, (1, 8, 32), 512, 151936


def report(decodes, prefills) -> None:
    """Prints medians. Of each round: seconds per step of each of :data:`BATCHES`, as far as that was measured, and seconds for the
    prompt."""
    steps = [statistics.median(column) for column in zip(*decodes)]
    for sequences, step in zip(BATCHES, steps):
        more = f", {sequences * steps[0] / step:.2f} times batch 1" if sequences > 1 else ""
        print(f"  decode, batch {sequences:<2}           {sequences / step:7.1f} tokens/s{more}")
    print(f"  prefill of {PREFILL}             {PREFILL / statistics.median(prefills):7.0f} tokens/s")
