"""torch's own attention, products, norm and gate at the shapes that `kernels/check` times; run by it. Attention reads
contiguous keys and values here, for want of a paged form."""

import torch
from report import report

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def attention(sequences, queries, positions, causal):
    def make():
        q = torch.randn(sequences, 32, queries, 128, **BF16)
        k, v = (torch.randn(sequences, 8, positions, 128, **BF16) for _ in range(2))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return [lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True)]

    return make


def product(m, n, k):
    def make():
        x, w = torch.randn(m, k, **BF16), torch.randn(n, k, **BF16)
        return [lambda: x @ w.T]

    return make


def norm():
    x, residual, w = torch.randn(4096, 4096, **BF16), torch.randn(4096, 4096, **BF16), torch.randn(4096, **BF16)
    return [lambda: torch.nn.functional.rms_norm(x + residual, (4096,), w)]


def gate():
    x = torch.randn(4096, 2 * 14336, **BF16)
    return [lambda: torch.nn.functional.silu(x[:, :14336]) * x[:, 14336:]]


torch.manual_seed(0)
report("decode_32x4096_page16", "torch_us", attention(32, 1, 4096, False))
report("decode_1x1024", "torch_us", attention(1, 1, 1024, False))
report("decode_1x32768", "torch_us", attention(1, 1, 32768, False))
report("prefill_8192", "torch_us", attention(1, 8192, 8192, True))
for m in (1, 16, 64):
    report(f"matmul_bf16_{m}x14336x4096", "torch_us", product(m, 14336, 4096))
report("matmul_bf16_8192x8192x8192", "torch_us", product(8192, 8192, 8192))
report("rms_norm_4096x4096", "torch_us", norm)
report("silu_mul_4096x14336", "torch_us", gate)
