#!/usr/bin/env python3
"""What streams cost in the gateway's memory: thousands that are open and silent, and one that a client reads slowly while
the worker would send 200 MB. Resident memory is the kernel's own account (`VmRSS`), before and with them. With --http2 the
gateway speaks HTTP/2 with the worker, and the slow reader is left out.
"""

import argparse
import asyncio
import http.client
import json
import pathlib
import resource
import subprocess
import tempfile
import time

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "t"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
BIG_BYTES = 200_000_000


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


class Worker:
    """Answers a prompt "big" with a stream of 200 MB, any other with one event and silence."""

    def __init__(self):
        self.sent = 0

    async def serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(length[0]) if length else b""
                if head.startswith(b"GET"):
                    data = MODELS if b"/v1/models" in head.split(b"\r\n")[0] else b"ok"
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))
                    continue
                writer.write(HEAD + chunk(EVENT % b"first"))
                if b'"big"' in body:
                    event = chunk(EVENT % (b"x" * 1000))
                    while self.sent < BIG_BYTES:
                        writer.write(event)
                        await writer.drain()
                        self.sent += len(event)
                else:
                    await asyncio.sleep(3600)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it left, or the script ends


class Http2Worker:
    """The same over HTTP/2 with prior knowledge, as little of RFC 9113 as that takes: what has no body is a probe, what has one
    is answered with one event and silence. Request heads are not decoded, and answers' are from HPACK's static table."""

    PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
    END_STREAM, ACK, END_HEADERS = 1, 1, 4

    def __init__(self):
        self.connections = 0

    @staticmethod
    def frame(kind, flags, stream, payload):
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    def answer(self, stream, media_type, data, ends):
        # `:status: 200`, and content-type (31) as a literal that is not indexed.
        head = b"\x88\x0f\x10" + bytes([len(media_type)]) + media_type
        flags = self.END_STREAM if ends else 0
        return self.frame(self.HEADERS, self.END_HEADERS, stream, head) + self.frame(self.DATA, flags, stream, data)

    async def serve(self, reader, writer):
        try:
            if await reader.readexactly(len(self.PREFACE)) != self.PREFACE:
                return
            self.connections += 1
            writer.write(self.frame(self.SETTINGS, 0, 0, b""))
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind in (self.SETTINGS, self.PING) and not flags & self.ACK:
                    writer.write(self.frame(kind, self.ACK, 0, payload if kind == self.PING else b""))
                elif kind == self.HEADERS and flags & self.END_STREAM:
                    writer.write(self.answer(stream, b"application/json", MODELS, True))
                elif kind == self.DATA and flags & self.END_STREAM:
                    writer.write(self.answer(stream, b"text/event-stream", EVENT % b"first", False))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it left, or the script ends


def rss_mb(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


async def stream(port, prompt, limit=65536):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": prompt}]}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
                 b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b"\n\n")
    return reader, writer


async def silent_streams(args, pid):
    before, open_streams = rss_mb(pid), []
    for start in range(0, args.streams, 100):
        batch = [stream(args.port, f"prompt {i}") for i in range(start, min(start + 100, args.streams))]
        open_streams += await asyncio.gather(*batch)
    await asyncio.sleep(1)
    with_them = rss_mb(pid)
    for _, writer in open_streams:
        writer.close()
    await asyncio.sleep(2)
    return before, with_them, rss_mb(pid)


async def slow_reader(args, pid, worker):
    before = rss_mb(pid)
    reader, writer = await stream(args.port, "big", limit=2048)
    most, end = before, time.monotonic() + args.seconds
    while time.monotonic() < end:
        await reader.read(1024)
        await asyncio.sleep(1)
        most = max(most, rss_mb(pid))
    writer.close()
    return before, most, worker.sent


async def run(args):
    worker = Http2Worker() if args.http2 else Worker()
    server = await asyncio.start_server(worker.serve, "127.0.0.1", args.port + 10, backlog=4096)
    command = [args.keyway, "--listen", f"127.0.0.1:{args.port}", "--admin-listen", f"127.0.0.1:{args.port + 1}"]
    command += ["--worker", f"http://127.0.0.1:{args.port + 10}" + (";http2=true" if args.http2 else "")]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="keyway-memory-"))
    with open(folder / "log", "wb") as log:
        gateway = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(100):
            await asyncio.sleep(0.1)
            try:
                status = await asyncio.to_thread(readyz, args.port + 1)
            except OSError:
                continue
            if status == 200:
                break
        for _, writer in [await stream(args.port, "warm") for _ in range(20)]:
            writer.close()
        if not args.http2:
            before, most, sent = await slow_reader(args, gateway.pid, worker)
            print(f"slow reader, {args.seconds} s at 1 KB/s: {before:.1f} MB before, {most:.1f} MB at most "
                  f"(+{most - before:.2f}); the worker could send {sent / 1e6:.1f} of 200 MB", flush=True)
        before, held, after = await silent_streams(args, gateway.pid)
        print(f"{args.streams} silent streams: {before:.1f} MB before, {held:.1f} MB with them "
              f"({(held - before) * 1024 / args.streams:.1f} KB each), {after:.1f} MB after", flush=True)
        if args.http2:
            print(f"{worker.connections} connections to the worker so far", flush=True)
    finally:
        gateway.terminate()
        gateway.wait()
        server.close()


def readyz(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    connection.request("GET", "/readyz")
    return connection.getresponse().status


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keyway", required=True)
    parser.add_argument("--http2", action="store_true", help="to the worker")
    parser.add_argument("--streams", type=int, help="9000, or 10000 with --http2")
    parser.add_argument("--seconds", type=int, default=20, help="of the slow reader")
    parser.add_argument("--port", type=int, default=18520)
    args = parser.parse_args()
    args.streams = args.streams or (10000 if args.http2 else 9000)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < args.streams * (1.1 if args.http2 else 2) + 200:
        raise SystemExit(f"{hard} open files are too few for {args.streams} streams: raise `ulimit -n`")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
