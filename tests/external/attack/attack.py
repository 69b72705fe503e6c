#!/usr/bin/env python3
"""All attackers of `attackers.py` at once beside honest load. Honest clients are measured without and with them; the gateway's memory
is held against the formula in README.md, and at the end every gauge must read 0 again.
"""

import argparse
import hashlib
import http.client
import json
import multiprocessing
import os
import pathlib
import re
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
# Each sends other prompts: what one has left in the workers' caches must not help the next.
PHASES = ("first", "calm", "beside")
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


def honest(args, seconds, port, key_file, folder, watch):
    """A run of the load tester; its figures."""
    command = [args.bins / "keyway-loadtest", "run", "--url", f"http://127.0.0.1:{port}", "--workload", "shared-prefix", "--prefix-len", "1024",
               "--isl", "128", "--osl", "32", "--rate", str(args.rate), "--duration", f"{seconds}s", "--warmup", "5s",
               "--api-key-file", key_file, "--seed", str(PHASES.index(folder.name)), "--ui", "none", "-o", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        time.sleep(1)
        if watch:
            watch.look()
    if process.returncode:
        print(process.stderr.read().decode(), file=sys.stderr)
    result = json.loads(next(folder.rglob("run.json")).read_text(encoding="utf-8"))
    return result["response"], result["requests"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=int, default=1800, help="of the measurement with attackers (1800)")
    parser.add_argument("--calm-seconds", type=int, help="of the one without (as many, at most 300)")
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
        # First without being measured: what the gateway learns of its workers it has learned then.
        honest(args, 5, port, folder / "key", folder / "first", None)
        calm_seconds = args.calm_seconds or min(args.seconds, 300)
        calm, calm_requests = honest(args, calm_seconds, port, folder / "key", folder / "calm", None)
        watch = Watch(gateway.pid, admin)
        for attacker, *what in all_attackers:
            if attacker.__name__ not in args.without.split(","):
                running.append(multiprocessing.Process(target=attacked, args=(attacker, *what), daemon=True))
                running[-1].start()
        time.sleep(5)
        beside, requests = honest(args, args.seconds, port, folder / "key", folder / "beside", watch)
        for process in running:
            process.kill()
        for _ in range(40):
            time.sleep(1)
            page = ask(admin, "/metrics")[1]
            # Who asks is connected, too.
            left = {name: gauge(page, name) for name in GAUGES if gauge(page, name) > 2 * (name == "connections")}
            if not left:
                break
        sys.exit(report(args, (calm, calm_requests), (beside, requests), watch, left))
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


def report(args, calm, beside, watch, left):
    bound = ITSELF_MIB + INDEX_MIB + BODIES_MIB + watch.connections * CONNECTION_KIB / 1024
    print(f"{args.seconds} s with attackers, {args.rate} honest requests a second\n")
    print("| | honest requests | failed | TTFT p50 ms | TTFT p99 ms | whole p99 ms |\n|---|---|---|---|---|---|")
    for name, (response, requests) in (("without attackers", calm), ("with all of them", beside)):
        ms = lambda figure, point: f"{response[figure][point]:.1f}"
        print(f"| {name} | {requests['sent']} | {requests['failed']} | {ms('ttft', 'p50')} | {ms('ttft', 'p99')} | {ms('e2e', 'p99')} |")
    ratios = {figure: beside[0][figure]["p99"] / calm[0][figure]["p99"] for figure in ("ttft", "e2e")}
    print(f"\np99 with over without: TTFT {ratios['ttft']:.2f}, whole {ratios['e2e']:.2f} (bound {SLOWER})")
    print(f"memory: at most {watch.memory_mib:.0f} MiB, bound {bound:.0f} (at most {watch.connections:.0f} connections)")
    print(f"/livez and /metrics together: at most {1000 * watch.slow:.0f} ms")
    print(f"left at the end: {left or 'nothing'}")
    good = not beside[1]["failed"] and max(ratios.values()) <= SLOWER and watch.memory_mib <= bound and not left
    print("held" if good else "NOT HELD")
    return 0 if good else 1


if __name__ == "__main__":
    main()
