"""The table of run.sh and its bars, against a run in which nothing was said before the first token: TTFT, mean and p99, by the
client's clock within 5 %; the prefill rates that the gateway has learned within 10 %. Figures are the means over the keys of run.sh."""

import json
import pathlib
import re
import sys

TTFT_SHARE, RATE_SHARE = 0.05, 0.10


def figures(folder, run, keys):
    each = [figures_of(folder, f"{run}.{key}") for key in range(1, keys + 1)]
    sums = {name: sum(figures[name] for figures in each) for name in each[0]}
    return {name: value if name in ("ok", "failed") else value / keys for name, value in sums.items()}


def figures_of(folder, run):
    report = json.loads((folder / f"{run}.out" / "run.json").read_text())
    metrics = (folder / f"{run}.metrics").read_text()
    rates = [float(value) for value in
             re.findall(r"^keyway_worker_prefill_tokens_per_second\{[^}]*\} (\S+)$", metrics, re.MULTILINE)]
    total, count = (sum(float(value) for value in re.findall(
        rf"^keyway_time_to_first_token_seconds_{which}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE))
        for which in ("sum", "count"))
    ttft = report["service"]["ttft"]
    return {"ok": report["requests"]["ok"], "failed": report["requests"]["failed"],
            "mean": ttft["mean"], "p50": ttft["p50"], "p99": ttft["p99"], "rate": sum(rates) / max(len(rates), 1),
            "own": 1000 * total / max(count, 1)}


def main():
    folder, keys, runs = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    base, missed = {}, []
    print("| API | said first | ok | TTFT mean | p50 | p99 | the gateway's own mean | prefill rate learned |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for run in runs:
        api, first = run.split("-")
        now = figures(folder, run, keys)
        against = base.setdefault(api, now)

        def cell(key, unit):
            change = now[key] / against[key] - 1 if against[key] else float("inf")
            return f"{now[key]:,.0f} {unit}" + ("" if against is now else f" ({change:+.1%})"), abs(change)

        cells = {key: cell(key, "tokens/s" if key == "rate" else "ms") for key in ("mean", "p50", "p99", "own", "rate")}
        print(f"| {api} | {first} | {now['ok']} | " + " | ".join(text for text, _ in cells.values()) + " |")
        bars = {"mean": TTFT_SHARE, "p99": TTFT_SHARE, "rate": RATE_SHARE}
        missed += [f"{run}: {key} {cells[key][0]}" for key, bar in bars.items() if cells[key][1] > bar]
        missed += [f"{run}: {now['failed']} requests failed"] if now["failed"] else []
    sys.exit("\n".join(["missed:", *missed]) if missed else 0)


if __name__ == "__main__":
    main()
