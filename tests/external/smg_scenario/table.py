"""Prints what run.sh has measured, means of all seeds, and fails where a bar is missed."""

import json
import pathlib
import statistics
import sys

# What SMG states for its shared index, at the same load (smg-project/smg, pull request 2438, read 29 November 2026).
SMG_BEST = 0.878
OF_ONE = 0.99
NAMES = {
    "events-1": "one, KV events",
    "events-8": "eight, KV events",
    "told-1": "one, no events",
    "told-8": "eight, told placements",
    "told-8-early": "eight, told placements, words ten times as often",
    "alone-8": "eight, no events, nothing told",
}


def main():
    folder, seeds = pathlib.Path(sys.argv[1]), sys.argv[2:]
    runs = {}
    for name in NAMES:
        of_name = [json.loads((folder / f"{seed}-{name}.json").read_text())["runs"][0] for seed in seeds]
        later = [run["sessions"]["later_turns"] for run in of_name]
        runs[name] = {
            "cached": statistics.mean(turn["cached"] for turn in later),
            "same": statistics.mean(turn["same_worker"] for turn in later),
            "all": statistics.mean(run["cached"] for run in of_name),
            "mean": statistics.mean(run["ttft"]["mean"] for run in of_name),
            "p99": statistics.mean(run["ttft"]["p99"] for run in of_name),
        }
        possible = statistics.mean(turn["possible"] for turn in later)
    print(f"later turns: an unbounded cache would have {possible:.3f} of their tokens; seeds {' '.join(seeds)}")
    print("| gateways | later turns cached | of one | at the same worker | all cached | TTFT mean, ms | p99, ms |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for name, title in NAMES.items():
        run, one = runs[name], runs["events-1" if name.startswith("events") else "told-1"]
        of_one = run["cached"] / one["cached"]
        print(
            f"| {title} | {run['cached']:.3f} | {of_one:.3f} | {run['same']:.3f} | {run['all']:.3f} "
            f"| {run['mean']:.0f} | {run['p99']:.0f} |"
        )
        if name.endswith("-8") and not name.startswith("alone") and (run["cached"] < SMG_BEST or of_one < OF_ONE):
            missed.append(title)
    if missed:
        sys.exit(f"below {SMG_BEST}, or {OF_ONE} of one gateway: {', '.join(missed)}")


if __name__ == "__main__":
    main()
