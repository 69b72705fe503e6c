"""Makes the checkpoints and golden outputs under tests/data: tiny random models in Hugging Face's own code.

Not part of any build or test run; its outputs are committed. To make them again (all, or those named):

    python3 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch transformers==5.23 safetensors numpy
    /tmp/goldens/bin/python worker/tests/make_goldens.py [FAMILY]...

Per family: config.json, the weights, and golden.safetensors with
  ids          the prompt
  positions    positions whose logits are kept
  logits       their logits in float64 throughout: where that code goes to float32 by itself (norms, softmaxes,
               routers) it is kept from doing so. Only the angles of the rotary embedding stay float32, since
               checkpoints are trained with that rounding.
  greedy       the greedy continuation
The sliding windows are shorter than the prompt, and the prompt is longer than 256, the attention's own chunk.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers as tf
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

DATA = pathlib.Path(__file__).parent / "data"
PROMPT, CONTINUATION = 300, 16
POSITIONS = [0, 1, 2, 7, 15, 16, 17, 31, 32, 63, 64, 100, 200, 255, 256, 257, 299]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
COMMON = dict(
    vocab_size=320, hidden_size=64, num_attention_heads=4, max_position_embeddings=512,
    eos_token_id=256, bos_token_id=None, pad_token_id=None,
)
SIZES = dict(num_key_value_heads=2, head_dim=16, **COMMON)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
GPT_OSS_ROPE = dict(
    rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=64,
)
DEEPSEEK_ROPE = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.7,
    original_max_position_embeddings=128,
)
DEEPSEEK = dict(
    num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1,
    intermediate_size=80, moe_intermediate_size=32, rope_parameters=DEEPSEEK_ROPE, **COMMON,
)
FAMILIES = {
    "llama": (F32, tf.LlamaForCausalLM, tf.LlamaConfig(
        num_hidden_layers=2, intermediate_size=96, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE, **SIZES)),
    "mistral": (F16, tf.MistralForCausalLM, tf.MistralConfig(
        num_hidden_layers=2, intermediate_size=80, sliding_window=41, **SIZES)),
    # Its config.json is rewritten with the keys of before transformers 5.
    "qwen2": (F16, tf.Qwen2ForCausalLM, tf.Qwen2Config(
        num_hidden_layers=2, intermediate_size=80, tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=128), **SIZES)),
    "qwen3": (BF16, tf.Qwen3ForCausalLM, tf.Qwen3Config(
        num_hidden_layers=2, intermediate_size=80, tie_word_embeddings=False, **SIZES)),
    "qwen3_moe": (BF16, tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(
        num_hidden_layers=3, intermediate_size=80, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False, **SIZES)),
    # Saved in several files.
    "mixtral": (BF16, tf.MixtralForCausalLM, tf.MixtralConfig(
        num_hidden_layers=2, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=False, **SIZES)),
    # The limit is low enough to clamp.
    "gpt_oss": (BF16, tf.GptOssForCausalLM, tf.GptOssConfig(
        num_hidden_layers=3, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.6,
        sliding_window=32, rope_parameters=GPT_OSS_ROPE, tie_word_embeddings=True, **SIZES)),
    "gpt_oss_mxfp4": (BF16, tf.GptOssForCausalLM, tf.GptOssConfig(
        num_hidden_layers=5, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.6,
        sliding_window=40, rope_parameters=GPT_OSS_ROPE, tie_word_embeddings=True, **SIZES)),
    "deepseek_v2": (BF16, tf.DeepseekV2ForCausalLM, tf.DeepseekV2Config(
        num_hidden_layers=2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24,
        n_shared_experts=2, topk_method="group_limited_greedy", routed_scaling_factor=3.0, **DEEPSEEK)),
    "deepseek_v3": (BF16, tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config(
        num_hidden_layers=2, q_lora_rank=40, kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=16,
        n_shared_experts=1, routed_scaling_factor=2.5, **DEEPSEEK)),
    # Wider than one block of 128 by 128, in both directions.
    "deepseek_v3_fp8": (BF16, tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config(
        num_hidden_layers=2, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        n_shared_experts=1, routed_scaling_factor=2.5, tie_word_embeddings=True, **{
            **DEEPSEEK, "hidden_size": 136, "intermediate_size": 160, "moe_intermediate_size": 48,
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2})),
}
# E2M1, by its code (OCP Microscaling Formats 1.0, table 5.3.3).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Float64(TorchFunctionMode):
    """Keeps float64 tensors from becoming float32, outside the rotary embedding."""

    on = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.on and args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

    def leave_rotary_out(self, model):
        def switch(on):
            self.on = on
        model.model.rotary_emb.register_forward_pre_hook(lambda *_: switch(False))
        model.model.rotary_emb.register_forward_hook(lambda *_: switch(True))


def redraw(model, generator):
    """Replaces every parameter: the default initialisation leaves logits nearly flat, biases and sinks zero."""
    def draw(name, shape):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1 + 0.1 * noise
        if "sinks" in name:
            return noise
        if name.endswith("e_score_correction_bias"):
            return 0.1 * noise
        return (0.05 if name.endswith("bias") else 0.08) * noise
    for name, p in model.named_parameters():
        p.data = draw(name, p.shape).to(p.dtype)
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.data = draw(name, b.shape).to(b.dtype)


def mxfp4_experts(state, generator):
    """Draws the experts' matrices in MXFP4, two codes a byte, the lower first, a power of two per 32. Returns what a
    checkpoint holds and the matrices' values as the model wants them, input-major."""
    stored, values = dict(state), {}
    for name, tensor in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator)
        exponents = torch.randint(121, 124, (experts, outputs, inputs // 32), generator=generator)
        rows = E2M1[codes] * torch.exp2(exponents[..., None] - 127.0)
        values[name] = rows.reshape(experts, outputs, inputs).transpose(1, 2).contiguous()
        del stored[name]
        stored[name + "_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        stored[name + "_scales"] = exponents.to(torch.uint8)
    return stored, values, dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])


def fp8_linears(state, _generator):
    """Quantises every matrix but the embedding, the head and the routers to E4M3 with one f32 scale per 128 by 128."""
    stored, values = dict(state), {}
    for name, tensor in state.items():
        if tensor.dim() != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            continue
        rows, width = tensor.shape
        scales = torch.empty(-(-rows // 128), -(-width // 128))
        quantised, value = torch.empty(rows, width, dtype=torch.float8_e4m3fn), torch.empty(rows, width)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scales[i, j] = tensor[block].float().abs().max() / 448
                quantised[block] = (tensor[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
                value[block] = quantised[block].float() * scales[i, j]
        stored[name], stored[name + "_scale_inv"], values[name] = quantised, scales, value
    return stored, values, dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


QUANTISED = {"gpt_oss_mxfp4": mxfp4_experts, "deepseek_v3_fp8": fp8_linears}


def saved_names(model, folder):
    """The model's tensors under the names a checkpoint has."""
    from safetensors.torch import load_file
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def load_exact(folder, cls):
    options = dict(attn_implementation="eager", dtype=torch.float32)
    if any(part in folder.name for part in ("moe", "mixtral", "gpt_oss", "deepseek")):
        options["experts_implementation"] = "eager"
    return cls.from_pretrained(folder, **options).double().eval()


def save_quantised(model, folder, cls, quantise, generator):
    """Saves the model quantised; returns one that computes with the quantised values."""
    state = saved_names(model, folder)
    stored, values, quantisation = quantise(state, generator)
    save_file({**{k: v.float() for k, v in state.items()}, **values}, folder / "model.safetensors", {"format": "pt"})
    exact = load_exact(folder, cls)
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return exact


def rewrite_with_old_keys(path):
    """As transformers 4 wrote it: `torch_dtype`, and `rope_theta` beside `rope_scaling`."""
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = dict(type=rope.pop("rope_type"), **rope)
    del config["layer_types"]
    path.write_text(json.dumps(config, indent=2) + "\n")


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
def make(family, seed):
    dtype, cls, config = FAMILIES[family]
    folder = DATA / family
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    model = cls(config)
    redraw(model, generator)
    model.to(dtype)
    if family in QUANTISED:
        exact = save_quantised(model, folder, cls, QUANTISED[family], generator)
    else:
        model.save_pretrained(folder, max_shard_size="100KB" if family == "mixtral" else "50GB")
        if family == "qwen2":
            rewrite_with_old_keys(folder / "config.json")
        exact = load_exact(folder, cls)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, config.vocab_size, (PROMPT,), generator=generator)
    with Float64() as float64:
        float64.leave_rotary_out(exact)
        continuation, lead = greedy(exact, ids.tolist())
        positions = torch.tensor(POSITIONS)
        logits = exact(ids[None]).logits[0, positions].contiguous()
    assert logits.dtype == torch.float64
    save_file({
        "ids": ids.to(torch.int32),
        "positions": positions.to(torch.int32),
        "logits": logits,
        "greedy": torch.tensor(continuation, dtype=torch.int32),
    }, folder / "golden.safetensors")
    return lead


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        seed = 1
        while (lead := make(family, seed)) < 1e-3:
            seed += 1
        print(json.dumps(dict(family=family, seed=seed, smallest_lead=lead)))
