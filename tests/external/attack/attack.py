#!/usr/bin/env python3
"""All attackers of `attackers.py` at once beside honest load, in rounds: attackers stand still for a while, then they go on. Honest
clients are measured in both, so that what else happens on the machine is in both. The gateway's memory is held against the formula in
README.md, and at the end every gauge must read 0 again.
"""

import argparse
import hashlib
import http.client
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import attackers

WORKERS = 4
MIB = 1 << 20
INDEX_MIB, BODIES_MIB = 64, 256
# What the gateway takes beside its budgets: itself, and each connection.
ITSELF_MIB, CONNECTION_KIB = 160, 64
SLOWER = 1.5
# At the start of each half of a round, which no figure counts: attackers whose connections have ended begin anew.
WARM_UP_SECONDS = 5
GAUGES = ("in_flight", "arriving", "connections", "body_memory_bytes")


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def ready(port):
    for _ in range(200):
        try:
            if ask(port, "/readyz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the gateway is not ready")


def memory(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[1]) / 1024


def gauge(page, name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if re.match(rf"keyway_{name}(\{{|\s)", line))


class Watch:
    """Once a second: memory, connections, and whether `/livez` answers."""

    def __init__(self, pid, admin):
        self.pid, self.admin = pid, admin
        self.memory_mib, self.connections, self.slow = 0, 0, 0

    def look(self):
        began = time.monotonic()
        page = ask(self.admin, "/metrics")[1] if ask(self.admin, "/livez")[0] == 200 else ""
        self.slow = max(self.slow, time.monotonic() - began)
        self.memory_mib = max(self.memory_mib, memory(self.pid))
        self.connections = max(self.connections, gauge(page, "connections"))


