"""Instructions in user space that a request and an event take in one build of keyway and in another: the same on any machine, however busy it
is. Each count is the difference between a longer run and a shorter one, so that starting and stopping are in neither. See run.sh."""

import argparse
import http.client
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import bench

PORT, ADMIN = 9150, 9151
SIZES = {"unary 1 KB": 1024, "unary 32 KB": 32768}


def prompts(size, new):
    """As those of unary.lua: 256 of them, or `new` ones without end."""
    shared = ("the quick brown fox jumps over the lazy dog, " * (size // 45 + 1))[:size // 2]
    for i in itertools.count() if new else range(256):
        own = (f"prompt {i} says this, " * (size // 16 + 1))[:size // 2]
        yield json.dumps({"model": "mock", "messages": [{"role": "system", "content": shared}, {"role": "user", "content": own}], "max_tokens": 1})


def requests(size, count, new):
    """So many, one after the other, on one connection."""
    # Each in one piece: how many come in two would differ from run to run.
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    asked = [(head % (len(body), body)).encode() for body in itertools.islice(prompts(size, new), count)]
    connection = socket.create_connection(("127.0.0.1", PORT), 60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for nth in range(count):
        connection.sendall(asked[nth % len(asked)])
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.read()[:1]) == (200, b"{"), answer.status
    connection.close()


def streams(count):
    """So many streams, one after the other, on one connection."""
    stream = bench.Stream(PORT)
    for _ in range(count):
        stream.ask()
        data = b""
        while not data.endswith(bench.END):
            more = stream.sock.recv(1 << 16)
            assert more, "the connection was closed"
            data += more
    stream.sock.close()


def instructions(binary, args, scratch, backends, work):
    """What a gateway takes from its start to its end, with this work in between."""
    log = scratch / "valgrind.log"
    workers = [part for port in backends for part in ("--worker", f"http://127.0.0.1:{port}")]
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={log}", binary, "--listen", f"127.0.0.1:{PORT}",
               "--admin-listen", f"127.0.0.1:{ADMIN}", *args.keyway_args.split(), *workers]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               env={**os.environ, "RUST_LOG": args.log}, preexec_fn=lambda: os.sched_setaffinity(0, {0}))
    try:
        bench.await_port(PORT)
        bench.await_port(ADMIN, "/readyz")
        work()
        time.sleep(0.2)
    finally:
        bench.stop(process)
    found = re.search(r"Collected\s*:\s*(\d+)", log.read_text())
    return int(found[1]) if found else sys.exit(f"valgrind says nothing: {log.read_text()[-500:]}")


def each(binary, args, scratch, backends, work, counts):
    """Instructions of one unit of the work."""
    fewer, more = (instructions(binary, args, scratch, backends, lambda count=count: work(count)) for count in counts)
    return (more - fewer) / (counts[1] - counts[0])


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--keyway", required=True)
    parse.add_argument("--base", required=True, help="the build that it is compared with")
    parse.add_argument("--keyway-args", default="")
    parse.add_argument("--new-prompts", action="store_true", help="half of each unary prompt was never sent before, instead of 256 prompts in turn")
    parse.add_argument("--log", default="warn", help="RUST_LOG: with `info` each request writes its line, as by default")
    parse.add_argument("--repeats", type=int, default=3)
    args = parse.parse_args()
    args.backend = "plain"
    scratch = pathlib.Path(tempfile.mkdtemp())
    backends = [bench.spawn(bench.unary_backend(args, scratch), "others"),
                bench.spawn([sys.executable, bench.HERE / "stream_backend.py", "--port", bench.STREAMS], "others")]
    rows = {name: lambda binary, size=size: each(binary, args, scratch, bench.BACKENDS, lambda count: requests(size, count, args.new_prompts), (500, 2500))
            for name, size in SIZES.items()}
    rows["event"] = lambda binary: each(binary, args, scratch, [bench.STREAMS], streams, (20, 80)) / bench.EVENTS
    print("| | base | keyway | more | from run to run |\n|---|---:|---:|---:|---:|")
    try:
        for port in (*bench.BACKENDS, bench.STREAMS):
            bench.await_port(port)
        for name, measure in rows.items():
            runs = [(measure(args.base), measure(args.keyway)) for _ in range(args.repeats)]
            base, own = (statistics.median(side) for side in zip(*runs))
            spread = max((max(side) - min(side)) / statistics.median(side) for side in zip(*runs))
            print(f"| {name} | {base:,.0f} | {own:,.0f} | {100 * (own / base - 1):+.2f} % | {100 * spread:.2f} % |", flush=True)
    finally:
        for backend in backends:
            bench.stop(backend)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
