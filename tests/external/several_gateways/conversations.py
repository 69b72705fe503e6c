"""Conversations before real workers, through one gateway and through several that see no KV events."""

import argparse
import http.client
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

# What conversations are like: eight turns of some 400 tokens behind one of twelve system prompts of 1,400.
TURNS = 8
GROUPS = 12
SYSTEM_WORDS = 200
TURN_WORDS = 60
ANSWER_TOKENS = 8
THINK_S = 1.0
# Clients begin one after the other within so many seconds, as those of a fleet that is at work do.
START_S = 10.0
# Bars: hits, and TTFT p99, of one gateway's.
HITS_OF_ONE = 0.98
P99_OF_ONE = 1.1


def words(dice, count):
    return " ".join(f"w{dice.randrange(10**6)}" for _ in range(count))


class Fleet:
    """Workers, and gateways before them, that end with the block."""

    def __init__(self, arguments, gateways, folder):
        self.processes = []
        self.arguments, self.folder = arguments, folder
        first = arguments.listen_port
        self.workers = [first + i for i in range(arguments.workers)]
        self.gateways = [first + 100 + 2 * i for i in range(gateways)]

    def __enter__(self):
        for port in self.workers:
            options = ["--listen", f"127.0.0.1:{port}", "--num-kv-blocks", str(self.arguments.kv_blocks)]
            self.start("keyway-worker", options, port)
        key = self.folder / "hash.key"
        key.write_text("one key for all")
        peers = [f"http://127.0.0.1:{port + 1}" for port in self.gateways]
        for port in self.gateways:
            lines = [f'listen = "127.0.0.1:{port}"', f'admin_listen = "127.0.0.1:{port + 1}"']
            lines.append(f"worker = {json.dumps([f'http://127.0.0.1:{worker}' for worker in self.workers])}")
            lines += ["[routing]", f'hash_key_file = "{key}"']
            if len(peers) > 1 and not self.arguments.silent:
                lines += ["[peers]", f"urls = {json.dumps(peers)}", f"every_ms = {self.arguments.every_ms}"]
            config = self.folder / f"{port}.toml"
            config.write_text("\n".join(lines) + "\n")
            self.start("keyway", ["--config", str(config)], port)
        try:
            for port in self.workers:
                self.wait(port, "/health")
            for port in self.gateways:
                self.wait(port + 1, "/readyz")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, binary, options, port):
        log = open(self.folder / f"{binary}-{port}.log", "w")
        command = [str(self.arguments.bins / binary), *options]
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def wait(self, port, path):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if any(process.poll() is not None for process in self.processes):
                sys.exit(f"a process has ended (is its port another's?); logs are in {self.folder}")
            try:
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                client.request("GET", path)
                if client.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit(f"nothing answers well at 127.0.0.1:{port}{path}; logs are in {self.folder}")

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


class Counted:
    def __init__(self):
        self.lock = threading.Lock()
        self.prompt = self.cached = self.possible = 0
        self.ttft, self.failed = [], []

    def add(self, usage, said_before, ttft):
        with self.lock:
            self.prompt += usage["prompt_tokens"]
            self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.possible += said_before
            self.ttft.append(ttft)


def ask(port, messages):
    """The answer's text, its usage, and seconds to its first token."""
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began, first, usage, text = time.monotonic(), None, None, ""
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = client.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:200]!r}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            said = choice["delta"].get("content") or ""
            if said and first is None:
                first = time.monotonic() - began
            text += said
    client.close()
    if usage is None or first is None:
        raise RuntimeError("a stream without a first token or a usage")
    return text, usage, first


def converse(number, seed, gateways, counted):
    dice = random.Random(f"{seed} {number}")
    system = words(random.Random(f"{seed} system {dice.randrange(GROUPS)}"), SYSTEM_WORDS)
    messages, before = [{"role": "system", "content": system}], 0
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(dice, TURN_WORDS)})
        try:
            text, usage, ttft = ask(dice.choice(gateways), messages)
        except (OSError, RuntimeError, http.client.HTTPException, ValueError) as error:
            with counted.lock:
                counted.failed.append(repr(error))
            return
        counted.add(usage, before, ttft)
        before = usage["total_tokens"]
        messages.append({"role": "assistant", "content": text})
        time.sleep(dice.expovariate(1 / THINK_S))


def run(arguments, gateways, seed):
    counted, numbers, lock = Counted(), iter(range(arguments.conversations)), threading.Lock()
    with tempfile.TemporaryDirectory() as folder, Fleet(arguments, gateways, pathlib.Path(folder)) as fleet:

        def client(client_number):
            if not arguments.burst:
                time.sleep(random.Random(f"{seed} client {client_number}").uniform(0, START_S))
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                converse(number, seed, fleet.gateways, counted)

        clients = [threading.Thread(target=client, args=[i]) for i in range(arguments.at_once)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
    if counted.failed:
        sys.exit(f"{len(counted.failed)} conversations failed, the first by {counted.failed[0]}")
    return counted


def p99(times):
    return sorted(times)[len(times) * 99 // 100]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser.add_argument("--bins", type=pathlib.Path, required=True)
    parser.add_argument("--gateways", type=numbers, default=[1, 4, 8])
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kv-blocks", type=int, default=1_500)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--conversations", type=int, default=160)
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--every-ms", type=int, default=50)
    parser.add_argument("--listen-port", type=int, default=18_800)
    arguments = parser.parse_args()
    rows = {}
    for seed in arguments.seeds:
        for gateways in arguments.gateways:
            counted = run(arguments, gateways, seed)
            hits, of_past = counted.cached / counted.prompt, counted.cached / max(1, counted.possible)
            row = (hits, of_past, statistics.mean(counted.ttft), p99(counted.ttft))
            rows.setdefault(gateways, []).append(row)
            what = f"{len(counted.ttft)} requests, cached {hits:.3f}, TTFT p99 {row[3] * 1e3:.0f} ms"
            print(f"seed {seed}, {gateways} gateways: {what}", file=sys.stderr)
    means = {gateways: [statistics.mean(column) for column in zip(*found)] for gateways, found in rows.items()}
    one = means[arguments.gateways[0]]
    print("| gateways | cached | of one | of what was said before | TTFT mean, ms | p99, ms | of one |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for gateways, (hits, of_past, mean, last) in means.items():
        print(
            f"| {gateways} | {hits:.3f} | {hits / one[0]:.3f} | {of_past:.3f} | {mean * 1e3:.0f} | {last * 1e3:.0f} "
            f"| {last / one[3]:.2f} |"
        )
        if hits < HITS_OF_ONE * one[0] or last > P99_OF_ONE * one[3]:
            missed.append(str(gateways))
    if missed and not arguments.silent:
        sys.exit(f"below {HITS_OF_ONE} of one gateway's hits, or above {P99_OF_ONE} of its p99: {', '.join(missed)} gateways")


if __name__ == "__main__":
    main()
