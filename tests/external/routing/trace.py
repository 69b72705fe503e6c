"""The workload and what it could reach at best. Prompts are made of the trace's block names alone, as text or as token ids
of the same number of tokens; the references are computed from the trace. Sends nothing."""

import collections
import functools
import hashlib
import json
import struct

BLOCK = 512
RATE = 6000.0


class Request:
    """One row: when it comes, in seconds of the trace, and what it asks."""

    def __init__(self, at, tokens, blocks):
        self.at, self.tokens, self.blocks = at, tokens, blocks

    @property
    def session(self):
        """Whose turn it is: the trace does not say, but all prompts share their first block and sessions the second."""
        return f"s{self.blocks[min(1, len(self.blocks) - 1)]}"


def load(path, seconds):
    """Requests of the first so many seconds; those of one timestamp spread over the gap to the next."""
    rows = []
    with open(path) as lines:
        for line in lines:
            row = json.loads(line)
            rows.append(Request(row["timestamp"] / 1000, row["input_length"], row["hash_ids"]))
    bursts = collections.OrderedDict()
    for row in rows:
        bursts.setdefault(row.at, []).append(row)
    starts = list(bursts) + [rows[-1].at + 3]
    for start, end in zip(starts, starts[1:]):
        for i, row in enumerate(bursts[start]):
            row.at = start + (end - start) * i / len(bursts[start])
    return [row for row in rows if row.at < seconds]


def distinct_blocks(requests):
    return len({block for request in requests for block in request.blocks})


def _block(name):
    return hashlib.shake_128(str(name).encode()).digest(2 * BLOCK)


def as_text(request):
    """Four hexadecimal digits a token, which the mock takes for one."""
    text = "".join(_block(name).hex() for name in request.blocks)
    return json.dumps(text[: 4 * request.tokens])


@functools.lru_cache(maxsize=20_000)
def _ids(name):
    return ",".join(map(str, struct.unpack(f"<{BLOCK}H", _block(name))))


def as_ids(request):
    *whole, last = request.blocks
    rest = request.tokens - BLOCK * len(whole)
    return "[" + ",".join([*map(_ids, whole), ",".join(_ids(last).split(",")[:rest])]) + "]"


def pooled(requests, blocks, warm_s, block_tokens=16):
    """Share of prompt tokens that one LRU cache of so many of the trace's blocks holds, kept in blocks of so many tokens, and each
    request's TTFT at that without a queue."""
    size = max(block_tokens, BLOCK)
    cache = collections.OrderedDict()
    hit = total = 0
    ttft = []
    for request in requests:
        held = 0
        names = cut(request, size)
        for name in names:
            if name not in cache:
                break
            held += 1
        # The last token is always computed.
        cached = min(held * size, request.tokens - 1)
        # Leaves are evicted first.
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) * size > blocks * BLOCK:
            cache.popitem(last=False)
        if request.at >= warm_s:
            hit, total = hit + cached, total + request.tokens
            ttft.append((request.tokens - cached) / RATE)
    return hit / max(total, 1), ttft


def cut(request, size):
    """Names of a prompt's blocks of so many tokens. The trace's own begin a prompt each: a name stands for all before it."""
    if size == BLOCK:
        return request.blocks
    return [(i, request.blocks[(i + 1) * size // BLOCK - ((i + 1) * size % BLOCK == 0)]) for i in range(request.tokens // size)]


def quantiles(values):
    """Mean and nearest-rank quantiles, as a dict."""
    values = sorted(values)
    rank = lambda q: values[min(len(values) - 1, int(q * len(values)))]
    return {"mean": sum(values) / len(values), "p50": rank(0.5), "p90": rank(0.9), "p99": rank(0.99)}
