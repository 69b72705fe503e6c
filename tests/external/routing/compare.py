"""Runs every router that has no undisturbed result yet, and prints the table of all there are."""

import argparse
import datetime
import itertools
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

import drive
import routers
import trace

WORKERS = 8
# More than this of a core used by others spoils a run.
FOREIGN_CORES_MAX = 0.1
ATTEMPTS = 3


def main():
    args = arguments()
    requests = trace.load(args.trace, args.minutes * 60)
    distinct = trace.distinct_blocks(requests)
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    for cache, block in itertools.product(args.cache, args.block_tokens):
        for repeat in range(1, args.repeats + 1):
            for name in args.router:
                attempts(args, requests, distinct, name, (cache, block), repeat)
    if not args.no_table:
        (args.out / "table.md").write_text(table(args, requests, distinct))
        print((args.out / "table.md").read_text())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True, help="Mooncake's conversation trace")
    parser.add_argument("--minutes", type=float, default=30, help="of the trace")
    parser.add_argument("--warm-minutes", type=float, default=5, help="that do not count")
    parser.add_argument("--speed", type=float, default=20, help="seconds of the trace in one")
    parser.add_argument("--output-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--cache", type=int, nargs="+", default=[25, 60], help="of the distinct blocks, in per cent")
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16], help="of a block of the workers' caches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--router", nargs="+", choices=routers.NAMES, default=routers.NAMES, metavar="NAME")
    parser.add_argument("--keep-disturbed", action="store_true", help="count runs that others disturbed")
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--bin-dir", type=pathlib.Path, required=True)
    parser.add_argument("--scratch", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results; what is there is not run again")
    return parser.parse_args()


# --- runs ------------------------------------------------------------------------------------------------------------


def files_of(args, name, cache, block, repeat):
    """The results of a router; those at 16 tokens a block name no size."""
    size = "" if block == 16 else f"-b{block}"
    return args.out / f"{name}.{cache}{size}.{repeat}.json"


def attempts(args, requests, distinct, name, caches, repeat):
    result = files_of(args, name, *caches, repeat)
    for _ in range(ATTEMPTS):
        if result.exists():
            return
        found = run(args, requests, distinct, name, caches, args.out / f"{result.stem}.metrics.txt")
        disturbed = found["foreign_cores"] > FOREIGN_CORES_MAX and not args.keep_disturbed
        if disturbed:
            count = len(list(args.out.glob(f"{result.stem}.disturbed-*.json")))
            (args.out / f"{result.stem}.disturbed-{count + 1}.json").write_text(json.dumps(found, indent=1))
        else:
            result.write_text(json.dumps(found, indent=1))
        print(f"{result.stem}{' disturbed' if disturbed else ''}: {json.dumps(found)}", flush=True)


def run(args, requests, distinct, name, caches, metrics):
    cache, block = caches
    processes = []
    try:
        blocks = distinct * cache // 100 * trace.BLOCK // block // WORKERS
        fleet, mock = start_mock(args, processes, (blocks, block), routers.GAUGES.get(name, "vllm"))
        ports = []
        while len(ports) < routers.TOGETHER.get(name, 1):
            # Two side by side each, all of them before the first is in use.
            port = free_ports()
            ports += [port] if all(abs(port - other) > 1 for other in ports) else []
        started = [start_router(args, processes, (fleet, block), name, port, ports) for port in ports]
        found = drive.measure(
            [f"http://127.0.0.1:{port}" for port in ports],
            requests,
            speed=args.speed,
            warm_s=args.warm_minutes * 60,
            model="mock",
            ids=name in routers.BY_EVENTS,
            sessions=name in routers.BY_SESSION,
            output_tokens=args.output_tokens,
            router_pids=[router.pid for router in started],
            other_pids=[mock.pid],
        )
        # What the router says of itself: whether it took the events, or routed blind.
        pages = [urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=10).read() for port in ports]
        metrics.write_bytes(b"".join(pages))
        pages = [urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode() for url, _, _ in fleet]
        found["prompt_tokens"] = [counted(page, "prompt_tokens") for page in pages]
        cached = [counted(page, "prefix_cache_hits|cached_tokens") for page in pages]
        found["computed_tokens"] = [came - had for came, had in zip(found["prompt_tokens"], cached)]
        return found
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGKILL)
            process.wait()


def start(processes, command, log):
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*", "RUST_LOG": os.environ.get("RUST_LOG", "warn")}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    processes.append(process)
    return process


