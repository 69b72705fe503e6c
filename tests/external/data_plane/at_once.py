"""What one build of keyway takes more than another, both at the same time on one core: whatever disturbs the machine disturbs both, so that
a fiftieth shows within minutes. They change places, as who is second has it a little easier. See run.sh."""

import argparse
import concurrent.futures
import contextlib
import math
import os
import pathlib
import select
import shutil
import statistics
import sys
import tempfile
import time

import bench

PORTS = (9130, 9140)
PLACES = ("base", "keyway"), ("keyway", "base")


class Streams:
    """32 streams through each proxy, one after the other on each connection, read by one client in the order in which they come."""

    def __init__(self, ports):
        self.poll, self.open, self.events = select.epoll(), {}, [0] * len(ports)
        for _ in range(32):
            for place, port in enumerate(ports):
                stream = bench.Stream(port)
                self.poll.register(stream.sock.fileno(), select.EPOLLIN)
                self.open[stream.sock.fileno()] = place, stream
                # Each begins in a phase of its own.
                time.sleep(0.0047)
                stream.ask()

    def read(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for fd, _ in self.poll.poll(0.1):
                place, stream = self.open[fd]
                data = stream.sock.recv(1 << 16)
                assert data, "a connection was closed"
                self.events[place] += data.count(b"data: {")
                stream.tail = (stream.tail + data)[-5:]
                if stream.tail == bench.END:
                    stream.ask()

    def close(self):
        for _, stream in self.open.values():
            stream.sock.close()


def event_us(processes, seconds):
    streams = Streams(PORTS)
    streams.read(0.5)
    before, counted = [bench.cpu_ns(process.pid) for process in processes], streams.events[:]
    streams.read(seconds)
    after = [bench.cpu_ns(process.pid) for process in processes]
    streams.close()
    return [(b - a) / 1e3 / (now - then) for a, b, then, now in zip(before, after, counted, streams.events)]


def request_us(processes, size, seconds):
    def one(place):
        return bench.measured(processes[place], lambda: bench.unary(PORTS[place], size, seconds))

    with concurrent.futures.ThreadPoolExecutor() as both:
        return [result["cpu_us"] / result["requests"] for result in both.map(one, range(2))]


@contextlib.contextmanager
def proxies(args, scratch, places, backends):
    """Both, in this order."""
    started = []
    try:
        for name, port in zip(places, PORTS):
            started.append(bench.Proxies(args, scratch, port).start(name, backends))
        yield started
    finally:
        for process in started:
            bench.stop(process)


def measure(args, scratch):
    rows = {"unary 1 KB": [], "unary 32 KB": [], "event": []}
    for nth in range(2 * args.repeats):
        places = PLACES[nth % 2]
        ordered = lambda pair: pair if places[0] == "base" else pair[::-1]
        if args.only != "streams":
            with proxies(args, scratch, places, bench.BACKENDS) as processes:
                request_us(processes, 1024, 1)
                for size, name in ((1024, "unary 1 KB"), (32768, "unary 32 KB")):
                    rows[name].append(ordered(request_us(processes, size, args.seconds)))
        if args.only != "unary":
            with proxies(args, scratch, places, [bench.STREAMS]) as processes:
                rows["event"].append(ordered(event_us(processes, args.seconds)))
        print(f"{nth + 1} of {2 * args.repeats}", file=sys.stderr, flush=True)
    return rows


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--keyway", required=True)
    parse.add_argument("--base", required=True, help="the build that it is compared with")
    parse.add_argument("--keyway-args", default="")
    parse.add_argument("--only", choices=["unary", "streams"])
    parse.add_argument("--repeats", type=int, default=8, help="of both orders")
    parse.add_argument("--seconds", type=int, default=2)
    args = parse.parse_args()
    args.backend = "plain"
    os.sched_setaffinity(0, bench.CORES["others"])
    scratch = pathlib.Path(tempfile.mkdtemp())
    backends = [bench.spawn(bench.unary_backend(args, scratch), "others"),
                bench.spawn([sys.executable, bench.HERE / "stream_backend.py", "--port", bench.STREAMS], "others")]
    try:
        for port in (*bench.BACKENDS, bench.STREAMS):
            bench.await_port(port)
        rows = measure(args, scratch)
    finally:
        for backend in backends:
            bench.stop(backend)
        shutil.rmtree(scratch, ignore_errors=True)
    print("| | base µs | keyway µs | more | standard error | pairs |\n|---|---|---|---|---|---|")
    for name, pairs in rows.items():
        if len(pairs) > 1:
            base, own = (statistics.median(side) for side in zip(*pairs))
            logs = [math.log(own / base) for base, own in pairs]
            more, error = statistics.mean(logs), statistics.stdev(logs) / len(logs) ** 0.5
            print(f"| {name} | {base:.2f} | {own:.2f} | {100 * math.expm1(more):+.1f} % | {100 * error:.1f} | {len(pairs)} |")


if __name__ == "__main__":
    main()
