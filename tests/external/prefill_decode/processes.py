"""The simulator's scenarios by processes: the same requests from the load tester through a gateway to a mock fleet whose workers have
roles and move KV, and how far each figure is from the simulator's."""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

KV_BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = "23461", "64", "256"
ENGINE = ["--profile", "fcfs-6k", "--kv-blocks", KV_BLOCKS, "--block-size", BLOCK_TOKENS]
SIMULATED = ["--spread-bursts", *ENGINE, "--index-block-tokens", BLOCK_TOKENS, "--index-knows-capacity", "--policy", "prefix", "--itl"]
# Of what comes in the trace's own time. At 1, workers for prefill have all that they can do for minutes, and a mean is chance.
WITH_ROLES = 0.66
# Name, the mock's workers for prefill, the gateway's [routing], the simulator's options, and how fast the trace goes by.
SCENARIOS = {
    "alone": (0, 'pull = "never"', [], 1),
    "pull": (0, 'pull = "auto"', ["--pull"], 1),
    "split": (5, 'split = "auto"\npull = "never"', ["--prefill", "5"], WITH_ROLES),
    "always": (5, 'split = "always"\npull = "never"', ["--prefill", "5", "--split", "always"], WITH_ROLES),
}


def started(command, log, words):
    """A process, and the addresses that its log names behind some words."""
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    for _ in range(600):
        found = re.findall(words, log.read_text())
        if found:
            return process, found
        if process.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit(f"{command[0]} does not start; see {log}")


def metric(admin, name, **labels):
    text = urllib.request.urlopen(f"{admin}/metrics", timeout=10).read().decode()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = (line for line in text.splitlines() if line.startswith(name) and all(label in line for label in wanted))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def measured(options, name):
    """One run of processes."""
    prefill, routing, _, pace = SCENARIOS[name]
    speed = options.time_scale
    out = Path(options.out) / name
    out.mkdir(parents=True, exist_ok=True)
    mock = [options.bin_dir / "keyway-loadtest", "mock", "--workers", str(options.workers), "--base-port", "0", *ENGINE,
            "--time-scale", str(speed), "--kv-transfers", "--prefill", str(prefill)]
    fleet, urls = started(mock, out / "mock.log", r"worker \d+ ready on (http://\S+)")
    role = (lambda i: "both") if prefill == 0 else (lambda i: "prefill" if i < prefill else "decode")
    config = out / "keyway.toml"
    # The gateway's own times, in the fleet's time.
    config.write_text(f"[routing]\nblock_bytes = {BLOCK_BYTES}\nhold_horizon_ms = {500 / speed}\nload_scrape_ms = {int(1000 / speed)}\n"
                      f"slow_start_ms = 0\n{routing}\n"
                      + "".join(f'[[worker]]\nurl = "{url}"\nrole = "{role(i)}"\n' for i, url in enumerate(urls)))
    keyway = [options.bin_dir / "keyway", "--config", config, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    gateway, [admin] = started(keyway, out / "gateway.log", r"admin on (http://\S+)")
    try:
        url = re.search(r"listening on (http://\S+)", wait_for(out / "gateway.log", "listening on")).group(1)
        while sum(worker["state"] == "ready" for worker in json.load(urllib.request.urlopen(f"{admin}/workers"))) < options.workers:
            time.sleep(0.1)
        load = [options.bin_dir / "keyway-loadtest", "run", "--url", url, "--workload", "trace", "--trace", options.trace, "--slice",
                options.slice, "--spread-bursts", "--time-scale", str(speed * pace), "--text-seed", "1", "-o", out / "run"]
        done = subprocess.run(load, stdout=(out / "table.txt").open("w"), stderr=subprocess.STDOUT, check=False)
        if done.returncode not in (0, 1, 3):
            sys.exit(f"the load test ended with {done.returncode}; see {out}")
        run = json.loads((out / "run" / "run.json").read_text())
        ways = {way: metric(admin, "keyway_prompt_ways_total", way=way) for way in ("split", "pull")}
        pulls = metric(admin, "keyway_kv_pulls_total")
        missed = (pulls - metric(admin, "keyway_kv_pulls_total", outcome="done")) / max(pulls, 1)
    finally:
        for process in (gateway, fleet):
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    ttft, itl = run["response"]["ttft"], run["itl"]
    return {
        "moved": sum(ways.values()) / run["requests"]["sent"], "cached": run["cache"]["achieved"], "missed": missed,
        "mean": ttft["mean"] * speed / 1e3, "p99": ttft["p99"] * speed / 1e3, "itl p99": itl["p99"] * speed,
        "failed": run["requests"]["failed"], "verdict": f"{run['verdict']['status']}: {run['verdict']['reason']}",
    }


def wait_for(log, words):
    for _ in range(600):
        if words in log.read_text():
            return log.read_text()
        time.sleep(0.05)
    sys.exit(f"no '{words}' in {log}")


def simulated(options, name):
    """The same in virtual time."""
    _, _, extra, pace = SCENARIOS[name]
    command = [options.bin_dir / "keyway-loadtest", "simulate", "--trace", options.trace, "--slice", options.slice, *SIMULATED,
               "--workers", str(options.workers), "--time-scale", str(pace), *extra, "--json"]
    run = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["runs"][0]
    return {
        "moved": (run["split"] + run["pulled"]) / run["requests"], "cached": run["cached"], "mean": run["ttft"]["mean"] / 1e3,
        "p99": run["ttft"]["p99"] / 1e3, "itl p99": run["itl"]["p99"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"some of {', '.join(SCENARIOS)}; all by default")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--bin-dir", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--slice", default="0s..30m")
    parser.add_argument("--time-scale", type=float, default=10)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    print("| scenario | | moved | cached | TTFT mean s | p99 s | ITL p99 ms |")
    print("|---" * 7 + "|")
    far = []
    for name in options.scenarios or SCENARIOS:
        virtual, real = simulated(options, name), measured(options, name)
        for title, row in (("simulated", virtual), ("processes", real)):
            print(f"| {name} | {title} | {row['moved']:.0%} | {row['cached']:.3f} | {row['mean']:.2f} | {row['p99']:.1f} "
                  f"| {row['itl p99']:.0f} |", flush=True)
        # Blocks leave a cache between a choice and its fetch at times.
        if real["failed"] or real["missed"] > 0.05:
            far.append(f"{name}: {real['failed']} requests failed, {real['missed']:.0%} of pulls did not come")
        if not real["verdict"].startswith("valid"):
            print(f"note {name}: {real['verdict']}")
        for figure in ("cached", "mean"):
            off = real[figure] / virtual[figure] - 1
            if abs(off) > 0.1:
                far.append(f"{name}: {figure} is {off:+.0%} from the simulator's")
    print()
    print("\n".join(far) or "cached tokens and mean times to first token are within 10 % of the simulator's")
    sys.exit(bool(far))


main()
