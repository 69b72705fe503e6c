"""Simulates fleets whose workers are for a part of requests, and fleets that fetch prefixes from each other; prints Markdown."""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

BINARY, TRACE, *WANTED = sys.argv[1:]
CONVERSATIONS = ["--trace", TRACE, "--spread-bursts", "--slice", "0s..30m", "--profile", "fcfs-6k", "--kv-blocks", "23461",
                 "--block-size", "64", "--index-block-tokens", "64", "--index-knows-capacity", "--policy", "prefix", "--itl"]
AGENTS = ["--agents", "400", "--turns", "20", "--isl", "600", "--osl", "200", "--think-time", "exp(2s)", "--prefix-len", "2000",
          "--profile", "fcfs-6k", "--kv-blocks", "16384", "--index-knows-capacity", "--policy", "prefix", "--itl"]


def figures(options, seed=0):
    done = subprocess.run([BINARY, "simulate", *options, "--hash-seed", str(seed), "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"simulate {' '.join(options)}: {done.stderr.strip()}")
    return json.loads(done.stdout)["runs"][0]


def mean(runs):
    """Figure by figure: seeds break ties otherwise, which moves a p99 by some percent."""
    if any(run is None for run in runs):
        return None
    if isinstance(runs[0], dict):
        return {key: mean([run[key] for run in runs]) for key in runs[0]}
    return statistics.mean(runs) if isinstance(runs[0], (int, float)) else runs[0]


def table(head, rows, seeds=5):
    """Rows of a name and the options that it stands for, in the order given; means of so many seeds."""
    with ThreadPoolExecutor(2) as pool:
        every = [(options, seed) for _, options in rows for seed in range(seeds)]
        found = list(pool.map(lambda run: figures(*run), every))
    runs = [mean(found[i : i + seeds]) for i in range(0, len(found), seeds)]
    print(f"| {head} | split or fetched | cached | TTFT mean s | p50 | p99 | ITL p50 ms | p99 | to the last token, mean s |")
    print("|---" * 9 + "|")
    for (name, _), run in zip(rows, runs):
        moved = (run["split"] + run["pulled"]) / run["requests"]
        ttft, itl = run["ttft"], run["itl"]
        print(f"| {name} | {moved:.0%} | {run['cached']:.3f} | {ttft['mean'] / 1e3:.2f} | {ttft['p50'] / 1e3:.2f} "
              f"| {ttft['p99'] / 1e3:.1f} | {itl['p50']:.0f} | {itl['p99']:.0f} | {run['e2e']['mean'] / 1e3:.1f} |")
    print()


WAYS = (("wherever it costs less", "auto"), ("all elsewhere", "always"), ("none elsewhere", "never"))


def split():
    """Eight workers, some of them for prefill, at three loads."""
    for load, scale in (("0.5", "0.66"), ("0.75", "1"), ("0.95", "1.27")):
        base = [*CONVERSATIONS, "--workers", "8", "--time-scale", scale]
        rows = [("each worker does all", base)]
        for prefill in (4, 5, 6):
            rows += [(f"{prefill} for prefill, {name}", [*base, "--prefill", str(prefill), "--split", way]) for name, way in WAYS]
        print(f"Conversations at {load} of what eight workers can compute:\n")
        table("eight workers", rows)
    base = [*AGENTS, "--workers", "8", "--sessions", "64"]
    rows = [("each worker does all", base)]
    for prefill in (2, 4):
        rows += [(f"{prefill} for prefill, {name}", [*base, "--prefill", str(prefill), "--split", way]) for name, way in WAYS]
    print("Agents, 64 at once:\n")
    table("eight workers", rows)


def fleet():
    """64 workers."""
    base = [*CONVERSATIONS, "--workers", "64", "--rate", "28", "--repeat", "2"]
    rows = [("each worker does all", base)]
    for prefill in (40, 48):
        rows += [(f"{prefill} for prefill, {name}", [*base, "--prefill", str(prefill), "--split", way]) for name, way in WAYS[:2]]
    table("64 workers", rows, seeds=2)


def pull():
    """Prefixes fetched from other workers."""
    base = [*CONVERSATIONS, "--workers", "8"]
    rows = [("none fetches", base)]
    rows += [(f"{gbit} Gbit/s", [*base, "--pull", "--kv-gbit", gbit]) for gbit in ("5", "10", "25", "100", "400")]
    table("eight workers", rows)
    one = ["--workers", "1", "--engine-speed", "20"]
    pooled = figures([str(8 * 23461) if option == "23461" else option for option in CONVERSATIONS] + one)
    print(f"One pooled cache of the same size finds {pooled['cached']:.3f}.\n")


PARTS = {"split": split, "fleet": fleet, "pull": pull}
for part in WANTED or PARTS:
    if part not in PARTS:
        sys.exit(f"{part}: one of {', '.join(PARTS)}")
    PARTS[part]()
