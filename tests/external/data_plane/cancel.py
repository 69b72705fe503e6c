"""How soon a worker notices that a client has left, behind each proxy. See run.sh.

The backend is in this process: it notes when the connection of an abandoned call ends. Phases: `prefill` (nothing was
answered yet), `decode` (events flow), `last` (all was said but the end of the body). Over HTTP/2 (`--http2`, for what speaks
it in clear text: keyway) the client resets its stream and keeps the connection."""

import argparse
import pathlib
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time

import bench

PATIENCE = 1.0
HEAD = {
    True: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    False: b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n",
}
PIECE = {True: b"10\r\ndata: {\"x\": 1}\n\n\r\n", False: b"x" * 100}
DONE = {True: b"e\r\ndata: [DONE]\n\n\r\n", False: b"x"}


class Backend:
    """A worker that takes one call at a time and waits until its connection ends."""

    def __init__(self, port):
        self.listener = socket.create_server(("127.0.0.1", port))
        self.phase, self.stream = "prefill", True
        self.begun, self.ended, self.ended_at = threading.Event(), threading.Event(), 0.0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            sock, _ = self.listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    def serve(self, sock):
        buffer = b""
        try:
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    buffer += data
                head, buffer = buffer.split(b"\r\n\r\n", 1)
                if not head.startswith(b"POST"):
                    body = b'{"object":"list","data":[{"id":"mock","object":"model"}],"status":"ok"}'
                    sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                                 % (len(body), body))
                    continue
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                while len(buffer) < length:
                    buffer += sock.recv(1 << 16)
                self.call(sock)
                return
        except OSError:
            pass
        finally:
            sock.close()

    def call(self, sock):
        try:
            if self.phase != "prefill":
                sock.sendall(HEAD[self.stream] + PIECE[self.stream])
            if self.phase == "last":
                sock.sendall(DONE[self.stream])
            self.begun.set()
            while True:
                sock.settimeout(0.005 if self.phase == "decode" else None)
                try:
                    if not sock.recv(4096):
                        break
                except TimeoutError:
                    sock.sendall(PIECE[self.stream])
        except OSError:
            pass
        self.ended_at = time.monotonic()
        self.ended.set()


class Http1:
    """A client that leaves by closing its connection."""

    def __init__(self, body):
        self.sock = socket.create_connection(("127.0.0.1", bench.PROXY))
        self.sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                          b"content-length: %d\r\n\r\n%s" % (len(body), body))

    def hear(self):
        self.sock.recv(4096)

    def leave(self):
        self.sock.close()


class Http2:
    """A client that leaves by resetting its stream."""

    def __init__(self, body):
        import h2.connection
        import h2.events

        self.events = h2.events
        self.sock = socket.create_connection(("127.0.0.1", bench.PROXY))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = h2.connection.H2Connection()
        self.connection.initiate_connection()
        head = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "x"),
                ("content-type", "application/json"), ("content-length", str(len(body)))]
        self.connection.send_headers(1, head)
        self.connection.send_data(1, body, end_stream=True)
        self.sock.sendall(self.connection.data_to_send())

    def hear(self):
        while not any(isinstance(event, self.events.DataReceived)
                      for event in self.connection.receive_data(self.sock.recv(4096))):
            self.sock.sendall(self.connection.data_to_send())

    def leave(self):
        self.connection.reset_stream(1, 8)
        self.sock.sendall(self.connection.data_to_send())


def one(backend, phase, stream, client):
    """Seconds from the client's end to the worker's, or None."""
    backend.phase, backend.stream = phase, stream
    backend.begun.clear(), backend.ended.clear()
    body = b'{"model":"mock","stream":%s,"messages":[{"role":"user","content":"hi"}]}' % (b"true" if stream else b"false")
    client = client(body)
    assert backend.begun.wait(10), "no call came"
    if phase != "prefill":
        client.hear()
    left = time.monotonic()
    client.leave()
    noticed = backend.ended.wait(PATIENCE)
    took = backend.ended_at - left if noticed else None
    if not noticed:
        # The next try must not hear of this one.
        backend.ended.wait(30)
    return took


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--keyway", required=True)
    parse.add_argument("--venv", type=pathlib.Path)
    parse.add_argument("--proxies", default="nginx,keyway")
    parse.add_argument("--tries", type=int, default=20)
    parse.add_argument("--http2", action="store_true")
    args = parse.parse_args()
    args.keyway_args, args.base = "", None
    backend, scratch = Backend(bench.STREAMS), pathlib.Path(tempfile.mkdtemp())
    print("| proxy | answer | phase | noticed | p50 ms | worst ms |\n|---|---|---|---|---|---|")
    try:
        for name in args.proxies.split(","):
            process = bench.Proxies(args, scratch).start(name, [bench.STREAMS])
            try:
                for stream in (True, False):
                    for phase in ("prefill", "decode", "last"):
                        client = Http2 if args.http2 else Http1
                        took = [one(backend, phase, stream, client) for _ in range(args.tries)]
                        seen = [1e3 * seconds for seconds in took if seconds is not None]
                        figures = f"{statistics.median(seen):.2f} | {max(seen):.2f}" if seen else "– | –"
                        kind = "stream" if stream else "unary"
                        kind += " h2" if args.http2 else ""
                        print(f"| {name} | {kind} | {phase} | {len(seen)}/{args.tries} | {figures} |", flush=True)
            finally:
                bench.stop(process)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
