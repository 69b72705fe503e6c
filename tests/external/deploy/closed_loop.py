"""The whole scaling loop: simulated engines, a real gateway, a real Prometheus with the deployed rules, and a scaler that does
what KEDA and the HPA document: it asks `max(keyway:scaler_workers)`, leaves a difference of a tenth alone, follows the
policies of deploy/kubernetes/autoscaling/keda, goes to zero after the cooldown, and starts workers that take a while.
Everything runs SPEED times as fast as it would; times below are of the simulated world. The load steps from 1 to 6 and back; SEED
makes another one of the same rates.
Usage: closed_loop.py KEYWAY KEYWAY_LOADTEST; needs prometheus in PATH. Prints a course and a verdict, ends with 1 if a bar is missed."""

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

KEYWAY, LOADTEST = sys.argv[1:3]
DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SPEED = float(os.environ.get("SPEED", 2))
SEED = int(os.environ.get("SEED", 7))
START_S, SLO_S, SCALE_IN_S = 60.0, 4.0, 300.0
LOW, HIGH = 2.5, 15.0  # requests a second
STEP_UP, STEP_DOWN, END = 240.0, 1140.0, 2040.0
PROFILE = "l4-8b"
SHOWN = ("desired", "reason", "prefill", "backlog", "need", "peak", "guard", "correction", "backlog_tokens", "prefill_tokens_per_s", "ttft_p90_s")
work = Path(tempfile.mkdtemp(prefix="keyway-loop-"))
children = []


