"""Makes the checkpoints and golden outputs under tests/data: tiny random models in Hugging Face's own code.

Not part of any build or test run; its outputs are committed. To make them again:

    python3 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch transformers==5.23 safetensors numpy
    /tmp/goldens/bin/python worker/tests/make_goldens.py

Per family: config.json, model.safetensors, and golden.safetensors with
  ids          the prompt
  positions    positions whose logits are kept
  logits       their logits, in float64 but for the norms and softmaxes, which that code always takes in float32
  greedy       the greedy continuation
"""

import json
import pathlib

import torch
import transformers as tf
from safetensors.torch import save_file

DATA = pathlib.Path(__file__).parent / "data"
PROMPT, CONTINUATION = 300, 16
SIZES = dict(
    vocab_size=320, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, eos_token_id=256, bos_token_id=None, pad_token_id=None,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FAMILIES = {
    "llama": (torch.float32, tf.LlamaForCausalLM, tf.LlamaConfig(
        num_hidden_layers=2, intermediate_size=96, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE, **SIZES)),
    "qwen2": (torch.float16, tf.Qwen2ForCausalLM, tf.Qwen2Config(
        num_hidden_layers=2, intermediate_size=80, tie_word_embeddings=True, **SIZES)),
    "qwen3": (torch.bfloat16, tf.Qwen3ForCausalLM, tf.Qwen3Config(
        num_hidden_layers=2, intermediate_size=80, tie_word_embeddings=False, **SIZES)),
    "qwen3_moe": (torch.bfloat16, tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(
        num_hidden_layers=3, intermediate_size=80, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False, **SIZES)),
}


def redraw(model, generator):
    """Replaces every parameter: the default initialisation leaves logits nearly flat and biases zero."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = (1 + 0.1 * noise if "norm" in name else 0.05 * noise if name.endswith("bias") else 0.08 * noise).to(p.dtype)


@torch.no_grad()
def greedy(model, ids):
    """The greedy continuation and the smallest lead of a chosen token over the next best."""
    ids, lead = list(ids), float("inf")
    for _ in range(CONTINUATION):
        top = model(torch.tensor([ids])).logits[0, -1].topk(2)
        lead = min(lead, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[-CONTINUATION:], lead


@torch.no_grad()
def make(family, dtype, cls, config, seed):
    generator = torch.Generator().manual_seed(seed)
    model = cls(config)
    redraw(model, generator)
    folder = DATA / family
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    options = dict(attn_implementation="eager", dtype=torch.float32)
    if "moe" in family:
        options["experts_implementation"] = "eager"
    exact = cls.from_pretrained(folder, **options).double().eval()
    ids = torch.randint(0, config.vocab_size, (PROMPT,), generator=generator)
    continuation, lead = greedy(exact, ids.tolist())
    positions = torch.tensor([0, 1, 2, 7, 15, 16, 17, 31, 32, 63, 64, 100, 200, 255, 256, 257, 299])
    save_file({
        "ids": ids.to(torch.int32),
        "positions": positions.to(torch.int32),
        "logits": exact(ids[None]).logits[0, positions].contiguous(),
        "greedy": torch.tensor(continuation, dtype=torch.int32),
    }, folder / "golden.safetensors")
    return lead


if __name__ == "__main__":
    for family, (dtype, cls, config) in FAMILIES.items():
        seed = 1
        while (lead := make(family, dtype, cls, config, seed)) < 1e-3:
            seed += 1
        print(json.dumps(dict(family=family, seed=seed, smallest_lead=lead)))
