"""Every policy of the gateway and every formula of another router over the workloads that hurt one or the other, in virtual
time (`keyway-loadtest simulate`): 8, 64 and 512 workers at 0.5, 0.8 and 0.95 of what they can compute without any cache,
five seeds each. Prints a table and the bar: `prefix` is never worse than `least-loaded` in TTFT p99 by more than 2 %, unless
the seeds' confidence intervals overlap.

    python3 tests/external/routing/simulate.py --bin target/release/keyway-loadtest [--trace conversation_trace.jsonl]

It takes hours on two cores; with --out what was run is kept, so that pieces (--workload, --workers, --policy, --seeds) add up.

With --gateways it compares several gateways that decide for themselves with one, over the trace: the share of prompt tokens
found cached, and TTFT.
"""

import argparse
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

BLOCK = 512
RATE = 6000
POLICIES = ["prefix", "least-loaded", "power-of-two", "chwbl", "lmetric", "dynamo", "threshold"]
KINDS = ["one block shared", "one prefix half", "never repeats", "shared prefixes", "agents"]
# Student's t for 95 % and few samples, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}


def prompts(kind, rng):
    """Endless block lists of one workload."""
    fresh = iter(range(10**6, 10**9))
    new = lambda n: [next(fresh) for _ in range(n)]
    if kind == "one block shared":
        while True:
            yield [0] + new(rng.randint(2, 30))
    if kind == "one prefix half":
        hot = new(40)
        while True:
            yield (hot if rng.random() < 0.5 else []) + new(rng.randint(1, 12))
    if kind == "never repeats":
        while True:
            yield new(rng.randint(1, 40))
    if kind == "shared prefixes":
        groups = [new(rng.randint(4, 40)) for _ in range(200)]
        while True:
            # A few are asked for much more often than the rest.
            yield groups[min(int(rng.paretovariate(0.8)) - 1, 199)] + new(rng.randint(1, 8))
    if kind == "agents":
        tools, talks = new(20), []
        while True:
            if len(talks) < 300 or rng.random() < 0.05:
                talks.append(tools + new(rng.randint(4, 40)))
                talks = talks[-300:]
            talk = rng.choice(talks)
            talk += new(rng.randint(1, 3))
            yield list(talk) if len(talk) < 220 else list(talk[:220])


def write(path, kind, seed, requests, rate):
    """A trace of random arrivals in Mooncake's format; `rate` in prompt tokens a second."""
    rng = random.Random(f"{kind} {seed}")
    rows, source = [], prompts(kind, rng)
    for _ in range(requests):
        rows.append(next(source))
    mean = sum(len(row) for row in rows) * BLOCK / len(rows)
    at = 0.0
    with open(path, "w") as out:
        for row in rows:
            at += rng.expovariate(rate / mean)
            fields = {"timestamp": round(at * 1000), "input_length": len(row) * BLOCK - 7}
            out.write(json.dumps({**fields, "output_length": rng.randint(8, 64), "hash_ids": row}) + "\n")


