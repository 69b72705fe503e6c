"""A one-word request that comes some milliseconds behind a long one, at one simulated engine behind the gateway: behind nothing, behind
a picture, behind a text of the picture's tokens. See README.md."""

import argparse
import base64
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import time

BEHIND_S = 0.005
TOKEN_BYTES = 4
SHARE = 1.1


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port, content, max_tokens=1):
    """Seconds to the first token of a stream."""
    body = {"model": "mock", "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = json.dumps(body)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"{answer.status}: {answer.read().decode()}")
    first = None
    for line in answer:
        if first is None and b'"content":"' in line and b'"content":""' not in line:
            first = time.monotonic() - began
    connection.close()
    return first


def await_answer(port, path):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    sys.exit(f"nothing answers {path} on port {port}")


def backlog(admin):
    """Prompt tokens that the gateway plans for."""
    connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=5)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("keyway_scale_backlog_tokens{"))


def long_one(kind, args, chance):
    if kind == "picture":
        data = base64.b64encode(chance.randbytes(args.bytes * 3 // 4)).decode()
        return [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}, {"type": "text", "text": "what is this?"}]
    words = " ".join(f"{chance.randrange(1000):03}" for _ in range(args.image_tokens * TOKEN_BYTES // 4))
    return words + " what is this?"


def measure(port, admin, args):
    chance = random.Random(1)
    kinds = ("nothing", "picture", "text")
    rows = {kind: {"word": [], "long": [], "backlog": []} for kind in kinds}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # What the engine is, and how it counts.
        for kind in ("text",) * 20 + ("picture",) * 5:
            ask(port, long_one(kind, args, chance))
        for _ in range(args.rounds):
            for kind in kinds:
                before = pool.submit(ask, port, long_one(kind, args, chance)) if kind != "nothing" else None
                time.sleep(BEHIND_S + (0.02 if before else 0))
                seen = pool.submit(backlog, admin)
                rows[kind]["word"].append(ask(port, f"{chance.randrange(10**9)}"))
                rows[kind]["backlog"].append(seen.result())
                if before:
                    rows[kind]["long"].append(before.result())
    return rows


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--keyway", type=pathlib.Path, required=True)
    parse.add_argument("--loadtest", type=pathlib.Path, required=True)
    parse.add_argument("--rounds", type=int, default=60)
    parse.add_argument("--image-tokens", type=int, default=8_000)
    parse.add_argument("--bytes", type=int, default=1_000_000)
    args = parse.parse_args()
    engine, port, admin = free_port(), free_port(), free_port()
    commands = [[args.loadtest, "mock", "--base-port", engine, "--profile", "h100-8b", "--image-tokens", args.image_tokens],
                [args.keyway, "--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}", "--worker",
                 f"http://127.0.0.1:{engine}"]]
    started = []
    try:
        for command in commands:
            started.append(subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        await_answer(engine, "/health")
        await_answer(admin, "/readyz")
        rows = measure(port, admin, args)
    finally:
        for process in started:
            process.terminate()
            process.wait()
    print("| behind | word's TTFT p50 ms | p90 ms | long one's TTFT p50 ms | backlog planned for, tokens |")
    print("|---|---:|---:|---:|---:|")
    figures = {}
    for kind, row in rows.items():
        word = sorted(row["word"])
        figures[kind] = (statistics.median(word), word[len(word) * 9 // 10], statistics.median(row["backlog"]))
        p50, p90, planned = figures[kind]
        long_p50 = f"{1e3 * statistics.median(row['long']):.0f}" if row["long"] else ""
        print(f"| {kind} | {1e3 * p50:.1f} | {1e3 * p90:.1f} | {long_p50} | {planned:.0f} |")
    shares = [picture / text for picture, text in zip(figures["picture"], figures["text"])]
    print("\npicture over text: p50 {:.2f}, p90 {:.2f}, backlog {:.2f}".format(*shares))
    sys.exit(int(any(share > SHARE for share in shares)))


if __name__ == "__main__":
    main()
