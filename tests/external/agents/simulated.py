"""The tables of simulated.md. See simulated.sh."""

import json
import subprocess
import sys

LOADTEST, TRIES, *TABLES = sys.argv[1:]
CACHE_TOKENS = 65_536
# The setup of cliff.py: blocks of 16 tokens, time ten times as fast, conversations of 8,870 tokens on the average.
FLEET = {"--workers": 4, "--profile": "fcfs-6k", "--kv-blocks": CACHE_TOKENS // 16, "--engine-speed": 10}
AGENTS = {"--think-time": "exp(200ms)", "--prefix-groups": 400}
MEAN_TOKENS = 8_870
VARIED = {
    "exp(200ms)": {},
    "200ms": {"--think-time": "200ms"},
    "lognormal(200ms,400ms)": {"--think-time": "lognormal(200ms,400ms)"},
    "100ms, one in ten 2s": {"--think-time": "100ms", "--slow": 0.1, "--slow-time": "2s"},
    "a tenth of the speed": {"--think-time": "exp(2s)", "--engine-speed": 1},
    "2 to 38 turns": {"--turns": "uniform(2,38)"},
    "turns of any size": {"--isl": "lognormal(600,900)"},
    "larger, larger caches": {"--kv-blocks": 16_384, "--isl": 2_000, "--prefix-len": 10_000, "--osl": 100},
    "16 workers": {"--workers": 16},
    "1 worker": {"--workers": 1},
}
SUB_AGENTS = {"--spawns": 0.2, "--prefix-groups": 1}


def simulate(at_once, options, flags=(), sessions_each=10):
    every = {"--agents": at_once * sessions_each, "--sessions": at_once, "--policy": "prefix"} | FLEET | AGENTS | options
    words = [str(word) for option in every.items() for word in option]
    done = subprocess.run([LOADTEST, "simulate", "--index-knows-capacity", "--json", *words, *flags], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    run = json.loads(done.stdout)["runs"][0]
    return run, run["sessions"]


def row(*cells):
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def head(*cells):
    row(*cells)
    print("|---" + "|---:" * (len(cells) - 1) + "|")


def cells(run, of):
    paused = of["paused"] or {"n": 0, "max": 0.0}
    job = of["job"]
    return [f"{of['requests_per_s']:.1f}", f"{of['cached']:.3f}", f"{of['of_possible']:.3f}", *(f"{job[p] / 1e3:.1f}" for p in ("mean", "p50", "p90", "p99")),
            paused["n"], f"{paused['max'] / 1e3:.1f}", run["preemptions"]]


FIGURES = ["requests/s", "hits", "of possible", "job s", "p50", "p90", "p99", "paused turns", "longest s", "preempted"]


def cliff():
    head("pauses", "at once", *FIGURES)
    for at_once in (14, 29, 58, 116):
        row("yes", at_once, *cells(*simulate(at_once, {})))
        row("no", at_once, *cells(*simulate(at_once, {}, ["--no-pauses"])))


def mean_tokens(options):
    return options.get("--prefix-len", 2_000) + 10.5 * options["--isl"] + 9.5 * 60 if isinstance(options.get("--isl"), int) else MEAN_TOKENS


def vary():
    head("what differs", "× caches", "at once", "pauses", *FIGURES)
    for name, options in VARIED.items():
        for times in (1, 2):
            tokens = options.get("--workers", 4) * options.get("--kv-blocks", 4_096) * 16
            at_once = round(times * tokens / mean_tokens(options))
            for said, flags in (("yes", []), ("no", ["--no-pauses"])):
                row(name, times, at_once, said, *cells(*simulate(at_once, options, flags, sessions_each=6)))


def sub_agents():
    head("known by", "sessions at once", "requests/s", "hits", "of possible", "optimum", "of it", "hindsight", "of it")
    for at_once in (11, 23, 45):
        for said, flags in (("first message", []), ("name", ["--session-names"])):
            _, of = simulate(at_once, SUB_AGENTS, ["--optimum", "--hindsight", TRIES, *flags], sessions_each=6)
            shares = (of[share] for share in ("cached", "of_possible", "optimum", "of_optimum", "hindsight", "of_hindsight"))
            row(said, at_once, f"{of['requests_per_s']:.1f}", *(f"{share:.3f}" for share in shares))


for number, table in enumerate(TABLES or ["cliff", "vary", "sub-agents"]):
    print("\n" if number else "", end="")
    {"cliff": cliff, "vary": vary, "sub-agents": sub_agents}[table]()
