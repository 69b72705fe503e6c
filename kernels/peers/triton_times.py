"""Kernels in Triton, written plainly and tried with several tile sizes, at the shapes that `kernels/check` times; run by it.

    python3 triton_times.py                              times, where there is a GPU
    TRITON_INTERPRET=1 python3 triton_times.py check     each kernel against torch in float32, small, without a GPU

Before a kernel is timed it is checked in the same way."""

import sys

import torch
import triton
import triton.language as tl
from report import report

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def decode_kernel(q, keys, values, tables, sums, tops, totals, positions, table_stride, scale, GROUP: tl.constexpr,
                  KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """One split of one sequence's positions for the query heads of one KV head. Pages [page][kv head][offset][DIM]."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, dims, tile = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, TILE)
    head = kv_head * GROUP + heads
    rows = (sequence * KV_HEADS * GROUP + head)[:, None] * DIM + dims[None, :]
    query = tl.load(q + rows, mask=heads[:, None] < GROUP, other=0.0)
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    out = tl.zeros([16, DIM], tl.float32)
    tiles = tl.cdiv(tl.cdiv(positions, SPLITS), TILE)
    for i in range(0, tiles):
        at = (split * tiles + i) * TILE + tile
        seen = at < positions
        page = tl.load(tables + sequence * table_stride + at // PAGE, mask=seen, other=0)
        vectors = ((page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + at % PAGE)[:, None] * DIM + dims[None, :]
        key = tl.load(keys + vectors, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(query, tl.trans(key)) * (scale * LOG2_E), -1e30)
        raised = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp2(scores - raised[:, None]), 0.0)
        kept = tl.exp2(top - raised)
        value = tl.load(values + vectors, mask=seen[:, None], other=0.0)
        out = out * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * kept + tl.sum(weights, 1)
        top = raised
    place = (sequence * KV_HEADS * GROUP + head) * SPLITS + split
    tl.store(sums + place[:, None] * DIM + dims[None, :], out, mask=heads[:, None] < GROUP)
    tl.store(tops + place, top, mask=heads < GROUP)
    tl.store(totals + place, total, mask=heads < GROUP)


@triton.jit
def decode_join_kernel(sums, tops, totals, out, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """A query head's splits, joined."""
    row, dims, splits = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SPLITS)
    tops_of = tl.load(tops + row * SPLITS + splits)
    weights = tl.exp2(tops_of - tl.max(tops_of, 0))
    total = tl.sum(tl.load(totals + row * SPLITS + splits) * weights, 0)
    of = tl.load(sums + (row * SPLITS + splits)[:, None] * DIM + dims[None, :])
    tl.store(out + row * DIM + dims, (tl.sum(of * weights[:, None], 0) / total).to(out.dtype.element_ty))


