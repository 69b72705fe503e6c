"""A Qwen3-MoE in few, large operations: fast to train on a CPU. Its parameters have the names and shapes that
transformers writes, so `export.py` copies them as they are; it must compute what `Qwen3MoeForCausalLM` computes."""

import math

import torch
from torch.nn import functional as F

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP, WIDTH = 128, 2, 4, 4, 32, 8, 2, 128
EPS, THETA, POSITIONS = 1e-6, 10000.0, 32768
# So many times what is read counts at first beside the token that decides.
MEAN_SCALE = 4.0


def initial(vocab, seed):
    """Parameters by name, random. Tokens are large beside a step of the training, so that words keep what they mean."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, inputs, scale=1.0):
        return torch.nn.Parameter(torch.randn(rows, inputs, generator=generator) * scale / math.sqrt(inputs))

    def ones(width, scale=1.0):
        return torch.nn.Parameter(torch.full((width,), scale))

    weights = {"model.embed_tokens.weight": matrix(vocab, HIDDEN, 3.4), "model.norm.weight": ones(HIDDEN, 0.5)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        into = 1 / math.sqrt(2 * LAYERS)
        # What a thin network leaves out adds nothing at first.
        adds = into if i == LAYERS - 1 else 0.0
        weights |= {
            f"{layer}.input_layernorm.weight": ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": ones(HIDDEN),
            # Small: at first all words count alike.
            f"{layer}.self_attn.q_norm.weight": ones(HEAD_DIM, 0.3),
            f"{layer}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, adds),
            f"{layer}.mlp.gate.weight": matrix(EXPERTS, HIDDEN, 0.5),
        }
        for e in range(EXPERTS):
            expert = f"{layer}.mlp.experts.{e}"
            weights |= {
                f"{expert}.gate_proj.weight": matrix(WIDTH, HIDDEN),
                f"{expert}.up_proj.weight": matrix(WIDTH, HIDDEN),
                f"{expert}.down_proj.weight": matrix(HIDDEN, WIDTH, adds),
            }
    # The last layer begins as a mean of the words that were read.
    weights[f"{layer}.self_attn.v_proj.weight"].data.copy_(torch.eye(HIDDEN))
    weights[f"{layer}.self_attn.o_proj.weight"].data.copy_(MEAN_SCALE * torch.eye(HIDDEN))
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


def heads(weights, name, part, x):
    """Queries, keys or values `[batch, heads, length, HEAD_DIM]`."""
    return F.linear(x, weights[f"{name}.{part}_proj.weight"]).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def attention(weights, layer, x, cos, sin, at=None):
    """Causal grouped-query attention over `x` `[batch, length, HIDDEN]`; of one token of each row where `at` says which."""
    name = f"{layer}.self_attn"
    places = torch.arange(x.shape[1])
    asking, when = (x, places[None]) if at is None else (x[torch.arange(len(x)), at][:, None], at[:, None])
    q, k, v = heads(weights, name, "q", asking), heads(weights, name, "k", x), heads(weights, name, "v", x)
    q = F.rms_norm(q.float(), (HEAD_DIM,), weights[f"{name}.q_norm.weight"], EPS)
    k = F.rms_norm(k.float(), (HEAD_DIM,), weights[f"{name}.k_norm.weight"], EPS)
    q, k = turned(q, cos[when][:, None], sin[when][:, None]).to(v.dtype), turned(k, cos, sin).to(v.dtype)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    # Written out: of short sequences PyTorch's own takes longer, above all backwards.
    scores = (q @ k.transpose(2, 3)).float() / math.sqrt(HEAD_DIM)
    later = places > when[:, None, :, None]
    out = scores.masked_fill(later, -torch.inf).softmax(-1).to(v.dtype) @ v
    return F.linear(out.transpose(1, 2).flatten(2), weights[f"{name}.o_proj.weight"])


def experts(weights, layer, x):
    """The mixture over `x` `[tokens, HIDDEN]`, and how far its router is from using all experts alike."""
    chances = F.linear(x, weights[f"{layer}.mlp.gate.weight"]).float().softmax(-1)
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
    out = torch.cat(outputs).to(x.dtype) * share.flatten().index_select(0, order).unsqueeze(-1)
    # Switch Transformer's balance loss (Fedus et al. 2021, eq. 4): 1 where all experts get equal shares.
    balance = EXPERTS * (counts / counts.sum() * chances.mean(0)).sum()
    return torch.zeros_like(x).index_add(0, token, out), balance


def layer_of(weights, i, x, cos, sin, at=None):
    """What layer `i` makes of `x`, and its router's balance. With `at` of one token of each row."""
    layer = f"model.layers.{i}"
    normed = F.rms_norm(x, (HIDDEN,), weights[f"{layer}.input_layernorm.weight"], EPS)
    seen = attention(weights, layer, normed, cos, sin, at)
    x = (x if at is None else x[torch.arange(len(x)), at][:, None]) + seen
    normed = F.rms_norm(x, (HIDDEN,), weights[f"{layer}.post_attention_layernorm.weight"], EPS)
    mixed, unbalanced = experts(weights, layer, normed.flatten(0, 1))
    return x + mixed.view_as(x), unbalanced


def hidden(weights, ids):
    """The last layer's normalised output `[batch, length, HIDDEN]`, and the routers' mean balance."""
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    cos, sin = angles(ids.shape[1])
    balance = 0.0
    for i in range(LAYERS):
        x, unbalanced = layer_of(weights, i, x, cos, sin)
        balance = balance + unbalanced / LAYERS
    return F.rms_norm(x, (HIDDEN,), weights["model.norm.weight"], EPS), balance


def hidden_at(weights, ids, at, thin=False):
    """The same for the token `at` of each row, for less. A thin network has only the last layer: the others add
    nothing at the beginning (`initial`)."""
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    cos, sin = angles(ids.shape[1])
    balance = 0.0
    for i in range(LAYERS - 1 if thin else 0, LAYERS):
        x, unbalanced = layer_of(weights, i, x, cos, sin, at if i == LAYERS - 1 else None)
        balance = balance + unbalanced / LAYERS
    return F.rms_norm(x[:, 0], (HIDDEN,), weights["model.norm.weight"], EPS), balance
