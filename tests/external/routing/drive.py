"""Sends the trace to a router, or each request to any one of several, on schedule, open loop, and measures. All times are in
seconds of the trace: a delay of the router's own counts as often as the trace is compressed."""

import asyncio
import json
import os
import random
import time
from urllib.parse import urlsplit

import trace

# Simulated seconds in which a first token is good.
GOOD_S = 5.0


async def _send(address, session, body, sent):
    """One request on a connection of its own: seconds to the first event, cached tokens, or an error."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
        head += f"x-session-id: {session}\r\n" if session else ""
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            return None, None, status.decode().strip()
        first = usage = None
        while line := await reader.readline():
            if line.startswith(b"data: ") or line.startswith(b"data:"):
                first = first or time.monotonic() - sent
                if b'"usage"' in line and b"prompt_tokens" in line:
                    usage = json.loads(line[line.index(b"{") :].strip())["usage"]
                if b"[DONE]" in line:
                    break
        if first is None:
            return None, None, "no event"
        details = (usage or {}).get("prompt_tokens_details") or {}
        return first, details.get("cached_tokens", 0), None
    finally:
        writer.close()


async def _all(urls, requests, speed, model, ids, sessions, output_tokens):
    addresses = [(urlsplit(url).hostname, urlsplit(url).port) for url in urls]
    chance = random.Random(1)
    prompt_of = trace.as_ids if ids else trace.as_text
    results = [None] * len(requests)
    begin = time.monotonic() + 0.5

    async def one(i, body):
        intended = begin + requests[i].at / speed
        await asyncio.sleep(max(0.0, intended - time.monotonic()))
        late = time.monotonic() - intended
        try:
            session = requests[i].session if sessions else None
            sending = _send(chance.choice(addresses), session, body, intended)
            first, cached, error = await asyncio.wait_for(sending, 300)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as cause:
            first, cached, error = None, None, repr(cause)
        results[i] = (first, cached, error, late)

    tasks = []
    for i, request in enumerate(requests):
        # Made a little ahead, so that making it delays nothing and not all are in memory.
        await asyncio.sleep(max(0.0, begin + request.at / speed - 0.3 - time.monotonic()))
        fields = {"model": model, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        body = '{"prompt":' + prompt_of(request) + "," + json.dumps(fields)[1:]
        tasks.append(asyncio.create_task(one(i, body.encode())))
    await asyncio.gather(*tasks)
    return results


def _cpu_s(pids):
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            ticks += sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _machine_s():
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, softirq, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(urls, requests, *, speed, warm_s, model, ids, sessions, output_tokens, router_pids, other_pids):
    """Runs the trace; everything that the table needs, as a dict."""
    watched = [*router_pids, *other_pids, os.getpid()]
    before = _machine_s() - _cpu_s(watched), _cpu_s(router_pids), time.monotonic()
    results = asyncio.run(_all(urls, requests, speed, model, ids, sessions, output_tokens))
    elapsed = time.monotonic() - before[2]
    # The kernel's own work for our sockets counts as others', a few hundredths of a core.
    foreign = (_machine_s() - _cpu_s(watched) - before[0]) / elapsed
    counted = [(request, *result) for request, result in zip(requests, results) if request.at >= warm_s]
    answered = [(request, first * speed, cached) for request, first, cached, error, _ in counted if error is None]
    errors = [error for *_, error, _ in counted if error is not None]
    ttft = [first for _, first, _ in answered]
    tokens = sum(request.tokens for request, _, _ in answered)
    return {
        "requests": len(counted),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "cached": sum(cached for *_, cached in answered) / max(tokens, 1),
        "ttft": trace.quantiles(ttft) if ttft else None,
        "good": sum(first <= GOOD_S for first in ttft) / max(len(counted), 1),
        "late_p99_ms": 1e3 * trace.quantiles([late for *_, late in results])["p99"],
        "router_cpu_ms": 1e3 * (_cpu_s(router_pids) - before[1]) / len(requests),
        "foreign_cores": foreign,
        "elapsed_s": elapsed,
    }
