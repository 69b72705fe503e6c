#!/usr/bin/env python3
"""Three gateways with tenants before two simulated fleets. At one fleet every client takes its whole answer, at the other all clients
leave in the middle. Gateways are restarted meanwhile, one after the other. In the end /usage of all three is added up: for the first
fleet it must be what its engines have counted, to the token; for the second it must say how much is an estimate.
"""

import argparse
import hashlib
import http.client
import json
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

GATEWAYS = 3
KEYS = {"analysts": ["key-analysts"], "builders": ["key-builders", "key-builders-2"], "cooks": ["key-cooks"]}
# Of a hundred requests: streams whose clients leave, and answers that are no stream.
LEAVE, UNARY = 5, 5
CONNECTIONS = 8
OPERATOR = "operators-own"
SUMS = ["requests", "completed", "cancelled", "failed", "refused_limit", "refused_capacity", "refused_invalid"]
TOKENS = ["prompt_tokens", "cached_tokens", "generated_tokens"]
ESTIMATED = ["estimated_requests", "estimated_prompt_tokens", "estimated_generated_tokens"]


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"authorization": f"Bearer {OPERATOR}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def until(what, done, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if done():
                return
        except OSError:
            pass
        time.sleep(0.05)
    sys.exit(f"{what}: not within {seconds} s")


class Gateway:
    """One process after the other, on the same ports and with the same file."""

    def __init__(self, number, args, folder, urls):
        self.name, self.args = f"gw-{number}", args
        self.port, self.admin = args.listen_port + 2 * number, args.listen_port + 2 * number + 1
        self.config = folder / f"{self.name}.toml"
        self.log = open(folder / f"{self.name}.log", "w")
        workers = ", ".join(f'"{url}"' for url in urls)
        self.config.write_text(
            f'worker = [{workers}]\nlisten = "127.0.0.1:{self.port}"\nadmin_listen = "127.0.0.1:{self.admin}"\n'
            f'[auth]\ntenants_file = "{folder}/tenants.toml"\nadmin_token_file = "{folder}/token"\n'
            f'[usage]\nfile = "{folder}/{self.name}.redb"\ninstance = "{self.name}"\n'
            f'[limits]\ndrain_seconds = 60\n'
        )
        self.start()

    def start(self):
        command = [str(self.args.bins / "keyway"), "--config", str(self.config)]
        self.process = subprocess.Popen(command, stderr=self.log, env={"RUST_LOG": "warn"})
        until("a gateway is ready", lambda: get(self.admin, "/readyz")[0] == 200)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(timeout=90) != 0:
            sys.exit(f"{self.name} ended with {self.process.returncode}")

    def usage(self, query):
        status, text = get(self.admin, f"/usage?{query}")
        if status != 200:
            sys.exit(f"{self.name}: /usage?{query}: {status} {text}")
        return json.loads(text)["rows"]


def fleet(args, model):
    """Two engines of a model; the process and their addresses."""
    command = [str(args.bins / "keyway-loadtest"), "mock", "--workers", "2", "--base-port", "0", "--model", model]
    command += ["--time-scale", "2", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    urls = []
    while len(urls) < 2:
        line = process.stdout.readline()
        if not line:
            sys.exit("the simulated engines did not start")
        urls += re.findall(r"ready on (http://[^ ,\n]+)", line)
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return process, urls


def counted(urls):
    """What engines have counted: requests that ended by themselves, tokens by kind."""
    names = {
        "prompt_tokens": "vllm:prompt_tokens_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "generated_tokens": "vllm:generation_tokens_total",
    }
    sums = dict.fromkeys(["completed", "cancelled", *names], 0)
    for url in urls:
        page = get(urllib.parse.urlsplit(url).port, "/metrics")[1]
        for name, metric in names.items():
            sums[name] += sum(float(value) for value in re.findall(rf"^{metric}\{{[^}}]*\}} (\S+)$", page, re.M))
        for reason, value in re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)"\} (\S+)$', page, re.M):
            sums["cancelled" if reason == "abort" else "completed"] += float(value)
    return {name: int(value) for name, value in sums.items()}