def honest(args, seconds, port, key_file, folder, watch=None):
    """Load for so long; the times of its good answers to the first token and to the end, in milliseconds, and how many failed. All have
    the same shared prefixes, which the workers' caches then hold, and other requests behind them."""
    honest.runs += 1
    command = [args.bins / "keyway-loadtest", "run", "--url", f"http://127.0.0.1:{port}", "--workload", "shared-prefix", "--prefix-len", "1024",
               "--isl", "128", "--osl", "32", "--rate", str(args.rate), "--duration", f"{seconds}s", "--warmup", f"{WARM_UP_SECONDS}s",
               "--api-key-file", key_file, "--text-seed", "1", "--seed", str(honest.runs), "--records", "--ui", "none", "-o", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        time.sleep(1)
        if watch:
            watch.look()
    if process.returncode:
        print(process.stderr.read().decode(), file=sys.stderr)
    found = Found()
    for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines():
        found.add(json.loads(line))
    return found


honest.runs = 0


class Found:
    """What honest clients have met."""

    def __init__(self):
        self.ttft, self.whole, self.failed = [], [], 0

    def add(self, record):
        if record["outcome"] != "ok":
            self.failed += 1
        elif not record["warmup"]:
            self.ttft.append(record["first_ms"] - record["intended_ms"])
            self.whole.append(record["end_ms"] - record["intended_ms"])

    def __iadd__(self, other):
        self.ttft += other.ttft
        self.whole += other.whole
        self.failed += other.failed
        return self


def percentile(values, percent):
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def stolen():
    """Seconds of the cores that the machine's host has given to others."""
    return int(pathlib.Path("/proc/stat").read_text(encoding="utf-8").split()[8]) / os.sysconf("SC_CLK_TCK")


def tell(processes, number):
    """Sends a signal to attackers that are there."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=int, default=1800, help="with attackers, all rounds together (1800)")
    parser.add_argument("--rounds", type=int, default=6, help="how often attackers stand still, for a third of their time (6)")
    parser.add_argument("--rate", type=float, default=40, help="honest requests a second (40)")
    parser.add_argument("--port", type=int, default=18700)
    parser.add_argument("--without", default="", help="attackers to leave out, by name")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="keyway-attack-"))
    port, admin, first = args.port, args.port + 1, args.port + 10
    keys = {name: f"kw-{name}-{os.urandom(8).hex()}" for name in ("honest", "mallory", "leaver")}
    limits = {"leaver": "tokens_per_minute = 20000.0\n"}
    tables = [f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n{limits.get(name, "")}'
              for name, key in keys.items()]
    (folder / "tenants.toml").write_text("".join(tables), encoding="utf-8")
    (folder / "key").write_text(keys["honest"], encoding="utf-8")
    urls = [f'"http://127.0.0.1:{first + i}"' for i in range(1, WORKERS)]
    urls.append(f'"http://127.0.0.1:{first};kv-events=tcp://127.0.0.1:{port + 5}"')
    (folder / "keyway.toml").write_text(
        f'worker = [{", ".join(urls)}]\n[auth]\ntenants_file = "{folder}/tenants.toml"\n[routing]\nindex_bytes = {INDEX_MIB * MIB}\n'
        f"[limits]\nmax_body_memory_bytes = {BODIES_MIB * MIB}\n", encoding="utf-8")
    mock = subprocess.Popen([args.bins / "keyway-loadtest", "mock", "--workers", str(WORKERS), "--base-port", str(first), "--model", "mock"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Its log is a pipe that nobody reads.
    reader, writer = os.pipe()
    gateway = subprocess.Popen([args.bins / "keyway", "--config", folder / "keyway.toml", "--listen", f"127.0.0.1:{port}",
                                "--admin-listen", f"127.0.0.1:{admin}"], stdout=writer, stderr=writer)
    target, operators = ("127.0.0.1", port), ("127.0.0.1", admin)
    all_attackers = [
        (attackers.slow_bodies, target, keys["mallory"]), (attackers.slow_bodies, target, None), (attackers.idle, target, None),
        (attackers.large_bodies, target, keys["mallory"]), (attackers.large_json, target, keys["mallory"]),
        (attackers.floods, target, keys["mallory"]), (attackers.leavers, target, keys["leaver"]), (attackers.nonsense, target, None),
        (attackers.publisher, port + 5, None), (attackers.explainers, operators, None),
    ]
    running = []
    try:
        ready(admin)
        # First without being measured: what the gateway learns of its workers it has learned then, and caches hold the prefixes.
        honest(args, 30, port, folder / "key", folder / "first")
        watch, calm, beside, rounds = Watch(gateway.pid, admin), Found(), Found(), []
        for attacker, *what in all_attackers:
            if attacker.__name__ not in args.without.split(","):
                running.append(multiprocessing.Process(target=attacked, args=(attacker, *what), daemon=True))
                running[-1].start()
        for number in range(args.rounds):
            seconds = args.seconds // args.rounds
            tell(running, signal.SIGSTOP)
            times = [stolen()]
            without = honest(args, max(seconds // 3, 2 * WARM_UP_SECONDS), port, folder / "key", folder / f"calm-{number}", watch)
            times.append(stolen())
            tell(running, signal.SIGCONT)
            with_them = honest(args, seconds, port, folder / "key", folder / f"beside-{number}", watch)
            times.append(stolen())
            rounds.append((percentile(without.ttft, 99), percentile(with_them.ttft, 99), times[1] - times[0], times[2] - times[1]))
            calm += without
            beside += with_them
        for process in running:
            process.kill()
        for _ in range(40):
            time.sleep(1)
            page = ask(admin, "/metrics")[1]
            # Who asks is connected, too.
            left = {name: gauge(page, name) for name in GAUGES if gauge(page, name) > 2 * (name == "connections")}
            if not left:
                break
        sys.exit(report(args, calm, beside, rounds, watch, left))
    finally:
        for process in running:
            process.kill()
        gateway.terminate()
        mock.terminate()
        os.close(reader)


def attacked(attacker, *what):
    # Their own work is not what is measured.
    os.nice(19)
    attacker(*what)


def report(args, calm, beside, rounds, watch, left):
    bound = ITSELF_MIB + INDEX_MIB + BODIES_MIB + watch.connections * CONNECTION_KIB / 1024
    print(f"{args.seconds} s with attackers in {args.rounds} rounds, {args.rate} honest requests a second\n")
    print("| | honest requests | failed | TTFT p50 ms | TTFT p99 ms | whole p99 ms |\n|---|---|---|---|---|---|")
    for name, found in (("attackers stand still", calm), ("all of them go on", beside)):
        cells = [f"{percentile(found.ttft, 50):.1f}", f"{percentile(found.ttft, 99):.1f}", f"{percentile(found.whole, 99):.1f}"]
        print(f"| {name} | {len(found.ttft) + found.failed} | {found.failed} | {' | '.join(cells)} |")
    print("\n| round | TTFT p99 ms, without | with | times | core seconds that the host took, without | with |\n|---|---|---|---|---|---|")
    for number, (without, with_them, *taken) in enumerate(rounds):
        print(f"| {number + 1} | {without:.1f} | {with_them:.1f} | {with_them / without:.2f} | {taken[0]:.1f} | {taken[1]:.1f} |")
    ratios = [percentile(getattr(beside, figure), 99) / percentile(getattr(calm, figure), 99) for figure in ("ttft", "whole")]
    print(f"\np99 with over without: TTFT {ratios[0]:.2f}, whole {ratios[1]:.2f} (bound {SLOWER})")
    print(f"memory: at most {watch.memory_mib:.0f} MiB, bound {bound:.0f} (at most {watch.connections:.0f} connections)")
    print(f"/livez and /metrics together: at most {1000 * watch.slow:.0f} ms")
    print(f"left at the end: {left or 'nothing'}")
    good = not calm.failed and not beside.failed and max(ratios) <= SLOWER and watch.memory_mib <= bound and not left
    print("held" if good else "NOT HELD")
    return 0 if good else 1


if __name__ == "__main__":
    main()
