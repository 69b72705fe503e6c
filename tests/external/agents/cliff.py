"""Conversations before a fleet whose caches cannot hold them all. See run.sh."""

import argparse
import collections
import json
import pathlib
import re
import signal
import statistics
import subprocess
import threading
import time
import urllib.request

TURNS_MAX = 1024
PORT, BACKENDS = 21300, 21310
KEYWAY = {"keyway": [], "keyway-no-pauses": ["session_pause_ms = 0"]}


def announced(process, pattern):
    """What the process says of itself, while somebody reads on."""
    for line in process.stdout:
        if found := re.search(pattern, re.sub(r"\x1b\[[0-9;]*m", "", line)):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found.group(0)
    raise SystemExit(f"{process.args[0]} ended without saying {pattern}")


class Process:
    def __init__(self, command, pattern=None):
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if pattern:
            announced(self.process, pattern)
        else:
            threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def fleet(args):
    return Process([args.loadtest, "mock", "--workers", args.workers, "--base-port", BACKENDS, "--profile", "fcfs-6k",
                    "--kv-blocks", args.kv_blocks, "--time-scale", args.time_scale], rf":{BACKENDS + args.workers - 1}\b")


def router(name, args):
    urls = [f"http://127.0.0.1:{BACKENDS + n}" for n in range(args.workers)]
    if name in KEYWAY:
        config = args.scratch / "gateway.toml"
        workers = "".join(f'[[worker]]\nurl = "{url}"\n' for url in urls)
        config.write_text("\n".join([f'listen = "127.0.0.1:{PORT}"', f'admin_listen = "127.0.0.1:{PORT + 1}"', "[routing]",
                                     *KEYWAY[name], workers]))
        return Process([args.keyway, "--config", config], "listening on")
    listen = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", PORT, "--prometheus-port", PORT + 1, "--policy", "cache_aware"]
    if name == "smg":
        return Process([args.scratch / "routers/bin/smg", "launch", *listen, "--backend", "vllm", "--log-level", "warn"])
    if name == "vllm-router":
        return Process([args.scratch / "routers/bin/vllm-router", *listen])
    raise SystemExit(f"no router {name}")


def until_it_answers():
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5).read()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def metrics():
    """Turns that were paused, by the gateway's own histogram."""
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{PORT + 1}/metrics", timeout=5).read().decode()
    except OSError:
        return None
    found = re.search(r"^keyway_session_pause_seconds_count (\d+)", text, re.M)
    return int(found.group(1)) if found else None


def drive(name, at_once, args):
    out = (args.out or args.scratch) / f"{name}.{at_once}"
    command = [args.loadtest, "run", "--url", f"http://127.0.0.1:{PORT}", "--workload", "multi-turn", "--turns", args.turns,
               "--isl", args.added, "--prefix-len", args.first, "--prefix-groups", 400, "--osl", args.answer, "--think-time", args.think,
               "--concurrency", at_once, "--duration", f"{args.seconds}s", "--warmup", f"{args.warmup}s", "--ui", "none", "--records",
               "-o", out, "--seed", args.seed]
    if args.header:
        command += ["--session-header", args.header]
    with fleet(args), router(name, args):
        until_it_answers()
        time.sleep(2)
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        paused = metrics()
    if not (out / "run.json").exists():
        raise SystemExit(done.stdout + done.stderr)
    return figures(out, args) | {"paused": paused}


def figures(out, args):
    rows = [json.loads(line) for line in open(out / "requests.jsonl")]
    rows = [row for row in rows if row["outcome"] != "cancelled"]
    good = [row for row in rows if row["outcome"] == "ok"]
    counted = [row for row in good if not row["warmup"]]
    # What is answered when the load has ended, no more coming, is no rate of a load.
    answered = sum(args.warmup < row["end_ms"] / 1e3 <= args.seconds for row in good)
    asked, found, possible = (sum(row[key] or 0 for row in counted) for key in ("prompt_tokens", "cached_tokens", "possible_tokens"))
    waits = sorted((row["first_ms"] - row["intended_ms"]) / 1e3 for row in counted if row["first_ms"])
    jobs = collections.defaultdict(list)
    for row in good:
        jobs[row["row"] // TURNS_MAX].append(row)
    whole = [turns for turns in jobs.values() if len(turns) == args.turns]
    took = [(max(row["end_ms"] for row in turns) - min(row["intended_ms"] for row in turns)) / 1e3 for turns in whole]
    return {"rate": answered / (args.seconds - args.warmup), "failed": len(rows) - len(good), "cached": found / asked, "possible": possible / asked,
            "ttft_p50": statistics.median(waits), "ttft_p99": waits[int(0.99 * len(waits))], "longest": waits[-1],
            "jobs": len(took), "job_s": statistics.mean(took) if took else None}


def main():
    parse = argparse.ArgumentParser()
    parse.add_argument("--keyway", required=True)
    parse.add_argument("--loadtest", required=True)
    parse.add_argument("--scratch", type=pathlib.Path, required=True)
    parse.add_argument("--out", type=pathlib.Path)
    parse.add_argument("--routers", default="keyway,keyway-no-pauses,smg,vllm-router")
    parse.add_argument("--at-once", default="14,29,58,116")
    parse.add_argument("--seconds", type=int, default=40)
    parse.add_argument("--warmup", type=int, default=8)
    parse.add_argument("--turns", type=int, default=20)
    parse.add_argument("--added", type=int, default=600)
    parse.add_argument("--first", type=int, default=2000)
    parse.add_argument("--answer", type=int, default=60)
    parse.add_argument("--think", default="exp(200ms)")
    parse.add_argument("--kv-blocks", type=int, default=4096)
    parse.add_argument("--workers", type=int, default=4)
    parse.add_argument("--time-scale", type=int, default=10)
    parse.add_argument("--header", default="")
    parse.add_argument("--seed", type=int, default=1)
    args = parse.parse_args()
    print("| router | at once | requests/s | hits | of possible | TTFT p50 s | p99 s | longest s | whole conversations | s each | paused turns | failed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for at_once in args.at_once.split(","):
        for name in args.routers.split(","):
            row = drive(name, int(at_once), args)
            each = "" if row["job_s"] is None else f"{row['job_s']:.1f}"
            paused = "" if row["paused"] is None else row["paused"]
            print(f"| {name} | {at_once} | {row['rate']:.1f} | {row['cached']:.3f} | {row['cached'] / row['possible']:.2f} | {row['ttft_p50']:.3f} "
                  f"| {row['ttft_p99']:.2f} | {row['longest']:.2f} | {row['jobs']} | {each} | {paused} | {row['failed']} |", flush=True)


if __name__ == "__main__":
    main()