class Clients:
    """Those that leave in the middle of streams, and those that want no stream; paced, on threads."""

    def __init__(self, gateways, requests, seconds):
        self.work, self.seen, self.lock = queue.Queue(), {"left": 0, "events": 0, "unary": 0, "refused": 0}, threading.Lock()
        self.gateways, self.gap = gateways, seconds / max(requests, 1)
        keys = [key for of in KEYS.values() for key in of]
        for i in range(requests):
            self.work.put((gateways[i % GATEWAYS], keys[i // GATEWAYS % len(keys)], i % (LEAVE + UNARY) < LEAVE, i))
        self.threads = [threading.Thread(target=self.serve) for _ in range(CONNECTIONS)]
        for thread in self.threads:
            thread.start()

    def serve(self):
        while True:
            try:
                gateway, key, leaves, number = self.work.get_nowait()
            except queue.Empty:
                return
            try:
                self.leave(gateway, key, number) if leaves else self.whole(gateway, key, number)
            except (OSError, http.client.HTTPException):
                # It is being restarted.
                self.note("refused")
            time.sleep(self.gap * CONNECTIONS)

    def note(self, what, more=1):
        with self.lock:
            self.seen[what] += more

    def ask(self, gateway, key, body):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection, connection.getresponse()

    def leave(self, gateway, key, number):
        message = {"role": "user", "content": f"a tale of {number} parts"}
        body = {"model": "cut", "stream": True, "max_tokens": 2000, "ignore_eos": True, "messages": [message]}
        connection, answer = self.ask(gateway, key, body)
        if answer.status != 200:
            return self.note("refused")
        events = 0
        while events < 1 + number % 7:
            line = answer.fp.readline()
            if not line:
                sys.exit("a stream ended that was to be left")
            # The first chunk of a stream has a role, and no content.
            events += b'"content":"' in line and b'"content":""' not in line
        connection.sock.close() if connection.sock else answer.close()
        self.note("left")
        self.note("events", events)

    def whole(self, gateway, key, number):
        body = {"model": "whole", "max_tokens": 5, "messages": [{"role": "user", "content": f"a word on {number % 50}"}]}
        _, answer = self.ask(gateway, key, body)
        answer.read()
        self.note("unary" if answer.status == 200 else "refused")

    def join(self):
        for thread in self.threads:
            thread.join()


def load(args, gateway, number, folder):
    """Streams that are taken whole, from each tenant in turn."""
    keys = [key for of in KEYS.values() for key in of]
    share = args.requests * (100 - LEAVE - UNARY) // 100 // GATEWAYS // len(keys)
    running = []
    for at, key in enumerate(keys):
        file = folder / f"{key}.key"
        file.write_text(key)
        command = [str(args.bins / "keyway-loadtest"), "run", "--url", f"http://127.0.0.1:{gateway.port}", "--model", "whole"]
        command += ["--api-key-file", str(file), "--requests", str(share), "--rate", str(args.rate / GATEWAYS / len(keys))]
        command += ["--workload", "shared-prefix", "--prefix-groups", "8", "--prefix-len", "64", "--isl", "uniform(8,64)"]
        command += ["--osl", "uniform(1,8)", "--threads", "1", "--seed", str(10 * number + at), "--bytes-per-token", "4"]
        command += ["--ui", "none"]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return running


def added(rows, names):
    return {name: sum(row[name] for row in rows) for name in names}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bins", type=pathlib.Path, required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=900)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--listen-port", type=int, default=18720)
    return parser.parse_args()


def run(args, folder, started):
    tenants = "".join(
        f'[[tenant]]\nname = "{name}"\nkey_sha256 = {json.dumps([hashlib.sha256(key.encode()).hexdigest() for key in keys])}\n'
        for name, keys in KEYS.items()
    )
    (folder / "tenants.toml").write_text(tenants)
    (folder / "token").write_text(OPERATOR)
    fleets = {}
    for model in ["whole", "cut"]:
        process, urls = fleet(args, model)
        started.append(process)
        fleets[model] = urls
    gateways = [Gateway(number, args, folder, sum(fleets.values(), [])) for number in range(GATEWAYS)]
    started += gateways
    seconds = args.requests / args.rate
    began = time.monotonic()
    running = [one for number, gateway in enumerate(gateways) for one in load(args, gateway, number, folder)]
    started += running
    clients = Clients(gateways, args.requests * (LEAVE + UNARY) // 100, seconds)
    for turn in range(args.restarts * GATEWAYS):
        due = began + seconds * (turn + 1) / (args.restarts * GATEWAYS + 1)
        time.sleep(max(0, due - time.monotonic()))
        gateways[turn % GATEWAYS].end()
        gateways[turn % GATEWAYS].start()
    for one in running:
        one.wait()
    clients.join()
    took = time.monotonic() - began
    # The engines notice who has left, and each gateway tells once more what it has in its file.
    until("the engines are idle", lambda: all(is_idle(url) for urls in fleets.values() for url in urls))
    for gateway in gateways:
        gateway.end()
        gateway.start()
    return fleets, gateways, clients.seen, took


def is_idle(url):
    page = get(urllib.parse.urlsplit(url).port, "/metrics")[1]
    return not re.search(r"^vllm:num_requests_(running|waiting)\{[^}]*\} [1-9]", page, re.M)


def judge(fleets, gateways, seen, took):
    wrong = []
    expect = lambda what, got, want: got == want or wrong.append(f"{what}: {got}, not {want}")
    rows = [row for gateway in gateways for row in gateway.usage("group=tenant,key,model")]
    of = lambda model: [row for row in rows if row["model"] == model]
    whole, cut = added(of("whole"), SUMS + TOKENS + ESTIMATED), added(of("cut"), SUMS + TOKENS + ESTIMATED)
    engines = {model: counted(urls) for model, urls in fleets.items()}
    for name in ["completed", *TOKENS]:
        expect(f"whole answers: {name}", whole[name], engines["whole"][name])
    for name in ["cancelled", "failed", *ESTIMATED]:
        expect(f"whole answers: {name}", whole[name], 0)
    expect("streams that were left", cut["cancelled"], seen["left"])
    expect("streams that were left: all estimated", cut["estimated_requests"], cut["cancelled"])
    expect("streams that were left: generated tokens are estimated", cut["estimated_generated_tokens"], cut["generated_tokens"])
    if not seen["events"] <= cut["generated_tokens"] <= engines["cut"]["generated_tokens"]:
        wrong.append(f"left streams: {cut['generated_tokens']} tokens; clients saw {seen['events']}")
    for row in rows:
        expect(f"{row}: its ends", sum(row[name] for name in SUMS[1:]), row["requests"])
    # However it is asked, it is the same.
    for query in ["by=hour&group=model", "by=month", "by=day&group=key"]:
        again = [row for gateway in gateways for row in gateway.usage(query)]
        expect(query, added(again, SUMS + TOKENS + ESTIMATED), added(rows, SUMS + TOKENS + ESTIMATED))
    expect("keys", len({row["key"] for row in rows}), sum(map(len, KEYS.values())))
    expect("instances", len({row["instance"] for row in rows}), GATEWAYS)
    total = added(rows, SUMS + TOKENS + ESTIMATED)
    print(f"{total['requests']} requests in {took:.0f} s over {GATEWAYS} gateways; {seen['refused']} found one at its restart")
    print(f"{'':24}{'engines':>12}{'/usage':>12}{'estimated':>12}")
    for model, sums in [("whole", whole), ("cut", cut)]:
        for name in ["completed", "cancelled", *TOKENS]:
            estimated = sums.get(f"estimated_{name}", 0)
            print(f"{model + ' ' + name:24}{engines[model][name]:>12}{sums[name]:>12}{estimated:>12}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def main():
    args, started = parse(), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            return judge(*run(args, pathlib.Path(folder), started))
        finally:
            for one in started:
                process = getattr(one, "process", one)
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