def start_router(args, processes, fleet, name, port, ports):
    """A router that passes requests on at a port, among those at all of `ports`; its metrics are at the next one."""
    files = f"{name}-{ports.index(port) + 1}"
    log = args.scratch / f"{files}.log"
    router = start(processes, routers.command(name, *fleet, port, ports, args, files), log)
    ready(f"http://127.0.0.1:{port}", router, log)
    return router


def start_mock(args, processes, cache, gauges):
    blocks, block = cache
    command = [str(args.bin_dir / "keyway-loadtest"), "mock", "--profile", "fcfs-6k", "--workers", str(WORKERS)]
    command += ["--base-port", "0", "--time-scale", str(args.speed), "--kv-blocks", str(blocks), "--kv-events"]
    command += ["--block-size", str(block)]
    command += ["--kv-events-base-port", "0", "--kv-replay-base-port", "0", "--threads", "1", "--metrics", gauges, "--render"]
    log = args.scratch / "mock.log"
    mock = start(processes, command, log)
    line = re.compile(r"ready on ([^\s,]+).*KV events on ([^\s,]+),? replay on ([^\s,]+)")
    for _ in range(600):
        fleet = line.findall(log.read_text())
        if len(fleet) == WORKERS:
            return fleet, mock
        if mock.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit(f"the mock did not start: {log.read_text()[-500:]}")


def ready(url, process, log):
    """Waits until the router passes a request on; which of its probes says so differs."""
    body = json.dumps({"model": "mock", "prompt": "ready?", "max_tokens": 1}).encode()
    ask = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(ask, timeout=10).read()
        except OSError:
            time.sleep(0.1)
            continue
        time.sleep(3)  # Until all of the workers, and their events, are known.
        return
    sys.exit(f"{log} says why it did not start: {log.read_text()[-800:]}")


def free_ports():
    """The first of two ports side by side that nobody listens on."""
    import socket

    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def counted(page, names):
    """A worker's counter, by vLLM's or SGLang's name."""
    return sum(float(value) for value in re.findall(rf"^(?:vllm|sglang):(?:{names})_total(?:\{{[^}}]*\}})? (\S+)$", page, re.M))


# --- table -----------------------------------------------------------------------------------------------------------


def table(args, requests, distinct):
    today = datetime.date.today().isoformat()
    lines = [
        f"{today}, {os.cpu_count()} cores: {len(requests)} requests of {args.minutes:g} minutes, the first"
        f" {args.warm_minutes:g} as warm-up, at {args.speed:g} times their speed; {WORKERS} workers. Medians; times in s of"
        " the trace."
    ]
    for cache, block in itertools.product(args.cache, args.block_tokens):
        ratio, ttft = trace.pooled(requests, distinct * cache // 100, args.warm_minutes * 60, block)
        lines += [
            "",
            f"Caches of {cache} % of {distinct} distinct blocks, in blocks of {block} tokens:",
            "",
            "| router | runs | cached | of pooled | TTFT mean | p50 | p90 | p99 | within 5 s | most of mean: prompt tokens | computed | CPU ms | failed |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        best = trace.quantiles(ttft)
        times = " | ".join(f"{best[key]:.2f}" for key in ("mean", "p50", "p90", "p99"))
        lines.append(f"| *pooled LRU, no queue* | | {ratio:.3f} | 1 | {times} | {sum(t <= 5 for t in ttft) / len(ttft):.1%} | | | |")
        for name in args.router:
            files = [files_of(args, name, cache, block, repeat) for repeat in range(1, 10)]
            runs = [json.loads(file.read_text()) for file in files if file.exists()]
            runs = [run for run in runs if run["ttft"]]
            if runs:
                lines.append(row(name, runs, ratio))
    spoilt = sorted(file.stem for file in args.out.glob("*.disturbed-*.json"))
    return "\n".join([*lines, "", f"Discarded, because others used the machine: {', '.join(spoilt) or 'none'}.", ""])


def row(name, runs, pooled):
    median = lambda of: statistics.median(map(of, runs))
    cached = median(lambda run: run["cached"])
    times = " | ".join(f"{median(lambda run: run['ttft'][key]):.2f}" for key in ("mean", "p50", "p90", "p99"))
    most = lambda tokens: max(tokens) * WORKERS / max(sum(tokens), 1)
    load = " | ".join(f"{median(lambda run: most(run[what])):.2f}" for what in ("prompt_tokens", "computed_tokens"))
    good, cpu = median(lambda run: run["good"]), median(lambda run: run["router_cpu_ms"])
    failed = sum(run["failed"] for run in runs)
    return (
        f"| {name} | {len(runs)} | {cached:.3f} | {cached / pooled:.2f} | {times} | {good:.1%} | {load} | {cpu:.1f}"
        f" | {failed} |"
    )


main()
