"""A Qwen3-MoE in few, large operations: fast to train on a CPU. Its parameters have the names and shapes that
transformers writes, so `export.py` copies them as they are; it must compute what `Qwen3MoeForCausalLM` computes."""

import math

import torch
from torch.nn import functional as F

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP, WIDTH = 128, 4, 4, 2, 32, 8, 2, 192
EPS, THETA, POSITIONS = 1e-6, 10000.0, 32768


def initial(vocab, seed):
    """Parameters by name, random."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, inputs, scale=1.0):
        return torch.nn.Parameter(torch.randn(rows, inputs, generator=generator) * scale / math.sqrt(inputs))

    def ones(width):
        return torch.nn.Parameter(torch.ones(width))

    weights = {"model.embed_tokens.weight": matrix(vocab, HIDDEN, 0.3), "model.norm.weight": ones(HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        into = 1 / math.sqrt(2 * LAYERS)
        weights |= {
            f"{layer}.input_layernorm.weight": ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{layer}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, into),
            f"{layer}.mlp.gate.weight": matrix(EXPERTS, HIDDEN, 0.5),
        }
        for e in range(EXPERTS):
            expert = f"{layer}.mlp.experts.{e}"
            weights |= {
                f"{expert}.gate_proj.weight": matrix(WIDTH, HIDDEN),
                f"{expert}.up_proj.weight": matrix(WIDTH, HIDDEN),
                f"{expert}.down_proj.weight": matrix(HIDDEN, WIDTH, into),
            }
    return weights


def angles(length):
    """Cosine and sine of the rotary embedding, `[length, HEAD_DIM]`."""
    frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.outer(torch.arange(length).float(), frequency)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def turned(x, cos, sin):
    """The rotary embedding by halves."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(weights, layer, x, cos, sin):
    """Causal grouped-query attention over `x` `[batch, length, HIDDEN]`."""
    batch, length, _ = x.shape
    name = f"{layer}.self_attn"
    rows = [weights[f"{name}.{part}_proj.weight"] for part in "qkv"]
    qkv = F.linear(x, torch.cat(rows)).view(batch, length, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
    q = F.rms_norm(q, (HEAD_DIM,), weights[f"{name}.q_norm.weight"], EPS).transpose(1, 2)
    k = F.rms_norm(k, (HEAD_DIM,), weights[f"{name}.k_norm.weight"], EPS).transpose(1, 2)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v.transpose(1, 2)))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(batch, length, -1), weights[f"{name}.o_proj.weight"])


def experts(weights, layer, x):
    """The mixture over `x` `[tokens, HIDDEN]`, and how far its router is from using all experts alike."""
    chances = F.linear(x, weights[f"{layer}.mlp.gate.weight"]).softmax(-1)
    share, chosen = chances.topk(TOP, -1)
    share = share / share.sum(-1, keepdim=True)
    order = chosen.flatten().argsort()
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    token = order // TOP
    outputs = []
    for e, part in enumerate(x.index_select(0, token).split(counts.tolist())):
        name = f"{layer}.mlp.experts.{e}"
        gate, up = (F.linear(part, weights[f"{name}.{kind}_proj.weight"]) for kind in ("gate", "up"))
        outputs.append(F.linear(F.silu(gate) * up, weights[f"{name}.down_proj.weight"]))
    out = torch.cat(outputs) * share.flatten().index_select(0, order).unsqueeze(-1)
    # Switch Transformer's balance loss (Fedus et al. 2021, eq. 4): 1 where all experts get equal shares.
    balance = EXPERTS * (counts / counts.sum() * chances.mean(0)).sum()
    return torch.zeros_like(x).index_add(0, token, out), balance


def hidden(weights, ids):
    """The last layer's normalised output `[batch, length, HIDDEN]`, and the routers' mean balance."""
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    cos, sin = angles(ids.shape[1])
    balance = 0.0
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        normed = F.rms_norm(x, (HIDDEN,), weights[f"{layer}.input_layernorm.weight"], EPS)
        x = x + attention(weights, layer, normed, cos, sin)
        normed = F.rms_norm(x, (HIDDEN,), weights[f"{layer}.post_attention_layernorm.weight"], EPS)
        mixed, unbalanced = experts(weights, layer, normed.flatten(0, 1))
        x, balance = x + mixed.view_as(x), balance + unbalanced / LAYERS
    return F.rms_norm(x, (HIDDEN,), weights["model.norm.weight"], EPS), balance
