"""CPU of a long conversation's turn, and what short requests beside it wait. See run.sh."""

import argparse
import http.client
import json
import multiprocessing
import os
import queue
import random
import re
import signal
import subprocess
import threading
import time

GATEWAY_CORE, OTHER_CORE = 0, 1
LONG, SHORT = "long", "short"
WORDS = ("the request of a worker is cached there because its prefix was computed before and nobody has evicted "
         "what follows from it while other prompts came and went through this gateway").split()


def spawn(command, core, realtime=False):
    def place():
        os.sched_setaffinity(0, {core})
        if realtime:
            hurry()
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            start_new_session=True, preexec_fn=place, text=True)


def hurry():
    """The core is shared with those who make the load; what is timed must not wait for them."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        pass


def announced(process, pattern, last=True):
    """What the process says of itself; after the last such line nobody listens, and somebody must read on."""
    for line in process.stdout:
        if found := re.search(pattern, re.sub(r"\x1b\[[0-9;]*m", "", line)):
            if last:
                threading.Thread(target=process.stdout.read, daemon=True).start()
            return found.group(1)
    raise SystemExit(f"{process.args[0]} ended without saying {pattern}")


def call(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json"} if body else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


class Gateway:
    def __init__(self, args, backends, tokenizer):
        command = [args.keyway, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        for port in backends:
            command += ["--worker", f"http://127.0.0.1:{port}"]
        if tokenizer:
            command += ["--tokenizer", f"{LONG}={tokenizer}", "--tokenizer", f"{SHORT}={tokenizer}"]
        self.process = spawn(command, GATEWAY_CORE)
        self.admin = int(announced(self.process, r"admin on http://127.0.0.1:(\d+)", last=False))
        self.port = int(announced(self.process, r"listening on http://127.0.0.1:(\d+)"))

    def cpu_seconds(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def text(tokens, rng):
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


class Conversation:
    """A chat whose messages are kept as JSON, so that a turn is a join."""

    def __init__(self, rng, words, words_added):
        self.rng, self.words_added = rng, words_added
        self.messages = [json.dumps({"role": "system", "content": text(400, rng)})]
        while words > 0:
            self.add()
            words -= words_added

    def add(self):
        half = self.words_added // 2
        for role in ("user", "assistant"):
            self.messages.append(json.dumps({"role": role, "content": text(half, self.rng)}))

    def turn(self):
        self.add()
        asked = json.dumps({"role": "user", "content": "And then?"})
        return (f'{{"model":"{LONG}","max_tokens":1,"messages":[' + ",".join(self.messages) + f",{asked}]}}").encode()


def long_turns(port, bodies, rate):
    """Sends these at the rate, each on a connection of a pool; returns when all are answered."""
    todo = queue.Queue()

    def send():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while (body := todo.get()) is not None:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
    senders = [threading.Thread(target=send) for _ in range(16)]
    for sender in senders:
        sender.start()
    start = time.monotonic()
    for i, body in enumerate(bodies):
        time.sleep(max(0.0, start + i / rate - time.monotonic()))
        todo.put(body)
    for _ in senders:
        todo.put(None)
    for sender in senders:
        sender.join()


def short_requests(port, seconds, rate, out):
    """Latencies in ms, from the intended time of sending to the answer's end."""
    hurry()
    body = json.dumps({"model": SHORT, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello there."}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    latencies, start = [], time.monotonic()
    for i in range(int(seconds * rate)):
        due = start + i / rate
        time.sleep(max(0.0, due - time.monotonic()))
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        connection.getresponse().read()
        latencies.append(1e3 * (time.monotonic() - due))
    out.put(latencies)


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def phase(gateway, seconds, bodies, rate):
    """Short requests beside these long ones: their latencies, the gateway's CPU seconds."""
    out = multiprocessing.Queue()
    before = gateway.cpu_seconds()
    shorts = multiprocessing.Process(target=short_requests, args=(gateway.port, seconds, 100, out))
    shorts.start()
    if bodies:
        long_turns(gateway.port, bodies, rate)
    latencies = out.get()
    shorts.join()
    return latencies, gateway.cpu_seconds() - before


def keyer_counts(gateway):
    page = call(gateway.admin, "GET", "/metrics")[1]
    found = re.findall(r'keyway_token_keyer_requests_total\{model="long",outcome="(\w+)"\} (\d+)', page)
    return {outcome: int(count) for outcome, count in found}


def report(name, latencies, cpu, turns, base):
    cells = [f"{quantile(latencies, share):.2f}" for share in (0.5, 0.9, 0.99)]
    per_turn = f"{1e3 * (cpu - base) / turns:.2f}" if turns else "-"
    print(f"| {name} | {' | '.join(cells)} | {per_turn} |", flush=True)


def measure(args, backends, tokenizer, label):
    rng = random.Random(1)
    gateway = Gateway(args, backends, tokenizer)
    try:
        while call(gateway.admin, "GET", "/metrics")[1].count("keyway_worker_ready{") < 2 \
                or "} 0" in "".join(re.findall(r"keyway_worker_ready\{.*", call(gateway.admin, "GET", "/metrics")[1])):
            time.sleep(0.1)
        sample = Conversation(rng, 2000, args.added).turn()
        told = json.loads(call(gateway.admin, "POST", "/explain", sample)[1])
        scale = 2400 / told["prompt_tokens"]
        words, added = int(args.tokens * scale), int(args.added * scale)
        talks = [Conversation(rng, words, added) for _ in range(args.conversations)]
        for talk in talks:
            long_turns(gateway.port, [talk.turn()], 1)
        told = json.loads(call(gateway.admin, "POST", "/explain", talks[0].turn())[1])
        print(f"<!-- {label}: {told['prompt_tokens']} tokens by {told['keyed_by']}, {len(talks[0].turn())} bytes -->")
        turns = [talks[i % len(talks)].turn() for i in range(args.rate * args.seconds)]
        alone, base = phase(gateway, args.seconds, [], args.rate)
        report(f"{label}: short requests alone", alone, base, 0, base)
        beside, cpu = phase(gateway, args.seconds, turns, args.rate)
        report(f"{label}: beside the turns", beside, cpu, len(turns), base)
        print(f"<!-- added p99 {quantile(beside, 0.99) - quantile(alone, 0.99):.2f} ms; {keyer_counts(gateway)} -->")
        if tokenizer:
            before = keyer_counts(gateway)
            cold = [Conversation(rng, words, added).turn() for _ in range(args.conversations * 3)]
            burst, _ = phase(gateway, args.seconds, cold, 1000)
            after = keyer_counts(gateway)
            counted = {outcome: count - before.get(outcome, 0) for outcome, count in after.items()}
            report(f"{label}: beside {len(cold)} cold prompts at once", burst, 0, 0, 0)
            print(f"<!-- of these {counted} -->")
    finally:
        gateway.stop()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keyway", required=True)
    parser.add_argument("--loadtest", required=True)
    parser.add_argument("--tokenizer", default="builtin")
    for name, value in (("tokens", 100_000), ("added", 200), ("rate", 50), ("seconds", 20), ("conversations", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    mocks, ports = [], []
    try:
        for model in (LONG, SHORT):
            command = [args.loadtest, "mock", "--base-port", "0", "--model", model, "--profile", "instant"]
            mocks.append(spawn(command, OTHER_CORE, realtime=model == SHORT))
            ports.append(int(announced(mocks[-1], r"http://127.0.0.1:(\d+)")))
        print("| | p50, ms | p90 | p99 | CPU ms a turn |\n|---|---|---|---|---|")
        measure(args, ports, args.tokenizer, "tokens")
        measure(args, ports, None, "text")
    finally:
        for mock in mocks:
            os.killpg(mock.pid, signal.SIGKILL)
            mock.wait()


if __name__ == "__main__":
    main()