@triton.jit
def prefill_kernel(q, keys, values, out, tokens, scale, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
                   TILE: tl.constexpr):
    """ROWS tokens of one head, causal. q, out [head][token][DIM], keys, values [kv head][token][DIM]; long rows first."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    dims, tile = tl.arange(0, DIM), tl.arange(0, TILE)
    rows = block * ROWS + tl.arange(0, ROWS)
    at_rows = (head * tokens + rows)[:, None] * DIM + dims[None, :]
    query = tl.load(q + at_rows, mask=rows[:, None] < tokens, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    base = head // GROUP * tokens
    # First the tiles that all rows see whole, then those that need a mask.
    whole = block * ROWS // TILE * TILE
    for first in range(0, whole, TILE):
        vectors = (base + first + tile)[:, None] * DIM + dims[None, :]
        scores = tl.dot(query, tl.trans(tl.load(keys + vectors))) * (scale * LOG2_E)
        raised = tl.maximum(top, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - raised[:, None]), tl.exp2(top - raised)
        sums = sums * kept[:, None] + tl.dot(weights.to(query.dtype), tl.load(values + vectors))
        total = total * kept + tl.sum(weights, 1)
        top = raised
    for first in range(whole, tl.minimum((block + 1) * ROWS, tokens), TILE):
        at = first + tile
        vectors, there = (base + at)[:, None] * DIM + dims[None, :], at[:, None] < tokens
        scores = tl.dot(query, tl.trans(tl.load(keys + vectors, mask=there, other=0.0))) * (scale * LOG2_E)
        scores = tl.where(at[None, :] <= rows[:, None], scores, float("-inf"))
        raised = tl.maximum(top, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - raised[:, None]), tl.exp2(top - raised)
        sums = sums * kept[:, None] + tl.dot(weights.to(query.dtype), tl.load(values + vectors, mask=there, other=0.0))
        total = total * kept + tl.sum(weights, 1)
        top = raised
    tl.store(out + at_rows, (sums / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit
def product_kernel(x, w, y, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr):
    """A tile of x [m, k] by w [n, k]; BAND tiles of rows share their columns in the second-level cache."""
    tiles_m, tiles_n = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    band = tl.program_id(0) // (BAND * tiles_n)
    tall = tl.minimum(tiles_m - band * BAND, BAND)
    inside = tl.program_id(0) % (BAND * tiles_n)
    rows = (band * BAND + inside % tall) * ROWS + tl.arange(0, ROWS)
    columns = inside // tall * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, k, DEPTH):
        left = tl.load(x + (rows % m)[:, None] * k + first + depth[None, :])
        right = tl.load(w + (columns % n)[:, None] * k + first + depth[None, :])
        sums = tl.dot(left, tl.trans(right), sums)
    there = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(y + rows[:, None].to(tl.int64) * n + columns[None, :], sums.to(y.dtype.element_ty), mask=there)


@triton.jit
def norm_kernel(x, residual, w, out, eps, WIDTH: tl.constexpr):
    """A row of x + residual, kept in residual, normalised."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    kept = (tl.load(x + at).to(tl.float32) + tl.load(residual + at).to(tl.float32)).to(x.dtype.element_ty)
    tl.store(residual + at, kept)
    row = kept.to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    tl.store(out + at, (row * tl.load(w + tl.arange(0, WIDTH)).to(tl.float32)).to(out.dtype.element_ty))