def real(seconds):
    return seconds / SPEED


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(name, command, marker=None):
    log = open(work / f"{name}.log", "w+", encoding="utf-8")
    child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    children.append(child)
    while marker and marker not in (work / f"{name}.log").read_text(encoding="utf-8"):
        if child.poll() is not None:
            sys.exit(f"{name} ended:\n{(work / f'{name}.log').read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.02)
    return child


def get(url):
    return json.load(urllib.request.urlopen(url, timeout=5))


def trace(path):
    """Half of the prompts begin like one of forty; the other half are new."""
    rng, now, row = random.Random(SEED), 0.0, 0
    with open(path, "w", encoding="utf-8") as out:
        while now < END:
            now += rng.expovariate(HIGH if STEP_UP <= now < STEP_DOWN else LOW)
            row += 1
            own = [1000 + 4 * row + i for i in range(4)]
            group = rng.randrange(40)
            ids = [2 * group, 2 * group + 1] + own[:2] if rng.random() < 0.5 else own
            out.write(json.dumps({"timestamp": int(now * 1000), "input_length": 2048, "output_length": 32, "hash_ids": ids}) + "\n")


def optimum(path, begin, end):
    command = [LOADTEST, "simulate", "--trace", str(path), "--slice", f"{begin:.0f}s..{end:.0f}s", "--profile", PROFILE,
               "--find-workers", "--policy", "prefix", "--slo", f"ttft.p90<{SLO_S}s"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    workers = int(re.search(r"prefix needs (\d+) workers", said)[1])
    # The table has a line for each fleet tried: policy, workers, hit ratio.
    return workers, float(re.search(rf"^prefix +{workers} +([0-9.]+) %", said, re.M)[1])


class Fleet:
    """Workers as a Deployment has them: wanted, starting, listed, and gone when they have drained."""

    def __init__(self, admin):
        self.admin, self.workers, self.leaving = admin, {}, {}
        self.next = 0

    def scale(self, wanted, now):
        while len(self.workers) < wanted:
            self.workers[self.next] = {"ready_at": now + START_S, "port": None, "process": None}
            self.next += 1
        # Youngest first, those that are starting above all, as a ReplicaSet does.
        for number in sorted(self.workers, reverse=True)[: max(0, len(self.workers) - wanted)]:
            worker = self.workers.pop(number)
            if worker["process"]:
                self.leaving[number] = worker

    def tick(self, now):
        changed = False
        for number, worker in self.workers.items():
            if worker["process"] is None and now >= worker["ready_at"]:
                worker["port"] = free_port()
                command = [LOADTEST, "mock", "--workers", "1", "--base-port", str(worker["port"]), "--profile", PROFILE,
                           "--time-scale", str(SPEED)]
                worker["process"] = start(f"worker-{number}", command, "ready on")
        ports = sorted(w["port"] for w in self.workers.values() if w["process"])
        text = "worker = [" + ", ".join(f'"http://127.0.0.1:{p}"' for p in ports) + "]\n"
        path = work / "workers.toml"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            (work / "workers.new").write_text(text, encoding="utf-8")
            os.replace(work / "workers.new", path)
            changed = True
        if self.leaving and not changed:
            there = {row["worker"] for row in get(f"{self.admin}/workers")}
            for number in [n for n, w in self.leaving.items() if f"127.0.0.1:{w['port']}" not in there]:
                self.leaving.pop(number)["process"].kill()

    def ready(self):
        return sum(1 for w in self.workers.values() if w["process"])


class Scaler:
    """KEDA's ScaledObject with one Prometheus trigger of AverageValue 1, and the HPA it makes."""

    def __init__(self, prometheus):
        self.url, self.last_active, self.replicas, self.history = prometheus, 0.0, 1, []

    def value(self):
        query = urllib.parse.urlencode({"query": 'max(keyway:scaler_workers{model="mock"})'})
        result = get(f"{self.url}/api/v1/query?{query}")["data"]["result"]
        return float(result[0]["value"][1]) if len(result) == 1 else None

    def look(self, now):
        value = self.value()
        if value is None:
            return self.replicas
        if value > 0:
            self.last_active = now
        if self.replicas == 0:
            # KEDA itself goes from 0 to 1; the HPA takes over from there.
            self.replicas = 1 if value > 0 else 0
        elif value <= 0:
            if now - self.last_active > 30:
                self.replicas = 0
        elif abs(value / self.replicas - 1.0) > 0.1:
            wanted = math.ceil(value)
            if wanted > self.replicas:
                base = min([r for t, r in self.history if now - t < 15] + [self.replicas])
                wanted = min(wanted, max(6 * base, base + 8))
            else:
                base = max([r for t, r in self.history if now - t < 30] + [self.replicas])
                wanted = max(wanted, base - 1)
            self.replicas = wanted
        self.history = [(t, r) for t, r in self.history if now - t < 60] + [(now, self.replicas)]
        return self.replicas


def configure(gateway_admin):
    minutes, half = f"{real(SCALE_IN_S) * 1e3:.0f}ms", f"{real(SCALE_IN_S / 2) * 1e3:.0f}ms"
    rules = (DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8")
    # Of the rules, those of the sum look back for the scale-in time.
    head, sums = rules.split("  - name: keyway-scale")
    (work / "rules.yml").write_text(head + "  - name: keyway-scale" + sums.replace("[5m]", f"[{minutes}]").replace("[150s]", f"[{half}]"), encoding="utf-8")
    config = (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
    config = config.replace('"127.0.0.1:9090"', f'"{gateway_admin}"').replace("5s", "1s").replace("  - alerts.yml\n", "")
    (work / "prometheus.yml").write_text(config.split("  - job_name: keyway-worker")[0], encoding="utf-8")


def main():
    path = work / "trace.jsonl"
    trace(path)
    low, pooled = optimum(path, STEP_DOWN + 300, END)
    best = {"low": low, "high": optimum(path, STEP_UP + 60, STEP_DOWN)[0], "hits": pooled}
    print(f"optimum of the simulator for ttft.p90<{SLO_S}s: {best}", flush=True)
    listen, admin, metrics = (free_port() for _ in range(3))
    (work / "workers.toml").write_text("", encoding="utf-8")
    (work / "keyway.toml").write_text(f"""
listen = "127.0.0.1:{listen}"
admin_listen = "127.0.0.1:{admin}"
[routing]
slow_start_ms = {real(30_000):.0f}
load_scrape_ms = {real(1_000):.0f}
hold_horizon_ms = {real(500):.0f}
[discovery]
file = "{work}/workers.toml"
interval_seconds = {max(real(5), 0.05)}
[scale]
min = 0
max = 40
ttft_slo_seconds = {real(SLO_S)}
window_seconds = {real(30)}
scale_in_seconds = {real(SCALE_IN_S)}
start_seconds = {real(START_S)}
wait_seconds = {real(600)}
prefill_tokens_per_second = {3500 * SPEED}
[[scale.model]]
name = "mock"
""", encoding="utf-8")
    start("keyway", [KEYWAY, "--config", str(work / "keyway.toml")], "listening on")
    configure(f"127.0.0.1:{admin}")
    start("prometheus", ["prometheus", f"--config.file={work}/prometheus.yml", f"--storage.tsdb.path={work}/data",
                         f"--web.listen-address=127.0.0.1:{metrics}"], "Server is ready")
    fleet, scaler = Fleet(f"http://127.0.0.1:{admin}"), Scaler(f"http://127.0.0.1:{metrics}")
    began = time.monotonic()
    now = lambda: (time.monotonic() - began) * SPEED
    course, looked, load, offset = [], -99.0, None, None
    alone, alone_at = None, None
    fleet.scale(1, -START_S)
    while True:
        t = now()
        fleet.tick(t)
        if t - looked >= 15:
            looked = t
            fleet.scale(scaler.look(t), t)
            course.append((t - (offset or t), scaler.replicas, fleet.ready()))
            print(f"{t - (offset or t):7.0f} s  wanted {scaler.replicas:2d}  ready {fleet.ready():2d}  {why(admin)}", flush=True)
        if load is None and fleet.ready() and t > 30:
            command = [LOADTEST, "run", "--url", f"http://127.0.0.1:{listen}", "--model", "mock", "--workload", "trace",
                       "--trace", str(path), "--time-scale", str(SPEED), "--records", "--ui", "none", "-o", str(work / "out")]
            load, offset = start("load", command), t
        if load and load.poll() is not None and alone is None and scaler.replicas == 0 and not fleet.leaving:
            body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "anybody? " * 50}], "max_tokens": 4})
            (work / "one.json").write_text(body, encoding="utf-8")
            command = ["curl", "-sS", "--noproxy", "*", "-o", str(work / "one.out"), "-w", "%{http_code}", "-H",
                       "content-type: application/json", "-d", f"@{work}/one.json", f"http://127.0.0.1:{listen}/v1/chat/completions"]
            alone, alone_at = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), t
        if alone and alone.poll() is not None:
            return judge(course, best, alone.stdout.read(), t - alone_at)
        if t > END + offset_or(offset) + 1200:
            sys.exit("the fleet never went to nothing, or the last request was never answered")
        time.sleep(0.1)


