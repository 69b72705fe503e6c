"""A worker that streams: N events, each a fixed time after the one before. Streams tick on a grid of 1 ms, as those of
an engine's steps do: some of them at the same time, not all.

One epoll loop without a framework, so that it keeps time beside a client on the same core. Answers any GET with a
small JSON object, as routers probe this and that. Knows nothing of models; the unary side is measured against
`keyway-loadtest mock`."""

import argparse
import heapq
import itertools
import json
import math
import select
import socket
import time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "x"}], "status": "ok"}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENT = chunk(b'data: {"id":"c1","object":"chat.completion.chunk","created":1700000000,"model":"mock","choices":'
              b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n')
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Conn:
    serial = itertools.count()

    def __init__(self, sock):
        self.sock, self.buffer, self.left, self.serial = sock, b"", 0, next(Conn.serial)


def whole_request(buffer: bytes):
    """The request line, the body and the rest of the buffer, or None until they are here."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = buffer[:end].lower()
    at = head.find(b"\r\ncontent-length:")
    length = int(head[at + 17:].split(b"\r\n", 1)[0]) if at >= 0 else 0
    if len(buffer) < end + 4 + length:
        return None
    return buffer[:end].split(b"\r\n", 1)[0], buffer[end + 4:end + 4 + length], buffer[end + 4 + length:]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--port", type=int, required=True)
    args.add_argument("--events", type=int, default=64)
    args.add_argument("--gap-ms", type=float, default=5.0)
    args = args.parse_args()
    listener = socket.create_server(("127.0.0.1", args.port), backlog=1024)
    listener.setblocking(False)
    poll, conns, due = select.epoll(), {}, []
    poll.register(listener.fileno(), select.EPOLLIN)
    gap = args.gap_ms / 1e3
    models = json.dumps(MODELS).encode()
    ok = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models)

    def close(fd):
        conn = conns.pop(fd, None)
        if conn:
            conn.sock.close()

    def begin(fd, conn, request):
        line, _, conn.buffer = request
        if not line.startswith(b"POST"):
            conn.sock.sendall(ok)
            return
        conn.left = args.events - 1
        conn.sock.sendall(HEAD + EVENT)
        heapq.heappush(due, (math.ceil((time.monotonic() + gap) * 1e3) / 1e3, conn.serial, fd, conn))

    def readable(fd):
        conn = conns.get(fd)
        if conn is None:
            return
        data = conn.sock.recv(1 << 18)
        if not data:
            close(fd)
            return
        conn.buffer += data
        while not conn.left and (request := whole_request(conn.buffer)):
            begin(fd, conn, request)

    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else 1.0
        for fd, _ in poll.poll(wait):
            if fd == listener.fileno():
                sock, _ = listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                conns[sock.fileno()] = Conn(sock)
                poll.register(sock.fileno(), select.EPOLLIN)
                continue
            try:
                readable(fd)
            except OSError:
                close(fd)
        now = time.monotonic()
        while due and due[0][0] <= now:
            at, _, fd, conn = heapq.heappop(due)
            if conns.get(fd) is not conn:
                continue
            conn.left -= 1
            try:
                conn.sock.sendall(EVENT if conn.left else EVENT + LAST)
            except OSError:
                close(fd)
                continue
            if conn.left:
                heapq.heappush(due, (at + gap, conn.serial, fd, conn))


if __name__ == "__main__":
    main()