@triton.jit
def gate_kernel(x, out, width, TILE: tl.constexpr):
    """SiLU of the first half of a row times the second."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(x + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=at < width)


# Each of the following makes an operation's operands: (functions to be timed, output, what it should be).


def decode(sequences, positions, page=16, heads=32, kv_heads=8, dim=128):
    group, pages = heads // kv_heads, -(-positions // page)
    q = random(sequences, heads, dim)
    keys, values = random(sequences * pages, kv_heads, page, dim), random(sequences * pages, kv_heads, page, dim)
    order = torch.randperm(sequences * pages, device=DEVICE)
    tables, out = order.to(torch.int32).view(sequences, pages), torch.empty_like(q)

    def variant(splits, tile, warps, stages):
        state = [torch.empty(sequences * heads * splits * n, device=DEVICE) for n in (dim, 1, 1)]

        def launch():
            decode_kernel[(sequences, kv_heads, splits)](
                q, keys, values, tables, *state, positions, pages, dim**-0.5, group, kv_heads, dim, page, tile, splits,
                num_warps=warps, num_stages=stages)
            decode_join_kernel[(sequences * heads,)](*state, out, dim, splits)

        return launch

    def exact():
        rows = lambda of: of[order].view(sequences, pages, kv_heads, page, dim).transpose(1, 2).flatten(2, 3)[:, :, :positions]
        return attended(q[:, :, None], rows(keys), rows(values), False)[:, :, 0]

    splits = sorted({1, 2, 4, 8, 16, 32, 64}, key=lambda n: abs(n - 512 // (sequences * kv_heads)))[:2]
    return [variant(s, tile, 4, 3) for s in splits for tile in (64, 128)], out, exact


def prefill(tokens, heads=32, kv_heads=8, dim=128):
    q, keys, values = random(heads, tokens, dim), random(kv_heads, tokens, dim), random(kv_heads, tokens, dim)
    out = torch.empty_like(q)

    def variant(rows, tile, warps, stages):
        grid = (-(-tokens // rows), heads)
        return lambda: prefill_kernel[grid](q, keys, values, out, tokens, dim**-0.5, heads // kv_heads, dim, rows, tile,
                                            num_warps=warps, num_stages=stages)

    variants = [variant(*by) for by in [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3)]]
    return variants, out, lambda: attended(q[None], keys[None], values[None], True)[0]


def product(m, n, k):
    x, w = random(m, k), random(n, k)
    y = torch.empty(m, n, device=DEVICE, dtype=DTYPE)

    def variant(rows, columns, depth, warps, stages):
        grid = (-(-m // rows) * -(-n // columns),)
        return lambda: product_kernel[grid](x, w, y, m, n, k, rows, columns, depth, 8, num_warps=warps, num_stages=stages)

    few = [(16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 64, 4, 5), (64, 64, 128, 4, 4), (64, 32, 128, 4, 4)]
    many = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3)]
    return [variant(*by) for by in (few if m <= 64 else many)], y, lambda: x.float() @ w.float().T


def norm(rows, width):
    x, residual, w = random(rows, width), random(rows, width), random(width)
    out, first = torch.empty_like(x), residual.clone()

    def launch():
        norm_kernel[(rows,)](x, residual, w, out, 1e-6, width, num_warps=8)

    def exact():
        kept = (x.float() + first.float()).to(DTYPE).float()
        return kept * torch.rsqrt((kept * kept).mean(1, keepdim=True) + 1e-6) * w.float()

    return [launch], out, exact


def gate(rows, width):
    x = random(rows, 2 * width)
    out = torch.empty(rows, width, device=DEVICE, dtype=DTYPE)

    def variant(tile):
        return lambda: gate_kernel[(rows, -(-width // tile))](x, out, width, tile)

    wide = x.float()
    return [variant(1024), variant(4096)], out, lambda: torch.nn.functional.silu(wide[:, :width]) * wide[:, width:]


def attended(q, keys, values, causal):
    """In float32."""
    q, keys, values = q.float(), keys.float(), values.float()
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)


def random(*shape):
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def checked(operation, *shape):
    """The variants of an operation, each of which gives what it should at this shape."""
    variants, out, exact = operation(*shape)
    for number, variant in enumerate(variants):
        out.fill_(float("nan"))
        variant()
        expected = exact()
        error = (out.float() - expected).abs().max().item() / expected.abs().max().item()
        if not error < 2e-2:
            raise ValueError(f"{operation.__name__}{shape}, variant {number}: off by {error:.3g} of the largest")
    return variants


SMALL = [(decode, 3, 70), (decode, 1, 600), (prefill, 200), (product, 5, 96, 256), (product, 150, 300, 128), (norm, 3, 256),
         (gate, 3, 300)]
TIMED = [
    ("decode_32x4096_page8", decode, 32, 4096, 8),
    ("decode_32x4096_page16", decode, 32, 4096),
    ("decode_32x4096_page256", decode, 32, 4096, 256),
    ("decode_1x1024", decode, 1, 1024),
    ("decode_1x32768", decode, 1, 32768),
    ("prefill_8192", prefill, 8192),
    *((f"matmul_bf16_{m}x14336x4096", product, m, 14336, 4096) for m in (1, 16, 64)),
    ("matmul_bf16_8192x8192x8192", product, 8192, 8192, 8192),
    ("rms_norm_4096x4096", norm, 4096, 4096),
    ("silu_mul_4096x14336", gate, 4096, 14336),
]

torch.manual_seed(0)
if sys.argv[1:] == ["check"]:
    # Triton's interpreter takes bf16's bits for whole numbers in products.
    DEVICE, DTYPE = "cpu", torch.float16
    for operation, *shape in SMALL:
        print(f"{operation.__name__}{tuple(shape)}: {len(checked(operation, *shape))} variants right")
else:
    DEVICE, DTYPE = "cuda", torch.bfloat16
    for name, operation, *shape in TIMED:
        report(name, "triton_us", lambda: checked(operation, *shape))
