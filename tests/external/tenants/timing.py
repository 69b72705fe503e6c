#!/usr/bin/env python3
"""Whether a tenant can tell by its clock what another one has asked: times to first token of a prompt that the other tenant has
just asked, beside those of a prompt that nobody has, by the two-sample Kolmogorov-Smirnov test. Beside that, which must be
told apart, what the same tenant sees of its own prompt, and what both see where tenants share (`isolate = false`).

One request at a time, in an order of chance, through a gateway before two workers. Exit code 1 where what must not be told
apart is, or what must be is not.
"""

import argparse
import hashlib
import http.client
import json
import math
import os
import pathlib
import random
import subprocess
import tempfile
import time

KEYS = {"alice": "kw-alice", "bob": "kw-bob"}
# Below it, two samples are taken to differ.
LEVEL = 0.05


def kolmogorov_smirnov(a, b):
    """The greatest distance of two samples' distributions, and the chance of one as great where they are the same."""
    a, b = sorted(a), sorted(b)
    i = j = 0
    distance = 0.0
    while i < len(a) and j < len(b):
        at = min(a[i], b[j])
        while i < len(a) and a[i] <= at:
            i += 1
        while j < len(b) and b[j] <= at:
            j += 1
        distance = max(distance, abs(i / len(a) - j / len(b)))
    n = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = n * distance
    if x < 0.2:
        return distance, 1.0
    chance = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return distance, min(max(chance, 0.0), 1.0)


def announced(log, marker, count, child, patience=60):
    """What follows the marker in a log, once it is there so often."""
    end = time.monotonic() + patience
    while time.monotonic() < end and child.poll() is None:
        found = log.read_text(errors="replace").split(marker)[1:]
        if len(found) >= count:
            return [rest.split()[0].rstrip(",/") for rest in found[:count]]
        time.sleep(0.05)
    raise SystemExit(f"no {marker!r} in {log}")


class Fleet:
    """A gateway before two workers, as long as the block lasts."""

    def __init__(self, args, isolate):
        self.args, self.isolate, self.children = args, isolate, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="keyway-tenants-"))

    def __enter__(self):
        if self.args.worker:
            worker = [self.args.worker, "--listen", "127.0.0.1:0", "--model", "random"]
            workers = [self.start("worker", worker, "ready on ")[0] for _ in range(2)]
        else:
            mock = [self.args.loadtest, "mock", "--workers", "2", "--base-port", "0", "--profile", self.args.profile]
            workers = self.start("mock", mock, "ready on ", 2)
        tables = [
            f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
            for name, key in KEYS.items()
        ]
        (self.folder / "tenants.toml").write_text("".join(tables))
        text = f"worker = {json.dumps(workers)}\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n"
        text += f"[auth]\ntenants_file = '{self.folder}/tenants.toml'\nisolate = {str(self.isolate).lower()}\n"
        (self.folder / "keyway.toml").write_text(text)
        gateway = [self.args.keyway, "--config", str(self.folder / "keyway.toml")]
        self.addr = self.start("keyway", gateway, "listening on http://")[0]
        self.model = self.first_model()
        return self

    def start(self, name, command, marker, count=1):
        log = self.folder / f"{name}-{len(self.children)}.log"
        environment = dict(os.environ, RUST_LOG="info")
        with open(log, "ab") as out:
            self.children.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
        return announced(log, marker, count, self.children[-1])

    def __exit__(self, *_):
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.wait()

    def first_model(self):
        """Once there is one, the workers are ready."""
        for _ in range(600):
            connection = http.client.HTTPConnection(self.addr, timeout=60)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {KEYS['bob']}"})
            models = json.loads(connection.getresponse().read()).get("data")
            if models:
                return models[0]["id"]
            time.sleep(0.1)
        raise SystemExit("no worker is ready")

    def ask(self, connection, tenant, prompt):
        """Milliseconds to the first event, and the prompt tokens that were cached."""
        body = json.dumps({
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        })
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[tenant]}"}
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        first = answer.readline()
        took = (time.perf_counter() - began) * 1e3
        rest = (first + answer.read()).decode()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {rest}")
        usages = [json.loads(line[6:]).get("usage") for line in rest.splitlines() if line.startswith("data: {")]
        usage = [usage for usage in usages if usage][-1]
        return took, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def prompt_of(words, chance):
    return " ".join(chance.choice(["cold", "warm", "near", "far", "old", "new", "red", "blue"]) for _ in range(words))


def measure(args, isolate, chance):
    """Times and cached tokens by who asks what."""
    found = {"unseen": [], "other tenant's": [], "own": []}
    with Fleet(args, isolate) as fleet:
        connection = http.client.HTTPConnection(fleet.addr, timeout=60)
        for _ in range(args.samples + 5):
            prompt, unseen = prompt_of(args.words, chance), prompt_of(args.words, chance)
            fleet.ask(connection, "alice", prompt)
            asks = [("unseen", "bob", unseen), ("other tenant's", "bob", prompt), ("own", "alice", prompt)]
            chance.shuffle(asks)
            for name, tenant, text in asks:
                found[name].append(fleet.ask(connection, tenant, text))
    # The first ones warm up.
    return {name: asked[5:] for name, asked in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keyway", required=True)
    parser.add_argument("--loadtest", required=True)
    parser.add_argument("--worker", help="real workers of this binary instead of simulated ones")
    parser.add_argument("--profile", default="h100-8b", help="of the simulated ones")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--words", type=int, default=400, help="of a prompt")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    print("| tenants | prompt | TTFT p50 ms | p90 ms | cached tokens | D | p | told apart | meant |\n|" + "---|" * 9)
    failed = False
    for isolate in (True, False):
        found = measure(args, isolate, chance)
        unseen = [took for took, _ in found["unseen"]]
        for name, asked in found.items():
            times = sorted(took for took, _ in asked)
            cached = sum(tokens for _, tokens in asked) / len(asked)
            quantiles = [times[len(times) // 2], times[len(times) * 9 // 10]]
            row = ["isolated" if isolate else "share", name, *(f"{ms:.2f}" for ms in quantiles), f"{cached:.0f}"]
            if name != "unseen":
                distance, p = kolmogorov_smirnov(unseen, times)
                apart, meant = p < LEVEL, name == "own" or not isolate
                failed |= apart != meant
                row += [f"{distance:.3f}", f"{p:.3g}", "yes" if apart else "no", "yes" if meant else "no"]
            else:
                row += [""] * 4
            print("| " + " | ".join(row) + " |", flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
