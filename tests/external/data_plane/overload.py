#!/usr/bin/env python3
"""Four times what a fleet can do, in an open loop, from two tenants of equal weight: what goodput is left, how soon the
surplus is refused, and what the greedy tenant does to the other's time to first token.

`keyway-loadtest mock` simulates the workers (first come, first served, 6,000 tokens of prefill a second each), one
`keyway-loadtest run` each tenant. Goodput: answers whose first token came within the objective, of both tenants together.
"""

import argparse
import hashlib
import http.client
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import time

KEYS = {"modest": "kw-modest", "greedy": "kw-greedy"}
PROMPT_TOKENS, ANSWER_TOKENS = 1000, 4


def wait_for(port, path, patience=20):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"nothing ready on port {port}{path}")


class Fleet:
    """A gateway before simulated workers, as long as the block lasts."""

    def __init__(self, args, folder, tenants=True, shed=True):
        self.args, self.folder, self.children = args, folder, []
        self.port, self.admin, self.base = args.port, args.port + 1, args.port + 10
        self.tenants, self.shed = tenants, shed

    def __enter__(self):
        args, folder = self.args, self.folder
        tables = [
            f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
            for name, key in KEYS.items()
        ]
        (folder / "tenants.toml").write_text("".join(tables))
        workers = ", ".join(f'"http://127.0.0.1:{self.base + i}"' for i in range(args.workers))
        text = f"worker = [{workers}]\nlisten = '127.0.0.1:{self.port}'\nadmin_listen = '127.0.0.1:{self.admin}'\n"
        text += f"[routing]\nhold_horizon_ms = {args.horizon_ms}\n"
        if self.shed:
            text += f"shed_after_ms = {args.shed_after_ms}\n"
        if self.tenants:
            text += f"[auth]\ntenants_file = '{folder}/tenants.toml'\n"
        (folder / "keyway.toml").write_text(text)
        mock = [args.loadtest, "mock", "--workers", str(args.workers), "--base-port", str(self.base)]
        self.start(mock + ["--profile", "fcfs-6k"])
        self.start([args.keyway, "--config", str(folder / "keyway.toml")])
        wait_for(self.admin, "/readyz")
        return self

    def start(self, command):
        log = open(self.folder / "log", "ab")
        self.children.append(subprocess.Popen(command, stdout=log, stderr=log))

    def __exit__(self, *_):
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.wait()

    def load(self, rates, seed):
        """Runs each tenant at its rate at the same time; their results by name."""
        runs = {}
        for i, (name, rate) in enumerate(rates.items()):
            key = self.folder / f"{name}.key"
            key.write_text(KEYS[name])
            out = self.folder / f"{name}-{seed}-{rate:.1f}"
            command = [self.args.loadtest, "run", "--url", f"http://127.0.0.1:{self.port}", "--api-key-file", str(key)]
            command += ["--workload", "random", "--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS)]
            command += ["--rate", f"{rate:.3f}", "--duration", f"{self.args.seconds}s", "--seed", str(seed * 10 + i)]
            command += ["--warmup", "3s", "--slo", f"ttft<{self.args.slo_ms}ms", "-o", str(out)]
            log = open(self.folder / "log", "ab")
            runs[name] = (out, subprocess.Popen(command, stdout=log, stderr=log))
        for _, run in runs.values():
            run.wait()
        return {name: json.loads((out / "run.json").read_text()) for name, (out, _) in runs.items()}


def within(run, slo_ms):
    """Answers a second whose first token came in time, of the seconds that count."""
    times = [us / 1e3 for us in run["samples"]["ttft_us"] if us is not None]
    share = sum(ms <= slo_ms for ms in times) / max(len(times), 1)
    return share * run["requests"]["ok"] / (run["config"]["duration_s"] - 3)


def refusals(port, key, stop, found):
    """Asks again and again while the fleet is overloaded; notes how long each refusal took and what it said."""
    prompt = "word " * PROMPT_TOKENS
    body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not stop.wait(0.05):
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        took = (time.perf_counter() - began) * 1e3
        answer.read()
        if answer.status == 503:
            found.append((took, answer.getheader("retry-after")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keyway", required=True)
    parser.add_argument("--loadtest", required=True)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--capacity", type=float, help="requests a second; measured if absent")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--slo-ms", type=int, default=2500)
    parser.add_argument("--shed-after-ms", type=int, default=1200)
    parser.add_argument("--horizon-ms", type=int, default=150)
    parser.add_argument("--port", type=int, default=18480)
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="keyway-overload-"))
    print(f"results in {folder}; {os.cpu_count()} cores", flush=True)
    rows = []
    for seed in range(1, args.repeats + 1):
        with Fleet(args, folder) as fleet:
            capacity = args.capacity or args.workers * 5.8
            calm = fleet.load({"modest": 0.4 * capacity, "greedy": 0.5 * capacity}, seed)
            peak = max(
                sum(within(run, args.slo_ms) for run in runs.values())
                for runs in (calm, fleet.load({"modest": 0.45 * capacity, "greedy": 0.55 * capacity}, seed + 100))
            )
            stop, found = threading.Event(), []
            asking = threading.Thread(target=refusals, args=(fleet.port, KEYS["greedy"], stop, found))
            asking.start()
            pressed = fleet.load({"modest": 0.4 * capacity, "greedy": 3.6 * capacity}, seed + 200)
            stop.set()
            asking.join()
        good = sum(within(run, args.slo_ms) for run in pressed.values())
        took = sorted(ms for ms, _ in found) or [float("nan")]
        rows.append({
            "peak goodput/s": round(peak, 2),
            "goodput/s at 4x": round(good, 2),
            "share": round(good / peak, 3),
            "modest TTFT p99 ms": round(calm["modest"]["response"]["ttft"]["p99"]),
            "beside greedy ms": round(pressed["modest"]["response"]["ttft"]["p99"]),
            "ratio": round(pressed["modest"]["response"]["ttft"]["p99"] / calm["modest"]["response"]["ttft"]["p99"], 3),
            "modest refused": pressed["modest"]["requests"]["failed"],
            "refusals asked": len(found),
            "refusal p50 ms": round(took[len(took) // 2], 2),
            "refusal p99 ms": round(took[len(took) * 99 // 100], 2),
            "all say Retry-After": all(after and int(after) >= 1 for _, after in found),
        })
        print(json.dumps(rows[-1]), flush=True)
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
