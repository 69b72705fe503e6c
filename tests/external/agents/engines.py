"""Conversations before real engines whose caches cannot hold them all, with pauses and without. See engines.md."""

import json
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "engines"))
from fleet import Gateway, arguments, ask, new_engine, series, tiny_model  # noqa: E402
from routers import wake  # noqa: E402

BLOCKS = 256
NAMES = {"keyway": "", "keyway-no-pauses": "[routing]\nsession_pause_ms = 0\n"}


def drive(args, port, out, at_once):
    command = [args.loadtest, "run", "--url", f"http://127.0.0.1:{port}", "--workload", "multi-turn", "--turns", args.turns,
               "--isl", args.added, "--prefix-len", args.first, "--prefix-groups", 400, "--osl", args.answer, "--think-time", args.think,
               "--concurrency", at_once, "--duration", f"{args.seconds}s", "--warmup", f"{args.warmup}s", "--ui", "none", "--records",
               "-o", out, "--seed", args.seed, "--text-seed", at_once]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if not (out / "requests.jsonl").exists():
        sys.exit(done.stdout + done.stderr)
    return [json.loads(line) for line in open(out / "requests.jsonl")]


def measure(args, model, name, engines, at_once):
    wake(engines)
    gateway = Gateway(args, args.scratch, model, engines, args.by, name, NAMES[name]).start()
    try:
        before = [engine.counted() for engine in engines]
        rows = drive(args, gateway.port, args.scratch / f"{name}.{at_once}", at_once)
        after = [engine.counted() for engine in engines]
        paused = sum(series(gateway.admin, "keyway_session_pause_seconds_count").values())
    finally:
        gateway.process.stop()
    asked, found = (sum(b[which] - a[which] for a, b in zip(before, after)) for which in (0, 1))
    rows = [row for row in rows if row["outcome"] != "cancelled"]
    good = [row for row in rows if row["outcome"] == "ok"]
    # What is answered when the load has ended says nothing of a load.
    counted = [row for row in good if args.warmup < row["end_ms"] / 1e3 <= args.seconds]
    tokens, cached, possible = (sum(row[key] or 0 for row in counted) for key in ("prompt_tokens", "cached_tokens", "possible_tokens"))
    waits = sorted((row["first_ms"] - row["intended_ms"]) / 1e3 for row in counted if row["first_ms"])
    return {"rate": len(counted) / (args.seconds - args.warmup), "hits": cached / tokens, "possible": possible / tokens, "engines": found / asked,
            "p50": statistics.median(waits), "longest": waits[-1], "paused": int(paused), "failed": len(rows) - len(good)}


def main():
    parse = arguments(__doc__)
    parse.add_argument("--loadtest", type=pathlib.Path, required=True)
    parse.add_argument("--by", choices=("events", "text"), default="events", help="what the gateway goes by")
    parse.add_argument("--engines", type=int, default=3)
    parse.add_argument("--at-once", default="8,15,30,60")
    parse.add_argument("--seconds", type=int, default=60)
    parse.add_argument("--warmup", type=int, default=15)
    parse.add_argument("--turns", type=int, default=10)
    parse.add_argument("--first", type=int, default=400)
    parse.add_argument("--added", type=int, default=180)
    parse.add_argument("--answer", type=int, default=12)
    parse.add_argument("--think", default="exp(300ms)")
    args = parse.parse_args()
    model = tiny_model(args, "deep")
    engines = [new_engine(args, args.scratch, model, nth, BLOCKS) for nth in range(args.engines)]
    worse = False
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.await_ready()
        print("| at once | | requests/s | hits | of possible | engines' hits / queries | TTFT p50 s | longest s | paused turns | failed |")
        print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for at_once in args.at_once.split(","):
            for name in NAMES:
                row = measure(args, model, name, engines, int(at_once))
                worse |= row["failed"] > 0
                print(f"| {at_once} | {name} | {row['rate']:.2f} | {row['hits']:.3f} | {row['hits'] / row['possible']:.2f} | {row['engines']:.3f} "
                      f"| {row['p50']:.2f} | {row['longest']:.1f} | {row['paused']} | {row['failed']} |", flush=True)
    finally:
        for engine in engines:
            if engine.process:
                engine.process.stop()
    sys.exit(worse)


if __name__ == "__main__":
    main()
