#!/usr/bin/env python3
"""A gateway's memory under churn: every prompt is new, so the index, once full, forgets as much as it learns. Memory is what the
process wrote and holds (`RssAnon`), once a second; flat means that the last fifth's median lies at most 5 % of the index's budget
above the first fifth's.
"""

import argparse
import http.client
import os
import pathlib
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

WORKERS = 2
# More than the index can know of, so that its own bound is what is reached, not that of the workers' caches.
KV_BLOCKS = 10_000_000
CONNECTIONS = 4
SHARE = 0.05


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def ready(port):
    for _ in range(200):
        try:
            if ask(port, "GET", "/readyz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the gateway is not ready")


def memory(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[1]) << 10


def gauge(port, name):
    return float(re.search(rf"^{name} (\S+)", ask(port, "GET", "/metrics")[1].decode(), re.MULTILINE)[1])


def prompt(size):
    return b'{"model":"mock","max_tokens":1,"messages":[{"role":"user","content":"%s"}]}' % os.urandom(size // 2).hex().encode()


class Load:
    """Sends a new prompt for each token that it is given, on connections that stay."""

    def __init__(self, port, size):
        self.tokens, self.sent, self.failed = queue.Queue(CONNECTIONS), 0, 0
        for _ in range(CONNECTIONS):
            threading.Thread(target=self.send, args=(port, size), daemon=True).start()

    def send(self, port, size):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while True:
            self.tokens.get()
            try:
                connection.request("POST", "/v1/chat/completions", prompt(size), {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                self.failed += answer.status != 200
            except (OSError, http.client.HTTPException):
                connection.close()
                self.failed += 1
            self.sent += 1

    def run(self, rate, seconds, each_second):
        begin = time.monotonic()
        for second in range(seconds):
            for i in range(rate):
                time.sleep(max(0.0, begin + second + i / rate - time.monotonic()))
                self.tokens.put(None)
            each_second()


def judge(samples, budget, index_bytes):
    fifth = max(len(samples) // 5, 1)
    first, last = statistics.median(samples[:fifth]), statistics.median(samples[-fifth:])
    mib = 1 / (1 << 20)
    print(f"memory after the warm-up {first * mib:.2f} MiB, at the end {last * mib:.2f} MiB ({(last - first) * mib:+.2f}, bar "
          f"{budget * SHARE * mib:+.2f}); least {min(samples) * mib:.2f}, most {max(samples) * mib:.2f}; "
          f"the index {index_bytes * mib:.2f} of {budget * mib:.0f} MiB")
    return last - first <= budget * SHARE and index_bytes <= budget * (1 + SHARE)


def measure(args, gateway, admin):
    budget, load, samples = args.index_mib << 20, Load(args.listen_port, args.prompt_bytes), []
    # Until it is full, and as long again.
    before = time.monotonic()
    known = -1
    while gauge(admin, "keyway_index_blocks") > known:
        known = gauge(admin, "keyway_index_blocks")
        load.run(args.rate, 5, lambda: None)
        if time.monotonic() - before > 600:
            sys.exit("the index does not fill: more --rate or less --index-mib")
    filled = round(time.monotonic() - before)
    load.run(args.rate, filled, lambda: None)
    warm = load.sent
    load.run(args.rate, args.seconds, lambda: samples.append(memory(gateway.pid)))
    blocks = (load.sent - warm) * args.prompt_bytes // 64
    held = gauge(admin, "keyway_index_blocks")
    print(f"{load.sent - warm} prompts in {args.seconds} s, {load.failed} failed; {blocks} blocks through an index of {held:.0f}: "
          f"it was replaced {blocks / held:.1f} times; full after {filled} s")
    return judge(samples, budget, gauge(admin, "keyway_index_bytes")) and load.failed == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--rate", type=int, default=30)
    parser.add_argument("--prompt-bytes", type=int, default=96 << 10)
    parser.add_argument("--index-mib", type=int, default=32)
    parser.add_argument("--listen-port", type=int, default=18620)
    args = parser.parse_args()
    port, folder = args.listen_port, pathlib.Path(tempfile.mkdtemp(prefix="keyway-soak-"))
    workers = [f"http://127.0.0.1:{port + 2 + i}" for i in range(WORKERS)]
    (folder / "keyway.toml").write_text(f"worker = {workers}\n[routing]\nindex_bytes = {args.index_mib << 20}\n".replace("'", '"'))
    with open(folder / "log", "wb") as log:
        output = {"stdout": log, "stderr": log}
        mock = subprocess.Popen([args.bins / "keyway-loadtest", "mock", "--workers", str(WORKERS), "--base-port", str(port + 2),
                                 "--profile", "instant", "--kv-blocks", str(KV_BLOCKS)], **output)
        gateway = subprocess.Popen([args.bins / "keyway", "--config", folder / "keyway.toml", "--listen", f"127.0.0.1:{port}",
                                    "--admin-listen", f"127.0.0.1:{port + 1}"], env=os.environ | {"RUST_LOG": "warn"}, **output)
    try:
        ready(port + 1)
        flat = measure(args, gateway, port + 1)
    finally:
        for process in (gateway, mock):
            process.terminate()
            process.wait()
    print("flat" if flat else f"NOT FLAT; the logs are in {folder}")
    sys.exit(not flat)


if __name__ == "__main__":
    main()