def offset_or(offset):
    return offset or 0.0


def why(admin):
    """The gateway's own sum, for whoever reads the course."""
    row = get(f"http://127.0.0.1:{admin}/scale")[0]
    return ", ".join(f"{key} {row[key]:.4g}" if isinstance(row[key], float) else f"{key} {row[key]}" for key in SHOWN)


def judge(course, best, status, first_s):
    rows = [json.loads(line) for line in (work / "out/requests.jsonl").open(encoding="utf-8")]
    ttft = sorted((r["intended_ms"] / 1e3 * SPEED, (r["first_ms"] - r["intended_ms"]) / 1e3 * SPEED if r["first_ms"] else math.inf) for r in rows)

    def p90(begin, end):
        window = sorted(v for t, v in ttft if begin <= t < end)
        return window[min(len(window) - 1, int(0.9 * len(window)))] if window else 0.0

    def hits(begin, end):
        of = [r for r in rows if begin <= r["intended_ms"] / 1e3 * SPEED < end]
        return 100 * sum(r["cached_tokens"] or 0 for r in of) / max(1, sum(r["prompt_tokens"] or 0 for r in of))

    late = [t for t in range(int(STEP_UP), int(STEP_DOWN), 10) if p90(t, t + 30) > SLO_S]
    recovered = (max(late) + 10 if late else STEP_UP) - STEP_UP
    loaded = [(t, r) for t, r, _ in course if 0 <= t < END]
    peak = max(r for _, r in loaded)
    settled = [r for t, r in loaded if STEP_UP + 600 <= t < STEP_DOWN]
    # From the load's last 120 s, when the scale-in time and one worker each 30 s have passed.
    low = [r for t, r in loaded if t > END - 120]
    moves = [b - a for (_, a), (_, b) in zip(loaded, loaded[1:]) if b != a]
    turns = sum(1 for a, b in zip(moves, moves[1:]) if (a > 0) != (b > 0))
    lost = sum(1 for r in rows if r["outcome"] != "ok")
    hit = hits(STEP_DOWN + 300, END)
    bars = [
        ("p90 TTFT under the SLO again after the step", f"{recovered:.0f} s", recovered <= 60 + 3 * START_S),
        ("most workers beside the optimum", f"{peak} of {best['high']}", peak <= math.ceil(1.25 * best["high"])),
        ("settled at high load", f"{sorted(set(settled))}", all(abs(r - best["high"]) <= 1 for r in settled)),
        ("settled at low load", f"{sorted(set(low))} of {best['low']}", all(abs(r - best["low"]) <= 1 for r in low)),
        ("changes of direction", f"{turns}", turns <= 2),
        ("requests lost", f"{lost} of {len(rows)}", lost == 0),
        ("hit ratio after scale-in beside a fleet that never was larger", f"{hit:.1f} % of {best['hits']:.1f} %", hit >= best["hits"] - 2),
        ("from nothing: the waiting request answered", f"{status} after {first_s:.0f} s", status == "200"),
    ]
    for name, figure, good in bars:
        print(f"{'met   ' if good else 'MISSED'} {name}: {figure}")
    print("p90 TTFT by minute:", " ".join(f"{p90(t, t + 60):.1f}" for t in range(0, int(END), 60)))
    return 0 if all(good for _, _, good in bars) else 1


try:
    code = main()
finally:
    for child in children:
        child.kill()
print(f"logs: {work}")
sys.exit(code)