class Kept:
    """Figures of what was run, one line of JSON each, in a file or for this time only."""

    def __init__(self, path):
        self.path, self.known = path, {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.known[tuple(row["of"])] = row

    def of(self, policies, *run):
        """Of one trace, by policy, those that are known."""
        return {name: self.known[(*run, name)] for name in policies if (*run, name) in self.known}

    def add(self, runs, *run):
        for name, found in runs.items():
            row = {"of": [*run, name], "p99_s": found["ttft"]["p99"] / 1e3, "cached": found["cached"]}
            self.known[(*run, name)] = row
            if self.path:
                with open(self.path, "a") as out:
                    out.write(json.dumps(row) + "\n")


def simulate(args, policies, trace, workers, seed, more):
    command = [args.bin, "simulate", "--trace", trace, "--profile", "fcfs-6k", "--workers", str(workers), "--json"]
    command += ["--policy", ",".join(policies), "--seed", str(seed), "--hash-seed", str(seed)]
    command += [] if "--events" in more else ["--index-knows-capacity"]
    out = subprocess.run([*map(str, command), *map(str, more)], check=True, stdout=subprocess.PIPE)
    return {run["policy"]: run for run in json.loads(out.stdout)["runs"]}


def recorded(args, policies, workers, share, seed, more=()):
    """The trace of real conversations, at the rate that loads so many workers."""
    with open(args.trace) as lines:
        tokens = [json.loads(line)["input_length"] for line in lines][: max(args.requests, args.each * workers)]
    rate = share * workers * RATE / statistics.mean(tokens)
    options = ["--rate", str(rate), "--spread-bursts", "--requests", str(len(tokens)), *more]
    return simulate(args, policies, args.trace, workers, seed, options)


def gateways(args):
    """Several gateways beside one: who sees what it sent alone, who sees events too, and who sees the others' load as well,
    by gauges, in requests or in prompt tokens that wait, or because they tell each other."""
    knows = {
        "one, events": (1, ["--events"]),
        "events": (args.gateways, ["--events"]),
        "events, load": (args.gateways, ["--events", "--scrape", args.scrape]),
        "events, load, peers": (args.gateways, ["--events", "--scrape", args.scrape, "--peers", args.peers]),
        "events, tokens": (args.gateways, ["--events", "--scrape", args.scrape, "--gauges-count-tokens"]),
        "one, model": (1, []),
        "model": (args.gateways, []),
        "model, load": (args.gateways, ["--scrape", args.scrape]),
        "model, load, peers": (args.gateways, ["--scrape", args.scrape, "--peers", args.peers]),
    }
    print(f"{args.gateways} gateways, gauges read every {args.scrape}, peers every {args.peers}; means of the seeds\n")
    print("| workers | load | knows | cached | of one | TTFT mean | p50 | p99 | p99 of one | max/mean |")
    print(f"|{'---|' * 10}")
    for workers in args.workers:
        for share in args.load:
            for name, (count, more) in knows.items():
                more = ["--gateways", count, *more]
                runs = [recorded(args, ["prefix"], workers, share, seed, more)["prefix"] for seed in range(args.seeds)]
                mean = lambda of: statistics.mean(of(run) for run in runs)
                cached, p99 = mean(lambda run: run["cached"]), mean(lambda run: run["ttft"]["p99"] / 1e3)
                one = (cached, p99) if count == 1 else one
                rest = [mean(lambda run: run["ttft"][figure] / 1e3) for figure in ("mean", "p50")]
                print(
                    f"| {workers} | {share} | {name} | {cached:.3f} | {cached / one[0]:.3f} | {rest[0]:.2f} | {rest[1]:.2f} "
                    f"| {p99:.2f} | {p99 / one[1]:.2f} | {mean(lambda run: run['max_over_mean']):.2f} |",
                    flush=True,
                )


def interval(values):
    if len(values) < 2:
        return statistics.mean(values), 0.0
    return statistics.mean(values), STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def one(args, kept, kind, workers, share, seed):
    """Figures by policy of one trace; runs what is not kept."""
    requests = max(args.requests, args.each * workers)
    which = (kind, workers, share, requests, seed)
    missing = [name for name in args.policy if name not in kept.of(args.policy, *which)]
    if missing and kind == "recorded":
        kept.add(recorded(args, missing, workers, share, seed), *which)
    elif missing:
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder) / "trace.jsonl"
            write(trace, kind, seed, requests, share * workers * RATE)
            kept.add(simulate(args, missing, trace, workers, seed, []), *which)
    return kept.of(args.policy, *which)


def row(policies, runs):
    """The cells of one row, and whether `prefix` is worse than it may be."""
    p99 = {name: interval([run[name]["p99_s"] for run in runs]) for name in policies}
    cached = {name: statistics.mean(run[name]["cached"] for run in runs) for name in policies}
    (ours, ours_ci), (least, least_ci) = p99["prefix"], p99["least-loaded"]
    worse = ours > 1.02 * least and ours - ours_ci > least + least_ci
    return " | ".join(f"{p99[name][0]:.2f} ({cached[name]:.0%})" for name in policies), worse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="keyway-loadtest, a release build")
    parser.add_argument("--trace", help="Mooncake's conversation trace, beside the generated workloads")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.8, 0.95])
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--policy", nargs="+", default=POLICIES, choices=POLICIES, help="prefix and least-loaded among them")
    parser.add_argument("--workload", nargs="+", default=[*KINDS, "recorded"], choices=[*KINDS, "recorded"])
    parser.add_argument("--requests", type=int, default=3000, help="of each run")
    parser.add_argument("--each", type=int, default=20, help="requests of each worker at least")
    parser.add_argument("--out", type=pathlib.Path, help="file of what was run; what it has is not run again")
    parser.add_argument("--gateways", type=int, help="compare so many gateways with one, over the trace")
    parser.add_argument("--scrape", default="1s", help="how often they read the workers' gauges")
    parser.add_argument("--peers", default="50ms", help="how often they tell each other what they have")
    args = parser.parse_args()
    if args.gateways:
        return gateways(args)
    kinds = [kind for kind in args.workload if kind != "recorded" or args.trace]
    kept = Kept(args.out)
    print("TTFT p99 in s (cached share), means of the seeds\n")
    print(f"| workload | workers | load | {' | '.join(args.policy)} | |\n|{'---|' * (len(args.policy) + 4)}")
    missed = 0
    for kind in kinds:
        for workers in args.workers:
            for share in args.load:
                runs = [one(args, kept, kind, workers, share, seed) for seed in range(args.seeds)]
                text, worse = row(args.policy, runs)
                missed += worse
                print(f"| {kind} | {workers} | {share} | {text} | {'WORSE' if worse else 'ok'} |", flush=True)
    print(f"\n{missed} of the rows worse than least-loaded by more than 2 % outside the intervals")
    sys.exit(1 if missed else 0)


main()
